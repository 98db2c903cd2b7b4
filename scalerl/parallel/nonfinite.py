"""Gradients that are not finite: which parameter has them, and for how long a run may skip its updates."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from scalerl.errors import UserError

logger = logging.getLogger(__name__)

# (position in the family's table, the same for all ranks; megatron's name, layer counted over all stages; gradient)
Gradient = tuple[int, str, Tensor]


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
