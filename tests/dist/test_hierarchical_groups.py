"""Groups of cp ranks within groups of cp ranks (cp_comm_type=a2a+p2p), made by megatron-core on real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.launch import run_ranks


def groups_of_a_rank(sizes: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from scalerl.parallel.layout import Layout, initialize

    groups = initialize(Layout(**sizes), backend="gloo", timeout_s=60, seed=1)
    sums = []
    for group in groups.hierarchical_cp:
        total = torch.tensor([dist.get_rank()])
        dist.all_reduce(total, group=group)
        sums.append(int(total))
    return {
        "hierarchical": [dist.get_process_group_ranks(group) for group in groups.hierarchical_cp],
        "cp": dist.get_process_group_ranks(groups.cp),
        "sums": sums,
    }


def test_neighbours_first_and_every_pair_of_ranks_connected() -> None:
    ranks = run_ranks(4, groups_of_a_rank, dict(world_size=4, cp_size=4, hierarchical_cp_sizes=(2, 2)))
    assert [rank["hierarchical"] for rank in ranks] == [
        [[0, 1], [0, 2]],
        [[0, 1], [1, 3]],
        [[2, 3], [0, 2]],
        [[2, 3], [1, 3]],
    ]
    for rank in ranks:
        assert rank["cp"] == [0, 1, 2, 3]
        assert rank["sums"] == [sum(members) for members in rank["hierarchical"]]


def test_none_unless_asked_for() -> None:
    ranks = run_ranks(2, groups_of_a_rank, dict(world_size=2, cp_size=2))
    assert [rank["hierarchical"] for rank in ranks] == [[], []]


def test_a_product_that_is_not_cp_size() -> None:
    from scalerl.parallel.layout import Layout

    with pytest.raises(ValueError, match=r"the product of \(2, 2\) is not cp_size = 8"):
        Layout(8, cp_size=8, hierarchical_cp_sizes=(2, 2))
