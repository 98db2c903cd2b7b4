"""Rotary embedding and core attention of packed sequences, and each layer's RMSNorm, for megatron's local layer spec.

The rotary tables are made once for a micro-batch; the core attention applies them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from scalerl.models import ModelShape
from scalerl.models.vision import VisionModel
from scalerl.parallel.layout import mark
from scalerl.parallel.micro_batch import Packing
from scalerl.parallel.ulysses import heads_to_tokens, tokens_to_heads


@cache
def _varlen_attn() -> Callable[..., Any] | None:
    """torch's attention over packed sequences on CUDA, or None; its import takes half a second, of no use on a CPU."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


@cache
def _takes_fewer_key_heads(attention: Callable[..., Any]) -> bool:
    """Whether torch's attention takes fewer key than query heads: 2.12 and newer; 2.11 wants as many."""
    return "enable_gqa" in inspect.signature(attention).parameters


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm whose weight gradient megatron sums over tp ranks when they hold parts of the sequence."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        mark(self.weight, sequence_parallel=config.sequence_parallel)


class PostNorm(RMSNorm):
    """RMSNorm of what attention or MLP adds to the residual, in the place of megatron's sum of both and a bias.

    There is no bias, and no dropout.
    """

    def forward(self, *_: bool) -> Callable[..., Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns what megatron calls with (output, bias), residual and share of dropout."""
        return self._sum

    def _sum(self, output_and_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        output, _ = output_and_bias
        # megatron calls it with gradients in passes without them, too.
        with torch.set_grad_enabled(output.requires_grad):
            return residual + super().forward(output)


class ZeroCentredRMSNorm(RMSNorm):
    """RMSNorm that multiplies with 1 + weight.

    The weight is kept as the files have it: 1 + weight would lose in bfloat16 what little was learned.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class Rotary:
    """The model's rotary embedding (arXiv 2104.09864), with Llama 3's scaling or YaRN where config.json asks for it."""

    def __init__(self, shape: ModelShape, device: str) -> None:
        exponents = torch.arange(0, shape.rotary_dim, 2, dtype=torch.float32) / shape.rotary_dim
        frequencies = 1.0 / shape.rope_theta**exponents
        # What queries and keys are multiplied with.
        self.scale = 1.0
        if shape.rope_scaling and shape.rope_scaling["rope_type"] == "yarn":
            frequencies, self.scale = _yarn(frequencies, shape.rope_scaling, shape.rope_theta)
        elif shape.rope_scaling:
            frequencies = _llama3(frequencies, shape.rope_scaling)
        self.frequencies = frequencies.to(device)
        self.axes = None if shape.vision is None else _axes(shape.vision, len(frequencies)).to(device)

    def tables(self, position_ids: Tensor) -> Tensor:
        """Cosines and sines of positions: [1, T] int64 -> [2, T, turned numbers of a head / 2] float32.

        position_ids: [3, T] with pictures, in time, height and width.
        """
        positions_T1 = position_ids.T.float()
        if len(position_ids) > 1:
            positions_T1 = positions_T1[:, self.axes]
        angles = positions_T1 * self.frequencies
        return torch.stack([angles.cos(), angles.sin()]) * self.scale


def _axes(vision: VisionModel, num_pairs: int) -> Tensor:
    """[num_pairs] the axis by whose position each pair of a head turns: 0 time, 1 height, 2 width."""
    if not vision.interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(vision.sections))
    axes = torch.zeros(num_pairs, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * vision.sections[axis] : 3] = axis
    return axes


