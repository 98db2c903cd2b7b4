"""Divides the layers of a model into pipeline stages and model chunks, and says which numbers cannot be divided."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from scalerl.config.suggestions import divisors_text

_STAGES = "pipeline_model_parallel_size"
_CHUNKS = "virtual_pipeline_model_parallel_size"
_FIRST, _LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


@dataclass(frozen=True)
class PipelineSizes:
    """The division of a model's layers into stages, and of a stage's into model chunks.

    pp_size: stages.  vpp_size: model chunks of a stage (1: not interleaved).
    first, last: layers of that stage where they differ from the others.
    """

    pp_size: int
    vpp_size: int = 1
    first: int | None = None
    last: int | None = None

    def stages(self, num_layers: int) -> list[int]:
        """The layers of each stage. Raises ValueError with the first of `violations`."""
        for violation in self.violations(num_layers):
            raise ValueError(violation)
        return self._divided(num_layers)

    def chunks(self, num_layers: int) -> list[int]:
        """The layers of one model chunk, for each stage. Raises ValueError as `stages` does."""
        return [size // self.vpp_size for size in self.stages(num_layers)]

    def violations(self, num_layers: int, prefix: str = "megatron") -> list[str]:
        """Lists why num_layers cannot be divided in this way; empty if they can.  prefix: key of the MegatronConfig."""
        if self.pp_size == 1:
            return self._given_for_one_stage(prefix)
        layers_left, stages_left = self._rest(num_layers)
        if stages_left == self.pp_size:
            if num_layers % self.pp_size:
                return [
                    f"{prefix}.{_STAGES} = {self.pp_size}: must divide the model's {num_layers} layers; set one of "
                    f"{divisors_text(num_layers)}"
                ]
        elif (
            layers_left < 0
            or (layers_left and not stages_left)
            or (stages_left and (layers_left % stages_left or not layers_left))
        ):
            return [
                f"{prefix}.{_FIRST} = {self.first}, {_LAST} = {self.last}: leave {layers_left} of the model's "
                f"{num_layers} layers to {stages_left} stages; the rest must be the same number for each"
            ]
        sizes = set(self._divided(num_layers))
        wrong = sorted(size for size in sizes if size % self.vpp_size)
        if wrong:
            return [
                f"{prefix}.{_CHUNKS} = {self.vpp_size}: must divide the {', '.join(map(str, wrong))} layers of a "
                f"stage; set one of {divisors_text(functools.reduce(math.gcd, sizes))} (1 is null)"
            ]
        return []

    def _given_for_one_stage(self, prefix: str) -> list[str]:
        settings = ((_FIRST, self.first), (_LAST, self.last), (_CHUNKS, self.vpp_size if self.vpp_size > 1 else None))
        return [
            f"{prefix}.{name} = {value}: needs {prefix}.{_STAGES} above 1; set {prefix}.{_STAGES}=2 or more, or "
            f"{prefix}.{name}=null"
            for name, value in settings
            if value is not None
        ]

    def _rest(self, num_layers: int) -> tuple[int, int]:
        """The (layers, stages) that remain beside the stages whose layers are set."""
        set_sizes = [size for size in (self.first, self.last) if size is not None]
        return num_layers - sum(set_sizes), self.pp_size - len(set_sizes)

    def _divided(self, num_layers: int) -> list[int]:
        layers_left, stages_left = self._rest(num_layers)
        sizes = [layers_left // max(stages_left, 1)] * self.pp_size
        for stage, size in ((0, self.first), (-1, self.last)):
            if size is not None:
                sizes[stage] = size
        return sizes
