"""Which devices a rollout server runs on, and which trainer rank feeds it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl.cluster.pools import ResourcePool
from scalerl.config.schema import RolloutConfig
from scalerl.models.adapters import Adapter
from scalerl.rollout.prompt_sampling import sample_seed
from scalerl.rollout.sampling.policy_servers import verification_is_due
from scalerl.rollout.servers import server_set as module
from scalerl.rollout.servers.client import ClientSettings, Replica
from scalerl.rollout.servers.engines import Launch
from scalerl.rollout.servers.host import in_device_order
from scalerl.rollout.servers.purpose import POLICY
from scalerl.rollout.servers.recovery import LostServer
from scalerl.rollout.servers.requests import RolloutError
from scalerl.rollout.servers.server_set import ReplicaPlan, ServerSet, launches, plan_replicas
from scalerl.rollout.sync.session import plan_feeds


def pool_of(nnodes: int, devices_per_node: int, device: str = "cuda") -> ResourcePool:
    return ResourcePool(None, nnodes, devices_per_node, device, range(nnodes))


def test_replicas_fill_the_nodes_in_order() -> None:
    plans = plan_replicas(pool_of(2, 4), RolloutConfig(tensor_model_parallel_size=2))
    assert plans == [
        ReplicaPlan(0, (0,), (0, 1)),
        ReplicaPlan(1, (0,), (2, 3)),
        ReplicaPlan(2, (1,), (0, 1)),
        ReplicaPlan(3, (1,), (2, 3)),
    ]


def test_a_replica_has_the_devices_of_its_ranks_whatever_their_numbers() -> None:
    """Of two nodes of eight GPUs, where another pool has the others."""
    pool = pool_of(2, 2)
    plans = plan_replicas(pool, RolloutConfig(tensor_model_parallel_size=2))
    assert [plan.gpu_ids(pool, ["6", "4", "0", "3"]) for plan in plans] == [[["6", "4"]], [["0", "3"]]]


def test_a_replica_on_several_nodes_has_all_devices_of_neighbours() -> None:
    pool = pool_of(5, 2)
    plans = plan_replicas(pool, RolloutConfig(tensor_model_parallel_size=4))
    assert plans == [ReplicaPlan(0, (0, 1), (0, 1)), ReplicaPlan(1, (2, 3), (0, 1))]
    assert plans[1].gpu_ids(pool, [str(rank) for rank in range(10)]) == [["4", "5"], ["6", "7"]]
    assert plan_replicas(pool, RolloutConfig(tensor_model_parallel_size=4, num_replicas=1)) == plans[:1]
    started = launches(Launch("/m", RolloutConfig(), "cuda", 64), plans[1], [["4", "5"], ["6", "7"]])
    assert [(of_node.nnodes, of_node.node_rank, of_node.gpu_ids) for of_node in started] == [
        (2, 0, ("4", "5")),
        (2, 1, ("6", "7")),
    ]


def test_more_replicas_on_several_nodes_than_fit_on_the_cpu() -> None:
    plans = plan_replicas(pool_of(4, 1, "cpu"), RolloutConfig(tensor_model_parallel_size=2, num_replicas=3))
    assert [plan.nodes for plan in plans] == [(0, 1), (2, 3), (0, 1)]


def test_fewer_replicas_than_fit() -> None:
    plans = plan_replicas(pool_of(1, 8), RolloutConfig(tensor_model_parallel_size=2, num_replicas=1))
    assert plans == [ReplicaPlan(0, (0,), (0, 1))]


def test_a_pool_of_their_own_with_devices_left_over() -> None:
    """Of five devices a node, two replicas of two: none lies on two nodes."""
    plans = plan_replicas(pool_of(2, 5), RolloutConfig(tensor_model_parallel_size=2))
    assert [(plan.nodes, plan.devices) for plan in plans] == [
        ((0,), (0, 1)),
        ((0,), (2, 3)),
        ((1,), (0, 1)),
        ((1,), (2, 3)),
    ]


def test_the_devices_of_a_node_with_more_than_ten_are_in_order() -> None:
    assert in_device_order([10, 9, 15, 2]) == ["2", "9", "10", "15"]
    assert in_device_order(["GPU-b", "11", "GPU-a", "3"]) == ["3", "11", "GPU-a", "GPU-b"]


def test_more_replicas_than_processes_on_the_cpu() -> None:
    plans = plan_replicas(pool_of(1, 2, "cpu"), RolloutConfig(num_replicas=3))
    assert [plan.nodes for plan in plans] == [(0,)] * 3


def test_a_replica_larger_than_the_trainer() -> None:
    """Two ranks of one server beside a trainer of one process (CPU)."""
    plans = plan_replicas(pool_of(1, 1, "cpu"), RolloutConfig(tensor_model_parallel_size=2))
    assert plans == [ReplicaPlan(0, (0,), (0, 1))]


@given(
    nnodes=st.integers(1, 4),
    replicas_per_node=st.integers(1, 4),
    tp_size=st.integers(1, 4),
    nodes_each=st.integers(1, 3),
)
def test_every_device_has_one_replica(nnodes: int, replicas_per_node: int, tp_size: int, nodes_each: int) -> None:
    """Of replicas on a part of a node each, or of replicas on nodes_each whole nodes."""
    pool = pool_of(nnodes * nodes_each, replicas_per_node * tp_size)
    if nodes_each > 1:
        tp_size, replicas_per_node = nodes_each * pool.devices_per_node, 1
    plans = plan_replicas(pool, RolloutConfig(tensor_model_parallel_size=tp_size))
    places = [[(node, device) for node in plan.nodes for device in plan.devices] for plan in plans]
    assert sorted(place for of_replica in places for place in of_replica) == [
        (node, device) for node in range(pool.nnodes) for device in range(pool.devices_per_node)
    ]
    assert [plan.index for plan in plans] == list(range(nnodes * replicas_per_node))
    # The rank that feeds an engine rank sits on the same device of the same node.
    feeds = plan_feeds([Replica("", "sglang", tp_size, "")] * len(plans), pool.world_size)
    for of_replica, ranks in zip(places, feeds, strict=True):
        assert [divmod(rank, pool.devices_per_node) for rank in ranks] == of_replica


def test_feeds_count_engine_ranks_over_all_replicas() -> None:
    replicas = [Replica("a", "sglang", 2, ""), Replica("b", "embedded", 1, ""), Replica("c", "sglang", 2, "")]
    assert plan_feeds(replicas, 8) == [(0, 1), (2,), (3, 4)]
    # More engine ranks than trainer ranks: around again.
    assert plan_feeds(replicas, 2) == [(0, 1), (0,), (1, 0)]
    assert plan_feeds(replicas, 1) == [(0, 0), (0,), (0, 0)]


def test_feeds_of_no_replica() -> None:
    assert plan_feeds([], 4) == []


NUMBERS = st.integers(0, 2**31)


@given(NUMBERS, NUMBERS, NUMBERS, NUMBERS)
def test_sample_seed(seed: int, step: int, position: int, sample: int) -> None:
    value = sample_seed(seed, step, position, sample)
    assert 0 <= value < 2**63
    assert value == sample_seed(seed, step, position, sample)


def test_sample_seeds_differ() -> None:
    """Of the samples of a step, of the same sample in other steps, and of the same numbers in another order."""
    seeds = {
        sample_seed(seed, step, position, sample)
        for seed in range(2)
        for step in range(5)
        for position in range(20)
        for sample in range(8)
    }
    assert len(seeds) == 2 * 5 * 20 * 8
    assert sample_seed(0, 1, 2, 3) != sample_seed(3, 2, 1, 0)


def test_sample_seed_is_the_same_in_every_version() -> None:
    """A resumed run must draw what it would have drawn: a change here is a change of results."""
    # numpy promises that SeedSequence never changes.
    assert [sample_seed(42, 1, 0, sample) for sample in range(2)] == [7829184764001561178, 1246512530140951215]


def test_the_first_syncs_and_then_every_kth_are_verified() -> None:
    assert [at for at in range(25) if verification_is_due(at, 10)] == [0, 1, 2, 10, 20]
    assert all(verification_is_due(at, 1) for at in range(25))
    assert not any(verification_is_due(at, 0) for at in range(25))


def server_set(num_servers: int, waits: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> ServerSet:
    """A set without Ray, of servers that do not answer.  waits: gets the ends of each wait."""

    def values_of(what: str, ending: list[str], timeout_s: float) -> list[str]:
        waits.append(ending)
        return [f"{end} has ended" for end in ending]

    monkeypatch.setattr("scalerl.rollout.servers.server_set.values_of", values_of)
    servers = ServerSet.__new__(ServerSet)
    servers.purpose, servers.config, servers.timeout_s = POLICY, RolloutConfig(max_restarts=1), 1.0
    servers.replicas = [Replica(f"http://{index}", "sglang", 1, "") for index in range(num_servers)]
    servers.down, servers.num_restarts_of = {}, {}
    hosts: list[Any] = [
        SimpleNamespace(end=SimpleNamespace(remote=lambda index=index: f"server {index}"))
        for index in range(num_servers)
    ]
    servers.hosts = hosts
    servers.clients = dict.fromkeys(range(num_servers))  # type: ignore[assignment]
    monkeypatch.setattr(module, "are_well", lambda clients: dict.fromkeys(clients, False))
    return servers


def test_servers_that_were_lost_together_are_ended_together(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[list[str]] = []
    servers = server_set(4, waits, monkeypatch)
    lost = [LostServer(index, f"http://{index}", "gone") for index in (1, 3)]
    assert servers.end_lost([*lost, LostServer(1, "http://1", "gone, said another"), LostServer(0, "before", "late")])
    assert [sorted(ended) for ended in waits] == [["server 1", "server 3"]]
    assert servers.down[1] == "rollout server 1 was lost: gone\nserver 1 has ended" and set(servers.down) == {1, 3}
    assert servers.end_lost(lost) and len(waits) == 1, "they have ended"
    assert not servers.end_lost([LostServer(0, "before", "late")])
    servers.end_failed({0: "no weights", 2: "no weights"})
    assert waits[1:] == [["server 0", "server 2"]] and set(servers.down) == {0, 1, 2, 3}


def test_all_that_were_lost_are_ended_where_one_has_no_restart_left(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[list[str]] = []
    servers = server_set(2, waits, monkeypatch)
    servers.num_restarts_of = {0: 1}
    with pytest.raises(RolloutError, match=r"server 0 was lost: gone\n.*\nIt was restarted 1 times.*max_restarts=1"):
        servers.end_failed({0: "gone", 1: "gone"})
    assert waits == [["server 0", "server 1"]]


def test_replicas_know_the_arguments_that_their_servers_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their checksums depend on them, and whether requests name an adapter."""
    servers = server_set(1, [], monkeypatch)
    kwargs = {"sglang": {"ep_size": 2}}
    servers.config = RolloutConfig(tensor_model_parallel_size=2, engine_kwargs=kwargs)
    servers.starting, servers.settings = [], ClientSettings(POLICY, 64, 1.0, 1)
    monkeypatch.setattr("scalerl.rollout.servers.server_set.values_of", lambda *_: [("http://new", "key")])
    for adapter, name in ((None, None), (Adapter(4, 8, ("q_proj",)), "policy")):
        servers.launch = Launch("/m", servers.config, "cpu", 64, adapter=adapter)
        servers.wait_ready()
        assert servers.replicas == [Replica("http://new", "sglang", 2, "key", kwargs, adapter=name)]
