"""The sizes of a parallel layout: how devices, layers and tokens are divided, by the keys of a `megatron` section."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from scalerl.config.suggestions import divisors_text

if TYPE_CHECKING:
    from scalerl.config.schema import MegatronConfig, PPOConfig

# Sizes that fix the process groups, which all models of a process share.
LAYOUT_FIELDS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "context_parallel_size",
    "hierarchical_context_parallel_sizes",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
DEVICE_KEYS = ("trainer.nnodes", "trainer.n_gpus_per_node")
LONGEST_SAMPLE_KEYS = ("data.max_prompt_length", "data.max_response_length")
LONGEST_SAMPLE = " + ".join(LONGEST_SAMPLE_KEYS)
_STAGES = "pipeline_model_parallel_size"
_CHUNKS = "virtual_pipeline_model_parallel_size"
_FIRST, _LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


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
    def fewest_samples(self) -> tuple[int, str]:
        """The fewest samples of a mini-batch with which every data-parallel rank has its micro-batches.

        Returns (samples, the ranks that need them, for messages).
        """
        ranks, multiple = self.dp_size, self.micro_batch_multiple
        if multiple == 1:
            return ranks, f"{ranks} data-parallel ranks"
        return ranks * multiple, f"{ranks} data-parallel ranks x {multiple} stages of the interleaved pipeline"

    def stages(self, num_layers: int) -> list[int]:
        """The layers of each pipeline stage. Raises ValueError with the first of `pipeline_violations`."""
        for violation in self.pipeline_violations(num_layers):
            raise ValueError(violation)
        return self._stages(num_layers)

    def chunks(self, num_layers: int) -> list[int]:
        """The layers of one model chunk, for each pipeline stage. Raises ValueError as `stages` does."""
        return [size // self.vpp_size for size in self.stages(num_layers)]

    def pipeline_violations(self, num_layers: int, prefix: str = "megatron") -> list[str]:
        """Lists why num_layers cannot be divided into stages and chunks.  prefix: key of the MegatronConfig."""
        first, last = self.first_stage_layers, self.last_stage_layers
        if self.pp_size == 1:
            settings = {_FIRST: first, _LAST: last, _CHUNKS: self.vpp_size if self.vpp_size > 1 else None}
            return [
                f"{prefix}.{name} = {value}: needs {prefix}.{_STAGES} above 1; set {prefix}.{_STAGES}=2 or more, or "
                f"{prefix}.{name}=null"
                for name, value in settings.items()
                if value is not None
            ]
        layers, stages = self._rest(num_layers)
        if stages == self.pp_size and num_layers % self.pp_size:
            return [
                f"{prefix}.{_STAGES} = {self.pp_size}: must divide the model's {num_layers} layers; set one of "
                f"{divisors_text(num_layers)}"
            ]
        if layers < 0 or (layers % stages or not layers if stages else layers):
            return [
                f"{prefix}.{_FIRST} = {first}, {_LAST} = {last}: leave {layers} of the model's {num_layers} layers to "
                f"{stages} stages; the rest must be the same number for each"
            ]
        sizes = set(self._stages(num_layers))
        wrong = sorted(size for size in sizes if size % self.vpp_size)
        if wrong:
            return [
                f"{prefix}.{_CHUNKS} = {self.vpp_size}: must divide the {', '.join(map(str, wrong))} layers of a "
                f"stage; set one of {divisors_text(math.gcd(*sizes))} (1 is null)"
            ]
        return []

    def _rest(self, num_layers: int) -> tuple[int, int]:
        """The number of layers, and of stages, that are left after the stages whose layers are set."""
        set_sizes = [size for size in (self.first_stage_layers, self.last_stage_layers) if size is not None]
        return num_layers - sum(set_sizes), self.pp_size - len(set_sizes)

    def _stages(self, num_layers: int) -> list[int]:
        layers, stages = self._rest(num_layers)
        sizes = [layers // max(stages, 1)] * self.pp_size
        for stage, size in ((0, self.first_stage_layers), (-1, self.last_stage_layers)):
            if size is not None:
                sizes[stage] = size
        return sizes

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


def longest_sample(cfg: PPOConfig) -> int:
    """The number of tokens of the longest sample: data.max_prompt_length + data.max_response_length."""
    return cfg.data.max_prompt_length + cfg.data.max_response_length


def tokens_needed(longest: int, megatron: MegatronConfig) -> int:
    """The tokens of a micro-batch that is one sequence of `longest` tokens, padding included."""
    return LayoutSizes.of(megatron).padded_tokens(longest, sequence_parallel=megatron.sequence_parallel)


def layout_keys(megatron: str, pool: str) -> tuple[str, ...]:
    """The keys that determine the data-parallel ranks of a model.  megatron, pool: dotted sections."""
    return (*(f"{megatron}.{name}" for name in LAYOUT_FIELDS), f"{pool}.nnodes", f"{pool}.n_gpus_per_node")


def alignment_keys(megatron: str) -> tuple[str, str]:
    """The keys that determine how many tokens of padding a layout adds to a sequence."""
    return f"{megatron}.tensor_model_parallel_size", f"{megatron}.context_parallel_size"
