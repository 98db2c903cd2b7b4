"""Assignment of samples to ranks and micro-batches: packed by tokens, balanced over data-parallel ranks."""

from scalerl.batch.alignment import Alignment
from scalerl.batch.plan import SizeKeys, StepPlan, packing_metrics, plan_step, seqlen_metrics

__all__ = [
    "Alignment",
    "SizeKeys",
    "StepPlan",
    "packing_metrics",
    "plan_step",
    "seqlen_metrics",
]
