"""Rules of the generative judge, which has servers on devices of its own."""

from __future__ import annotations

from collections.abc import Iterator

from scalerl.config.rules.base import rule
from scalerl.config.rules.rollout import own_pool_rule
from scalerl.config.schema import PPOConfig
from scalerl.config.sections import JUDGE

_POOL = f"{JUDGE}.resource_pool"


@rule(f"{JUDGE}.model.path", f"{_POOL}.nnodes", f"{_POOL}.n_gpus_per_node")
def _model_and_pool_given(cfg: PPOConfig) -> Iterator[str]:
    judge, pool = cfg.reward_model.judge, cfg.reward_model.judge.resource_pool
    lacks = [] if judge.model.path is not None else [f"{JUDGE}.model.path=DIRECTORY"]
    lacks += [] if pool.nnodes else [f"{_POOL}.nnodes=1", f"{_POOL}.n_gpus_per_node={pool.n_gpus_per_node}"]
    if judge.enable and lacks:
        yield (
            f"{JUDGE}.enable = true: needs the directory of a language model, and devices of its own, as it writes "
            f"while the policy generates; set {' and '.join(lacks)}, or {JUDGE}.enable=false"
        )
    given = {f"{JUDGE}.model.path": judge.model.path, f"{_POOL}.nnodes": pool.nnodes}
    unused = {key: value for key, value in given.items() if value}
    if not judge.enable and unused:
        key, value = next(iter(unused.items()))
        yield (
            f"{key} = {value}: has no effect when {JUDGE}.enable = false; set "
            f"{' and '.join([f'{JUDGE}.enable=true', *lacks])}, or leave {' and '.join(unused)} out"
        )


@rule(f"{JUDGE}.min_score", f"{JUDGE}.max_score")
def _range(cfg: PPOConfig) -> Iterator[str]:
    judge = cfg.reward_model.judge
    if judge.enable and judge.min_score >= judge.max_score:
        yield (
            f"{JUDGE}.min_score = {judge.min_score:g}: must be below {JUDGE}.max_score = {judge.max_score:g}, or every "
            f"sample has the same score; set {JUDGE}.max_score={judge.min_score + 1:g} or more"
        )


JUDGE_RULES = [_model_and_pool_given, own_pool_rule(JUDGE, lambda cfg: cfg.reward_model.judge.enable), _range]
