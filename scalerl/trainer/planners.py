"""The packing rules that follow from a model's layout, and the packing plans of a run's roles."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from scalerl.batch import Alignment, SizeKeys, StepPlan, episodes, plan_step
from scalerl.batch.columns import PICTURE_PATCHES
from scalerl.cluster.batch import HeldRows
from scalerl.config import LayoutSizes
from scalerl.models.flops import FlopsShape


@dataclass(frozen=True)
class PackingRules:
    """The arguments of `batch.plan_step` that follow from a parallel layout and `max_tokens_per_micro_batch`."""

    dp_size: int
    max_tokens_per_micro_batch: int
    micro_batch_multiple: int
    alignment: Alignment

    @classmethod
    def of(cls, layout: LayoutSizes, *, max_tokens_per_micro_batch: int, sequence_parallel: bool) -> PackingRules:
        """The packing rules of a layout."""
        return cls(
            dp_size=layout.dp_size,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            micro_batch_multiple=layout.micro_batch_multiple,
            alignment=Alignment.of_layout(
                tp_size=layout.tp_size, cp_size=layout.cp_size, sequence_parallel=sequence_parallel
            ),
        )


@dataclass(frozen=True)
class Planner:
    """Packs a step's samples for one model.

    samples_per_update: samples of a mini-batch; None: one mini-batch with all samples.
    keys: the configuration keys of samples_per_update and max_tokens_per_micro_batch, for errors.
    """

    rules: PackingRules
    samples_per_update: int | None
    flops: FlopsShape
    # Not compared: planners that differ only in their keys make the same plans.
    keys: SizeKeys = field(default_factory=SizeKeys, compare=False)

    def can_share_plan(self, other: Planner) -> bool:
        """Whether plans of `other` obey this planner's rules, on the same ranks; the FLOPs of the models may differ."""
        return self.rules == other.rules and self.samples_per_update in (None, other.samples_per_update)

    def plan(self, samples: HeldRows) -> StepPlan:
        """Plans mini-batches of whole groups in the order of the prompts; equal planners make equal plans."""
        rows = range(len(samples))
        # A sample may have several rows.
        of_updates = episodes.sample_starts(samples.samples)[:: self.samples_per_update or len(samples)]
        starts = [*of_updates.tolist(), len(samples)]
        return plan_step(
            samples.num_tokens_S,
            mini_batches=[rows[start:end] for start, end in itertools.pairwise(starts)],
            workload_S=self.flops.forward_each(samples.num_tokens_S, samples.samples.get(PICTURE_PATCHES.name)),
            name_of=lambda row: f"prompt {samples.samples['prompt_uid'][row]}",
            keys=self.keys,
            **vars(self.rules),
        )


def plan_roles(planners: Mapping[str, Planner], samples: HeldRows) -> dict[str, StepPlan]:
    """Makes the plan of each role; roles with equal planners share one plan."""
    plans: dict[str, StepPlan] = {}
    for role, planner in planners.items():
        same = next((other for other in plans if planners[other] == planner), None)
        plans[role] = planner.plan(samples) if same is None else plans[same]
    return plans
