"""Rules between the keys of `scalerl generate`."""

from __future__ import annotations

from collections.abc import Iterator

from scalerl.config.rules.base import rule
from scalerl.config.schema import GenerationConfig

_TP_SIZE = "rollout.tensor_model_parallel_size"


@rule("data.n_samples", "rollout.temperature")
def _greedy_repeats(cfg: GenerationConfig) -> Iterator[str]:
    if cfg.data.n_samples > 1 and cfg.rollout.temperature == 0:
        yield (
            f"data.n_samples = {cfg.data.n_samples}: greedy decoding (rollout.temperature = 0) gives the same response "
            "each time; set rollout.temperature=1, or data.n_samples=1"
        )


@rule("data.prompt_key", "data.response_key")
def _responses_are_new(cfg: GenerationConfig) -> Iterator[str]:
    if cfg.data.response_key == cfg.data.prompt_key:
        yield (
            f"data.response_key = {cfg.data.response_key}: is data.prompt_key too, and both columns are written; set "
            "data.response_key=responses"
        )


@rule(_TP_SIZE, "rollout.num_replicas", "trainer.nnodes", "trainer.n_gpus_per_node")
def _replicas_fit(cfg: GenerationConfig) -> Iterator[str]:
    rollout, nnodes, per_node = cfg.rollout, cfg.trainer.nnodes, cfg.trainer.n_gpus_per_node
    tp_size = rollout.tensor_model_parallel_size
    room = nnodes * (per_node // tp_size)
    if not room:
        yield (
            f"{_TP_SIZE} = {tp_size}: a replica lives on one node, so it must be at most trainer.n_gpus_per_node = "
            f"{per_node}; set {_TP_SIZE}={per_node} or less, or trainer.n_gpus_per_node={tp_size} or more"
        )
    elif rollout.num_replicas is not None and rollout.num_replicas > room:
        yield (
            f"rollout.num_replicas = {rollout.num_replicas}: trainer.nnodes x trainer.n_gpus_per_node = {nnodes} x "
            f"{per_node} devices have room for {room} of {_TP_SIZE} = {tp_size}; set rollout.num_replicas={room} or "
            "less, or null"
        )


GENERATION_RULES = [_greedy_repeats, _responses_are_new, _replicas_fit]
