"""Which sample trains where: packing under a token budget, balanced over data-parallel ranks."""

from scalerl.balance.alignment import Alignment
from scalerl.balance.micro_batches import get_reverse_idx, rearrange_micro_batches
from scalerl.balance.plan import StepPlan, packing_metrics, plan_step, seqlen_metrics

__all__ = [
    "Alignment",
    "StepPlan",
    "get_reverse_idx",
    "packing_metrics",
    "plan_step",
    "rearrange_micro_batches",
    "seqlen_metrics",
]
