"""Dotted names of sections and keys that several messages and rules name."""

from __future__ import annotations

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
HYBRID = "actor_rollout_ref.hybrid_engine"
JUDGE = "reward_model.judge"
CORRECTION = "algorithm.rollout_correction"
IMPORT_FILES = "trainer.import_files"


def trained_layout_keys(megatron: str) -> tuple[str, ...]:
    """The keys that determine the data-parallel ranks of the trained model and their micro-batches."""
    return (
        *alignment_keys(megatron),
        f"{megatron}.pipeline_model_parallel_size",
        f"{megatron}.virtual_pipeline_model_parallel_size",
        "trainer.nnodes",
        "trainer.n_gpus_per_node",
    )


def alignment_keys(megatron: str) -> tuple[str, str]:
    """The keys that determine how many tokens of padding a layout adds to a sequence."""
    return f"{megatron}.tensor_model_parallel_size", f"{megatron}.context_parallel_size"
