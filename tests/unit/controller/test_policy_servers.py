"""The order of the servers' steps, as far as it needs no server."""

from __future__ import annotations

from scalerl.controller.sampling.policy_servers import PolicyServers


def test_nothing_that_failed_asks_nobody() -> None:
    """A sync in which every server answered makes no remote call for the empty list."""
    # The rollout workers, which it would ask, are known from `wait_ready` on.
    servers = PolicyServers.__new__(PolicyServers)
    assert not hasattr(servers, "rollout_workers")
    servers._end_failed({})
