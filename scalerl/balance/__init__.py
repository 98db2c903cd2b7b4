"""Assignment of samples to ranks and micro-batches: packing under a token budget, balanced over data-parallel ranks."""

from scalerl.balance.alignment import Alignment
from scalerl.balance.plan import SizeKeys, StepPlan, packing_metrics, plan_step, seqlen_metrics

__all__ = [
    "Alignment",
    "SizeKeys",
    "StepPlan",
    "packing_metrics",
    "plan_step",
    "seqlen_metrics",
]
