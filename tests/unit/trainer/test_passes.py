"""All passes of a step begin before the step waits for one, so that models in pools of their own compute together."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from scalerl.config import compose
from scalerl.trainer.ppo import train_step

NEEDED = ("data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.n=4")


class WaitedError(Exception):
    pass


class Role:
    def __init__(self, name: str, begun: list[str]) -> None:
        self.name, self.begun = name, begun

    def begin_logprobs(self, batch: Any) -> Role:
        self.begun.append(self.name)
        return self

    begin_values = begin_scores = begin_logprobs

    def add_to(self, batch: Any) -> Any:
        raise WaitedError


def test_every_pass_begins_before_one_is_waited_for() -> None:
    begun: list[str] = []
    names = ("actor", "reference", "critic", "reward_model")
    config = compose("ppo", [*NEEDED, "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4"])
    run: Any = SimpleNamespace(
        **{name: Role(name, begun) for name in names},
        config=config,
        timers=lambda _: nullcontext(),
        samples=SimpleNamespace(next_batch=lambda step: (None, {})),
        rollout=SimpleNamespace(release_device=lambda: None, place=lambda samples, plans: None),
        planners={},
    )
    with pytest.raises(WaitedError):
        train_step(run, 1)
    assert begun == list(names)
