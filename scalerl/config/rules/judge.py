"""Rules of the generative judge, which has servers on devices of its own."""

from __future__ import annotations

from collections.abc import Iterator

from scalerl.config.rules.base import rule
from scalerl.config.rules.rollout import own_pool_rule
from scalerl.config.schema import PPOConfig
from scalerl.config.sections import JUDGE

_POOL = f"{JUDGE}.resource_pool"


@rule(f"{JUDGE}.model.path")
def _model_given(cfg: PPOConfig) -> Iterator[str]:
    judge = cfg.reward_model.judge
    if judge.enable and judge.model.path is None:
        yield (
            f"{JUDGE}.model.path = null: needed when {JUDGE}.enable = true; set it to the directory of a language "
            f"model, or {JUDGE}.enable=false"
        )
    if not judge.enable and judge.model.path is not None:
        yield (
            f"{JUDGE}.model.path = {judge.model.path}: has no effect when {JUDGE}.enable = false; set "
            f"{JUDGE}.enable=true, or {JUDGE}.model.path=null"
        )


@rule(f"{_POOL}.nnodes")
def _pool_given(cfg: PPOConfig) -> Iterator[str]:
    judge = cfg.reward_model.judge
    if judge.enable and not judge.resource_pool.nnodes:
        yield (
            f"{_POOL}.nnodes = 0: needed when {JUDGE}.enable = true, the judge writes while the policy generates, on "
            f"devices of its own; set {_POOL}.nnodes=1 or more and {_POOL}.n_gpus_per_node"
        )
    if not judge.enable and judge.resource_pool.nnodes:
        yield (
            f"{_POOL}.nnodes = {judge.resource_pool.nnodes}: has no effect, this run has no judge; set "
            f"{JUDGE}.enable=true, or {_POOL}.nnodes=0"
        )


@rule(f"{JUDGE}.min_score", f"{JUDGE}.max_score")
def _range(cfg: PPOConfig) -> Iterator[str]:
    judge = cfg.reward_model.judge
    if judge.enable and judge.min_score >= judge.max_score:
        yield (
            f"{JUDGE}.min_score = {judge.min_score:g}: must be below {JUDGE}.max_score = {judge.max_score:g}, or every "
            f"sample has the same score; set {JUDGE}.max_score={judge.min_score + 1:g} or more"
        )


JUDGE_RULES = [_model_given, _pool_given, own_pool_rule(JUDGE, lambda cfg: cfg.reward_model.judge.enable), _range]
