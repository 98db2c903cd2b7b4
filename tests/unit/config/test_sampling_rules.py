"""Which ways to fill a step go together."""

from __future__ import annotations

from typing import Any

import pytest

from scalerl.config import compose
from scalerl.config.validate import validate_ppo

BASE = ["data.train_files=t", "data.val_files=v", "actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.n=4"]
STALE = "trainer.max_staleness"
PARTIAL = "actor_rollout_ref.rollout.partial_rollout"
CORRECTED = "algorithm.rollout_correction.rollout_is=token"
OWN = ["actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.rollout.resource_pool.nnodes=1"]
BOUND_1 = [f"{STALE}=1", CORRECTED]

LEGAL = {
    "over-sampling": ["data.gen_batch_size=2048"],
    "dynamic sampling": ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"],
    "partial rollouts": [*BOUND_1, f"{PARTIAL}=true", "data.gen_batch_size=2048"],
    "one step off": [*OWN, *BOUND_1],
    "ahead and interrupted": [
        *OWN,
        f"{STALE}=4",
        f"{PARTIAL}=true",
        "algorithm.rollout_correction.rollout_rs=seq_mean_k3",
        "algorithm.rollout_correction.rollout_rs_threshold=0.01",
    ],
    "the recipe": ["+recipe=dapo"],
}
# -> parts of the one violation.
ILLEGAL: dict[str, tuple[list[str], list[str]]] = {
    "fewer than a batch": (["data.gen_batch_size=512"], ["gen_batch_size = 512", "gen_batch_size=1024 or more"]),
    "over-sampling ahead": (
        [*OWN, *BOUND_1, "data.gen_batch_size=2048"],
        ["gen_batch_size = 2048", "over-sampling ends"],
    ),
    "groups of one": (
        ["algorithm.filter_groups.enable=true", "algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.n=1"],
        ["rollout.n = 1", "set actor_rollout_ref.rollout.n=2"],
    ),
    "scores that come too late": (
        ["algorithm.filter_groups.enable=true", "reward_model.enable=true", "reward_model.model.path=r"],
        ["filter_groups.enable = true", "reward_model.enable=false"],
    ),
    "interrupted under the same policy": (
        [f"{PARTIAL}=true"],
        ["partial_rollout = true", f"set {STALE}=1 and data.gen_batch_size=1536 and {CORRECTED}, or {PARTIAL}=false"],
    ),
    "interrupted on devices of their own": (
        [*OWN, f"{PARTIAL}=true"],
        ["partial_rollout = true", f"set {STALE}=1 and {CORRECTED}, or"],
    ),
    "ahead on the trainer's devices": (BOUND_1, [f"{STALE} = 1", "hybrid_engine=false", f"{PARTIAL}=true"]),
    "nothing to interrupt": (
        [*BOUND_1, f"{PARTIAL}=true"],
        ["partial_rollout = true", "set data.gen_batch_size=1536, or"],
    ),
    "no correction but bypassing": (
        [*OWN, f"{STALE}=1", "algorithm.rollout_correction.bypass_mode=true"],
        ["need a correction", f"set algorithm.rollout_correction.bypass_mode=false and {CORRECTED}, or"],
    ),
    "no correction": ([*OWN, f"{STALE}=1"], [f"{STALE} = 1", "need a correction", "rollout_is=token"]),
}


@pytest.mark.parametrize("name", LEGAL)
def test_what_goes_together(name: str) -> None:
    assert validate_ppo(compose("ppo", [*BASE, *LEGAL[name]])) == []


@pytest.mark.parametrize("name", ILLEGAL)
def test_what_does_not_is_the_one_violation(name: str) -> None:
    from scalerl.config import ConfigError

    overrides, texts = ILLEGAL[name]
    with pytest.raises(ConfigError) as caught:
        compose("ppo", [*BASE, *overrides])
    (violation,) = caught.value.violations
    assert all(text in violation for text in texts), violation


def test_a_step_begins_as_many_prompts_as_it_trains_on_unless_told_otherwise() -> None:
    cfg: Any = compose("ppo", [*BASE, "data.train_batch_size=512"])
    assert cfg.data.gen_batch_size == 512
