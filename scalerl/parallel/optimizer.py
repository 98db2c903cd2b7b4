"""OptimConfig -> megatron's (distributed) optimizer and learning-rate schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

if TYPE_CHECKING:
    from scalerl.config.schema import MegatronConfig, OptimConfig

# constant never decays; megatron wants a length all the same.
_NO_DECAY_STEPS = 10**12


def build_optimizer(ddp_model: Any, optim: OptimConfig, megatron: MegatronConfig, dtype: torch.dtype) -> Any:
    config = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        clip_grad=optim.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=megatron.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(config, [ddp_model], use_gloo_process_groups=False)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        _allocate_adam_state(part.optimizer)
    return optimizer


def _allocate_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """torch's Adam has no state before its first step, and megatron's checkpoints cannot describe what is not there."""
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter].update(
                    step=torch.tensor(0.0), exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter)
                )


def clip_gradients(optimizer: Any, grad_norm: float) -> None:
    """Scales the gradients so that their norm is at most clip_grad. grad_norm: over all parameters of all ranks."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        parameters = part.get_parameters()
        if part.config.clip_grad > 0 and parameters:
            clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, grad_norm)


def build_schedule(optimizer: Any, optim: OptimConfig) -> OptimizerParamScheduler:
    """Warm-up gives update k (from 0) lr * (k + 1) / lr_warmup_steps, so that no update is wasted on lr 0."""
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=optim.lr_warmup_steps,
        lr_decay_steps=optim.lr_decay_steps or _NO_DECAY_STEPS,
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
