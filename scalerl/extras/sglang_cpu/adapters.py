"""Low-rank adapters (LoRA) in a server of SGLang without a GPU: memory that is not pinned, and experts in torch."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def register_adapters() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    experts = "sglang.srt.lora.layers.FusedMoEWithLoRA._forward_with_lora"
    HookRegistry.register(experts, _experts, HookType.REPLACE)
    # SGLang's layers with adapters pin memory of the host whether or not there is a GPU.
    torch.Tensor.pin_memory = lambda self, device=None: self
    for name in ("tensor", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))


def _unpinned(make: Any) -> Any:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return make(*args, **kwargs)

    return made


def _experts(layer: Any, hidden_states: Tensor, topk_output: Any, lora_info: Any, **_: Any) -> Any:
    """A layer's experts with the adapters of their tokens; SGLang's are Triton kernels.

    SGLang's buffers: A of gate and up [slots, experts, 2 * max_rank, H], B [slots, experts, 2 * I, max_rank], A of down
    [slots, experts, max_rank, I], B [slots, experts, H, max_rank]. The factor alpha / rank is in B.
    """
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    dispatched = layer.base_layer.dispatcher.dispatch(hidden_states=hidden_states, topk_output=topk_output)
    x, (weights, ids, _) = dispatched.hidden_states, dispatched.topk_output
    output = torch.zeros_like(x)
    for expert in range(layer.base_layer.w13_weight.shape[0]):
        rows, columns = (ids == expert).nonzero(as_tuple=True)
        if len(rows):
            down = _expert(layer.base_layer, expert, x[rows], _Adapters(lora_info, expert, rows))
            output.index_add_(0, rows, down * weights[rows, columns, None].to(down.dtype))
    return layer.base_layer.dispatcher.combine(combine_input=StandardCombineInput(hidden_states=output))


def _expert(base: Any, expert: int, x: Tensor, adapters: _Adapters) -> Tensor:
    gate_up = F.linear(x, base.w13_weight[expert]) + adapters.gate_up(x)
    gate, up = gate_up.chunk(2, -1)
    inner = F.silu(gate) * up
    return F.linear(inner, base.w2_weight[expert]) + adapters.down(inner)


class _Adapters:
    """The adapters of one expert's tokens.  rows: of the batch, one for each of these tokens."""

    def __init__(self, info: Any, expert: int, rows: Tensor) -> None:
        self.info, self.expert = info, expert
        self.slots = info.token_lora_mapping[rows].long()
        self.active = [slot for slot in self.slots.unique().tolist() if info.adapter_enabled[slot]]

    def gate_up(self, x: Tensor) -> Tensor:
        def change(slot: int, tokens: Tensor) -> Tensor:
            low = F.linear(tokens, self.info.gate_up_lora_a_weights[slot, self.expert])
            halves = zip(low.chunk(2, -1), self.info.gate_up_lora_b_weights[slot, self.expert].chunk(2), strict=True)
            return torch.cat([F.linear(half, b) for half, b in halves], -1)

        return self._of_each(x, self.info.gate_up_lora_b_weights.shape[-2], change)

    def down(self, inner: Tensor) -> Tensor:
        def change(slot: int, tokens: Tensor) -> Tensor:
            low = F.linear(tokens, self.info.down_lora_a_weights[slot, self.expert])
            return F.linear(low, self.info.down_lora_b_weights[slot, self.expert])

        return self._of_each(inner, self.info.down_lora_b_weights.shape[-2], change)

    def _of_each(self, x: Tensor, width: int, change: Any) -> Tensor:
        """What the adapters add to an output [tokens, width] of x: zero where a token has none."""
        changes = x.new_zeros(len(x), width)
        for slot in self.active:
            mine = self.slots == slot
            changes[mine] = change(slot, x[mine]).to(x.dtype)
        return changes
