"""Keys of verl's engines, by which its models are trained and computed."""

from __future__ import annotations

import re
from typing import Any

from scalerl.extras.verl.keys.entry import (
    AlreadySo,
    Context,
    Entry,
    Outcome,
    Refused,
    absent,
    computed,
    goes_with,
    is_one_of,
    renamed,
    same,
)
from scalerl.extras.verl.keys.overrides import OVERRIDE_ENTRIES
from scalerl.extras.verl.keys.vocabulary.words import ACTOR, ANY, MEGATRON, NONE, OF_FSDP, OFF, PACKED, POLICY, REF


def _seconds(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _dtype(value: Any) -> Any:
    return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(value, value)


def _converted_weights(match: re.Match[str], value: Any, context: Context) -> Outcome:
    """Reads the directory of converted weights, which is refused where it is used: they may be other weights."""
    if is_one_of(value, NONE) or context.foreign(f"{match[1]}.megatron.use_dist_checkpointing") is not True:
        return AlreadySo("use_dist_checkpointing is off")
    of_actor = context.foreign(f"{ACTOR}.megatron.dist_checkpointing_path")
    if match[1] == REF and of_actor in (None, value):
        return AlreadySo("the reference starts from the weights that the actor starts from")
    return Refused(
        "has no counterpart because a model starts from a Hugging Face directory, of which each rank reads its part; "
        "leave it out, and set the model's path to that directory"
    )


def engine_entries(section: str) -> list[Entry]:
    """Makes the entries of a section of verl's Megatron engine.  section: its name, `a.megatron|b.megatron` in ()."""
    return [
        same(f"{section}.use_mbridge", True, why="weights go from and to Hugging Face names by one table per family"),
        same(f"{section}.vanilla_mbridge", why="weights go from and to Hugging Face names by one table per family"),
        same(
            f"{section}.use_dist_checkpointing",
            why="a rank reads its part of the model's directory; a checkpoint goes on with trainer.resume_mode",
        ),
        same(f"{section}.dist_checkpointing_prefix", why="checkpoints have names of their own"),
        same(
            f"{section}.(dist_ckpt_optim_fully_reshardable|distrib_optim_fully_reshardable_mem_efficient)",
            why="a checkpoint loads on every layout",
        ),
        absent(
            f"{section}.dynamic_context_parallel",
            *OFF,
            why="context_parallel_size is the same for all sequences",
        ),
        goes_with(f"{section}.max_seqlen_per_dp_cp_rank", "dynamic_context_parallel"),
        same(f"{section}.(pad_bshd_to_minibatch_max|pad_to_length|pad_to_length_*)", why=PACKED),
        absent(f"{section}.use_megatron_fsdp", *OFF, why="gradients are reduced by Megatron's own data parallelism"),
        absent(f"{section}.extra", {}, None, why=MEGATRON),
        absent(f"{section}.enable", True, why=MEGATRON),
    ]


MEGATRON_KEYS = [
    *OVERRIDE_ENTRIES,
    *engine_entries(f"{ANY}.megatron"),
    computed(
        f"{ANY}.megatron.dist_checkpointing_path",
        "no counterpart where `use_dist_checkpointing` is true, once for actor and reference; else already so",
        "a model starts from a Hugging Face directory, of which each rank reads its part",
        _converted_weights,
    ),
    same(
        f"{ANY}.megatron.(forward_only|load_weight)|{ANY}.load_weight",
        why="a role's work decides it: only what is trained has gradients, and every model has its weights",
    ),
    same(
        f"({ACTOR}|{REF}).(megatron.|)entropy_(from_logits_with_chunking|from_logits_chunk_size|checkpointing)|"
        f"({ACTOR}|{REF}).(megatron.|)(entropy_chunk_size|use_entropy_chunking|chunked_entropy*)",
        why="log-probs and entropy are computed in pieces; no number depends on it",
    ),
    renamed(
        f"({POLICY}|{ANY}.megatron|{ANY}).nccl_timeout",
        "trainer.timeout_s",
        why="seconds of every collective and worker call",
        convert=_seconds,
    ),
    absent(
        f"{ANY}.megatron.nccl_communicator_config_path",
        None,
        why="NCCL is configured by its environment variables",
        instead="leave it out, and export them before the command",
    ),
    same(f"({ANY}|trainer).strategy|model_engine", "megatron", "fsdp", "fsdp2", "dp", why=MEGATRON),
    renamed(f"{ANY}(.model|).fsdp_config.(param_offload|optimizer_offload)", r"\1.megatron.\3", why=MEGATRON),
    renamed(
        f"({ACTOR}|{REF}|critic).(fsdp_config.|)ulysses_sequence_parallel_size",
        r"\1.megatron.context_parallel_size",
        why="devices that share a sequence, by Ulysses",
    ),
    renamed(
        f"({ACTOR}|{REF}|critic)(.model|).fsdp_config.(dtype|mixed_precision.param_dtype)",
        r"\1.megatron.dtype",
        convert=_dtype,
        why="of parameters and arithmetic",
    ),
    same(
        f"{ANY}(.model|).(fsdp_config|fsdp).({OF_FSDP})",
        why=f"{MEGATRON}, whose optimizer state is split over data-parallel ranks",
    ),
    same(f"{ANY}.(engine|model).strategy", why=MEGATRON),
    same(f"{ANY}.(use_torch_compile|torch_compile)", why="Megatron's layers; no number depends on it"),
]
