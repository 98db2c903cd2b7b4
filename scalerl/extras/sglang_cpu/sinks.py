"""Attention with sinks (gpt-oss) in a server without a GPU: torch's backend of SGLang knows none.

Imported in SGLang's processes alone.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor


def accept_backend(model_hook: Any, name: str) -> None:
    """Makes SGLang start gpt-oss with the attention backend `name`: it has a list of those that know sinks.

    model_hook: the module with the list. There the backend goes by the name of one on it.
    """
    backends_of = model_hook.attention_backends_of

    def listed(arguments: Any) -> tuple[str, ...]:
        return tuple("triton" if backend == name else backend for backend in backends_of(arguments))

    model_hook.attention_backends_of = listed


class TorchBackend(TorchNativeAttnBackend):
    """SGLang's attention in torch, which takes the sinks that gpt-oss's layers give it."""

    _sinks: Tensor | None = None

    def forward_extend(self, *args: Any, sinks: Tensor | None = None, **named: Any) -> Tensor:
        self._sinks = sinks
        return super().forward_extend(*args, **named)

    def forward_decode(self, *args: Any, sinks: Tensor | None = None, **named: Any) -> Tensor:
        self._sinks = sinks
        return super().forward_decode(*args, **named)

    def _run_sdpa_forward_extend(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        extend_prefix_lens: Tensor,
        extend_seq_lens: Tensor,
        *args: Any,
        **named: Any,
    ) -> Tensor:
        if self._sinks is None:
            lengths = extend_prefix_lens, extend_seq_lens
            return super()._run_sdpa_forward_extend(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, *lengths, *args, **named
            )
        slots = self._slots(req_to_token, req_pool_indices, seq_lens)
        return self._with_sinks(query, output, k_cache, v_cache, slots, extend_seq_lens.tolist(), **named)

    def _run_sdpa_forward_decode(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        *args: Any,
        **named: Any,
    ) -> Tensor:
        if self._sinks is None:
            return super()._run_sdpa_forward_decode(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, *args, **named
            )
        slots = self._slots(req_to_token, req_pool_indices, seq_lens)
        return self._with_sinks(query, output, k_cache, v_cache, slots, list(repeat(1, len(slots))), **named)

    def _slots(self, req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor) -> list[Tensor]:
        """The places of each sequence's tokens in the cache."""
        rows = zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
        return [req_to_token[row, :length] for row, length in rows]

    def _with_sinks(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: list[Tensor],
        new_lengths: list[int],
        *,
        scaling: float,
        sliding_window_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Attends with the last new_lengths[i] tokens of sequence i: query and output [new tokens, heads, d].

        sliding_window_size: tokens before itself that a token sees; None: all.
        """
        assert self._sinks is not None
        sinks = self._sinks.to(query.dtype)[:, None, None]
        for q, out, places, new in zip(
            query.split(new_lengths), output.split(new_lengths), slots, new_lengths, strict=True
        ):
            repeats = q.shape[1] // k_cache.shape[1]
            k, v = (
                cache[places].to(q.dtype).repeat_interleave(repeats, dim=1).transpose(0, 1)
                for cache in (k_cache, v_cache)
            )
            positions = torch.arange(len(places))
            back = positions[-new:, None] - positions
            hidden = back < 0
            if sliding_window_size is not None:
                hidden |= back > sliding_window_size
            scores = (q.transpose(0, 1) @ k.transpose(1, 2) * scaling).masked_fill(hidden, float("-inf"))
            shares = torch.cat([scores, sinks.expand(-1, new, 1)], dim=-1).softmax(-1)[..., :-1]
            out.copy_((shares @ v).transpose(0, 1))
        return output
