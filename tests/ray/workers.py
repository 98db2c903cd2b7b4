"""Workers of the tests. In a module of their own, which the worker processes import."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import Any

import numpy as np

from scalerl.batch.data_proto import DataProto, Jagged
from scalerl.checkpoint.store import CheckpointWriteError
from scalerl.cluster.dispatch import Dispatch, Execute, MicroBatches, Result, Worker, register
from scalerl.cluster.worker_group import WorkerGroup
from scalerl.data.problems import DataError
from scalerl.parallel.layout import Layout
from scalerl.rollout.servers.client import RolloutClient
from scalerl.tracking.metrics import Metric
from scalerl.trainer.ranks.rl_worker import RLWorker
from scalerl.trainer.ranks.worker import MegatronWorker


def deal(group: WorkerGroup, rows: list[int], *, weight: int = 1) -> tuple[list[Any], dict[str, Any]]:
    """Row i to rank i modulo their number."""
    return [[rows[rank :: group.world_size] for rank in range(group.world_size)]], {"weight": (weight,) * 4}


def add_up(group: WorkerGroup, values: list[tuple[int, int]]) -> dict[str, Any]:
    return {"ranks": [rank for rank, _ in values], "sum": sum(value for _, value in values), "of": group.world_size}


def as_given(group: WorkerGroup, number: int) -> tuple[list[Any], dict[str, Any]]:
    return [number], {}


def doubled(group: WorkerGroup, value: int) -> int:
    return 2 * value


def deal_to_one_rank_too_few(group: WorkerGroup, rows: list[int]) -> tuple[list[Any], dict[str, Any]]:
    return [[rows] * (group.world_size - 1)], {}


def fail_to_collect(group: WorkerGroup, values: list[int]) -> None:
    raise LookupError("collected nothing")


class PlainWorker(Worker):
    """No model: says what reached it."""

    def __init__(self, rank: int, layout: Layout, *, greeting: str) -> None:
        self.rank, self.layout, self.greeting = rank, layout, greeting

    def rendezvous(self) -> str:
        return f"address of rank {self.rank}"

    def join(self, address: str) -> None:
        self.address = address

    @register(Dispatch.RANK_ZERO)
    def first(self, *args: Any, **kwargs: Any) -> tuple[int, tuple, dict]:
        return self.rank, args, kwargs

    @register(Dispatch.ONE_TO_ALL)
    def everyone(self, *, factor: int) -> tuple[int, int, str, str]:
        return self.rank, self.rank * factor, self.greeting, self.address

    def not_registered(self) -> None:
        raise AssertionError("not for the group")

    @register(Dispatch.DP_COMPUTE_PROTO)
    def measure(self, shard: DataProto, micro_batches: MicroBatches, *, scale: int) -> Result:
        """Every rank makes the columns, marked with its rank; metrics from tp rank 0 of the last stage."""
        ids = shard.tokens["input_ids"]
        column = DataProto(
            {"scaled": Jagged(ids.values * scale, ids.cu_seqlens)}
            | {"rank": Jagged(ids.values * 0 + self.rank, ids.cu_seqlens)},
            {"twice": 2 * shard.samples["length"], "rank": np.full(len(shard), self.rank)},
        )
        at = self.layout.coordinates(self.rank)
        if at.pp_rank < self.layout.pp_size - 1:
            return {}, column
        num_tokens = float(len(ids.values))
        return {
            "num_tokens": Metric(num_tokens, "sum"),
            "mean_id": Metric(float(ids.values.double().mean()), "mean", num_tokens),
            "longest": Metric(float(ids.lengths.max()), "max"),
        }, column

    @register(Dispatch.DP_COMPUTE_PROTO)
    def see(self, shard: DataProto, micro_batches: MicroBatches) -> Result:
        """What this rank was given, token columns, sample columns and micro-batches, as metrics that name it."""
        seen = {
            "uids": shard.samples["uid"].tolist(),
            "tokens": {
                name: [column[row].tolist() for row in range(len(column))] for name, column in shard.tokens.items()
            },
            "micro_batches": micro_batches,
        }
        self.seen = seen
        return {}, None

    # --- dispatch modes of one's own ---

    @register(dispatch_mode={"dispatch_fn": deal, "collect_fn": add_up}, execute_mode=Execute.ALL)
    def weigh(self, rows: list[int], *, weight: int) -> tuple[int, int]:
        return self.rank, weight * sum(rows)

    @register({"dispatch_fn": as_given, "collect_fn": doubled}, Execute.RANK_ZERO)
    def rank_and(self, number: int) -> int:
        return 100 * self.rank + number

    @register({"dispatch_fn": deal_to_one_rank_too_few, "collect_fn": add_up})
    def weigh_too_few(self, rows: list[int]) -> int:
        raise AssertionError("never called")

    @register({"dispatch_fn": deal, "collect_fn": fail_to_collect})
    def weigh_in_vain(self, rows: list[int], *, weight: int) -> int:
        return weight

    @register(Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def lead(self) -> int:
        return self.rank

    # --- calls that nobody waits for ---

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def wait_for(self, path: str) -> int:
        """Returns when the file is there."""
        while not os.path.exists(path):
            time.sleep(0.01)
        return self.rank

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def count_rows(self, shard: DataProto, micro_batches: MicroBatches) -> Result:
        return {"rows": Metric(float(len(shard)), "sum")}, None

    @register({"dispatch_fn": deal, "collect_fn": add_up}, blocking=False)
    def weigh_later(self, rows: list[int], *, weight: int) -> tuple[int, int]:
        return self.rank, weight * sum(rows)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def fail_later(self, rank: int) -> int:
        return self.fail(rank)

    @register(Dispatch.ONE_TO_ALL)
    def what_was_seen(self) -> dict[str, Any]:
        return self.seen

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, rank: int) -> int:
        if self.rank == rank:
            print(f"rank {rank} fails", file=sys.stderr)
            raise ArithmeticError("no such number")
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def refuse(self) -> None:
        raise DataError(["rows.parquet: row 3: no prompt"])

    @register(Dispatch.ONE_TO_ALL)
    def cannot_write(self) -> None:
        raise CheckpointWriteError("no space left")

    @register(Dispatch.ONE_TO_ALL)
    def fail_everywhere(self) -> None:
        raise ArithmeticError(f"no such number on rank {self.rank}")

    @register(Dispatch.DP_COMPUTE_PROTO)
    def fail_on_shard(self, shard: DataProto, micro_batches: MicroBatches, *, rank: int) -> Result:
        self.fail(rank)
        return {}, None

    @register(Dispatch.ONE_TO_ALL)
    def die(self, rank: int) -> int:
        if self.rank == rank:
            print("about to die", file=sys.stderr)
            os._exit(7)
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def hang(self, rank: int) -> int:
        if self.rank == rank:
            print("about to hang", file=sys.stderr)
            time.sleep(3600)
        return self.rank


class MeetingWorker(MegatronWorker):
    """A trainer rank without a model, whose ranks meet in collectives."""

    @register(Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def meet(self, stopped: int | None, idle: int | None = None) -> float:
        """Sum over the ranks.  stopped: a rank whose process stops before; idle: one that does something else."""
        import torch
        import torch.distributed as dist

        number = torch.tensor([float(self.rank)])
        if self.rank == stopped:
            print("about to stop", file=sys.stderr)
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.rank == idle:
            print("about to dawdle", file=sys.stderr)
            time.sleep(3600)
        dist.all_reduce(number)
        return float(number)


class SyncingWorker(RLWorker):
    """A trainer rank whose weights a test can see, and whose transfers a test can spoil."""

    @register(Dispatch.ONE_TO_ALL)
    def exported(self) -> dict[str, np.ndarray] | None:
        """Rank 0: the actor's weights as transformers names them. Collective."""
        buckets = self.engines["actor"].export_buckets(20_000)
        weights = {name: tensor.clone().numpy() for bucket in buckets for name, tensor in bucket}
        return weights if self.rank == 0 else None

    @register(Dispatch.ONE_TO_ALL)
    def lose_bucket(self, number: int | None, kind: str) -> None:
        """From now on, of every sync to servers of this kind, bucket `number` (from 1; None: none) does not arrive."""
        for client in self.weight_sync.clients.values():
            for name in ("begin_weight_update", "update_weights"):
                vars(client).pop(name, None)
            if client.engine.name == kind:
                _lose_bucket(client, number)