def _llama3(frequencies: Tensor, scaling: dict) -> Tensor:
    """Scales frequencies by Llama 3.1's rule: long waves are stretched by `factor`, short ones kept, others blended."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling["factor"])


def _yarn(frequencies: Tensor, scaling: dict, theta: float) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071, section 3.2 and eq. 22): (frequencies, scale of queries and keys).

    Pairs that turn more than beta_fast times over the original positions are kept, those that turn less than beta_slow
    times are stretched by `factor`, those between blended by their number.
    """
    num_pairs, factor = len(frequencies), scaling["factor"]

    def pair_of(turns: float) -> float:
        """The number of the pair that turns so often over the original positions."""
        return (
            num_pairs * math.log(scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)) / math.log(theta)
        )

    first, last = pair_of(scaling["beta_fast"]), pair_of(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    # One step where both are the same.
    width = (last - first) or 0.001
    stretched = ((torch.arange(num_pairs, dtype=torch.float32) - first) / width).clamp(0, 1)
    blended = frequencies * (1 - stretched) + frequencies / factor * stretched
    return blended, 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotate_pairs(x: Tensor, cos_sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotates x [T, heads, d]: of its first r numbers pairs (i, i + r / 2) turn by their angle.

    cos_sin: [2, T, r / 2]. interleaved: pairs (2 i, 2 i + 1). In float32, returned in x's dtype.
    """
    cos, sin = cos_sin[:, :, None]
    num_pairs = cos_sin.shape[-1]
    turned, rest = x.float().split([2 * num_pairs, x.shape[-1] - 2 * num_pairs], dim=-1)
    first, second = turned.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turned.chunk(2, dim=-1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    turned = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    return torch.cat([turned, rest], dim=-1).to(x.dtype)


@lru_cache(maxsize=1)
def _compiled_rotate() -> Any:
    return torch.compile(rotate_pairs, dynamic=True)


class RotateQueriesAndKeys:
    """The rotation of a layer's queries and keys."""

    def __init__(self, layer_number: int, *, interleaved: bool = False, nope_layers: Sequence[int] = ()) -> None:
        """layer_number: from 1 on over the whole model.  interleaved: as of `rotate_pairs`.

        nope_layers: for each layer of the model whether it has no rotary embedding; empty: all have one.
        """
        self.interleaved = interleaved
        self.is_nope = bool(nope_layers) and bool(nope_layers[layer_number - 1])

    def __call__(self, query: Tensor, key: Tensor, cos_sin: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rotates as `rotate_pairs`. cos_sin None: they have been rotated already."""
        if cos_sin is None or self.is_nope:
            return query, key
        # On CUDA one kernel instead of five.
        turn = _compiled_rotate() if query.is_cuda else rotate_pairs
        return turn(query, cos_sin, self.interleaved), turn(key, cos_sin, self.interleaved)


class PackedAttention(torch.nn.Module):
    """Rotary embedding and causal attention inside each sequence of a packed (THD) micro-batch.

    On CUDA one variable-length flash call for the whole micro-batch; on CPU one scaled_dot_product_attention call
    for each sequence length. Neither computes padding. With context parallelism tokens are swapped for heads before
    and back after (`ulysses`).
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        cp_group: Any = None,
        rotary: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """rotary: arguments of `RotateQueriesAndKeys`."""
        super().__init__()
        self.softmax_scale = softmax_scale
        self.cp_group = cp_group
        self.rotate = RotateQueriesAndKeys(layer_number, **(rotary or {}))
        if config.context_parallel_size > 1 and cp_group is None:
            raise ValueError("context parallelism needs the cp group: ModuleSpec(PackedAttention, {'cp_group': ...})")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: Packing,
        **_: Any,
    ) -> Tensor:
        """Attends: query [t, heads/tp, d], key [t, kv_heads/tp, d], value [t, kv_heads/tp, dv] -> [t, heads/tp * dv].

        t: this cp rank's tokens, P / cp.
        """
        packing = packed_seq_params
        query, key = self.rotate(query, key, packing.cos_sin)
        if packing.order is not None and packing.natural is not None:
            query, key, value = heads_to_tokens(query, key, value, packing.natural, self.cp_group)
        # The fused kernels want one head size, on a CPU too: other ones make whole matrices of scores. Zeros after a
        # narrower value stay apart in the output.
        narrower = query.shape[2] - value.shape[2]
        if narrower:
            value = F.pad(value, (0, narrower))
        out = self.attend(query, key, value, packing)
        if narrower:
            out = out[..., :-narrower]
        if packing.order is not None:
            out = tokens_to_heads(out, packing.order, self.cp_group)
        return out.reshape(out.shape[0], -1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        """Attends with this rank's heads over all tokens: [P, h, d], [P, kv, d], [P, kv, d] -> [P, h, d]."""
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and _varlen_attn() is not None:
            return _flash(query, key, value, packing.cu_seqlens_q, packing.max_seqlen_q, self.softmax_scale)
        return _per_length(query, key, value, packing.lengths, self.softmax_scale)


def attend_in_sequences(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
) -> Tensor:
    """Attends inside each of several sequences, to what comes before and after: [P, heads, d] each -> [P, heads, d].

    cu_seqlens: int32, their bounds, on the tensors' device.
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and _varlen_attn() is not None:
        return _flash(query, key, value, cu_seqlens, max_seqlen, scale, is_causal=False)
    # Those of one length become neighbours.
    lengths = cu_seqlens.diff()
    by_length = lengths.argsort(stable=True)
    starts = cu_seqlens[:-1][by_length]
    sorted_lengths = lengths[by_length]
    shifts = starts - (sorted_lengths.cumsum(0) - sorted_lengths)
    order_P = torch.arange(len(query), device=query.device) + shifts.repeat_interleave(sorted_lengths)
    query, key, value = (tensor[order_P] for tensor in (query, key, value))
    attended = _per_length(query, key, value, tuple(sorted_lengths.tolist()), scale, is_causal=False)
    return torch.empty_like(attended).index_copy(0, order_P, attended)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float | None,
    *,
    is_causal: bool = True,
) -> Tensor:
    """[P, heads, d]. CUDA, bfloat16 or float16; torch must have `_varlen_attn`."""
    attention = _varlen_attn()
    assert attention is not None
    # (-1, 0): everything to the left, nothing to the right. torch 2.10's argument is_causal is gone since 2.11.
    options: dict[str, Any] = {"window_size": (-1, 0 if is_causal else -1)}
    if scale is not None:
        options["scale"] = scale
    if current_flash_attention_impl() is not None:
        # FlashAttention 3 would else share out keys as the longest sequence asks, and numbers depend on the packing.
        options["num_splits"] = 1
    group = query.shape[1] // key.shape[1]
    if group > 1 and _takes_fewer_key_heads(attention):
        options["enable_gqa"] = True
    elif group > 1:
        key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    return attention(query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)


def _per_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[int, ...],
    scale: float | None,
    *,
    is_causal: bool = True,
) -> Tensor:
    """One scaled_dot_product_attention call for all neighbours of one length: on short ones a call each is overhead.

    Rows of a micro-batch are in the order of their lengths (`micro_batch.by_length`), so these are all of that length.
    """
    runs = [(length, sum(1 for _ in same)) for length, same in groupby(lengths) if length]
    num_tokens = [length * number for length, number in runs]
    outputs = []
    for (length, _), *share in zip(runs, *(x.split(num_tokens) for x in (query, key, value)), strict=True):
        # [N sequences, heads, L, d]
        q, k, v = (tensor.unflatten(0, (-1, length)).transpose(1, 2) for tensor in share)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True, scale=scale)
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)
