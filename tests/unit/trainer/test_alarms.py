"""Alarms: what raises each, what is said, and that a run says it once."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from scalerl.config import compose
from scalerl.config.keys import leaves
from scalerl.config.schema import AlarmsConfig, PPOConfig
from scalerl.trainer.alarms import KINDS, Alarms, raised

# A healthy step: the twentieth of the quickstart.
HEALTHY = {
    "actor/kl_loss": 0.184,
    "actor/ppo_kl": -0.0003,
    "actor/entropy": 0.149,
    "response_length/clip_ratio": 0.0,
    "reward/equal_groups_frac": 0.55,
    "training/rollout_probs_diff_mean": 1e-7,
    "global_seqlen/balanced_min": 5169.0,
    "global_seqlen/balanced_max": 5170.0,
    "reward/num_failed": 0.0,
}
NUM_SAMPLES = 512
LIMITS = vars(AlarmsConfig())
# Name of an alarm -> what of a step makes it happen, and what does not yet.
BEYOND = {
    "kl": ({"actor/kl_loss": 1.01}, {"actor/kl_loss": 1.0}),
    "entropy": ({"actor/entropy": 0.009}, {"actor/entropy": 0.01}),
    "length": ({"response_length/clip_ratio": 0.51}, {"response_length/clip_ratio": 0.5}),
    "equal_rewards": ({"reward/equal_groups_frac": 1.0}, {"reward/equal_groups_frac": 0.9}),
    "mismatch": ({"training/rollout_probs_diff_mean": 0.06}, {"training/rollout_probs_diff_mean": 0.05}),
    "starved_ranks": ({"global_seqlen/balanced_min": 2000.0}, {"global_seqlen/balanced_min": 2585.0}),
    "failed_rewards": ({"reward/num_failed": 52.0}, {"reward/num_failed": 51.0}),
}


def names(metrics: dict[str, float], **limits: float | None) -> list[str]:
    return [alarm.name for alarm in raised(metrics, LIMITS | limits, NUM_SAMPLES)]


def configured(*keys: str) -> PPOConfig:
    needed = ["data.train_files=t", "data.val_files=v", "actor_rollout_ref.model.path=m"]
    return compose("ppo", [*needed, *keys], rules=False)


def test_a_healthy_step_raises_none() -> None:
    assert names(HEALTHY) == []
    assert names({}) == [], "of what is not logged nothing is said"


@pytest.mark.parametrize("name", KINDS)
def test_each_alarm_alone(name: str) -> None:
    beyond, within = BEYOND[name]
    assert names(HEALTHY | beyond) == [name]
    assert names(HEALTHY | within) == []
    assert names(HEALTHY | beyond, **{KINDS[name].limit: None}) == [], "null: no such alarm"


@pytest.mark.parametrize("metric", ["actor/reward_kl_penalty", "actor/ppo_kl"])
def test_any_kl_is_an_explosion(metric: str) -> None:
    assert names(HEALTHY | {metric: 5.0}) == ["kl"]


def test_every_limit_is_of_one_alarm() -> None:
    assert sorted(kind.limit for kind in KINDS.values()) == sorted(field.name for field in fields(AlarmsConfig))


@pytest.mark.parametrize("name", KINDS)
def test_its_line_says_number_limit_and_keys_that_there_are(name: str) -> None:
    (alarm,) = raised(HEALTHY | BEYOND[name][0], LIMITS, NUM_SAMPLES)
    line, kind = alarm.line(7), KINDS[name]
    assert line.startswith(f"alarm {name} at step 7: ") and "\n" not in line
    assert f"{alarm.value:.3g}" in line and f"trainer.alarms.{kind.limit}={LIMITS[kind.limit]:g}" in line
    keys = {leaf.key for leaf in leaves(PPOConfig)}
    named = re.findall(r"\b(?:actor_rollout_ref|data|algorithm|trainer|reward_model)\.[\w.]*\w", kind.remedy)
    assert set(named) <= keys
    assert named or name == "failed_rewards"


def test_a_run_says_each_once() -> None:
    cfg, alarms = configured("data.train_batch_size=64", "actor_rollout_ref.rollout.n=8"), Alarms()
    long, failing = HEALTHY | BEYOND["length"][0], HEALTHY | BEYOND["failed_rewards"][0]
    said = [alarms.new(cfg, metrics, step) for step, metrics in enumerate([HEALTHY, long, long])]
    assert [[alarm.name for alarm in new] for new in said] == [[], ["length"], []]
    assert [alarm.name for alarm in alarms.new(cfg, long | failing, 3)] == ["failed_rewards"]
    assert alarms.first_steps == {"length": 1, "failed_rewards": 3}