class StrikingWorker(RLWorker):
    """A trainer rank that kills a server at a point at which it measures memory, or lacks memory there."""

    @register(Dispatch.ONE_TO_ALL)
    def strike_at(self, point: str | None, index: int = 0, process_group: int = 0) -> None:
        """Kills a server once, when the rank that leads it measures at this point.  None: never.

        process_group: of the server.  Released memory is not waited for: that of other processes says nothing.
        """
        memory, leads = self.weight_sync.memory, self.weight_sync.feeds[index].lead == self.rank
        assert memory is not None
        memory.wait_s = 0.0

        def noted(at: Any, measured: Any) -> Any:
            if at == point and leads:
                del memory._noted
                client = self.weight_sync.clients[self.weight_sync.feeds[index].replica.url]
                os.killpg(process_group, signal.SIGKILL)
                while asyncio.run(client.is_well()):
                    time.sleep(0.05)
            return type(memory)._noted(memory, at, measured)

        vars(memory).pop("_noted", None)
        if point is not None:
            memory._noted = noted

    @register(Dispatch.ONE_TO_ALL)
    def lack_at(self, *points: str) -> None:
        """Has every rank lack a byte at these points from now on, and at no other."""
        assert self.weight_sync.memory is not None
        vars(self.weight_sync.memory).pop("lack", None)
        if points:
            self.weight_sync.memory.lack = lambda at, *_: (1, "in this test") if at in points else None


def _lose_bucket(client: RolloutClient, number: int | None) -> None:
    begin, update = type(client).begin_weight_update, type(client).update_weights
    count = 0

    def restart() -> None:
        nonlocal count
        count = 0
        begin(client)

    def lossy(*args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        if count != number:
            update(client, *args, **kwargs)

    client.begin_weight_update, client.update_weights = restart, lossy
