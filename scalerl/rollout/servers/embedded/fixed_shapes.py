"""The parts of a forward pass that depend on shapes, in shapes that are the same however many rows are computed.

A matrix product may add in another order when its shape changes. So products with weights and experts are computed for
NUM_ROWS rows at a time, or for the tokens of one prompt; all else of a forward pass is row by row, attention too, whose
kernel takes one row and head after the other. A batch of products of one shape computes each as it would be alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from scalerl.models import FAMILIES

NUM_ROWS = 32
# Name of the attention and the experts of this module in transformers' registries.
IN_BLOCKS = "scalerl_in_blocks"
# Bytes; a product's kernel may depend on where its numbers begin.
ALIGNMENT = 64


# Rows of each block of the products of the current pass; None: NUM_ROWS each. Without a value: one product.
_num_rows: ContextVar[Sequence[int] | None] = ContextVar("num_rows")


def compute_in_blocks(model: PreTrainedModel) -> None:
    """Lets passes over `model` have any number of rows, if it is of a family that is known to allow that, on a CPU.

    Other models, and other devices, whose kernels choose by shape more often, stay with passes of NUM_ROWS rows.
    """
    of_transformers = type(model).__module__.startswith("transformers.models.")
    if model.device.type == "cpu" and of_transformers and model.config.model_type in FAMILIES:
        model.set_attn_implementation(IN_BLOCKS)
        lay_weights_by_column(model)
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = LinearInBlocks


def lay_weights_by_column(model: PreTrainedModel) -> None:
    """Stores float32 weights of linear layers in the order in which a product of few rows reads them: a quarter faster.

    Not those that are also the embeddings, which are read by row; bfloat16 gains nothing.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32 and id(module.weight) not in embeddings:
            module.weight.data = module.weight.data.t().contiguous().t()


def computes_in_blocks(model: PreTrainedModel) -> bool:
    return model.config._attn_implementation == IN_BLOCKS


def has_experts(model: PreTrainedModel) -> bool:
    return model._can_set_experts_implementation()


@contextlib.contextmanager
def products_in_blocks(model: PreTrainedModel, num_rows: Sequence[int] | None = None) -> Iterator[None]:
    """Computes the model's products with weights in blocks of rows, within the block of code.

    num_rows: of each block; None: NUM_ROWS each.  With num_rows, products of fewer rows than that are computed row by
    row.
    """
    token = _num_rows.set(num_rows)
    try:
        # Routers of experts are no modules of torch.
        with _LinearFunction() if has_experts(model) else contextlib.nullcontext():
            yield
    finally:
        _num_rows.reset(token)


class _LinearFunction(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (linear_in_blocks if func is F.linear else func)(*args, **(kwargs or {}))


class LinearInBlocks(nn.Linear):
    """torch's linear layer, within `products_in_blocks` computed in blocks of rows."""

    def forward(self, input: Tensor) -> Tensor:
        return linear_in_blocks(input, self.weight, self.bias)


def linear_in_blocks(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    try:
        num_rows = _num_rows.get()
    except LookupError:
        return F.linear(input, weight, bias)
    rows_RK, weight_KN = input.reshape(-1, input.shape[-1]), weight.t()
    if num_rows is None:
        output_RN = _products(rows_RK, weight_KN, bias)
    else:
        sizes = list(num_rows) if len(rows_RK) == sum(num_rows) else [1] * len(rows_RK)
        output_RN = torch.cat([_product(_aligned(block), weight_KN, bias) for block in rows_RK.split(sizes)])
    return output_RN.view(*input.shape[:-1], weight.shape[0])


def _products(rows_RK: Tensor, weight_KN: Tensor, bias: Tensor | None) -> Tensor:
    """[R, N] of blocks of NUM_ROWS rows.  In float32 one call multiplies all of them, each as it would be alone."""
    assert len(rows_RK) % NUM_ROWS == 0, len(rows_RK)
    if rows_RK.dtype == torch.float32:
        blocks_BRK = rows_RK.view(-1, NUM_ROWS, rows_RK.shape[1])
        weights_BKN = weight_KN.expand(len(blocks_BRK), -1, -1)
        if bias is None:
            output_BRN = torch.bmm(blocks_BRK, weights_BKN)
        else:
            output_BRN = torch.baddbmm(bias, blocks_BRK, weights_BKN)
        return output_BRN.view(len(rows_RK), -1)
    output_RN = rows_RK.new_empty(len(rows_RK), weight_KN.shape[1])
    for block, output in zip(rows_RK.split(NUM_ROWS), output_RN.split(NUM_ROWS), strict=True):
        _product(block, weight_KN, bias, output)
    return output_RN


def _product(rows_RK: Tensor, weight_KN: Tensor, bias: Tensor | None, output_RN: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.mm(rows_RK, weight_KN, out=output_RN)
    return torch.addmm(bias, rows_RK, weight_KN, out=output_RN)


def _aligned(tensor: Tensor) -> Tensor:
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def attention_in_blocks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    prompt_lens: Sequence[int] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' sdpa attention, [B, T, heads, d], of one token of each row, or of each prompt.

    query, key, value: [B, heads, T, d].  prompt_lens: tokens of each prompt, if T is all of them, one after the other.
    """
    if prompt_lens is not None:
        assert attention_mask is None
        options: dict[str, Any] = {"scale": scaling, "enable_gqa": key.shape[1] != query.shape[1]}
        outputs = [
            F.scaled_dot_product_attention(_aligned(q), _aligned(k), _aligned(v), is_causal=q.shape[2] > 1, **options)
            for q, k, v in zip(*(states.split(list(prompt_lens), 2) for states in (query, key, value)), strict=True)
        ]
        return torch.cat([output.transpose(1, 2) for output in outputs], 1), None
    if query.shape[2] > 1 or attention_mask is None:  # one prompt
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return attention_of_one_token(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


def attention_of_one_token(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float | None
) -> Tensor:
    """[R, heads, 1, d].  query: of one token of each row.  attention_mask: [R, 1, 1, L], added to the scores.

    In float32 the heads that share keys are computed together, as if they were tokens: a quarter faster, and other
    bits. bfloat16 gains nothing.
    """
    num_sharing = query.shape[1] // key.shape[1]
    if num_sharing == 1 or query.dtype != torch.float32:
        options: dict[str, Any] = {"scale": scaling, "enable_gqa": num_sharing > 1}
        return F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, **options)
    shared = query.reshape(len(query), key.shape[1], num_sharing, -1)
    mask = attention_mask.expand(-1, -1, num_sharing, -1)
    output = F.scaled_dot_product_attention(shared, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(len(query), query.shape[1], 1, -1)


def experts_in_blocks(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Multiplies each token with its own experts, for NUM_ROWS tokens at a time."""
    parts = zip(*(x.split(NUM_ROWS) for x in (hidden, top_k_index, top_k_weights)), strict=True)
    return torch.cat([batched_mm_experts_forward(module, *part) for part in parts])


AttentionInterface.register(IN_BLOCKS, attention_in_blocks)
AttentionMaskInterface.register(IN_BLOCKS, sdpa_mask)
ALL_EXPERTS_FUNCTIONS.register(IN_BLOCKS, experts_in_blocks)
