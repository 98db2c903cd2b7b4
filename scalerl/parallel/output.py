"""The end of the last stage of a language model: it gives hidden states and the output weight, never the logits."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor


def hand_out_hidden(model: GPTModel) -> None:
    """Makes the model return the hidden states that its output layer, which keeps its parameter, would multiply."""

    def forward(hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return hidden, None

    layer: Any = model.output_layer
    layer.forward = forward


def output_weight(model: GPTModel) -> Tensor:
    """[V / tp, H] output weight of the last chunk: the output layer's, or the embedding's if tied on one stage."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    weight = model.output_layer.weight
    assert weight is not None
    return weight


def whole_hidden(hidden_TH: Tensor, *, sequence_parallel: bool) -> Tensor:
    """Hidden states [T, H] of all tokens on every tp rank; the gradients of the vocabulary parts are summed."""
    if sequence_parallel:
        return gather_from_sequence_parallel_region(hidden_TH, tensor_parallel_output_grad=True)
    return copy_to_tensor_model_parallel_region(hidden_TH)
