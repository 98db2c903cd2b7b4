"""Sections, reasons and neutral values that several parts of the vocabulary name."""

from __future__ import annotations

POLICY = "actor_rollout_ref"
ACTOR, REF, ROLLOUT, MODEL = f"{POLICY}.actor", f"{POLICY}.ref", f"{POLICY}.rollout", f"{POLICY}.model"
# Sections that have a model, as groups of a pattern.
TRAINED = f"({ACTOR}|critic)"
ANY = f"({ACTOR}|{REF}|critic|reward_model|reward.reward_model)"
SGLANG = f"{ROLLOUT}.engine_kwargs.sglang"
PACKED = "sequences are always packed, padding is never computed"
PACKING = "micro-batches are packed up to a number of tokens; no number depends on it"
MAX_TOKENS = "max_tokens_per_micro_batch"
ALL_DEVICES = "tokens of a micro-batch over all devices that share it, not of one of them"
# The keys of verl's FSDP engine, below the name of its section.
OF_FSDP = (
    "wrap_policy(.*|)|(param|optimizer|grad)_offload|offload_policy|offload_params|cpu_offload|reshard_after_forward|"
    "fsdp_size|forward_prefetch|model_dtype|dtype|use_orig_params|seed|full_determinism|ulysses_sequence_parallel_size|"
    "entropy_from_logits_with_chunking|entropy_checkpointing|use_torch_compile|forward_only|strategy|"
    "mixed_precision(.*|)|sharding_strategy"
)
MEGATRON = "every model is trained by Megatron"
OFF = (None, False)
NONE = (None, "null", "none", "", False, 0)
PROGRAM = f"{ROLLOUT}.program.path"
TURNS = "turns and tools are those of a program of yours"
