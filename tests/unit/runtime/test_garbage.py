"""Only what is there at the first call is kept out of collections; cycles that a run leaves are freed by each call."""

from __future__ import annotations

import gc
import weakref

import pytest

from scalerl.runtime import garbage


class Knot:
    def __init__(self) -> None:
        self.myself = self


@pytest.fixture(autouse=True)
def not_frozen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(garbage, "_frozen", False)
    yield
    gc.unfreeze()


def test_the_first_call_freezes_and_no_other() -> None:
    gc.unfreeze()
    garbage.collect_garbage()
    frozen = gc.get_freeze_count()
    assert frozen > 1000
    later = [Knot() for _ in range(100)]
    garbage.collect_garbage()
    assert gc.get_freeze_count() <= frozen and len(later) == 100


def test_what_a_run_left_is_freed() -> None:
    garbage.collect_garbage()
    for _ in range(2):
        left = weakref.ref(Knot())
        garbage.collect_garbage()
        assert left() is None
