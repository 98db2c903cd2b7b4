"""The metrics of an RL step that are logged: of its samples, balance, time and throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalerl.algorithms import rollout_corr_metrics
from scalerl.batch import StepPlan, episodes, packing_metrics, seqlen_metrics
from scalerl.batch.columns import PICTURE_PATCHES
from scalerl.config import PPOConfig, num_devices
from scalerl.models.flops import FlopsShape, mfu
from scalerl.rollout.sampling.groups import SCORE, GroupFilter, kept_uids
from scalerl.tracking.metrics import (
    Metric,
    compute_data_metrics,
    compute_throughput_metrics,
    compute_timing_metrics,
    rollout_diff_metrics,
    to_floats,
)
from scalerl.tracking.metrics.failed_samples import with_wrong_extras

NODE_MEMORY = "perf/cpu_memory_used_gb"
# Metrics that count an episode once, however many rows it has.
_OF_EPISODES = ("critic/score/", "critic/rewards/", "num_turns/")
EQUAL_GROUPS = "reward/equal_groups_frac"


@dataclass(frozen=True)
class StepOutcome:
    """The result of a step.  samples: per-sample columns, with advantages if the tokens of a sample share one.

    plan: the actor's packing plan.  metrics: those of the roles.
    """

    samples: Mapping[str, np.ndarray]
    plan: StepPlan
    metrics: Mapping[str, Metric]


@dataclass(frozen=True)
class MfuBasis:
    """What a model's FLOP utilization (MFU) is computed from: its FLOPs per sequence and the peak of its devices.

    peak: FLOP/s of one device; None (unknown device): no MFU.
    """

    flops: FlopsShape
    peak: float | None
    num_devices: int


def step_metrics(
    config: PPOConfig,
    outcome: StepOutcome,
    mfu_bases: Mapping[str, MfuBasis],
    timing_s: Mapping[str, float],
    *,
    step: int,
    epoch: int,
) -> dict[str, float]:
    """Computes every metric of a step that is logged.

    mfu_bases: by role, actor and critic.  timing_s: seconds by part of the step, with the whole step as `step`.
    """
    samples = outcome.samples
    prompt_S, response_S = samples["prompt_length"], samples["response_length"]
    num_tokens_S, patches_S = prompt_S + response_S, samples.get(PICTURE_PATCHES.name)
    metrics = {"training/global_step": float(step), "training/epoch": float(epoch)}
    metrics |= to_floats(rollout_corr_metrics(rollout_diff_metrics(outcome.metrics)))
    metrics |= compute_data_metrics(
        samples, samples.get("advantages"), config.data.max_prompt_length, config.data.max_response_length
    )
    of_episodes = episodes.columns(samples)
    metrics |= episode_metrics(samples, of_episodes)
    extras = with_wrong_extras(*(of_episodes[name] for name in ("reward_extra", "data_source", "reward_failed")))
    metrics |= reward_extra_means(extras)
    num_groups, num_equal = count_equal_groups(samples)
    # A group of one is compared with nothing.
    if num_groups < len(episodes.sample_starts(samples)):
        metrics[EQUAL_GROUPS] = num_equal / num_groups
    metrics |= seqlen_metrics(num_tokens_S, outcome.plan) | packing_metrics(num_tokens_S, outcome.plan)
    num_sampled = int(samples.get("num_sampled_tokens", response_S).sum())
    metrics |= compute_timing_metrics(timing_s, int(prompt_S.sum()), int(response_S.sum()), num_sampled)
    throughput = compute_throughput_metrics(int(num_tokens_S.sum()), timing_s["step"], num_devices(config))
    # The maximum over the nodes: the driver's node counts like those of the ranks.
    throughput[NODE_MEMORY] = max(throughput[NODE_MEMORY], metrics.get(NODE_MEMORY, 0.0))
    metrics |= throughput
    epochs = {"actor": config.actor_rollout_ref.actor.ppo_epochs, "critic": config.critic.ppo_epochs}
    for role, mfu_basis in mfu_bases.items():
        rejected = outcome.metrics.get(f"{role}/rejected_updates")
        # A step of the critic's warm-up has no update of the actor; a rejected update has no FLOP utilization.
        if f"update_{role}" in timing_s and not (rejected and rejected.value):
            flops = mfu_basis.flops.train(num_tokens_S.tolist(), patches_S) * epochs[role]
            utilization = mfu(flops, timing_s[f"update_{role}"], mfu_basis.num_devices, mfu_basis.peak)
            metrics |= {} if utilization is None else {f"perf/mfu/{role}": utilization}
    actor = mfu_bases.get("actor")
    # There is no separate pass if the sampler's log-probs, or the update's, serve as the old ones.
    has_pass = "old_log_prob" in timing_s and not config.algorithm.rollout_correction.bypass_mode
    if actor is not None and has_pass:
        flops = actor.flops.forward(num_tokens_S.tolist(), patches_S)
        utilization = mfu(flops, timing_s["old_log_prob"], actor.num_devices, actor.peak)
        metrics |= {} if utilization is None else {"perf/mfu/actor_infer": utilization}
    return metrics


def episode_metrics(samples: Mapping[str, np.ndarray], of_episodes: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Scores, rewards and turns of episodes, and num_trajectories/*, where an episode has several rows; else {}.

    of_episodes: `episodes.columns` of the samples.
    """
    num_rows, num_episodes = len(samples["uid"]), len(of_episodes["uid"])
    if num_rows == num_episodes:
        return {}
    counted = compute_data_metrics(of_episodes)
    means = {name: counted[name] for name in counted if name.startswith(_OF_EPISODES)}
    counts_E = np.bincount(episodes.of_rows(samples))
    return means | {
        "num_trajectories/mean": num_rows / num_episodes,
        "num_trajectories/max": float(counts_E.max()),
        "num_trajectories/min": float(counts_E.min()),
    }


def count_equal_groups(samples: Mapping[str, np.ndarray]) -> tuple[int, int]:
    """The number of the step's groups, and of those whose scored samples all have one score."""
    num_groups = len(kept_uids(samples, None))
    return num_groups, num_groups - len(kept_uids(samples, GroupFilter(SCORE)))


def no_contrast(samples: Mapping[str, np.ndarray], metrics: Mapping[str, float]) -> str | None:
    """The line about a step whose advantages are all 0; None where one is not, or a teacher's KL is learned from.

    metrics: of `step_metrics`.
    """
    if "actor/distillation_loss" in metrics or any(
        metrics.get(f"critic/advantages/{end}") != 0.0 for end in ("min", "max")
    ):
        return None
    num_groups, num_equal = count_equal_groups(samples)
    return f"{num_equal} of {num_groups} groups have equal rewards: nothing is learned in this step"


def reward_extra_means(extras: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The metrics reward_extra/{key}: means of the numbers that the reward function returned beside the score."""
    values: dict[str, list[float]] = {}
    for extra in extras:
        for key, value in extra.items():
            if isinstance(value, int | float):
                values.setdefault(key, []).append(value)
    return {f"reward_extra/{key}": float(np.mean(numbers)) for key, numbers in values.items()}
