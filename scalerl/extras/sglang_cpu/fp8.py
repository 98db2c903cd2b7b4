"""Weights in blocks of fp8 in SGLang on a CPU: kept as they are loaded, and multiplied out in each product.

SGLang itself has them on a CPU only where the CPU has AMX. The products are exact, so what is checked is which numbers
and scales a server has, and where: kernels of a GPU round activations too.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.layers.moe.token_dispatcher import CombineInput

_MODULE = "sglang.srt.layers.quantization.fp8"
_SCALES = "_scale_inv"


def register_fp8() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_MODULE}.Fp8Config.get_supported_act_dtypes", _any_dtype, HookType.REPLACE)
    for method, apply in (("Fp8LinearMethod", _linear), ("Fp8MoEMethod", _experts)):
        HookRegistry.register(f"{_MODULE}.{method}.process_weights_after_loading_block_quant", _keep, HookType.REPLACE)
        HookRegistry.register(f"{_MODULE}.{method}.apply", apply, HookType.AROUND)


def _any_dtype(*_: Any) -> list[torch.dtype]:
    """Of activations: float32 too, in which a CPU is compared with transformers."""
    return [torch.bfloat16, torch.float16, torch.float32]


def _keep(*_: Any) -> None:
    """Leaves the parameters as they are loaded, so that they can be loaded again."""


def _linear(
    apply: Callable[..., torch.Tensor],
    method: Any,
    layer: torch.nn.Module,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    if not method.block_quant:
        return apply(method, layer, x, bias)
    return torch.nn.functional.linear(x, _multiplied_out(layer, "weight", method, x.dtype), bias)


def _experts(
    apply: Callable[..., CombineInput], method: Any, layer: torch.nn.Module, dispatch_output: Any
) -> CombineInput:
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    if not method.block_quant:
        return apply(method, layer, dispatch_output)
    hidden = dispatch_output.hidden_states
    weights = {name: _multiplied_out(layer, name, method, hidden.dtype) for name in ("w13_weight", "w2_weight")}
    plain: Any = SimpleNamespace(num_experts=layer.num_experts, moe_ep_size=layer.moe_ep_size, **weights)
    output = fused_moe_native.moe_forward_native(plain, hidden, dispatch_output.topk_output, method.moe_runner_config)
    return StandardCombineInput(hidden_states=output)


def _multiplied_out(layer: torch.nn.Module, name: str, method: Any, dtype: torch.dtype) -> torch.Tensor:
    """A layer's weights [..., rows, columns], each number times the scale of its block."""
    numbers, scales = getattr(layer, name), getattr(layer, name + _SCALES)
    height, width = method.quant_config.weight_block_size
    *_, rows, columns = numbers.shape
    whole = scales.repeat_interleave(height, -2)[..., :rows, :].repeat_interleave(width, -1)[..., :columns]
    return (numbers.float() * whole.float()).to(dtype)
