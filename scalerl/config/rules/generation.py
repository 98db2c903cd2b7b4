"""Rules between the keys of `scalerl generate`."""

from __future__ import annotations

from collections.abc import Iterator

from scalerl.config.replicas import ReplicaRoom, replica_size_violations
from scalerl.config.rules.base import rule
from scalerl.config.schema import GenerationConfig

_TP_SIZE = "rollout.tensor_model_parallel_size"
_NODES = ("trainer.nnodes", "trainer.n_gpus_per_node")


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


@rule("rollout.name", _TP_SIZE, "rollout.num_replicas", *_NODES)
def _replicas_fit(cfg: GenerationConfig) -> Iterator[str]:
    rollout, trainer = cfg.rollout, cfg.trainer
    room = ReplicaRoom(trainer.nnodes, trainer.n_gpus_per_node, rollout.tensor_model_parallel_size)
    yield from replica_size_violations(rollout, "rollout", room, _NODES)
    if rollout.num_replicas is not None and 0 < room.num_replicas < rollout.num_replicas:
        yield (
            f"rollout.num_replicas = {rollout.num_replicas}: {' x '.join(_NODES)} = {trainer.nnodes} x "
            f"{trainer.n_gpus_per_node} devices have room for {room.num_replicas} of {_TP_SIZE} = {room.tp_size}; set "
            f"rollout.num_replicas={room.num_replicas} or less, or null"
        )


GENERATION_RULES = [_greedy_repeats, _responses_are_new, _replicas_fit]
