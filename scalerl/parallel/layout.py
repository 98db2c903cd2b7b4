"""The layout of a model: how many ranks it is spread over, in which order, and the process groups of this rank."""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scalerl.base.random_states import seed_generators
from scalerl.config import LayoutSizes


@dataclass(frozen=True)
class Coordinates:
    """The place of one rank in a layout. etp_rank, ep_rank: its place for the experts of a mixture."""

    tp_rank: int
    cp_rank: int
    dp_rank: int
    pp_rank: int
    etp_rank: int
    ep_rank: int


@dataclass(frozen=True)
class Layout(LayoutSizes):
    """The sizes of a layout, checked against each other, and the place of each rank in it; no torch.distributed.

    Ranks count tp first, then cp, then dp, then pp (megatron-core: tp-cp-ep-dp-pp). Inside one pipeline stage the
    experts count their own way over the same ranks: etp first, then ep, then the data-parallel copies of an expert.
    """

    def __post_init__(self) -> None:
        if self.world_size % self.copy_size:
            raise ValueError(
                f"world size {self.world_size} is not a multiple of tp_size * cp_size * pp_size = "
                f"{self.tp_size} * {self.cp_size} * {self.pp_size}"
            )
        if self.stage_size % self.experts_size:
            raise ValueError(
                f"the {self.stage_size} ranks of a pipeline stage are not a multiple of etp_size * ep_size = "
                f"{self.etp_size} * {self.ep_size}"
            )
        if self.hierarchical_cp_sizes and math.prod(self.hierarchical_cp_sizes) != self.cp_size:
            raise ValueError(f"the product of {self.hierarchical_cp_sizes} is not cp_size = {self.cp_size}")

    def coordinates(self, rank: int) -> Coordinates:
        """The place of a rank in the layout."""
        in_stage = rank % self.stage_size
        return Coordinates(
            tp_rank=in_stage % self.tp_size,
            cp_rank=in_stage // self.tp_size % self.cp_size,
            dp_rank=in_stage // (self.tp_size * self.cp_size),
            pp_rank=rank // self.stage_size,
            etp_rank=in_stage % self.etp_size,
            ep_rank=in_stage // self.etp_size % self.ep_size,
        )

    def output_ranks(self) -> list[int]:
        """The rank that holds the results of each dp rank: tp and cp rank 0 of the last pipeline stage."""
        rank_of_dp_rank = {}
        for rank in range(self.world_size):
            if self.is_output_rank(rank):
                rank_of_dp_rank[self.coordinates(rank).dp_rank] = rank
        return [rank_of_dp_rank[dp_rank] for dp_rank in range(self.dp_size)]

    def is_output_rank(self, rank: int) -> bool:
        """Whether the rank holds the results of its dp rank, as `output_ranks` says."""
        coordinates = self.coordinates(rank)
        return coordinates.tp_rank == 0 and coordinates.cp_rank == 0 and coordinates.pp_rank == self.pp_size - 1

    def layers(self, num_layers: int, pp_rank: int) -> list[range]:
        """Global indices of the layers of each model chunk of a pipeline stage.

        Chunk c of all stages comes before chunk c + 1 of any: with 8 layers, 2 stages and 2 chunks, stage 0 holds
        [0, 1] and [4, 5]. Raises ValueError if the layers cannot be divided so.
        """
        per_chunk = self.chunks(num_layers)
        begin = sum(per_chunk[:pp_rank])
        return [
            range(chunk * sum(per_chunk) + begin, chunk * sum(per_chunk) + begin + per_chunk[pp_rank])
            for chunk in range(self.vpp_size)
        ]

    def owner_of_layer(self, num_layers: int, layer: int) -> tuple[int, int]:
        """The stage and model chunk, (pp_rank, chunk), of a global layer index."""
        for pp_rank in range(self.pp_size):
            for chunk, layers in enumerate(self.layers(num_layers, pp_rank)):
                if layer in layers:
                    return pp_rank, chunk
        raise ValueError(f"layer {layer} of {num_layers}")

    def experts(self, num_experts: int, ep_rank: int) -> range:
        """Global indices of the experts that this expert-parallel rank holds in every layer."""
        per_rank = num_experts // self.ep_size
        return range(ep_rank * per_rank, (ep_rank + 1) * per_rank)


