"""Keys of the checkpoints that stay: one number for actor and critic, which share a checkpoint."""

from __future__ import annotations

import pytest

from scalerl.config import compose, validate_ppo

REQUIRED = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.n=4"]
ACTOR, CRITIC = "trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"


def test_critics_are_kept_as_long_as_actors() -> None:
    assert compose("ppo", [*REQUIRED, f"{ACTOR}=3"]).trainer.max_critic_ckpt_to_keep == 3
    assert compose("ppo", [*REQUIRED, f"{ACTOR}=3", f"{CRITIC}=3"])


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
