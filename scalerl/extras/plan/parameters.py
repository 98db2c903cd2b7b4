"""The number of parameters that a rank of each pipeline stage holds, counted in the family's table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from scalerl.models import ModelShape, Param
from scalerl.models.adapters import adapter_pairs, counted_trained_params
from scalerl.models.sizes import FLOAT, counted_params, model_bytes
from scalerl.parallel.layout import Layout


@dataclass(frozen=True)
class StageParameters:
    """The number of parameters on one rank of a pipeline stage, by which ranks hold copies of them.

    layers: global indices of the stage's layers.  shared: parameters of everything but experts; copies: dp x cp ranks.
    experts: parameters of its experts; copies: the ranks of the stage that have the same experts.  frozen: those that
    an adapter leaves as they are; shared and experts are the adapter's then. Without one a frozen vision tower, which
    is saved (tower).  joined: numbers of the adapter as a pass
    joins them, of matrices that consist of several projections.  merged: numbers of the largest matrix that has an
    adapter.  buffers: float32, without gradient (biases of routers).  largest: parameters of the largest tensor that
    has a gradient.
    """

    layers: tuple[int, ...]
    shared: int
    experts: int
    frozen: int
    tower: int
    joined: int
    merged: int
    buffers: int
    largest: int
    shared_copies: int
    expert_copies: int

    @property
    def trained(self) -> int:
        """The number of parameters that have a gradient."""
        return self.shared + self.experts

    def weight_bytes(self, itemsize: int) -> int:
        """The bytes of the weights; buffers are float32."""
        return itemsize * (self.trained + self.frozen) + FLOAT * self.buffers

    @property
    def gradient_bytes(self) -> int:
        """The bytes of the main gradients, which are float32 whatever the model's dtype."""
        return FLOAT * self.trained

    @property
    def exchange_bytes(self) -> int:
        """The bytes of gloo's copies of the main gradients (torch's ProcessGroupGloo::reduce_scatter_tensor_coalesced).

        Experts have a buffer for themselves, whose copy is made when gloo's threads may still hold the other's.
        """
        return FLOAT * self.trained

    def optimizer_numbers(self, *, distributed: bool) -> int:
        """The number of parameters whose optimizer state this rank keeps."""
        if not distributed:
            return self.trained
        return -(-self.shared // self.shared_copies) + -(-self.experts // self.expert_copies)

    def optimizer_bytes(self, itemsize: int, *, distributed: bool) -> int:
        """The bytes of Adam's two moments and, unless the weights are float32, of the main parameters; all float32."""
        tensors = 2 if itemsize == FLOAT else 3
        return tensors * FLOAT * self.optimizer_numbers(distributed=distributed)

    def saved_bytes(self, itemsize: int) -> int:
        """The bytes that this rank writes of a checkpoint: its shares of weights, main parameters and two moments.

        At most: of several ranks that hold the same part of a tensor, as of norms with tp, only the first writes it.
        """
        numbers = self.optimizer_numbers(distributed=True)
        # Of a model with an adapter what is frozen is not saved.
        buffers = 0 if self.frozen > self.tower else self.buffers
        copied = FLOAT * buffers + itemsize * self.tower
        return (itemsize + 3 * FLOAT) * numbers + -(-copied // self.shared_copies)


def stage_parameters(shape: ModelShape, layout: Layout) -> tuple[StageParameters, ...]:
    """The parameters of every pipeline stage.  Raises ValueError if the layout cannot hold the model."""
    # Whatever the number of copies, the parameters are the same.
    fewest = layout.pp_size * math.lcm(layout.tp_size, layout.experts_size)
    one = replace(layout, world_size=fewest, cp_size=1, hierarchical_cp_sizes=())
    shared, experts = layout.dp_size * layout.cp_size, max(1, layout.stage_size // layout.experts_size)
    return tuple(replace(stage, shared_copies=shared, expert_copies=experts) for stage in _stages(shape, one))


@cache
def _stages(shape: ModelShape, layout: Layout) -> tuple[StageParameters, ...]:
    trained = [param for param, _ in counted_trained_params(shape)]
    names = {param.name for param in trained}
    others = [param for param, _ in counted_params(shape) if param.name not in names]
    stages = []
    for pp_rank in range(layout.pp_size):
        layers = {layer for chunk in layout.layers(shape.num_layers, pp_rank) for layer in chunk}
        here = list(_held(trained, shape, layout, pp_rank, layers))
        others_here = list(_held(others, shape, layout, pp_rank, layers))
        stages.append(
            StageParameters(
                layers=tuple(sorted(layers)),
                shared=sum(held.numbers for held in here if held.param.expert is None),
                experts=sum(held.numbers for held in here if held.param.expert is not None),
                frozen=sum(held.numbers for held in others_here if held.param.has_gradient),
                tower=sum(held.numbers for held in others_here if held.param.of_tower and not shape.adapter),
                joined=sum(held.joined(shape) for held in others_here),
                merged=max((prod(held.size) for held in others_here if held.pairs(shape)), default=0),
                buffers=sum(held.numbers for held in others_here if not held.param.has_gradient),
                largest=max((held.numbers for held in here), default=0),
                shared_copies=1,
                expert_copies=1,
            )
        )
    return tuple(stages)


@dataclass(frozen=True)
class _Held:
    """A parameter of a rank, of the shape that it has there; of experts one, for `count` in one tensor."""

    param: Param
    size: tuple[int, ...]
    count: int

    @property
    def numbers(self) -> int:
        return self.count * prod(self.size)

    def joined(self, shape: ModelShape) -> int:
        """The numbers of A and B of all its pairs together, if it consists of several projections."""
        rank = shape.adapter.rank if shape.adapter and len(self.param.hf) > 1 else 0
        return self.count * self.pairs(shape) * rank * sum(self.size)

    def pairs(self, shape: ModelShape) -> int:
        """The number of its projections that have an adapter."""
        return 0 if shape.adapter is None else sum(pair is not None for pair in adapter_pairs(self.param, shape))


def _held(
    params: Iterable[Param], shape: ModelShape, layout: Layout, pp_rank: int, layers: set[int]
) -> Iterator[_Held]:
    experts_here = shape.num_experts // layout.ep_size
    for param in params:
        if _is_on_stage(param, shape, layout, pp_rank, layers):
            size, count = (layout.tp_size, 1) if param.expert is None else (layout.etp_size, experts_here)
            yield _Held(param, param.mcore_shape(shape, size), count)


def checkpoint_bytes(shape: ModelShape, itemsize: int) -> int:
    """The bytes of a checkpoint's tensors: what is trained, and float32 main parameter and two moments of each."""
    if shape.adapter is None:
        return model_bytes(shape, itemsize) + 3 * FLOAT * num_trained(shape)
    return (itemsize + 3 * FLOAT) * num_trained(shape)


def num_trained(shape: ModelShape) -> int:
    """The number of parameters of the whole model that have a gradient."""
    return sum(count * prod(param.joined_shape(shape)) for param, count in counted_trained_params(shape))


def _is_on_stage(param: Param, shape: ModelShape, layout: Layout, pp_rank: int, layers: set[int]) -> bool:
    is_first, is_last = pp_rank == 0, pp_rank == layout.pp_size - 1
    if param.layer is not None:
        return param.layer in layers
    if param.stage_part == "first":
        # Tied weights: the last stage keeps a copy of the embedding.
        has_copy = is_last and param.kind == "vocab" and shape.tie_word_embeddings and shape.head == "lm"
        return is_first or has_copy
    return is_last
