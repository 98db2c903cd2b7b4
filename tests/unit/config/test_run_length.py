"""How many steps a run takes, and data too small for one step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scalerl.config import (
    PPOConfig,
    compose,
    decay_to_the_end,
    too_few_conversations,
    too_few_prompts,
    total_steps,
    violations_of,
)
from scalerl.config.schema import SFTTrainerConfig, TrainerConfig

ACTOR = "actor_rollout_ref.actor"
PPO = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.n=4"]
SFT = ["data.train_files=a", "model.path=m"]


@pytest.mark.parametrize("section", [TrainerConfig, SFTTrainerConfig])
@pytest.mark.parametrize(
    ("changes", "num_rows", "batch_size", "steps"),
    [
        ({"total_epochs": 1}, 64, 16, 4),
        ({"total_epochs": 3}, 64, 16, 12),
        ({"total_epochs": 1}, 65, 16, 5),  # the last batch runs into the next epoch
        ({"total_epochs": 5}, 17, 8, 11),
        ({"total_epochs": 5, "total_training_steps": 7}, 64, 16, 7),
    ],
)
def test_total_steps(section: Callable, changes: dict[str, int], num_rows: int, batch_size: int, steps: int) -> None:
    assert total_steps(section(**changes), num_rows, batch_size) == steps


def ppo(*overrides: str) -> PPOConfig:
    return compose("ppo", [*PPO, "trainer.n_gpus_per_node=2", *overrides])


@pytest.mark.parametrize(
    ("num_prompts", "overrides", "expected"),
    [
        (3, [8, 2], "data.train_batch_size = 8: data.train_files give 3 prompts"),
        (3, [8, 2], "give at least 8, or set data.train_batch_size=2"),
        (7, [8, 2], "or set data.train_batch_size=6"),
        # Fewer than a mini-batch: both sizes.
        (3, [8, 8], f"or set data.train_batch_size=3 and {ACTOR}.ppo_mini_batch_size=3"),
        (5, [4, 4, "data.gen_batch_size=6"], "data.gen_batch_size = 6: data.train_files give 5 prompts"),
        (5, [4, 4, "data.gen_batch_size=6"], "give at least 6, or set data.gen_batch_size=5 or less"),
    ],
)
def test_fewer_prompts_than_a_step_takes(num_prompts: int, overrides: list, expected: str) -> None:
    batch, mini, *more = overrides
    cfg = ppo(f"data.train_batch_size={batch}", f"{ACTOR}.ppo_mini_batch_size={mini}", *more)
    (violation,) = too_few_prompts(cfg, num_prompts)
    assert expected in violation


def test_the_sizes_that_are_proposed_are_valid() -> None:
    (violation,) = too_few_prompts(ppo("data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8"), 3)
    cfg = ppo(*violation.rpartition("or set ")[2].split(" and "))
    assert violations_of(cfg) == [] and list(too_few_prompts(cfg, 3)) == []


def test_as_many_prompts_as_a_step_takes_are_enough() -> None:
    assert list(too_few_prompts(ppo("data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=4"), 8)) == []


def test_fewer_conversations_than_an_update_takes() -> None:
    cfg = compose("sft", [*SFT, "data.train_batch_size=8", "trainer.n_gpus_per_node=4"])
    assert list(too_few_conversations(cfg, 8)) == []
    (violation,) = too_few_conversations(cfg, 5)
    assert violation.startswith("data.train_batch_size = 8: data.train_files give 5 conversations")
    assert violation.endswith("give at least 8, or set data.train_batch_size=5 or less")


def test_a_decay_without_an_end_of_its_own_takes_the_whole_run():
    """Ten steps: the actor has four updates in each, the critic two, and warms up for three."""
    batches = ["data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_epochs=2"]
    critic = ["algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=8", "critic.ppo_epochs=1"]
    warmup = ["trainer.critic_warmup=3", "trainer.total_epochs=2"]
    decays = [f"{ACTOR}.optim.lr_decay_style=cosine", "critic.optim.lr_decay_style=linear"]
    cfg = ppo(*batches, *critic, *warmup, *decays)
    assert list(decay_to_the_end(cfg, 80)) == []
    assert (cfg.actor_rollout_ref.actor.optim.lr_decay_updates, cfg.critic.optim.lr_decay_updates) == (28, 20)
    # What is given stays, and a constant rate has no end.
    cfg = ppo(*batches, *decays[:1], f"{ACTOR}.optim.lr_decay_updates=5")
    assert list(decay_to_the_end(cfg, 80)) == []
    assert (cfg.actor_rollout_ref.actor.optim.lr_decay_updates, cfg.critic.optim.lr_decay_updates) == (5, None)
    sft = compose("sft", [*SFT, "data.train_batch_size=8", "optim.lr_decay_style=cosine", "optim.lr_warmup_updates=9"])
    assert list(decay_to_the_end(sft, 80)) == [] and sft.optim.lr_decay_updates == 10
    sft.optim.lr_decay_updates = None
    (violation,) = decay_to_the_end(sft, 72)
    assert violation.startswith("optim.lr_warmup_updates = 9: must be below the 9 optimizer updates of the run")
