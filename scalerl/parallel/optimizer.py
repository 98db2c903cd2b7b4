"""Megatron's (distributed) optimizer and learning-rate schedule, built from OptimConfig."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from scalerl.parallel import platform
from scalerl.parallel.megatron_overrides import megatron_values

if TYPE_CHECKING:
    from scalerl.config.schema import MegatronConfig, OptimConfig

# constant never decays; megatron wants a length all the same.
_NO_DECAY_STEPS = 10**12


def build_optimizer(ddp_chunks: list, optim: OptimConfig, megatron: MegatronConfig, dtype: torch.dtype) -> Any:
    """megatron's Adam for the chunks, which its DDP has wrapped, with allocated state.  dtype: of the weights.

    On CUDA torch's Adam is the fused one. On the CPU it is not: how that rounds a number depends on where in a tensor
    the number is, so numbers would differ between layouts.
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        clip_grad=optim.clip_grad,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        initial_loss_scale=megatron.initial_loss_scale,
        min_loss_scale=megatron.min_loss_scale,
        loss_scale_window=megatron.loss_scale_window,
        params_dtype=dtype,
        use_distributed_optimizer=megatron.use_distributed_optimizer,
        **megatron_values("override_optimizer_config", optim.override_optimizer_config),
    )
    optimizer = get_megatron_optimizer(config, ddp_chunks, use_gloo_process_groups=False)
    parts = optimizer_parts(optimizer)
    for part in parts:
        _allocate_adam_state(part)
        if dtype == torch.float16:
            # megatron gives experts a scale of their own, but multiplies the loss with the first one's alone.
            part.grad_scaler = parts[0].grad_scaler
    if platform.device_type() == "cuda":
        use_fused_adam(optimizer)
    return optimizer


def use_fused_adam(optimizer: Any) -> None:
    """Makes torch's Adam update all parameters in few kernels, without a temporary copy of their second moments.

    To be called when the state is allocated; the count of steps moves to the parameters' device, where torch's fused
    kernel reads it. Nothing changes for an Adam that is not torch's: those of Transformer Engine and apex are fused.
    """
    for part in optimizer_parts(optimizer):
        if isinstance(part.optimizer, torch.optim.Adam):
            for group in part.optimizer.param_groups:
                group["fused"] = True
            for parameter, state in part.optimizer.state.items():
                state["step"] = state["step"].to(parameter.device)


