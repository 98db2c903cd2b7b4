"""The end of the last stage of a critic or reward model: one number for every token instead of a word.

Dims: T packed tokens of this cp rank, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from scalerl.parallel.marks import mark

_INIT_SEED = 0


class ValueHead(torch.nn.Module):
    """A linear layer H -> 1 in float32, the same on all tp ranks: its weight is not split.

    weight: [1, H], random until one is loaded: the same numbers on every rank and in every run, of standard deviation
    1 / (H + 1), so that values start near 0.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        size = config.hidden_size
        initial = torch.randn(1, size, generator=torch.Generator().manual_seed(_INIT_SEED)) / (size + 1)
        self.weight = torch.nn.Parameter(initial.to(config.params_dtype))
        self.sequence_parallel = config.sequence_parallel
        # Each tp rank sees its tokens only: megatron sums such gradients over tp ranks.
        mark(self.weight, sequence_parallel=config.sequence_parallel)

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Computes the values: hidden [T, 1, H] -> ([T, 1, 1] float32, None).

        With sequence parallelism the tokens of `hidden` are split over tp ranks. Without it every tp rank does the same
        work on the same tokens, so no gradient is summed.
        """
        values = F.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            # All tp ranks compute the same loss of all values: each keeps the gradient of its own tokens.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def put_value_head(model: GPTModel) -> None:
    """Puts a ValueHead in the place of the output layer of a model that does not tie it to its embedding."""
    assert not model.share_embeddings_and_output_weights
    # Any layer that takes hidden states does.
    model.output_layer = ValueHead(model.config)  # pyright: ignore[reportAttributeAccessIssue]  # megatron declares one class
