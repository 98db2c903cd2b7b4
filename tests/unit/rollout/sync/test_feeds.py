"""Which trainer rank sends to which rollout server."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from scalerl.rollout.servers.client import Replica
from scalerl.rollout.sync.session import feeds_of, plan_leads

SIZES = st.integers(1, 40)


@given(num_replicas=SIZES, world_size=SIZES)
def test_the_ranks_share_the_sending(num_replicas: int, world_size: int) -> None:
    leads = plan_leads(num_replicas, world_size)
    assert len(leads) == num_replicas and set(leads) <= set(range(world_size))
    sends = [leads.count(rank) for rank in range(world_size)]
    # No rank sends to two servers while another sends to none.
    assert max(sends) - min(sends) <= 1


def test_leads_are_far_apart() -> None:
    """Of two nodes with four ranks each, both send; of four servers, two a node."""
    assert plan_leads(2, 8) == [0, 4]
    assert plan_leads(4, 8) == [0, 2, 4, 6]
    assert plan_leads(3, 2) == [0, 1, 0]


def test_one_rank_talks_to_a_server_on_a_network_and_several_share_its_devices() -> None:
    replicas = [Replica("a", "sglang", 2, "key"), Replica("b", "sglang", 2, "key")]
    assert [feed.ranks for feed in feeds_of("shared", replicas, 4)] == [(0, 1), (2, 3)]
    for name in ("broadcast", "disk"):
        feeds = feeds_of(name, replicas, 4)
        assert [(feed.index, feed.replica.url, feed.ranks, feed.lead) for feed in feeds] == [
            (0, "a", (0,), 0),
            (1, "b", (2,), 2),
        ]


@given(sizes=st.lists(st.integers(1, 8), min_size=1, max_size=8), world_size=SIZES)
def test_each_rank_of_a_server_is_fed_by_one_trainer_rank(sizes: list[int], world_size: int) -> None:
    replicas = [Replica(str(index), "sglang", size, "key") for index, size in enumerate(sizes)]
    for transport in ("shared", "broadcast"):
        for feed in feeds_of(transport, replicas, world_size):
            fed = {rank: feed.engine_ranks(rank) for rank in range(world_size)}
            assert sorted(itertools.chain(*fed.values())) == list(range(feed.replica.tp_size))
            assert {rank for rank, numbers in fed.items() if numbers} == set(feed.ranks)
            if transport == "shared":
                # Beside it, on a GPU.
                assert all(feed.ranks[number] == rank for rank, numbers in fed.items() for number in numbers)
