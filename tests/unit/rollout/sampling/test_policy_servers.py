"""The policy's servers, as far as they need no server: who is asked, and which process has their orders."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from scalerl.config.schema import RolloutConfig
from scalerl.rollout.sampling.policy_servers import PolicyServers
from scalerl.rollout.servers.purpose import POLICY
from scalerl.rollout.servers.recovery import ServerRecovery
from scalerl.rollout.servers.replica import Replica
from scalerl.rollout.servers.server_set import ServerSet
from scalerl.rollout.sync.order import Step, SyncOrder, WrongOrderError


class Ranks:
    """In the place of the trainer's ranks: what they are asked, and the sync's steps on the servers they lead."""

    def __init__(self, steps: tuple[Any, ...] = ("begin", "bucket", "end", "check")) -> None:
        self.steps, self.asked = steps, list[str]()
        self.readings = None

    def call(self, method: Any, *args: Any, orders: dict[int, SyncOrder], **kwargs: Any) -> list[dict[str, Any]]:
        self.asked.append(method.__name__)
        for order in orders.values():
            for step in self.steps:
                order.advance(step)
        sizes = {"sync_s": 1.0, "verify_s": 0.0, "num_bytes": 1.0, "num_buckets": 1.0, "bucket_bytes": 1.0}
        # Each server has one rank that leads it.
        return [{**sizes, "failed": {}, "orders": {index: order}} for index, order in orders.items()]


class Nobody:
    """Whoever is not to be asked."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked")


def policy_servers(ranks: Any, num_servers: int = 2) -> PolicyServers:
    servers = PolicyServers.__new__(PolicyServers)
    servers.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(hybrid_engine=False))  # type: ignore[assignment]
    servers.rollout, servers.pool = RolloutConfig(free_cache_engine=False), SimpleNamespace(device="cpu")  # type: ignore[assignment]
    servers.num_syncs, servers.policy_version, servers.parts_s = 0, 0, {}
    servers.handover = SimpleNamespace(metrics=dict)  # type: ignore[assignment]
    server_set = ServerSet.__new__(ServerSet)
    server_set.replicas = [Replica(f"http://{index}", "embedded", 1, "key") for index in range(num_servers)]
    server_set.down, server_set.num_restarts_of = {}, {}
    server_set.config, server_set.purpose = servers.rollout, POLICY
    # Asks each server of a list, that of none too.
    server_set.control = Nobody()  # type: ignore[assignment]
    servers._server_set, servers.workers, servers.rollout_workers = server_set, ranks, Nobody()  # type: ignore[assignment]
    servers.recovery = ServerRecovery(server_set, servers.rollout_workers, servers._give_weights)
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
    assert ranks.asked == ["sync_weights"]
    # What the ranks did is known here, though nobody here did it.
    assert [order.allowed for order in servers.orders.values()] == [("release_kv", "begin", "check", "continue")] * 2


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
    # The servers' control is `Nobody`.
    with pytest.raises(WrongOrderError, match="http://1: continue is out of order"):
        servers.resume_interrupted()


def test_a_server_is_drained_from_the_request_that_interrupts_it_on() -> None:
    """Also where it fails in it: what it generates then is not known."""
    servers = policy_servers(Ranks())
    servers.mark_serving()

    def pause() -> dict[int, str]:
        assert not any(order.serving for order in servers.orders.values())
        return {1: "it does not answer"}

    servers.server_set.control = SimpleNamespace(pause=pause)  # type: ignore[assignment]
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
