"""The policy's servers, as far as they need no server: who is asked, and which process has their orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from scalerl.config.schema import RolloutConfig
from scalerl.rollout.sampling.policy_servers import PolicyServers
from scalerl.rollout.servers.client import Replica
from scalerl.rollout.servers.purpose import POLICY
from scalerl.rollout.servers.recovery import LostServer
from scalerl.rollout.servers.server_set import ServerSet
from scalerl.rollout.sync.session import RankReport, Step, SyncOrder, WrongOrderError


class Ranks:
    """In the place of the trainer's ranks: what they are asked, and the sync's steps on the servers they lead."""

    def __init__(self, steps: tuple[Any, ...] = ("begin", "bucket", "end", "check"), dies: Sequence[int] = ()) -> None:
        self.steps, self.asked = steps, list[Any]()
        # Servers that die in each sync.
        self.dies = list(dies)

    def call(self, method: Any, *args: Any, orders: dict[int, SyncOrder] | None = None, **kwargs: Any) -> Any:
        if orders is None:
            self.asked.append((method.__name__, sorted(args[0])))
            return []
        self.asked.append((method.__name__, sorted(orders)))
        failed = {self.dies.pop(0): "died"} if self.dies else {}
        for order in orders.values():
            for step in self.steps:
                order.advance(step)
        # Each server has one rank that leads it.
        return [
            RankReport(
                {index: failed[index]} if index in failed else {},
                {index: order},
                seconds={"send": 1.0},
                num_bytes=1,
                num_buckets=1,
                bucket_bytes=1,
            )
            for index, order in orders.items()
        ]


class Noted:
    """Those who ask the servers: what they are told, in the list of the ranks."""

    def __init__(self, noted: list[Any]) -> None:
        self.noted = noted

    def replace(self, successors: dict[int, Replica]) -> None:
        self.noted.append(("replace", {index: replica.url for index, replica in successors.items()}))

    def in_service(self, indices: Sequence[int]) -> None:
        self.noted.append(("in_service", list(indices)))


class Nobody:
    """Whoever is not to be asked."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked")


class Servers(ServerSet):
    """A set whose processes are started by nobody."""

    def __init__(self, num_servers: int, config: RolloutConfig) -> None:
        self.replicas = [Replica(f"http://{index}", "embedded", 1, "key") for index in range(num_servers)]
        self.down, self.num_restarts_of, self.clients = {}, {}, {}
        self.config, self.purpose = config, POLICY

    def end(self, lost: Mapping[int, str]) -> None:
        self.down |= lost

    def end_failed(self, failed: Mapping[int, str]) -> None:
        self.end(failed)

    def restart_down(self) -> dict[int, Replica]:
        restarted, self.down = sorted(self.down), {}
        for index in restarted:
            self.replicas[index] = replace(self.replicas[index], url=f"{self.replicas[index].url}'")
        return {index: self.replicas[index] for index in restarted}


def policy_servers(ranks: Any, num_servers: int = 2) -> PolicyServers:
    servers = PolicyServers.__new__(PolicyServers)
    servers.rollout, servers.pool = RolloutConfig(free_cache_engine=False), SimpleNamespace(device="cpu")  # type: ignore[assignment]
    servers.config, servers.num_syncs, servers.policy_version, servers.metrics = SimpleNamespace(), 0, 0, {}  # type: ignore[assignment]
    servers.server_set, servers.workers = Servers(num_servers, servers.rollout), ranks
    servers.rollout_workers = Noted(ranks.asked) if isinstance(ranks, Ranks) else ranks
    servers.orders = {index: servers._new_order(index) for index in range(num_servers)}
    return servers


def test_nothing_is_asked_of_anybody_where_nothing_happened() -> None:
    """After a generation without a loss, and for news of none."""
    servers = policy_servers(Nobody())
    servers.mark_serving()
    servers.mark_drained()
    servers.replace([], generating=False)


