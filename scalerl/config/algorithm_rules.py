"""Rules of the algorithm's keys: KL in the reward, and tokens chosen by covariance."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from scalerl.config.domains import show
from scalerl.config.layout_rules import ACTOR
from scalerl.config.rules import Rule
from scalerl.config.schema import AlgorithmConfig, KLControlConfig, PPOConfig

_COVARIANCE = f"{ACTOR}.policy_loss"
_CONTROL = tuple(f"kl_ctrl.{field.name}" for field in dataclasses.fields(KLControlConfig))


def _kl_control(cfg: PPOConfig) -> Iterator[str]:
    given, default = (_flat(config) for config in (cfg.algorithm, AlgorithmConfig()))
    changed = [key for key in given if given[key] != default[key]]
    if changed and not cfg.algorithm.use_kl_in_reward:
        yield (
            f"algorithm.{changed[0]} = {show(given[changed[0]])}: has no effect when algorithm.use_kl_in_reward = "
            f"false; set algorithm.use_kl_in_reward=true, or leave {', '.join(f'algorithm.{key}' for key in changed)} "
            "out"
        )


def _flat(config: AlgorithmConfig) -> dict[str, object]:
    control = dataclasses.asdict(config.kl_ctrl)
    return {"kl_penalty": config.kl_penalty} | {f"kl_ctrl.{name}": value for name, value in control.items()}


def _covariance_band(cfg: PPOConfig) -> Iterator[str]:
    loss = cfg.actor_rollout_ref.actor.policy_loss
    if loss.clip_cov_lb >= loss.clip_cov_ub:
        yield (
            f"{_COVARIANCE}.clip_cov_lb = {loss.clip_cov_lb:g}: must be below {_COVARIANCE}.clip_cov_ub = "
            f"{loss.clip_cov_ub:g}; set {_COVARIANCE}.clip_cov_ub={loss.clip_cov_lb + 1:g} or more"
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
    Rule((f"{_COVARIANCE}.clip_cov_lb", f"{_COVARIANCE}.clip_cov_ub"), _covariance_band),
]
