"""SGLang plugin for a CPU: torch's attention without triton, also for DeepSeek, experts that ranks share, gated delta
nets, MiniMax-M2's norms, weights in fp8, and adapters.

SGLang calls `register` in each of its processes, before it reads its arguments. It finds it by the entry point among
the import stand-ins (`stand_ins/*.dist-info`), so only if these are on PYTHONPATH.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.moe import MoeRunnerConfig
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.model_executor.model_runner import ModelRunner

# Names of the entry point, and for SGLang's --attention-backend.
PLUGIN = "scalerl_cpu"
ATTENTION_BACKEND = "scalerl_cpu"


def register() -> None:
    from sglang.srt.arg_groups import model_hook
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_attention_backend_choices

    from scalerl.extras.sglang_cpu.adapters import register_adapters
    from scalerl.extras.sglang_cpu.delta_kernels import add_gated, register_kernels
    from scalerl.extras.sglang_cpu.fp8 import register_fp8
    from scalerl.extras.sglang_cpu.sinks import accept_backend

    register_kernels()
    register_fp8()
    register_adapters()
    add_attention_backend_choices([ATTENTION_BACKEND])
    register_attention_backend(ATTENTION_BACKEND)(_create_backend)
    accept_backend(model_hook, ATTENTION_BACKEND)
    # SGLang assumes that triton works with every backend whose name it does not know.
    HookRegistry.register("sglang.srt.utils.common.support_triton", _support_triton, HookType.REPLACE)
    HookRegistry.register("sglang.srt.mem_cache.allocation.get_last_loc", _get_last_loc, HookType.REPLACE)
    gated_sum = "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add"
    HookRegistry.register(gated_sum, add_gated, HookType.REPLACE)
    experts = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
    HookRegistry.register(experts, _experts_of_this_rank, HookType.AROUND)
    capturer = "sglang.srt.state_capturer.routed_experts.RoutedExpertsCapturer.create"
    HookRegistry.register(capturer, _with_unpinned_memory, HookType.AROUND)
    load = "sglang.srt.models.gpt_oss.GptOssForCausalLM.load_weights"
    HookRegistry.register(load, _with_own_biases, HookType.AROUND)
    norm = "sglang.srt.models.minimax_m2.MiniMaxM2QKRMSNorm.forward"
    HookRegistry.register(norm, _joint_norm, HookType.REPLACE)
    if multiprocessing.parent_process() is None:
        _fork_its_processes()


def _fork_its_processes() -> None:
    """Makes SGLang's scheduler and detokenizer forks of this process, which has imported all that they need.

    SGLang spawns processes that import it anew, as CUDA needs; on a CPU that is 15 of the 24 seconds of processor time
    of a start. No other thread runs when they are forked.
    """
    set_start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: set_start_method("fork", force=force)
    # Otherwise the first garbage collection of each would copy every page that they share.
    os.register_at_fork(before=gc.freeze)


def _create_backend(model_runner: ModelRunner) -> AttentionBackend:
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    from scalerl.extras.sglang_cpu.sinks import TorchBackend

    # Otherwise SGLang computes the prompt's latent attention as for triton, whose keys and values are not in the cache.
    AttentionBackendRegistry.register(ATTENTION_BACKEND, lambda *_: AttnForwardMethod.MLA)
    return TorchBackend(model_runner)


def _support_triton(backend: str) -> bool:
    return False


def _get_last_loc(*args: torch.Tensor) -> torch.Tensor:
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(*args)


def _with_unpinned_memory(create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Creates what keeps the routers' choices, in memory of the host that is not registered with CUDA."""
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS, alloc_with_host_register

    ALLOC_MEMORY_FUNCS["cpu"] = lambda *size, **how: alloc_with_host_register(*size, **(how | {"pin_memory": False}))
    return create(*args, **kwargs)


def _with_own_biases(
    load: Callable[..., object], model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], *args: object
) -> object:
    """Loads gpt-oss's weights; all ranks but the first fill its experts' last biases with zeros before they store them.

    The ranks share the memory that buckets come in.
    """
    own = ((name, tensor.clone() if name.endswith("down_proj_bias") else tensor) for name, tensor in weights)
    return load(model, own, *args)


def _joint_norm(norms: Any, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MiniMax-M2's RMSNorm of queries over the heads of all ranks, and of keys. SGLang's is a triton kernel.

    query, key: [tokens, heads of this rank * head_dim].
    """
    import torch
    from sglang.srt.layers.dp_attention import attn_tp_all_reduce

    num_ranks = norms._q_norm.attn_tp_size
    squares = torch.stack([x.float().square().mean(-1) for x in (query, key)])
    if num_ranks > 1:
        squares = attn_tp_all_reduce(squares) / num_ranks
    query, key = (
        (x.float() * torch.rsqrt(square + norm.variance_epsilon)[:, None] * norm.weight.float()).to(x.dtype)
        for x, square, norm in zip((query, key), squares, (norms._q_norm, norms._k_norm), strict=True)
    )
    return query, key


def _experts_of_this_rank(
    loop: Callable[..., torch.Tensor],
    layer: FusedMoE,
    hidden: torch.Tensor,
    chosen: StandardTopKOutput,
    config: MoeRunnerConfig,
) -> torch.Tensor:
    """SGLang's loop over experts, [tokens, hidden size], where its ranks share them.

    The loop counts tokens by expert and has no place for -1, the number of each expert that another rank has. So each
    pair of a token and an expert that is here becomes a token with one expert.
    """
    if layer.moe_ep_size == 1:
        return loop(layer, hidden, chosen, config)
    rows, columns = (chosen.topk_ids >= 0).nonzero(as_tuple=True)
    output = hidden.new_zeros(hidden.shape)
    if len(rows):
        ids, weights = (chosen_of[rows, columns, None] for chosen_of in (chosen.topk_ids, chosen.topk_weights))
        here = chosen._replace(topk_ids=ids, topk_weights=weights)
        output.index_add_(0, rows, loop(layer, hidden[rows], here, config))
    return output
