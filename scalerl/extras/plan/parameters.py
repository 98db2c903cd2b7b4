"""The number of parameters that a rank of each pipeline stage holds, counted in the family's table."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from scalerl.models import ModelShape, Param
from scalerl.models.sizes import FLOAT, counted_params
from scalerl.parallel.layout import Layout


@dataclass(frozen=True)
class StageParameters:
    """The number of parameters on one rank of a pipeline stage, by which ranks hold copies of them.

    layers: global indices of the stage's layers.  shared: parameters of everything but experts; copies: dp x cp ranks.
    experts: parameters of its experts; copies: the ranks of the stage that have the same experts.  buffers: float32,
    without gradient (biases of routers).  largest: parameters of the largest tensor that has a gradient.
    """

    layers: tuple[int, ...]
    shared: int
    experts: int
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
        return itemsize * self.trained + FLOAT * self.buffers

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
        return (itemsize + 3 * FLOAT) * numbers + FLOAT * -(-self.buffers // self.shared_copies)


def stage_parameters(shape: ModelShape, layout: Layout) -> list[StageParameters]:
    """The parameters of every pipeline stage.  Raises ValueError if the layout cannot hold the model."""
    params = [param for param, _ in counted_params(shape)]
    experts_here = shape.num_experts // layout.ep_size
    stages = []
    for pp_rank in range(layout.pp_size):
        layers = {layer for chunk in layout.layers(shape.num_layers, pp_rank) for layer in chunk}
        shared = experts = buffers = largest = 0
        for param in params:
            if not _is_on_stage(param, shape, layout, pp_rank, layers):
                continue
            size = layout.tp_size if param.expert is None else layout.etp_size
            numbers = prod(param.mcore_shape(shape, size))
            if not param.has_gradient:
                buffers += numbers
            elif param.expert is None:
                shared += numbers
                largest = max(largest, numbers)
            else:
                # A rank's experts of a layer are one tensor.
                experts += numbers * experts_here
                largest = max(largest, numbers * experts_here)
        stages.append(
            StageParameters(
                layers=tuple(sorted(layers)),
                shared=shared,
                experts=experts,
                buffers=buffers,
                largest=largest,
                shared_copies=layout.dp_size * layout.cp_size,
                expert_copies=max(1, layout.stage_size // layout.experts_size),
            )
        )
    return stages


def _is_on_stage(param: Param, shape: ModelShape, layout: Layout, pp_rank: int, layers: set[int]) -> bool:
    is_first, is_last = pp_rank == 0, pp_rank == layout.pp_size - 1
    if param.layer is not None:
        return param.layer in layers
    if param.stage_part == "first":
        # Tied weights: the last stage keeps a copy of the embedding.
        return is_first or (is_last and shape.tie_word_embeddings and shape.head == "lm")
    return is_last
