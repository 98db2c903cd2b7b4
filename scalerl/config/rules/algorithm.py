"""Rules of the algorithm's keys: baselines, KL in the reward, and what a policy loss needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from scalerl.config.registered_names import GROUP_ESTIMATORS
from scalerl.config.rules.base import rule
from scalerl.config.schema import AlgorithmConfig, KLControlConfig, PPOConfig
from scalerl.config.sections import ACTOR, ROLLOUT
from scalerl.config.value_checks import show

_POLICY_LOSS = f"{ACTOR}.policy_loss"
_CONTROL = tuple(f"kl_ctrl.{field.name}" for field in dataclasses.fields(KLControlConfig))


@rule(*(f"algorithm.{key}" for key in ("kl_penalty", *_CONTROL)))
def _kl_control(cfg: PPOConfig) -> Iterator[str]:
    values, default = (_flat(config) for config in (cfg.algorithm, AlgorithmConfig()))
    # A weight of 0 asks for no KL, and there is none.
    changed = [key for key in values if values[key] != default[key] and (key, values[key]) != ("kl_ctrl.kl_coef", 0)]
    if changed and not cfg.algorithm.use_kl_in_reward:
        yield (
            f"algorithm.{changed[0]} = {show(values[changed[0]])}: has no effect when algorithm.use_kl_in_reward = "
            f"false; set algorithm.use_kl_in_reward=true, or leave {', '.join(f'algorithm.{key}' for key in changed)} "
            "out"
        )


def _flat(config: AlgorithmConfig) -> dict[str, Any]:
    control = dataclasses.asdict(config.kl_ctrl)
    return {"kl_penalty": config.kl_penalty} | {f"kl_ctrl.{name}": value for name, value in control.items()}


@rule(f"{_POLICY_LOSS}.clip_cov_lb", f"{_POLICY_LOSS}.clip_cov_ub")
def _covariance_band(cfg: PPOConfig) -> Iterator[str]:
    loss = cfg.actor_rollout_ref.actor.policy_loss
    if loss.clip_cov_lb >= loss.clip_cov_ub:
        yield (
            f"{_POLICY_LOSS}.clip_cov_lb = {loss.clip_cov_lb:g}: must be below {_POLICY_LOSS}.clip_cov_ub = "
            f"{loss.clip_cov_ub:g}; set {_POLICY_LOSS}.clip_cov_ub={loss.clip_cov_lb + 1:g} or more"
        )


@rule(f"{_POLICY_LOSS}.loss_mode", f"{_POLICY_LOSS}.dro_beta")
def _dro_weight(cfg: PPOConfig) -> Iterator[str]:
    loss = cfg.actor_rollout_ref.actor.policy_loss
    if loss.loss_mode == "dro" and loss.dro_beta is None:
        yield (
            f"{_POLICY_LOSS}.dro_beta = null: loss_mode = dro needs the weight of its squared log-ratio; set "
            f"{_POLICY_LOSS}.dro_beta=0.1, or another number above 0"
        )


@rule(f"{ROLLOUT}.n", "algorithm.adv_estimator")
def _group_baseline(cfg: PPOConfig) -> Iterator[str]:
    name = cfg.algorithm.adv_estimator
    if name in GROUP_ESTIMATORS and cfg.actor_rollout_ref.rollout.n == 1:
        yield (
            f"{ROLLOUT}.n = 1: algorithm.adv_estimator = {name} compares the samples of one prompt, so a group of one "
            f"has no baseline; set {ROLLOUT}.n=2 or more, for example {ROLLOUT}.n=8"
        )


@rule("algorithm.adv_estimator")
def _greedy_baseline(cfg: PPOConfig) -> Iterator[str]:
    if cfg.algorithm.adv_estimator == "remax" and cfg.reward_model.enable:
        yield (
            "algorithm.adv_estimator = remax: its greedy responses are scored by the reward function as they come, and "
            "a reward model scores when generation is over; set reward_model.enable=false, or another estimator"
        )


ALGORITHM_RULES = [_greedy_baseline, _group_baseline, _kl_control, _dro_weight, _covariance_band]
