from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.data import PromptCursor

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**40)
takes = st.lists(st.integers(0, 90), max_size=6)

GOLDEN_EPOCH_0 = [0, 1, 4, 2, 6, 8, 5, 9, 7, 3]
GOLDEN_EPOCH_1 = [7, 3, 4, 2, 5, 9, 6, 8, 0, 1]


@given(sizes, seeds, st.booleans(), st.integers(1, 4))
def test_every_row_once_per_epoch(num_rows, seed, shuffle, num_epochs):
    cursor = PromptCursor(num_rows, seed, shuffle)
    for _ in range(num_epochs):
        assert sorted(cursor.take(num_rows)) == list(range(num_rows))


@given(sizes, seeds, st.booleans(), takes)
def test_order_does_not_depend_on_the_sizes_of_takes(num_rows, seed, shuffle, ns):
    cursor = PromptCursor(num_rows, seed, shuffle)
    pieces = [row for n in ns for row in cursor.take(n)]
    assert pieces == PromptCursor(num_rows, seed, shuffle).take(sum(ns))
    assert cursor.num_taken == sum(ns)
    assert cursor.epoch == sum(ns) // num_rows


@settings(max_examples=200)
@given(sizes, seeds, st.booleans(), takes, takes)
def test_resume_anywhere_equals_uninterrupted(num_rows, seed, shuffle, before, after):
    cursor = PromptCursor(num_rows, seed, shuffle)
    for n in before:
        cursor.take(n)
    state = json.loads(json.dumps(cursor.state_dict()))
    resumed = PromptCursor(num_rows, seed, shuffle)
    resumed.take(3)  # A cursor that was used already forgets its place.
    resumed.load_state_dict(state)
    assert resumed.num_taken == cursor.num_taken
    assert [resumed.take(n) for n in after] == [cursor.take(n) for n in after]
    assert resumed.state_dict() == cursor.state_dict()


def test_order_is_the_documented_function():
    """The order is part of a checkpoint: it must be the same under every numpy and every version of scalerl."""
    cursor = PromptCursor(10, seed=42, shuffle=True)
    epochs = [cursor.take(10), cursor.take(10)]
    assert epochs == [GOLDEN_EPOCH_0, GOLDEN_EPOCH_1]
    for epoch, order in enumerate(epochs):
        words = np.random.Philox(np.random.SeedSequence([42, epoch])).random_raw(10).tolist()
        assert order == sorted(range(10), key=words.__getitem__)


def test_seed_and_epoch_change_the_order():
    orders = {
        tuple(PromptCursor(100, seed, True).take(100 * (epoch + 1))[-100:]) for seed in range(5) for epoch in range(5)
    }
    assert len(orders) == 25


def test_shuffle_is_uniform_over_positions():
    num_rows, num_epochs = 5, 2000
    cursor = PromptCursor(num_rows, 7, True)
    counts = np.zeros((num_rows, num_rows))
    for _ in range(num_epochs):
        for position, row in enumerate(cursor.take(num_rows)):
            counts[row, position] += 1
    # Binomial(2000, 1/5): standard deviation 18; 6 of them.
    assert np.abs(counts - num_epochs / num_rows).max() < 108


def test_without_shuffle():
    assert PromptCursor(3, 0, False).take(8) == [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (PromptCursor(5, 1, True), "num_rows 4 -> 5"),
        (PromptCursor(4, 2, True), "seed 1 -> 2"),
        (PromptCursor(4, 1, False), "shuffle True -> False"),
    ],
)
def test_state_of_another_order_is_refused(other, words):
    with pytest.raises(ValueError, match=words):
        other.load_state_dict(PromptCursor(4, 1, True).state_dict())
    assert other.num_taken == 0


def test_other_rows_of_the_same_number_are_refused():
    """A state from before there were digests is not, nor one that is loaded where nobody gives the rows."""
    cursor = PromptCursor(4, 1, True, "rows")
    cursor.take(3)
    state = cursor.state_dict()
    other = PromptCursor(4, 1, True, "other rows")
    with pytest.raises(ValueError, match=r"the prompts changed since the checkpoint \(their messages; there are 4 as"):
        other.load_state_dict(state)
    assert other.num_taken == 0
    for known, saved in ((cursor, state), (other, {k: v for k, v in state.items() if k != "digest"})):
        known.load_state_dict(saved)
        assert known.num_taken == 3
    without = PromptCursor(4, 1, True)
    without.load_state_dict(state)
    assert without.num_taken == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"position": 4}, "position=4"),
        ({"position": -1}, "position=-1"),
        ({"epoch": 1.5}, "epoch=1.5"),
        ({"epoch": None}, "epoch=None"),
    ],
)
def test_damaged_state_is_refused(change, words):
    cursor = PromptCursor(4, 1, True)
    with pytest.raises(ValueError, match=words):
        cursor.load_state_dict(cursor.state_dict() | change)
    with pytest.raises(ValueError, match="lacks position"):
        cursor.load_state_dict({key: value for key, value in cursor.state_dict().items() if key != "position"})


@pytest.mark.parametrize(("args", "words"), [((0, 1, True), "num_rows=0"), ((4, -1, True), r"data\.seed=-1")])
def test_bad_arguments(args, words):
    with pytest.raises(ValueError, match=words):
        PromptCursor(*args)


def test_negative_take():
    with pytest.raises(ValueError, match="take"):
        PromptCursor(4, 1, True).take(-1)
