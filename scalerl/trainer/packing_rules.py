"""What a model's layout asks of a packing plan, and the plans of a run's roles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scalerl.balance import Alignment, SizeKeys, StepPlan, plan_step
from scalerl.cluster.batch import BatchRef
from scalerl.config import micro_batch_multiple
from scalerl.config.schema import MegatronConfig
from scalerl.metrics import FlopsShape


def packing_rules(megatron: MegatronConfig, max_tokens_per_device: int) -> dict[str, Any]:
    """Arguments of `balance.plan_step`: a micro-batch fills all the devices that share its sequences."""
    return {
        "max_tokens_per_micro_batch": max_tokens_per_device * megatron.context_parallel_size,
        "devices_per_sequence": megatron.context_parallel_size,
        "micro_batch_multiple": micro_batch_multiple(megatron),
        "alignment": Alignment.of_layout(
            tp_size=megatron.tensor_model_parallel_size,
            cp_size=megatron.context_parallel_size,
            sequence_parallel=megatron.sequence_parallel,
        ),
    }


@dataclass(frozen=True)
class Planner:
    """Packs a step's samples for one model.

    samples_per_update: of a mini-batch; None: one mini-batch of all. max_tokens: of a micro-batch on one device.
    keys: what sets these two, for errors.
    """

    megatron: MegatronConfig
    dp_size: int
    max_tokens: int
    samples_per_update: int | None
    flops: FlopsShape
    # Not of the rules: planners that differ in nothing else make the same plans.
    keys: SizeKeys = field(default_factory=SizeKeys, compare=False)

    def fits_into(self, other: Planner) -> bool:
        """Whether the other's plans obey this one's rules (on the same ranks), though not its model's own FLOPs."""
        return (
            packing_rules(self.megatron, self.max_tokens) == packing_rules(other.megatron, other.max_tokens)
            and self.dp_size == other.dp_size
            and self.samples_per_update in (None, other.samples_per_update)
        )

    def plan(self, samples: BatchRef) -> StepPlan:
        """Mini-batches of whole groups in the order of the prompts; equal planners make equal plans."""
        size, rows = self.samples_per_update or len(samples), range(len(samples))
        return plan_step(
            samples.num_tokens_S,
            dp_size=self.dp_size,
            mini_batches=[rows[start : start + size] for start in range(0, len(samples), size)],
            workload_S=self.flops.forward_each(samples.num_tokens_S),
            sample_names=[f"prompt {uid}" for uid in samples.samples["prompt_uid"]],
            keys=self.keys,
            **packing_rules(self.megatron, self.max_tokens),
        )


def plan_roles(planners: Mapping[str, Planner], samples: BatchRef) -> dict[str, StepPlan]:
    """Each role's plan; roles with the same planner share one."""
    plans: dict[str, StepPlan] = {}
    for role, planner in planners.items():
        like = next((other for other in plans if planners[other] == planner), None)
        plans[role] = planner.plan(samples) if like is None else plans[like]
    return plans
