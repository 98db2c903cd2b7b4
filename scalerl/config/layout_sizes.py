"""The sizes of a parallel layout, from the keys of a `megatron` section and the number of devices.

`layout_checks` and `rules` check that the sizes fit each other, the devices and a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from scalerl.config.pipeline_sizes import PipelineSizes
from scalerl.config.schema import MegatronConfig, PPOConfig, SFTConfig


@dataclass(frozen=True)
class LayoutSizes:
    """The number of devices (on CPU: processes) that share each part of one model.

    world_size: devices of all copies of the model.
    tp_size, pp_size, cp_size: devices that share each layer, the layers, each sequence.
    ep_size, etp_size: devices that share the experts of a layer, each expert.
    vpp_size: model chunks of a stage (1: the pipeline is not interleaved).
    first_stage_layers, last_stage_layers: layers of that stage where they differ from the others.
    hierarchical_cp_sizes: how cp ranks divide into groups of groups, neighbours first; () when not set.
    """

    world_size: int
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1
    etp_size: int = 1
    vpp_size: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    hierarchical_cp_sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, megatron: MegatronConfig, world_size: int | None = None) -> Self:
        """Reads the sizes from a `megatron` section.  world_size: devices; None: those of one copy of the model."""
        tp_size, cp_size = megatron.tensor_model_parallel_size, megatron.context_parallel_size
        pp_size = megatron.pipeline_model_parallel_size
        return cls(
            tp_size * cp_size * pp_size if world_size is None else world_size,
            tp_size=tp_size,
            pp_size=pp_size,
            cp_size=cp_size,
            ep_size=megatron.expert_model_parallel_size,
            etp_size=megatron.expert_tensor_parallel_size or megatron.tensor_model_parallel_size,
            vpp_size=megatron.virtual_pipeline_model_parallel_size or 1,
            first_stage_layers=megatron.num_layers_in_first_pipeline_stage,
            last_stage_layers=megatron.num_layers_in_last_pipeline_stage,
            hierarchical_cp_sizes=tuple(megatron.hierarchical_context_parallel_sizes or ()),
        )

    @property
    def copy_size(self) -> int:
        """Devices of one data-parallel copy of the model."""
        return self.tp_size * self.cp_size * self.pp_size

    @property
    def dp_size(self) -> int:
        """Data-parallel copies of the model; the devices must be a multiple of copy_size."""
        return self.world_size // self.copy_size

    @property
    def stage_size(self) -> int:
        """Devices of one pipeline stage, over all copies."""
        return self.world_size // self.pp_size

    @property
    def experts_size(self) -> int:
        """Devices of one copy of a layer's experts."""
        return self.ep_size * self.etp_size

    @property
    def micro_batch_multiple(self) -> int:
        """The number that a rank's micro-batches in a mini-batch are a multiple of.

        An interleaved pipeline works in rounds of as many micro-batches as it has stages.
        """
        return self.pp_size if self.vpp_size > 1 else 1

    @property
    def pipeline(self) -> PipelineSizes:
        """The division of layers into stages and model chunks."""
        return PipelineSizes(self.pp_size, self.vpp_size, self.first_stage_layers, self.last_stage_layers)

    def padded_tokens(self, num_tokens: int, *, sequence_parallel: bool) -> int:
        """Tokens of a micro-batch that is one sequence of num_tokens, padding included, over all its devices."""
        sequence, micro_batch = alignment(
            tp_size=self.tp_size, cp_size=self.cp_size, sequence_parallel=sequence_parallel
        )
        return _round_up(_round_up(num_tokens, sequence), micro_batch)


def alignment(*, tp_size: int, cp_size: int, sequence_parallel: bool) -> tuple[int, int]:
    """The numbers that the tokens of a packed sequence, and of a whole micro-batch, are a multiple of.

    Context parallelism cuts every sequence into 2 * cp_size pieces; sequence parallelism splits the tokens of each of
    its ranks over tp_size.
    """
    sequence = 2 * cp_size if cp_size > 1 else 1
    return sequence, math.lcm(sequence, cp_size * tp_size if sequence_parallel else 1)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def world_size(cfg: PPOConfig | SFTConfig) -> int:
    """The number of the trainer's devices; on CPU, of its processes."""
    return cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node


def trained_megatron(cfg: PPOConfig | SFTConfig) -> MegatronConfig:
    """The `megatron` section of the model that the program trains; with PPO, of the actor."""
    return cfg.megatron if isinstance(cfg, SFTConfig) else cfg.actor_rollout_ref.actor.megatron


def trained_layout(cfg: PPOConfig | SFTConfig) -> LayoutSizes:
    """The layout of the model that the program trains; with PPO, of the actor."""
    return LayoutSizes.of(trained_megatron(cfg), world_size(cfg))
