"""Packed attention with a sink in each head's softmax, and with sliding windows in some layers (gpt-oss).

A sink is a learned logit s that takes its share of the softmax and has no value. From a kernel's output O and its
log-sum-exp L over the keys: L' = logaddexp(L, s) and O' = O exp(L - L'). The kernel's backward pass, given O' and L',
returns the gradients of queries, keys and values; that of s is -sum over the queries of exp(s - L') (dO' . O').
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from scalerl.parallel.attention import PackedAttention

if TYPE_CHECKING:
    from scalerl.models import ModelShape
    from scalerl.parallel.layout import Groups
    from scalerl.parallel.micro_batch import Packing


def sink_attention(shape: ModelShape, groups: Groups) -> ModuleSpec:
    """The spec of each layer's rotary embedding and attention of a model with sinks."""
    layers = shape.sliding_layers or (False,) * shape.num_layers
    windows = tuple(shape.sliding_window if is_sliding else None for is_sliding in layers)
    return ModuleSpec(module=SinkAttention, params={"cp_group": groups.cp, "windows": windows})


class SinkAttention(PackedAttention):
    """`PackedAttention` with a sink in each head; in some layers a token sees the last tokens alone, itself included.

    sinks: [heads / tp].  On CUDA in 16 bits one variable-length flash call, elsewhere whole matrices of scores.
    """

    def __init__(
        self, config: Any, layer_number: int, *args: Any, windows: tuple[int | None, ...], **named: Any
    ) -> None:
        """windows: for each layer of the model the tokens that a token sees; None: all before it."""
        super().__init__(config, layer_number, *args, **named)
        self.window = windows[layer_number - 1]
        num_heads = config.num_attention_heads // config.tensor_model_parallel_size
        sinks = torch.empty(num_heads, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.sinks = torch.nn.Parameter(sinks)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        sinks = self.sinks
        if packing.order is not None:
            # Of the heads for which this cp rank has all tokens.
            sinks = sinks.chunk(self.cp_group.size())[self.cp_group.rank()]
        scale = query.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            kernel = FlashKernel(packing.cu_seqlens_q, packing.max_seqlen_q, self.window, scale)
            return AttentionWithSinks.apply(query, key, value, sinks, kernel)
        return by_definition(query, key, value, sinks, packing.lengths, self.window, scale)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The tensors of a checkpoint: the sinks of all heads."""
        return make_sharded_tensors_for_checkpoint(
            {"sinks": self.sinks}, prefix, {"sinks": 0}, sharded_offsets=sharded_offsets
        )


class Kernel(Protocol):
    """Attention without sinks that gives its log-sum-exp away, and whose backward pass takes another one."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Computes the output [T, h, d], the log-sum-exp [h, T] float32, and what `backward` wants as `saved`."""
        ...

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *saved: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes the gradients of query, key and value from that of the output."""
        ...


@dataclass(frozen=True)
class FlashKernel:
    """torch's FlashAttention over packed sequences.  window: the tokens that a token sees; None: all before it."""

    cu_seqlens: Tensor
    max_seqlen: int
    window: int | None
    scale: float

    @property
    def _arguments(self) -> tuple[Any, ...]:
        """cu_seqlens and greatest lengths of queries and keys, share of dropout, whether nothing but causal."""
        return self.cu_seqlens, self.cu_seqlens, self.max_seqlen, self.max_seqlen, 0.0, self.window is None

    @property
    def _options(self) -> dict[str, Any]:
        left = -1 if self.window is None else self.window - 1
        return {"scale": self.scale, "window_size_left": left, "window_size_right": 0}

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        out, lse, *saved = torch.ops.aten._flash_attention_forward(
            query, key, value, *self._arguments, return_debug_mask=False, **self._options
        )
        return out, lse, tuple(saved[:2])

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *saved: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.aten._flash_attention_backward(
            grad, query, key, value, out, lse, *self._arguments, *saved, **self._options
        )


class AttentionWithSinks(torch.autograd.Function):
    """A kernel's attention with sinks: query [T, h, d], key and value [T, kv, d], sinks [h] -> [T, h, d]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor, kernel: Kernel) -> Tensor:
        out, lse_HT, saved = kernel.forward(query, key, value)
        with_sink_HT = torch.logaddexp(lse_HT, sinks_H.float()[:, None])
        out = out * (lse_HT - with_sink_HT).exp().t()[..., None].to(out.dtype)
        ctx.save_for_backward(query, key, value, sinks_H, out, with_sink_HT, *saved)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        query, key, value, sinks_H, out, lse_HT, *saved = ctx.saved_tensors
        grads = ctx.kernel.backward(grad.contiguous(), query, key, value, out, lse_HT, *saved)
        share_HT = (sinks_H.float()[:, None] - lse_HT).exp()
        grad_sinks_H = -(share_HT * (grad.float() * out.float()).sum(-1).t()).sum(1)
        return *grads, grad_sinks_H.to(sinks_H.dtype), None


def by_definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks_H: Tensor,
    lengths: tuple[int, ...],
    window: int | None,
    scale: float,
) -> Tensor:
    """The same from whole matrices of scores, all neighbours of one length together; arguments as of the kernel."""
    runs = [(length, sum(1 for _ in same)) for length, same in groupby(lengths) if length]
    num_tokens = [length * number for length, number in runs]
    outputs = []
    for (length, _), *share in zip(runs, *(x.split(num_tokens) for x in (query, key, value)), strict=True):
        # [N sequences, heads, L, d]
        q, k, v = (tensor.unflatten(0, (-1, length)).transpose(1, 2) for tensor in share)
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        scores = (q @ k.transpose(2, 3) * scale).masked_fill(_hidden(length, window, q.device), float("-inf"))
        sinks = sinks_H[:, None, None].expand(len(q), -1, length, 1).to(scores.dtype)
        shares = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        outputs.append((shares @ v).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def _hidden(length: int, window: int | None, device: torch.device) -> Tensor:
    """[L, L] whether the token of the row does not see that of the column."""
    positions = torch.arange(length, device=device)
    back = positions[:, None] - positions
    return back < 0 if window is None else (back < 0) | (back >= window)
