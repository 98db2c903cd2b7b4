"""Rules of the algorithm's keys: KL in the reward, and what a policy loss needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from scalerl.config.rules.base import Rule
from scalerl.config.rules.layout import ACTOR
from scalerl.config.schema import AlgorithmConfig, KLControlConfig, PPOConfig
from scalerl.config.value_checks import show

_POLICY_LOSS = f"{ACTOR}.policy_loss"
_CONTROL = tuple(f"kl_ctrl.{field.name}" for field in dataclasses.fields(KLControlConfig))


def _kl_control(cfg: PPOConfig) -> Iterator[str]:
    given, default = (_flat(config) for config in (cfg.algorithm, AlgorithmConfig()))
    # A weight of 0 asks for no KL, which is so.
    changed = [key for key in given if given[key] != default[key] and (key, given[key]) != ("kl_ctrl.kl_coef", 0)]
    if changed and not cfg.algorithm.use_kl_in_reward:
        yield (
            f"algorithm.{changed[0]} = {show(given[changed[0]])}: has no effect when algorithm.use_kl_in_reward = "
            f"false; set algorithm.use_kl_in_reward=true, or leave {', '.join(f'algorithm.{key}' for key in changed)} "
            "out"
        )


def _flat(config: AlgorithmConfig) -> dict[str, Any]:
    control = dataclasses.asdict(config.kl_ctrl)
    return {"kl_penalty": config.kl_penalty} | {f"kl_ctrl.{name}": value for name, value in control.items()}


def _covariance_band(cfg: PPOConfig) -> Iterator[str]:
    loss = cfg.actor_rollout_ref.actor.policy_loss
    if loss.clip_cov_lb >= loss.clip_cov_ub:
        yield (
            f"{_POLICY_LOSS}.clip_cov_lb = {loss.clip_cov_lb:g}: must be below {_POLICY_LOSS}.clip_cov_ub = "
            f"{loss.clip_cov_ub:g}; set {_POLICY_LOSS}.clip_cov_ub={loss.clip_cov_lb + 1:g} or more"
        )


def _dro_weight(cfg: PPOConfig) -> Iterator[str]:
    loss = cfg.actor_rollout_ref.actor.policy_loss
    if loss.loss_mode == "dro" and loss.dro_beta is None:
        yield (
            f"{_POLICY_LOSS}.dro_beta = null: loss_mode = dro needs the weight of its squared log-ratio; set "
            f"{_POLICY_LOSS}.dro_beta=0.1, or another number above 0"
        )


def _greedy_baseline(cfg: PPOConfig) -> Iterator[str]:
    if cfg.algorithm.adv_estimator == "remax" and cfg.reward_model.enable:
        yield (
            "algorithm.adv_estimator = remax: its greedy responses are scored by the reward function as they come, and "
            "a reward model scores when generation is over; set reward_model.enable=false, or another estimator"
        )


ALGORITHM_RULES = [
    Rule(("algorithm.adv_estimator",), _greedy_baseline),
    Rule(tuple(f"algorithm.{key}" for key in ("kl_penalty", *_CONTROL)), _kl_control),
    Rule((f"{_POLICY_LOSS}.loss_mode", f"{_POLICY_LOSS}.dro_beta"), _dro_weight),
    Rule((f"{_POLICY_LOSS}.clip_cov_lb", f"{_POLICY_LOSS}.clip_cov_ub"), _covariance_band),
]
