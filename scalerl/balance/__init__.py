"""Assignment of samples to ranks and micro-batches: packed by tokens, balanced over data-parallel ranks."""

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
