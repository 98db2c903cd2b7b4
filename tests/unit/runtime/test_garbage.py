"""Only what is there at the first call is kept out of collections; cycles that a run leaves are freed by each call; an
answer is read without a collection."""

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
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


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


def test_a_long_answer_is_read_without_a_collection() -> None:
    garbage.collect_garbage()
    garbage.collect_rarely()
    collections: list[str] = []

    def count(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    gc.callbacks.append(count)
    try:
        for _ in range(3):
            # As orjson makes the log-probs of 32,768 tokens.
            assert len([[-1.0, token, None] for token in range(32768)]) == 32768
    finally:
        gc.callbacks.remove(count)
    assert collections == []