def test_a_sync_without_a_loss_asks_the_ranks_once_and_nobody_else() -> None:
    ranks = Ranks()
    servers = policy_servers(ranks)
    servers.sync(1)
    assert ranks.asked == [("sync_weights", [0, 1])]
    # What the ranks did is known here, though nobody here did it.
    assert [order.allowed for order in servers.orders.values()] == [("release_kv", "begin", "check", "continue")] * 2


def restarted(url: str) -> list[Any]:
    """The steps by which server 1 comes back, up to its weights."""
    return [("replace", {1: url}), ("reconnect_rollout", [1]), ("sync_weights", [1])]


def test_a_lost_server_gets_the_weights_before_it_serves() -> None:
    ranks = Ranks()
    servers = policy_servers(ranks)
    servers.replace([LostServer(1, "http://1", "gone")], generating=True)
    assert ranks.asked == [*restarted("http://1'"), ("in_service", [1])]
    assert all(order.serving for order in servers.orders.values())
    ranks.asked.clear()
    # The news of a server that has a successor comes late.
    servers.replace([LostServer(1, "http://1", "gone")], generating=True)
    assert ranks.asked == []


def test_a_successor_that_dies_before_it_serves_is_restarted_and_gets_the_weights_again() -> None:
    ranks = Ranks(dies=[1])
    policy_servers(ranks).replace([LostServer(1, "http://1", "gone")], generating=False)
    assert ranks.asked == [*restarted("http://1'"), *restarted("http://1''"), ("in_service", [1])]


def test_a_server_that_dies_in_a_sync_comes_back_with_the_weights() -> None:
    ranks = Ranks(dies=[1])
    metrics = policy_servers(ranks).sync(1)
    assert ranks.asked == [("sync_weights", [0, 1]), *restarted("http://1'"), ("in_service", [1])]
    assert metrics["timing_s/update_weights/send"].value == 2.0


def test_a_server_that_is_down_gets_the_weights_once_it_is_restarted() -> None:
    ranks = Ranks()
    servers = policy_servers(ranks)
    servers.server_set.down[1] = "gone"
    servers.sync(1)
    assert ranks.asked == [("sync_weights", [0]), *restarted("http://1'"), ("in_service", [1])]


def test_a_server_that_serves_is_refused_where_its_weights_would_be_sent() -> None:
    servers = policy_servers(Ranks())
    servers.mark_serving()
    with pytest.raises(WrongOrderError, match="http://0: begin is out of order"):
        servers.sync(1)


@pytest.mark.parametrize("undefined", [("begin", "bucket"), ("release_kv", "release_weights", "resume_weights")])
def test_no_server_continues_its_samples_while_the_weights_of_one_are_undefined(undefined: tuple[Step, ...]) -> None:
    servers = policy_servers(Nobody())
    for step in undefined:
        servers.orders[1].advance(step)
    # No server is asked: the set has no clients.
    with pytest.raises(WrongOrderError, match="http://1: continue is out of order"):
        servers.resume_interrupted()


def test_a_server_is_drained_from_the_request_that_interrupts_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it fails in it: what it generates then is not known."""
    servers = policy_servers(Ranks())
    servers.mark_serving()

    def pause(clients: object) -> dict[int, str]:
        assert not any(order.serving for order in servers.orders.values())
        return {1: "it does not answer"}

    monkeypatch.setattr("scalerl.rollout.sampling.policy_servers.pause", pause)
    assert servers.pause() == {1: "it does not answer"}


def test_servers_of_a_sync_that_did_not_end_are_of_no_use_to_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(ServerSet, "stop", lambda self: ended.append("stop"))
    monkeypatch.setattr(ServerSet, "leave", lambda self: ended.append("leave"))
    monkeypatch.setattr(PolicyServers, "_remove_weights", lambda self: None)
    monkeypatch.setattr("scalerl.rollout.sampling.policy_servers.transport_of", lambda config: "shared")
    servers = policy_servers(Ranks())
    servers.leave()
    servers.workers = Ranks(steps=("begin", "end"))  # type: ignore[assignment]
    with pytest.raises(WrongOrderError):
        servers.sync(1)
    servers.leave()
    assert ended == ["leave", "stop"]