def optimizer_parts(optimizer: Any) -> list[Any]:
    """megatron's optimizers of dense and of expert parameters."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


@torch.no_grad()
def prepare_gradients(optimizer: Any) -> float:
    """Copies the gradients, without the loss scale, to where the inner optimizer reads them; returns their norm.

    The norm is that of the whole gradient, over all ranks. megatron's prepare_grads would also change the loss scale,
    once for dense and once for expert parameters, each by what it saw itself; `update_loss_scale` does so once, by what
    all ranks agreed on.
    """
    for part in optimizer_parts(optimizer):
        scaler = getattr(part, "grad_scaler", None)
        if scaler is None:
            part.prepare_grads()
        elif not part.is_stub_optimizer:
            part._copy_model_grads_to_main_grads()
            torch._foreach_mul_(part._collect_main_grad_data_for_unscaling(), scaler.inv_scale[0])
    return float(optimizer.get_grad_norm())


def agreed_finite(value: float) -> bool:
    """Whether the value is finite on every rank. Collective over all ranks."""
    flag = torch.tensor(float(math.isfinite(value)), device=torch.cuda.current_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def loss_scale(optimizer: Any) -> tuple[float, float] | None:
    """The loss scale as (now, lowest allowed); None without float16."""
    scaler = getattr(optimizer_parts(optimizer)[0], "grad_scaler", None)
    return None if scaler is None else (float(scaler.scale), float(scaler.min_scale))


def update_loss_scale(optimizer: Any, *, overflowed: bool) -> None:
    """Adapts the loss scale of float16; to be called after each update, skipped or not."""
    scaler = getattr(optimizer_parts(optimizer)[0], "grad_scaler", None)
    if scaler is not None:
        scaler.update(overflowed)


def _allocate_adam_state(part: Any) -> None:
    """Allocates Adam's moments, which it else makes in its first step: a checkpoint cannot describe what is not there.

    part: one of megatron's optimizers; what it allocates for the Adam of Transformer Engine or apex lacks the count of
    steps that torch's has by parameter.
    """
    optimizer = part.optimizer
    if not isinstance(optimizer, torch.optim.Adam):
        if part.init_state_fn is not None:
            part.init_state_fn(optimizer, part.config)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter].update(
                    step=torch.tensor(0.0), exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter)
                )


def clip_gradients(optimizer: Any, grad_norm: float) -> None:
    """Scales the gradients so that their norm is at most clip_grad. grad_norm: over all parameters of all ranks."""
    for part in optimizer_parts(optimizer):
        parameters = part.get_parameters()
        if part.config.clip_grad > 0 and parameters:
            clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, grad_norm)


def main_tensors(optimizer: Any) -> Iterator[tuple[torch.Tensor, int, dict[str, torch.Tensor], bool]]:
    """Yields the optimizer's tensors of each parameter of this rank's model: (parameter, start, tensors, is_range).

    tensors: `param` (the main parameter), `exp_avg`, `exp_avg_sq`, as they are in use. They are the numbers of the
    parameter from `start` on: those of this rank alone (is_range, the distributed optimizer), or all of them.
    """
    for part in optimizer_parts(optimizer):
        if part.is_stub_optimizer:
            continue
        if isinstance(part, DistributedOptimizer):
            for bucket in (b for ranges in part.gbuf_ranges for buckets in ranges.values() for b in buckets):
                for parameter, ranges in bucket["param_map"].items():
                    group, order = part.model_param_group_index_map[parameter]
                    main = part.optimizer.param_groups[group]["params"][order]
                    yield parameter, ranges["param"].start, _with_moments(part, main), True
        else:
            for parameter, main in _main_parameters(part):
                yield parameter, 0, _with_moments(part, main), False


def _main_parameters(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (model's parameter, main parameter) of an optimizer that every data-parallel rank has whole."""
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for ours, theirs in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from zip(ours, theirs, strict=True)
        groups = part.fp32_from_fp32_groups
    else:
        groups = [group["params"] for group in part.optimizer.param_groups]
    yield from ((parameter, parameter) for group in groups for parameter in group)


def _with_moments(part: Any, main: torch.Tensor) -> dict[str, torch.Tensor]:
    state = part.optimizer.state[main]
    return {"param": main} | {name: state[name] for name in ("exp_avg", "exp_avg_sq")}


@torch.no_grad()
def adopt_main_parameters(optimizer: Any, *, gather: bool = True) -> None:
    """Copies the main parameters into the model's: those of this rank's range, then those of all ranks. Collective.

    gather: False if the model has those of other ranks already.
    """
    parts = [part for part in optimizer_parts(optimizer) if not part.is_stub_optimizer]
    for part in parts:
        if hasattr(part, "_copy_main_params_to_model_params"):
            part._copy_main_params_to_model_params()
    if not gather:
        return
    chunks = {
        id(chunk): chunk
        for part in optimizer_parts(optimizer)
        if isinstance(part, DistributedOptimizer)
        for chunk in part.model_chunks
    }
    chunk: Any
    for chunk in chunks.values():
        chunk.start_param_sync()


def set_num_updates(optimizer: Any, num_updates: int) -> None:
    """Sets the number of updates that Adam has made: torch's Adam keeps it by parameter, fused ones by group."""
    for part in optimizer_parts(optimizer):
        if part.is_stub_optimizer:
            continue
        for state in part.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(num_updates)
        if not isinstance(part.optimizer, torch.optim.Adam):
            for group in part.optimizer.param_groups:
                # Not there yet before their first step, which would then begin to count.
                group["step"] = num_updates


def build_schedule(optimizer: Any, optim: OptimConfig) -> OptimizerParamScheduler:
    """Builds the schedule of the learning rate and makes its first step.

    Warm-up gives update k (from 0) lr * (k + 1) / lr_warmup_updates, so that no update is wasted on lr 0.
    """
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=optim.lr_warmup_updates,
        lr_decay_steps=optim.lr_decay_updates or _NO_DECAY_STEPS,
        lr_decay_style=optim.lr_decay_style,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    schedule.step(increment=1)
    return schedule
