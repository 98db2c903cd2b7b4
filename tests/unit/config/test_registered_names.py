"""Names that select a function: known before its module is imported, and reported with everything else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scalerl.algorithms import get_adv_estimator, get_policy_loss, register_adv_est, register_token_adv_est
from scalerl.algorithms.advantages import adv_estimator_names
from scalerl.base.user_code import forget_files, import_files
from scalerl.config import ConfigError, compose, model_roles, violations_of
from scalerl.config.names import (
    CRITIC_ESTIMATORS,
    ESTIMATORS,
    GROUP_ESTIMATORS,
    POLICY_LOSSES,
    REWARD_MANAGERS,
    RegisteredNames,
)
from scalerl.rewards import get_reward_manager

REQUIRED = [
    "data.train_files=a",
    "data.val_files=b",
    "actor_rollout_ref.model.path=m",
    "actor_rollout_ref.rollout.n=4",
]
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"


@pytest.mark.parametrize(
    ("names", "get"),
    [
        (ESTIMATORS, lambda name: get_adv_estimator(name).function),
        (POLICY_LOSSES, get_policy_loss),
        (REWARD_MANAGERS, get_reward_manager),
    ],
)
def test_scalerls_own_names_are_those_that_are_registered(names: RegisteredNames, get: Callable[[str], Any]) -> None:
    for name in names.own:
        get(name)

    def is_ours(name: str) -> bool:
        try:
            registered = get(name)
        except ValueError:  # another test of this process registered it and took it back
            return False
        return getattr(registered, "function", registered).__module__.startswith("scalerl.")

    assert {name for name in names._names if is_ours(name)} == set(names.own)


def test_the_estimators_with_a_critic_are_those_that_need_values() -> None:
    needing = {name for name in adv_estimator_names() if "values" in get_adv_estimator(name).needs}
    assert needing == CRITIC_ESTIMATORS and "gae" in needing
    assert set(GROUP_ESTIMATORS) <= set(ESTIMATORS.own)


def test_unknown_names_are_reported_with_everything_else() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(
            "ppo",
            [
                *REQUIRED,
                "algorithm.adv_estimator=grppo",
                f"{LOSS}=vanila",
                "reward_model.reward_manager=nave",
                "data.train_batch_size=10",
                "actor_rollout_ref.actor.ppo_mini_batch_size=4",
                "actor_rollout_ref.actor.optim.lr=-1",
            ],
        )
    text = "\n".join(caught.value.violations)
    for part in (
        "algorithm.adv_estimator='grppo': no such advantage estimator",
        "Did you mean 'grpo'?",
        f"{LOSS}='vanila': no such policy loss",
        "reward_model.reward_manager='nave': no such reward manager",
        "must divide data.train_batch_size = 10",
        "optim.lr = -1",
    ):
        assert part in text
    assert len(caught.value.violations) == 5


@pytest.mark.parametrize("name", ["gdpo", "cppo", "dppo_tv", "dapo"])
def test_another_algorithm_is_no_misspelt_one(name: str) -> None:
    for names in (ESTIMATORS, POLICY_LOSSES):
        assert "Did you mean" not in names.unknown(name)


def test_names_of_files_that_are_not_imported_yet_are_left_to_the_preflight() -> None:
    files = "trainer.import_files=[own.py]"
    assert compose("ppo", [*REQUIRED, files, "algorithm.adv_estimator=of_own.py", f"{LOSS}=of_own.py"])


def test_an_estimator_of_the_users_that_needs_values_has_a_critic() -> None:
    name = "test_registered_names_values"
    overrides = [
        *REQUIRED,
        f"algorithm.adv_estimator={name}",
        "trainer.import_files=[own.py]",
        # Of a critic only; whether there is one is not known before the file is imported.
        "trainer.critic_warmup=1",
        "critic.resource_pool.nnodes=1",
    ]
    cfg = compose("ppo", overrides)
    assert model_roles(cfg) == []

    @register_token_adv_est(name, needs=("values",))
    def estimator(rewards_T, response_mask_T, cu_seqlens, config, *, values):
        return rewards_T - values, rewards_T

    assert [role.name for role in model_roles(cfg)] == ["critic"]
    assert violations_of(cfg) == []


def test_an_estimator_of_the_users_without_values_has_none() -> None:
    name = "test_registered_names_none"

    @register_adv_est(name)
    def estimator(scores_S, uids_S, config):
        return scores_S

    cfg = compose("ppo", [*REQUIRED, f"algorithm.adv_estimator={name}"])
    cfg.trainer.critic_warmup = 1
    assert model_roles(cfg) == []
    (violation,) = violations_of(cfg)
    assert "this run has no critic that could learn first" in violation


def test_an_estimator_of_samples_gets_no_values() -> None:
    with pytest.raises(ValueError, match="register it with register_token_adv_est"):
        register_adv_est("test_registered_names_wrong", needs=("values",))


def test_names_of_a_users_file_are_forgotten_with_it(tmp_path: Path) -> None:
    name, file = "test_registered_names_file", tmp_path / "own.py"
    file.write_text(
        "from scalerl.algorithms import register_policy_loss, register_token_adv_est\n"
        "from scalerl.rewards import NaiveRewardManager, register_reward_manager\n"
        f"@register_token_adv_est({name!r}, needs=('values',))\n"
        "def estimator(rewards_T, response_mask_T, cu_seqlens, config, *, values): ...\n"
        f"@register_policy_loss({name!r})\n"
        "def loss(logprobs_T, old_logprobs_T, advantages_T, config): ...\n"
        f"@register_reward_manager({name!r})\n"
        "class Manager(NaiveRewardManager): ...\n"
    )
    known = (ESTIMATORS, POLICY_LOSSES, REWARD_MANAGERS, CRITIC_ESTIMATORS)
    import_files([str(file)])
    assert [name in names for names in known] == [True] * 4
    forget_files()
    assert [name in names for names in known] == [False] * 4
