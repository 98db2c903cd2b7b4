"""`WorkerGroup`: one Ray actor per rank, called as one object."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from scalerl.controller.batch import ShardedBatch
from scalerl.controller.pools import ResourcePool
from scalerl.controller.register import Dispatch, registered_methods
from scalerl.errors import UserError
from scalerl.metrics import Metric, merge_metrics
from scalerl.parallel.layout import Layout
from scalerl.rollout.server import ReservedPort


class WorkerError(UserError, RuntimeError):
    """A call failed on a rank; the message names the rank, its place in the layout and the cause."""


class WorkerGroup:
    """Every registered method of `cls` is a method of the group, once `join` has brought its ranks together."""

    def __init__(self, pool: ResourcePool, cls: type, layout: Layout, *, timeout_s: float, **init: Any) -> None:
        self.layout, self.timeout_s = layout, timeout_s
        remote = ray.remote(cls)
        self.ranks: list[ActorHandle] = []
        for rank in range(layout.world_size):
            options = pool.place(rank // pool.devices_per_node, num_devices=1)
            self.ranks.append(remote.options(**options, max_restarts=0, max_concurrency=1).remote(rank, layout, **init))
        # Rank 0's node hosts the rendezvous.
        self.rendezvous = self.ranks[0].rendezvous.remote()
        for name, mode in registered_methods(cls).items():
            setattr(self, name, partial(_CALLS[mode], self, name))

    def begin_join(self) -> list[Any]:
        (address,) = self._wait("start", [self.rendezvous])
        return [rank.join.remote(address) for rank in self.ranks]

    def end_join(self, joining: list[Any]) -> None:
        self._wait("start", joining)

    def stop(self) -> None:
        for rank in self.ranks:
            ray.kill(rank)

    def _rank_zero(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._wait(name, [getattr(self.ranks[0], name).remote(*args, **kwargs)])[0]

    def _one_to_all(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._wait(name, [getattr(rank, name).remote(*args, **kwargs) for rank in self.ranks])

    def _dp_compute(self, name: str, batch: ShardedBatch, **kwargs: Any) -> tuple[dict[str, Metric], list[Any]]:
        metrics, columns = [], []
        for rank, actor in enumerate(self.ranks):
            dp_rank = self.layout.coordinates(rank).dp_rank
            parts = batch.parts(dp_rank)
            # Ray resolves references among the arguments themselves, not inside of them.
            call = actor.run_on_shard.options(num_returns=2).remote(
                name,
                batch.plan.local_micro_batches(dp_rank),
                batch.shard_samples(dp_rank),
                kwargs,
                [(len(part.fragments), part.order) for part in parts],
                *(fragment for part in parts for fragment in part.fragments),
            )
            metrics.append(call[0])
            columns.append(call[1])
        merged = merge_metrics(self._wait(name, metrics))
        return merged, [columns[rank] for rank in self.layout.output_ranks()]

    def _wait(self, name: str, refs: list[Any]) -> list[Any]:
        """Values in rank order. Raises WorkerError for the first rank that fails, or those missing at the deadline."""
        deadline = time.monotonic() + self.timeout_s
        pending = list(refs)
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                missing = [rank for rank, ref in enumerate(refs) if ref in set(pending)]
                raise WorkerError(
                    f"{name}: ranks {missing} did not answer within trainer.timeout_s={self.timeout_s:.0f} s"
                )
            try:
                ray.get(done)
            except (RayTaskError, RayActorError, GetTimeoutError) as error:
                raise self._explain(name, refs.index(done[0]), error) from None
        return ray.get(refs)

    def _explain(self, name: str, rank: int, error: Exception) -> WorkerError:
        at = self.layout.coordinates(rank) if len(self.ranks) > rank else None
        if isinstance(error, RayTaskError):
            if isinstance(error.cause, UserError):
                return WorkerError(f"{name} failed on rank {rank} ({at}): {error.cause}")
            remote_trace = str(error).split("\n", 1)[-1]
            return WorkerError(f"{name} failed on rank {rank} ({at}): {error.cause}\n{remote_trace}")
        return WorkerError(f"{name}: the process of rank {rank} ({at}) died: {str(error).splitlines()[0]}")


def join(groups: Iterable[WorkerGroup]) -> None:
    """The ranks of each group import what they need and join torch.distributed; the groups do so side by side."""
    joining = [(group, group.begin_join()) for group in groups]
    for group, calls in joining:
        group.end_join(calls)


_CALLS: dict[Dispatch, Callable] = {
    Dispatch.RANK_ZERO: WorkerGroup._rank_zero,
    Dispatch.ONE_TO_ALL: WorkerGroup._one_to_all,
    Dispatch.DP_COMPUTE_PROTO: WorkerGroup._dp_compute,
}


def free_address() -> tuple[str, int]:
    """This node's address as other nodes see it, and a port that was free a moment ago."""
    host = ray.util.get_node_ip_address()
    # Not of the range from which the kernel gives ports to whoever connects meanwhile.
    reserved = ReservedPort(host)
    reserved.release()
    return host, reserved.port
