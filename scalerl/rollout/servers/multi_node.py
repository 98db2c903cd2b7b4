"""`MultiNodeServer`, a rollout server with a process on each of several nodes; they start, end and are lost as one."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from scalerl.cluster.ask import values_of
from scalerl.rollout.servers.process import POLL_INTERVAL_S, STOP_TIMEOUT_S, RolloutServer


@dataclass(eq=False, kw_only=True)
class MultiNodeServer(RolloutServer):
    """A server whose first process, the one that answers, is on this node; actors on other nodes have the others.

    When one of them ends, all are ended: who asks the server finds it gone, as one of a single process.
    others: the `ServerNode` of each other node, by node rank.  begun_with: arguments of its `begin` beside the key.
    """

    others: list[ActorHandle]
    begun_with: Mapping[str, Any]
    # Node rank of the process that ended before anybody stopped the server; None: none, or the first node's.
    ended_first: int | None = field(default=None, init=False)
    # How the process on each other node ended, once the server was stopped.
    accounts: list[str] = field(default_factory=list, init=False)

    def start(self) -> None:
        """Starts the processes of all nodes and returns.  Raises WorkerError when the actor of a node is gone."""
        super().start()
        try:
            values_of(
                f"{self.purpose.who} on its further nodes",
                [node.begin.remote(key=self.key, **self.begun_with) for node in self.others],
                self.start_timeout_s,
                key=self.purpose.key("start_timeout_s"),
            )
        except BaseException:
            self.stop()
            raise
        threading.Thread(target=self._end_together, name="end of a server on several nodes", daemon=True).start()

    def _end_together(self) -> None:
        """Ends the processes of all nodes as soon as one of them has ended."""
        waiting: list[ray.ObjectRef] = [node.ended.remote(self.key) for node in self.others]
        while self.alive():
            # A call to an actor that is gone is done too.
            done, _ = ray.wait(waiting, timeout=POLL_INTERVAL_S)
            if done:
                self.ended_first = 1 + waiting.index(done[0]) if self.alive() else None
                break
        self.stop()

    def stop(self) -> None:
        super().stop()
        ending = [node.end.remote(self.key) for node in self.others]
        self.accounts = [f"Its process on node {rank}: {_answer(call)}" for rank, call in enumerate(ending, 1)]

    def _shown_tail(self) -> str:
        # For the accounts of the others: one of them may be the reason.
        self.stop()
        first = [] if self.ended_first is None else [f"Its process on node {self.ended_first} ended first."]
        return "\n".join([*first, super()._shown_tail(), *self.accounts])


def _answer(ending: ray.ObjectRef) -> str:
    try:
        return ray.get(ending, timeout=STOP_TIMEOUT_S)
    except RayError as error:
        return f"its actor does not answer: {str(error).splitlines()[0]}"
