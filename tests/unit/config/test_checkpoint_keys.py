"""Keys of the checkpoints that stay: one number for actor and critic, which share a checkpoint."""

from __future__ import annotations

import pytest

from scalerl.config import compose, validate_ppo
from scalerl.config.compose import composed

REQUIRED = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.n=4"]
ACTOR, CRITIC = "trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"


def test_critics_are_kept_as_long_as_actors() -> None:
    assert compose("ppo", [*REQUIRED, f"{ACTOR}=3"]).trainer.max_critic_ckpt_to_keep == 3
    assert compose("ppo", [*REQUIRED, f"{ACTOR}=3", f"{CRITIC}=3"])


@pytest.mark.parametrize(("actor", "critic", "kept"), [(None, 3, None), (2, 3, 3), (5, 3, 5), (2, None, None)])
def test_of_two_numbers_the_larger_holds_for_both(actor: int | None, critic: int | None, kept: int | None) -> None:
    numbers = {key: "null" if number is None else number for key, number in ((ACTOR, actor), (CRITIC, critic))}
    composition = composed("ppo", [*REQUIRED, *(f"{key}={number}" for key, number in numbers.items())])
    trainer = composition.config.trainer
    assert (trainer.max_actor_ckpt_to_keep, trainer.max_critic_ckpt_to_keep) == (kept, kept)
    assert [translation.verdict for translation in composition.translations] == ["renamed"]


def test_a_number_for_the_critic_alone_is_the_number_of_checkpoints() -> None:
    trainer = compose("ppo", [*REQUIRED, f"{CRITIC}=3"]).trainer
    assert (trainer.max_actor_ckpt_to_keep, trainer.max_critic_ckpt_to_keep) == (3, 3)


def test_numbers_that_differ_break_a_rule() -> None:
    cfg = compose("ppo", REQUIRED)
    cfg.trainer.max_actor_ckpt_to_keep, cfg.trainer.max_critic_ckpt_to_keep = 2, 3
    (violation,) = validate_ppo(cfg)
    assert violation.startswith(f"{CRITIC} = 3: ") and f"must be {ACTOR} = 2;" in violation


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["actor_rollout_ref.actor.checkpoint.async_save=True", "critic.checkpoint.async_save=False"], True),
        (["critic.checkpoint.async_save=True"], True),
        (["actor_rollout_ref.actor.checkpoint.async_save=False"], False),
        ([], False),
    ],
)
def test_async_save_of_any_model_is_that_of_the_checkpoint(given: list[str], expected: bool) -> None:
    assert compose("ppo", [*REQUIRED, *given]).trainer.async_save is expected
