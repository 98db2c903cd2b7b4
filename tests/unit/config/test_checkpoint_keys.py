"""Keys of the checkpoints that stay: one number for actor and critic, which share a checkpoint."""

from __future__ import annotations

import pytest

from scalerl.config import ConfigError, compose

REQUIRED = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.n=4"]
ACTOR, CRITIC = "trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"


def test_critics_are_kept_as_long_as_actors() -> None:
    assert compose("ppo", [*REQUIRED, f"{ACTOR}=3"]).trainer.max_critic_ckpt_to_keep == 3
    assert compose("ppo", [*REQUIRED, f"{ACTOR}=3", f"{CRITIC}=3"])


@pytest.mark.parametrize("actor", ["null", "2"])
def test_another_number_is_refused(actor: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose("ppo", [*REQUIRED, f"{ACTOR}={actor}", f"{CRITIC}=3"])
    (found,) = caught.value.violations
    assert found.startswith(f"{CRITIC} = 3: ") and f"must be {ACTOR} = {actor};" in found
