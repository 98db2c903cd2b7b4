"""Ranks and their coordinates."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.parallel.layout import Layout

SIZES = st.integers(1, 5)


@settings(deadline=None)
@given(SIZES, SIZES, SIZES)
def test_coordinates_are_a_bijection(tp_size: int, pp_size: int, dp_size: int) -> None:
    layout = Layout(tp_size * pp_size * dp_size, tp_size, pp_size)
    assert layout.dp_size == dp_size
    found = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len({(at.tp_rank, at.dp_rank, at.pp_rank) for at in found}) == layout.world_size
    for rank, at in enumerate(found):
        assert 0 <= at.tp_rank < tp_size and 0 <= at.dp_rank < dp_size and 0 <= at.pp_rank < pp_size
        # tp fastest, so that its ranks share a node; pp slowest.
        assert rank == at.tp_rank + tp_size * (at.dp_rank + dp_size * at.pp_rank)


@settings(deadline=None)
@given(SIZES, SIZES, SIZES)
def test_output_ranks_hold_the_results(tp_size: int, pp_size: int, dp_size: int) -> None:
    layout = Layout(tp_size * pp_size * dp_size, tp_size, pp_size)
    ranks = layout.output_ranks()
    assert len(ranks) == dp_size
    for dp_rank, rank in enumerate(ranks):
        at = layout.coordinates(rank)
        assert (at.tp_rank, at.dp_rank, at.pp_rank) == (0, dp_rank, pp_size - 1)


def test_a_world_that_does_not_divide() -> None:
    with pytest.raises(ValueError, match=r"world size 6 is not a multiple of tp_size \* pp_size = 2 \* 2"):
        Layout(6, 2, 2)
