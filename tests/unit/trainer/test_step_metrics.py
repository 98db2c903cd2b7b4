"""The metrics of a step, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from scalerl.batch import StepPlan
from scalerl.config import PPOConfig
from scalerl.models.flops import FlopsShape
from scalerl.tracking.metrics import Metric
from scalerl.trainer.step_metrics import MfuBasis, StepOutcome, no_contrast, reward_extra_means, step_metrics

SHAPE = FlopsShape(
    num_layers=1, hidden_size=4, num_heads=2, num_kv_heads=1, head_dim=2, ffn_hidden_size=8, vocab_size=10
)
PEAK = 1e6
TIMING_S = {
    "gen": 3.0,
    "old_log_prob": 1.0,
    "ref": 0.5,
    "adv": 0.25,
    "update_actor": 2.0,
    "untimed": 0.25,
    "step": 8.0,
}


def column(*values: Any) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def outcome() -> StepOutcome:
    samples = {
        "uid": np.array([7, 7, 8, 8]),
        "data_source": column("a", "a", "b", "b"),
        "score": np.array([1.0, 0.0, 0.5, 0.5]),
        "reward_failed": np.zeros(4, dtype=bool),
        "advantages": np.array([1.0, -1.0, 0.0, 0.5], dtype=np.float32),
        "prompt_length": np.array([2, 2, 4, 4]),
        "prompt_length_before": np.array([2, 2, 4, 6]),
        "response_length": np.array([3, 1, 2, 4]),
        "finish_reason": column("stop", "length", "stop", "stop"),
        "reward_extra": column({"acc": True, "note": "x"}, {"acc": False}, {}, {"acc": True, "len": 7}),
    }
    plan = StepPlan(((((0, 1),),), (((2, 3),),)), lower_bounds=(1,), num_padded_tokens=3)
    metrics = {
        "actor/pg_loss": Metric(-0.125, "mean"),
        "actor/grad_norm": Metric(1.5, "mean"),
        "rollout_diff_partial/num": Metric(4.0, "sum"),
        "rollout_diff_partial/diff": Metric(0.4, "sum"),
        "rollout_diff_partial/diff2": Metric(0.08, "sum"),
        "rollout_diff_partial/x": Metric(2.0, "sum"),
        "rollout_diff_partial/y": Metric(2.0, "sum"),
        "rollout_diff_partial/xx": Metric(1.5, "sum"),
        "rollout_diff_partial/yy": Metric(1.5, "sum"),
        "rollout_diff_partial/xy": Metric(1.25, "sum"),
        "rollout_diff_partial/max": Metric(0.2, "max"),
        "rollout_corr/k3_kl": Metric(0.01, "mean", 4.0),
        "rollout_corr/rollout_is_mean": Metric(0.8, "mean", 4.0),
        "rollout_corr_partial/rollout_is_square": Metric(0.8, "mean", 4.0),
    }
    return StepOutcome(samples, plan, metrics)


# 14 of score and so on by hand; tokens: prompts 12, responses 10.
EXPECTED = {
    "training/global_step": 7.0,
    "training/epoch": 1.0,
    "actor/pg_loss": -0.125,
    "actor/grad_norm": 1.5,
    "training/rollout_probs_diff_valid": 1.0,
    "training/rollout_probs_diff_mean": 0.1,
    "training/rollout_probs_diff_max": 0.2,
    # sqrt(0.08 / 4 - 0.1^2)
    "training/rollout_probs_diff_std": 0.1,
    # cov = 1.25 / 4 - 0.25 = 0.0625; var = 1.5 / 4 - 0.25 = 0.125, both
    "training/rollout_actor_probs_pearson_corr": 0.5,
    "rollout_corr/k3_kl": 0.01,
    "rollout_corr/rollout_is_mean": 0.8,
    # sqrt(0.8 - 0.8^2) and 0.8^2 / 0.8
    "rollout_corr/rollout_is_std": 0.4,
    "rollout_corr/rollout_is_eff_sample_size": 0.8,
    "critic/score/mean": 0.5,
    "critic/score/max": 1.0,
    "critic/score/min": 0.0,
    "critic/rewards/mean": 0.5,
    "critic/rewards/max": 1.0,
    "critic/rewards/min": 0.0,
    # Over response tokens: (3 * 1 + 1 * -1 + 2 * 0 + 4 * 0.5) / 10
    "critic/advantages/mean": 0.4,
    "critic/advantages/max": 1.0,
    "critic/advantages/min": -1.0,
    "critic/returns/mean": 0.4,
    "critic/returns/max": 1.0,
    "critic/returns/min": -1.0,
    "prompt_length/mean": 3.0,
    "prompt_length/max": 4.0,
    "prompt_length/min": 2.0,
    "prompt_length/clip_ratio": 0.25,
    "response_length/mean": 2.5,
    "response_length/max": 4.0,
    "response_length/min": 1.0,
    "response_length/clip_ratio": 0.25,
    "response_length_non_aborted/mean": 2.5,
    "response_length_non_aborted/max": 4.0,
    "response_length_non_aborted/min": 1.0,
    "response_length_non_aborted/clip_ratio": 0.25,
    "response/aborted_ratio": 0.0,
    "reward/equal_groups_frac": 0.5,
    "reward_extra/acc": 2 / 3,
    "reward_extra/len": 7.0,
    # Tokens per sample 5, 3, 6, 8: the first two are dp rank 0's before and after.
    "global_seqlen/min": 8.0,
    "global_seqlen/max": 14.0,
    "global_seqlen/minmax_diff": 6.0,
    "global_seqlen/balanced_min": 8.0,
    "global_seqlen/balanced_max": 14.0,
    "global_seqlen/mean": 11.0,
    "packing/num_micro_batches": 1.0,
    "packing/optimality_gap": 0.0,
    "packing/padding_frac": 3 / 25,
    **{f"timing_s/{name}": seconds for name, seconds in TIMING_S.items()},
    # ms per response token (10) and per token (22)
    "timing_per_token_ms/gen": 300.0,
    "timing_per_token_ms/old_log_prob": 1000 / 22,
    "timing_per_token_ms/ref": 500 / 22,
    "timing_per_token_ms/adv": 250 / 22,
    "timing_per_token_ms/update_actor": 2000 / 22,
    "perf/total_num_tokens": 22.0,
    "perf/time_per_step": 8.0,
    # 22 tokens / (8 s * 2 devices)
    "perf/throughput": 1.375,
    # Weights: attention 4*2*(2*2 + 2*1) = 48, MLP 4*8*3 = 96, head 4*10 = 40. Pairs: 15 + 6 + 21 + 36 = 78.
    # Forward: 2 * 184 * 22 + 4 * 1 * 2 * 2 * 78 = 9344; training 3 times that, 2 epochs, over 2 s * 2 devices * peak.
    "perf/mfu/actor": 9344 * 3 * 2 / (2.0 * 2 * PEAK),
    "perf/mfu/actor_infer": 9344 / (1.0 * 2 * PEAK),
}


def config() -> PPOConfig:
    config = PPOConfig()
    config.data.max_prompt_length, config.data.max_response_length = 4, 4
    config.actor_rollout_ref.actor.ppo_epochs = 2
    config.trainer.n_gpus_per_node = 2
    return config


def test_every_key_and_value() -> None:
    metrics = step_metrics(config(), outcome(), {"actor": MfuBasis(SHAPE, PEAK, 2)}, TIMING_S, step=7, epoch=1)
    assert metrics.pop("perf/cpu_memory_used_gb") > 0
    assert metrics.keys() == EXPECTED.keys()
    assert metrics == pytest.approx(EXPECTED)
    assert all(type(value) is float for value in metrics.values())


def test_no_mfu_for_an_unknown_device() -> None:
    metrics = step_metrics(config(), outcome(), {"actor": MfuBasis(SHAPE, None, 2)}, TIMING_S, step=7, epoch=1)
    assert "perf/mfu/actor" not in metrics


@pytest.mark.parametrize(("rejected", "known"), [(0.0, True), (1.0, False)])
def test_no_mfu_of_updates_that_were_not_made(rejected: float, known: bool) -> None:
    step_outcome = dataclasses.replace(outcome(), metrics={"actor/rejected_updates": Metric(rejected, "max")})
    metrics = step_metrics(config(), step_outcome, {"actor": MfuBasis(SHAPE, PEAK, 2)}, TIMING_S, step=7, epoch=1)
    assert ("perf/mfu/actor" in metrics) is known and metrics["actor/rejected_updates"] == rejected


def test_a_sample_over_the_limit_is_not_passed_over() -> None:
    limited = config()
    limited.data.max_response_length = 3
    with pytest.raises(ValueError, match="response_length of sample 3 is 4: over the limit of 3"):
        step_metrics(limited, outcome(), {"actor": MfuBasis(SHAPE, None, 2)}, TIMING_S, step=7, epoch=1)


def test_a_step_without_sampler_logprobs() -> None:
    """No rollout_diff sums: no such metrics, and nothing else changes."""
    plain = dataclasses.replace(outcome(), metrics={"actor/pg_loss": Metric(-0.125, "mean")})
    metrics = step_metrics(config(), plain, {"actor": MfuBasis(SHAPE, PEAK, 2)}, TIMING_S, step=7, epoch=1)
    assert not any("rollout" in key for key in metrics) and metrics["actor/pg_loss"] == -0.125


def test_reward_extra_takes_numbers_only() -> None:
    extras = [{"acc": 1, "text": "no", "list": [1]}, {"acc": 0.5, "none": None}, {}]
    assert reward_extra_means(extras) == {"reward_extra/acc": 0.75}
    assert reward_extra_means([{}, {}]) == {}


def test_a_failed_sample_is_wrong_in_the_means_beside_the_score() -> None:
    step_outcome = outcome()
    # Each lacks what the other sample of its data source has.
    step_outcome.samples["reward_extra"][:] = [{"acc": True, "pred": "4"}, {}, {}, {"acc": True, "len": -7}]
    step_outcome.samples["reward_failed"][1:3] = True
    metrics = step_metrics(config(), step_outcome, {}, TIMING_S, step=7, epoch=1)
    assert metrics["reward_extra/acc"] == 0.5 and metrics["reward_extra/len"] == -7.0
    # Nothing is left to compare the other samples with.
    assert metrics["reward/equal_groups_frac"] == 1.0


def test_a_step_without_contrast_is_said() -> None:
    step_outcome = outcome()
    samples = dict(step_outcome.samples)
    samples["score"], samples["advantages"] = np.array([1.0, 1.0, 0.0, 0.0]), np.zeros(4, np.float32)
    alike = dataclasses.replace(step_outcome, samples=samples)
    metrics = step_metrics(config(), alike, {}, TIMING_S, step=7, epoch=1)
    assert metrics["reward/equal_groups_frac"] == 1.0
    assert no_contrast(samples, metrics) == "2 of 2 groups have equal rewards: nothing is learned in this step"
    assert no_contrast(samples, {**metrics, "actor/distillation_loss": 0.3}) is None
    differ = step_metrics(config(), step_outcome, {}, TIMING_S, step=7, epoch=1)
    assert no_contrast(step_outcome.samples, differ) is None
    # Advantages of single tokens are the ranks': a group of equal scores may teach.
    of_tokens = {"critic/advantages/min": Metric(-0.5, "min"), "critic/advantages/max": Metric(0.5, "max")}
    alike = dataclasses.replace(
        alike, metrics=of_tokens, samples={k: v for k, v in samples.items() if k != "advantages"}
    )
    assert no_contrast(alike.samples, step_metrics(config(), alike, {}, TIMING_S, step=7, epoch=1)) is None


def test_groups_of_one_have_no_share_of_equal_ones() -> None:
    step_outcome = outcome()
    step_outcome.samples["uid"][:] = range(4)
    metrics = step_metrics(config(), step_outcome, {}, TIMING_S, step=7, epoch=1)
    assert "reward/equal_groups_frac" not in metrics


def test_memory_of_nodes_is_the_largest_of_drivers_and_ranks():
    """An absurd size, so that no machine that runs this has more."""
    step_outcome = outcome()
    step_outcome = dataclasses.replace(
        step_outcome, metrics=step_outcome.metrics | {"perf/cpu_memory_used_gb": Metric(1e9, "max")}
    )
    assert step_metrics(config(), step_outcome, {}, TIMING_S, step=1, epoch=0)["perf/cpu_memory_used_gb"] == 1e9
    step_outcome = dataclasses.replace(
        step_outcome, metrics=step_outcome.metrics | {"perf/cpu_memory_used_gb": Metric(1e-9, "max")}
    )
    assert step_metrics(config(), step_outcome, {}, TIMING_S, step=1, epoch=0)["perf/cpu_memory_used_gb"] > 1e-3


def test_a_step_of_one_pass_has_no_mfu_of_another() -> None:
    timing_s = {name: seconds for name, seconds in TIMING_S.items() if name != "old_log_prob"}
    metrics = step_metrics(config(), outcome(), {"actor": MfuBasis(SHAPE, PEAK, 2)}, timing_s, step=7, epoch=1)
    assert metrics.keys() - {"perf/cpu_memory_used_gb"} == EXPECTED.keys() - {
        "timing_s/old_log_prob", "timing_per_token_ms/old_log_prob", "perf/mfu/actor_infer",
    }  # fmt: skip