@dataclass(frozen=True)
class Groups:
    """The process groups that scalerl's own collectives use, and this rank's place in them.

    dp: the copies that see other samples. dp_cp: those that see other tokens (dp x cp). etp, ep: of the experts.
    expert_dp: the copies of an expert.
    hierarchical_cp: of each of the layout's hierarchical_cp_sizes; () without them.
    """

    layout: Layout
    coordinates: Coordinates
    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup
    pp: dist.ProcessGroup
    etp: dist.ProcessGroup
    ep: dist.ProcessGroup
    expert_dp: dist.ProcessGroup
    hierarchical_cp: tuple[dist.ProcessGroup, ...] = ()

    @property
    def is_first_stage(self) -> bool:
        return self.coordinates.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.coordinates.pp_rank == self.layout.pp_size - 1


def initialize(
    layout: Layout,
    *,
    backend: str,
    timeout_s: float,
    seed: int,
    rank: int | None = None,
    store: dist.Store | None = None,
) -> Groups:
    """Starts torch.distributed and megatron's groups.

    store: where the ranks meet; None: rank and address are in the environment (RANK, WORLD_SIZE, MASTER_*).
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    # Threads that were still at work when a run ended (megatron's writer of checkpoints) may have held some of it.
    gc.collect()
    if not dist.is_initialized():
        rendezvous = {} if store is None else {"store": store, "rank": rank, "world_size": layout.world_size}
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **rendezvous)
    parallel_state.initialize_model_parallel(
        layout.tp_size,
        layout.pp_size,
        virtual_pipeline_model_parallel_size=layout.vpp_size if layout.vpp_size > 1 else None,
        context_parallel_size=layout.cp_size,
        hierarchical_context_parallel_sizes=list(layout.hierarchical_cp_sizes) or None,
        expert_model_parallel_size=layout.ep_size,
        expert_tensor_parallel_size=layout.etp_size,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        create_gloo_process_groups=False,
    )
    seed_generators(seed)
    model_parallel_cuda_manual_seed(seed)
    coordinates = layout.coordinates(dist.get_rank())
    # After initialize_model_parallel each of its ranks and groups is there, which its types do not say.
    state: Any = parallel_state
    megatron_coordinates = Coordinates(
        tp_rank=state.get_tensor_model_parallel_rank(),
        cp_rank=state.get_context_parallel_rank(),
        dp_rank=state.get_data_parallel_rank(),
        pp_rank=state.get_pipeline_model_parallel_rank(),
        etp_rank=state.get_expert_tensor_parallel_rank(),
        ep_rank=state.get_expert_model_parallel_rank(),
    )
    assert megatron_coordinates == coordinates, (
        f"megatron's rank order {megatron_coordinates} is not ours {coordinates}"
    )
    return Groups(
        layout,
        coordinates,
        tp=state.get_tensor_model_parallel_group(),
        cp=state.get_context_parallel_group(),
        dp=state.get_data_parallel_group(),
        dp_cp=state.get_data_parallel_group(with_context_parallel=True),
        pp=state.get_pipeline_model_parallel_group(),
        etp=state.get_expert_tensor_parallel_group(),
        ep=state.get_expert_model_parallel_group(),
        expert_dp=state.get_expert_data_parallel_group(),
        hierarchical_cp=tuple(state.get_hierarchical_context_parallel_groups(check_initialized=False) or ()),
    )


def leave() -> None:
    """Undoes `initialize`, so that this process can join another run, on another layout and with other ranks.

    Every rank of the layout calls it, after its last collective and when it holds no engine any more. The numbers of
    the next run are bitwise those of a new process. After a collective that failed or was cut short the other ranks
    cannot be known to have left it: end the process instead.
    """
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    # megatron keeps these, and `initialize` would find them on the next layout.
    parallel_state._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS = None
    if dist.is_initialized():
        dist.destroy_process_group()
    # Engines are full of cycles, and hold groups: buffers, and the threads of gloo's groups, would stay until the next
    # collection.
    gc.collect()
    torch.cuda.empty_cache()


def mark(parameter: Tensor, **attributes: Any) -> None:
    """Sets attributes of a parameter as megatron reads them: tensor_model_parallel, partition_dim, partition_stride,
    sequence_parallel, allreduce, grad_added_to_main_grad."""
    for name, value in attributes.items():
        setattr(parameter, name, value)
