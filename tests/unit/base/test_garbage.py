"""Imports and what is there at the first call are kept out of collections; each call frees cycles that a run left; an
answer is read without a collection."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref

import pytest

from scalerl.base import garbage


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


@pytest.mark.parametrize("collects", [True, False])
def test_an_import_is_out_of_collections(monkeypatch: pytest.MonkeyPatch, collects: bool) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    collected = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with garbage.frozen_imports():
            assert not gc.isenabled()
            module = importlib.import_module("colorsys")
        assert gc.isenabled() is collects
        # What a collection goes through.
        assert not any(thing is vars(module) for thing in gc.get_objects())
        with garbage.frozen_imports():
            later = [importlib.import_module("colorsys")]
        assert any(thing is later for thing in gc.get_objects())
    finally:
        (gc.enable if collected else gc.disable)()


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
