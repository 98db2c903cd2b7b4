"""How many ranks a model is spread over, in which order, and the process groups of this rank."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Coordinates:
    tp_rank: int
    dp_rank: int
    pp_rank: int


@dataclass(frozen=True)
class Layout:
    """Sizes only; no torch.distributed. Ranks count tp first, then dp, then pp (megatron-core: tp-cp-ep-dp-pp)."""

    world_size: int
    tp_size: int = 1
    pp_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size % (self.tp_size * self.pp_size):
            raise ValueError(
                f"world size {self.world_size} is not a multiple of tp_size * pp_size = {self.tp_size} * {self.pp_size}"
            )

    @property
    def dp_size(self) -> int:
        return self.world_size // (self.tp_size * self.pp_size)

    def coordinates(self, rank: int) -> Coordinates:
        return Coordinates(
            tp_rank=rank % self.tp_size,
            dp_rank=rank // self.tp_size % self.dp_size,
            pp_rank=rank // (self.tp_size * self.dp_size),
        )

    def output_ranks(self) -> list[int]:
        """For each dp rank, the rank that holds its results: tp rank 0 of the last pipeline stage."""
        found = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            if at.tp_rank == 0 and at.pp_rank == self.pp_size - 1:
                found[at.dp_rank] = rank
        return [found[dp_rank] for dp_rank in range(self.dp_size)]


@dataclass(frozen=True)
class Groups:
    """The process groups that scalerl's own collectives use, and this rank's place in them."""

    layout: Layout
    at: Coordinates
    tp: dist.ProcessGroup
    dp: dist.ProcessGroup
    pp: dist.ProcessGroup

    @property
    def is_first_stage(self) -> bool:
        return self.at.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.at.pp_rank == self.layout.pp_size - 1


def initialize(layout: Layout, *, backend: str, timeout_s: float, seed: int) -> Groups:
    """Starts torch.distributed (RANK, WORLD_SIZE, MASTER_* from the environment) and megatron's groups."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    parallel_state.initialize_model_parallel(
        layout.tp_size,
        layout.pp_size,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        create_gloo_process_groups=False,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    at = layout.coordinates(dist.get_rank())
    theirs = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    assert theirs == (at.tp_rank, at.dp_rank, at.pp_rank), f"megatron's rank order {theirs} is not ours {at}"
    return Groups(
        layout,
        at,
        tp=parallel_state.get_tensor_model_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
    )
