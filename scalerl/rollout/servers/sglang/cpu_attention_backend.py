"""An attention backend for SGLang on a CPU, with few calls for a batch instead of SGLang's one for each sequence."""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import Tensor

from scalerl.rollout.servers.sglang.cpu_attention import AttentionCall, Heads, plan_calls


class BatchedAttnBackend(TorchNativeAttnBackend):
    """Causal self-attention by calls for many sequences; all else is left to SGLang's loop over sequences.

    The loop does sliding windows, encoders, cross-attention, and keys and values of different width (MLA).
    """

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        # Calls of the current forward pass; all layers with the same heads share them.
        self._calls: dict[Heads, list[AttentionCall]] = {}

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self._calls = {}

    def _run_sdpa_forward_decode(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> Tensor:
        if _needs_loop(query, k_cache, v_cache, encoder_lens, is_cross_attn, sliding_window_size):
            return super()._run_sdpa_forward_decode(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens,
                scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
        query_lens = torch.ones_like(seq_lens)
        return self._attend(
            query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, query_lens, scaling
        )

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
        encoder_lens: Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> Tensor:
        if not causal or _needs_loop(query, k_cache, v_cache, encoder_lens, is_cross_attn, sliding_window_size):
            return super()._run_sdpa_forward_extend(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
                extend_prefix_lens, extend_seq_lens, encoder_lens,
                scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
        return self._attend(
            query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_seq_lens, scaling
        )

    def _attend(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        query_lens: Tensor,
        scaling: float | None,
    ) -> Tensor:
        heads = Heads(query.shape[1], k_cache.shape[1], k_cache.shape[2])
        if heads not in self._calls:
            self._calls[heads] = plan_calls(seq_lens, query_lens, req_to_token, req_pool_indices, heads)
        for call in self._calls[heads]:
            call.attend(query, output, k_cache, v_cache, scaling)
        return output


def _needs_loop(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    encoder_lens: Tensor | None,
    is_cross_attn: bool,
    sliding_window_size: int | None,
) -> bool:
    return (
        encoder_lens is not None
        or is_cross_attn
        or (sliding_window_size is not None and sliding_window_size > -1)
        or not query.shape[2] == k_cache.shape[2] == v_cache.shape[2]
    )
