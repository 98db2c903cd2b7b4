"""Rank order, layers of stages and chunks, experts of ranks."""

from __future__ import annotations

import itertools

import pytest

from scalerl.parallel.layout import Layout

SIZES = [
    (tp, cp, dp, pp)
    for tp, cp, dp, pp in itertools.product([1, 2, 3], [1, 2], [1, 2, 4], [1, 2])
    if tp * cp * dp * pp <= 24
]


@pytest.mark.parametrize(("tp_size", "cp_size", "dp_size", "pp_size"), SIZES)
def test_every_place_is_taken_once(tp_size: int, cp_size: int, dp_size: int, pp_size: int) -> None:
    layout = Layout(tp_size * cp_size * dp_size * pp_size, tp_size, pp_size, cp_size)
    assert layout.dp_size == dp_size
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len({(at.tp_rank, at.cp_rank, at.dp_rank, at.pp_rank) for at in places}) == layout.world_size
    # tp first, then cp, then dp, then pp.
    assert places == sorted(places, key=lambda at: (at.pp_rank, at.dp_rank, at.cp_rank, at.tp_rank))


@pytest.mark.parametrize(("tp_size", "cp_size", "dp_size", "pp_size"), SIZES)
def test_one_rank_of_each_dp_rank_holds_its_results(tp_size: int, cp_size: int, dp_size: int, pp_size: int) -> None:
    layout = Layout(tp_size * cp_size * dp_size * pp_size, tp_size, pp_size, cp_size)
    ranks = layout.output_ranks()
    assert len(ranks) == dp_size
    for dp_rank, rank in enumerate(ranks):
        at = layout.coordinates(rank)
        assert (at.tp_rank, at.cp_rank, at.dp_rank, at.pp_rank) == (0, 0, dp_rank, pp_size - 1)


def test_experts_count_their_own_way_over_the_ranks_of_a_stage() -> None:
    layout = Layout(8, tp_size=2, pp_size=1, ep_size=4, etp_size=1)
    assert [layout.coordinates(rank).ep_rank for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [list(layout.experts(8, ep_rank)) for ep_rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    layout = Layout(8, tp_size=2, pp_size=2, ep_size=2, etp_size=2)
    assert [(layout.coordinates(r).etp_rank, layout.coordinates(r).ep_rank) for r in range(4)] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
    ]


@pytest.mark.parametrize(
    ("layout", "num_layers", "expected"),
    [
        (Layout(2, pp_size=2), 4, [[[0, 1]], [[2, 3]]]),
        (Layout(2, pp_size=2, vpp_size=2), 8, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        (Layout(3, pp_size=3, first_stage_layers=1, last_stage_layers=1), 6, [[[0]], [[1, 2, 3, 4]], [[5]]]),
        (Layout(2, pp_size=2, first_stage_layers=1), 4, [[[0]], [[1, 2, 3]]]),
        (
            Layout(3, pp_size=3, vpp_size=2, first_stage_layers=2),
            10,
            [[[0], [5]], [[1, 2], [6, 7]], [[3, 4], [8, 9]]],
        ),
    ],
)
def test_layers_of_stages(layout: Layout, num_layers: int, expected: list[list[list[int]]]) -> None:
    layers_of_stages = [[list(chunk) for chunk in layout.layers(num_layers, stage)] for stage in range(layout.pp_size)]
    assert layers_of_stages == expected
    for stage, chunks in enumerate(expected):
        for chunk, layers in enumerate(chunks):
            assert all(layout.owner_of_layer(num_layers, layer) == (stage, chunk) for layer in layers)


@pytest.mark.parametrize(
    ("layout", "num_layers", "message"),
    [
        (Layout(2, pp_size=2), 3, "pipeline_model_parallel_size = 2: must divide the model's 3 layers"),
        (Layout(2, pp_size=2, vpp_size=2), 6, "virtual_pipeline_model_parallel_size = 2: must divide the 3 layers of"),
        (Layout(2, pp_size=2, first_stage_layers=1, last_stage_layers=1), 3, "leave 1 of the model's 3 layers to 0"),
        (Layout(3, pp_size=3, first_stage_layers=3), 3, "leave 0 of the model's 3 layers to 2 stages"),
        (Layout(1, first_stage_layers=1), 3, "needs megatron.pipeline_model_parallel_size above 1"),
    ],
)
def test_layers_that_do_not_divide(layout: Layout, num_layers: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout.layers(num_layers, 0)


def test_a_world_that_does_not_divide() -> None:
    with pytest.raises(
        ValueError, match=r"world size 6 is not a multiple of tp_size \* cp_size \* pp_size = 2 \* 1 \* 2"
    ):
        Layout(6, 2, 2)
    with pytest.raises(ValueError, match=r"the 6 ranks of a pipeline stage are not a multiple of etp_size \* ep_size"):
        Layout(6, ep_size=4)
