"""Saving and loading a run: on devices that servers share with the trainer only inside of `Rollout.lend_device`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scalerl.base.random_states import generator_states
from scalerl.trainer import ppo
from scalerl.trainer.saving import checkpoints


class Recorder:
    """In the place of all parts of a run: notes what is asked of them, in order."""

    def __init__(self, *, with_critic: bool) -> None:
        self.events: list[str] = []
        self.config = SimpleNamespace(
            actor_rollout_ref=SimpleNamespace(model=SimpleNamespace(path="a")),
            critic=SimpleNamespace(model=SimpleNamespace(path="c")),
        )
        self.rollout = SimpleNamespace(lend_device=self.lend_device)
        self.saves = SimpleNamespace(save=self.note("saved"), latest=None)
        self.actor = self.model("actor")
        self.critic = self.model("critic") if with_critic else None
        self.samples = SimpleNamespace(prompts=SimpleNamespace(load_state_dict=lambda state: None))
        self.stop = SimpleNamespace(requested=False)
        self.step, self.total_steps, self.kl = 3, 9, None

    def note(self, event: str) -> Any:
        return lambda *args, **kwargs: self.events.append(event)

    def model(self, name: str) -> Any:
        return SimpleNamespace(save=None, begin_save=None, load=self.note(f"{name} loaded"))

    @contextlib.contextmanager
    def lend_device(self) -> Iterator[None]:
        self.events.append("lent")
        yield
        self.events.append("back")


@pytest.mark.parametrize("with_critic", [False, True])
def test_a_save_has_the_device(with_critic: bool) -> None:
    run: Any = Recorder(with_critic=with_critic)
    ppo.save(run, {"of": "before"})
    assert run.events == ["lent", "saved", "back"]


@pytest.mark.parametrize("with_critic", [False, True])
def test_a_load_has_the_device(with_critic: bool, tmp_path: Path) -> None:
    run: Any = Recorder(with_critic=with_critic)
    ppo.load(run, checkpoints.Resumed(tmp_path, {"step": 7, "prompts": {}, "random": generator_states()}))
    assert run.events == ["lent", "actor loaded", *(["critic loaded"] if with_critic else []), "back"]
    assert (run.step, run.saves.latest) == (7, tmp_path)
