"""Which sample trains where: packing under a token budget, balanced over data-parallel ranks."""

from scalerl.balance.micro_batches import get_reverse_idx, rearrange_micro_batches
from scalerl.balance.plan import StepPlan, plan_step, seqlen_metrics

__all__ = ["StepPlan", "get_reverse_idx", "plan_step", "rearrange_micro_batches", "seqlen_metrics"]
