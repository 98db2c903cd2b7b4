"""Megatron's (distributed) optimizer and learning-rate schedule, built from OptimConfig; updates that are skipped."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from scalerl.errors import UserError
from scalerl.parallel import platform
from scalerl.parallel.megatron_overrides import megatron_values

if TYPE_CHECKING:
    from scalerl.config.schema import MegatronConfig, OptimConfig

logger = logging.getLogger(__name__)

# (position in the family's table, the same for all ranks; megatron's name, layer counted over all stages; gradient)
Gradient = tuple[int, str, Tensor]

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
            # megatron gives experts a separate scale, but multiplies the loss with the first one's alone.
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


# --- gradients that are not finite ---


class NonFiniteGradientError(UserError, FloatingPointError):
    """Too many updates in a row had a gradient that is not finite."""


class SkippedUpdates:
    """Counts updates that were skipped in a row. Each method is collective, and every rank raises or none."""

    def __init__(self, limit: int) -> None:
        """Begins to count.  limit: this many in a row end the run (megatron.max_consecutive_skipped_updates)."""
        self.limit = limit
        self.in_a_row = 0

    def applied(self) -> None:
        """Notes that an update was applied, which ends the row of skipped ones."""
        self.in_a_row = 0

    def skipped(self, update: int, grad_norm: float, gradients: Iterable[Gradient]) -> None:
        """Counts a skipped update, and warns on the lowest rank that has the first gradient that is not finite.

        Raises NonFiniteGradientError at the limit.

        update: number of the skipped update. grad_norm: over all ranks.
        """
        self.in_a_row += 1
        rank, reason = first_nonfinite(gradients)
        message = (
            f"update {update} skipped on all ranks, no weight was changed: the gradient norm is {grad_norm}; {reason}"
        )
        if dist.get_rank() == rank:
            logger.warning("%s; %d in a row, %d end the run", message, self.in_a_row, self.limit)
        if self.in_a_row >= self.limit:
            raise NonFiniteGradientError(
                f"{message}. That is {self.in_a_row} skipped updates in a row, the limit of "
                "megatron.max_consecutive_skipped_updates. Look at actor/grad_norm, the losses and the rewards of the "
                "steps before. If the norm grew gradually, lower optim.lr or optim.clip_grad. If it jumped, inspect "
                "that step's samples and advantages. With float16, try megatron.dtype=bfloat16. The last checkpoint "
                "is from before these updates and can be resumed"
            )

    def overflowed(self, update: int, scale: float, next_scale: float) -> None:
        """Logs a skip by which float16's loss scale finds its size: no sign of trouble, so it does not count."""
        if dist.get_rank() == 0:
            logger.info("update %d skipped: gradients overflow at loss scale %g, next %g", update, scale, next_scale)


def first_nonfinite(gradients: Iterable[Gradient]) -> tuple[int, str]:
    """Finds the first parameter, in the table's order, whose gradient is not finite. Collective.

    Returns the lowest rank that has it and a description.
    """
    first_by_rank: list[tuple[int, int, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(first_by_rank, _first_here(gradients))
    firsts = [first for first in first_by_rank if first is not None]
    if not firsts:
        return 0, "every value of it is finite, but the sum of their squares is not"
    order, rank, text = min(firsts)
    ranks = [str(other) for first_order, other, _ in sorted(firsts) if first_order == order]
    return rank, f"first in {text} (rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)})"


def _first_here(gradients: Iterable[Gradient]) -> tuple[int, int, str] | None:
    """Finds this rank's first gradient that is not finite: (position, rank, text)."""
    gradients = sorted(gradients, key=lambda gradient: gradient[0])
    if not gradients:
        return None
    # One answer for all: a GPU is asked once, not once per parameter.
    bad = torch.stack([~torch.isfinite(grad).all() for _, _, grad in gradients]).nonzero()
    if not len(bad):
        return None
    order, name, grad = gradients[int(bad[0])]
    num_bad = int((~torch.isfinite(grad)).sum())
    return order, dist.get_rank(), f"{name}: {num_bad} of {grad.numel()} values are nan or inf"
