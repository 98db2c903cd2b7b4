"""`WorkerGroup`: one Ray actor per rank, called as one object."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from scalerl.base.user_code import called, is_users_own, place_of
from scalerl.cluster.batch import ShardedBatch
from scalerl.cluster.dispatch import (
    Answer,
    Collected,
    DispatchMode,
    Execute,
    Future,
    OwnP,
    OwnR,
    P,
    RankProcess,
    Registration,
    T,
    Worker,
    WorkerMethod,
    registration_of,
    the_same_for_all,
)
from scalerl.cluster.failures import Failures, WorkerError
from scalerl.cluster.kill import kill_processes
from scalerl.cluster.pools import ActorSpec, ResourcePool
from scalerl.cluster.worker_logs import last_words
from scalerl.parallel.layout import Layout
from scalerl.tracking.metrics import merge_metrics

# How long ranks may take to leave a run: by then they have answered every call.
LEAVE_TIMEOUT_S = 60.0
# How long the driver waits for ranks before it looks whether one has failed; twice as long each time.
FIRST_LOOK_S, LAST_LOOK_S = 0.02, 0.5
# Arguments of more bytes that all ranks get go to the object store once, and each rank gets a reference: what holds an
# entry for each server, as a weight sync's orders, would else grow with servers x ranks.
MAX_BYTES_OF_EACH = 4096


@dataclass(frozen=True)
class Limit:
    """The time limit of a call.  key: the configuration key that sets it."""

    key: str
    seconds: float


class WorkerGroup:
    """A group of ranks whose workers have one class. `call` takes the class's registered methods, once `join_ranks` has
    brought the ranks together."""

    def __init__(
        self,
        pool: ResourcePool,
        cls: type[Worker],
        layout: Layout,
        *,
        timeout_s: float,
        limits: Mapping[str, Limit] | None = None,
        log_dir: Path | None = None,
        **init: Any,
    ) -> None:
        """Starts the ranks, which have not joined yet.

        timeout_s: limit of a call (trainer.timeout_s).  limits: method name -> its limit, where that is another.
        log_dir: gets the stacks of all ranks when some do not answer.
        """
        self.cls, self.layout, self.pool = cls, layout, pool
        self.timeout_s, self.limits = timeout_s, limits or {}
        options = {"max_restarts": 0, "max_concurrency": 1}
        self.actors = [
            # The process may have served another run with a worker of another class.
            pool.start(ActorSpec(RankProcess, rank // pool.devices_per_node, 1), options, cls, rank, layout, **init)
            for rank in range(layout.world_size)
        ]
        self.ranks: list[Any] = [pooled.actor for pooled in self.actors]
        self.failures = Failures(self.ranks, layout, log_dir)
        # Rank 0's node hosts the rendezvous.
        self.rendezvous = self.ranks[0].rendezvous.remote()

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    def begin_join(self) -> list[Any]:
        self._wait("start", [pooled.ready for pooled in self.actors])
        (address,) = self._wait("start", [self.rendezvous])
        return [rank.join.remote(address) for rank in self.ranks]

    def end_join(self, joining: list[Any]) -> None:
        self._wait("start", joining)

    def leave(self) -> None:
        """Makes the ranks leave; their processes wait for the next run. Raises Ray's error if a rank fails or hangs."""
        ray.get([rank.leave.remote() for rank in self.ranks], timeout=LEAVE_TIMEOUT_S)
        self.pool.keep(self.actors)

    def stop(self) -> None:
        for rank in self.ranks:
            ray.kill(rank)

    def kill(self) -> None:
        """Ends the ranks; no process of theirs is left when this returns, however stuck it was."""
        kill_processes(self.ranks)
        self.stop()

    def call(self, method: WorkerMethod[..., Any, P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a method on the ranks as its @register says: `workers.call(RLWorker.compute_values, shards)`.

        A registered function of a file of the user's own, which the ranks import, is called with the worker first.
        Raises WorkerError for the first rank that fails, TypeError for what is no registered method of this class.
        """
        name, registration = method.__name__, registration_of(method)
        if is_users_own(method) and name == method.__qualname__:
            name = f"{method.__module__}:{name}"
        # Each rank calls it by its name, so that a subclass's own is called.
        elif not hasattr(self.cls, name):
            raise TypeError(f"{method.__qualname__}: {self.cls.__name__}, which these ranks are, has no such method")
        future: Future[Any]
        if registration.dispatch is None:
            future = self._dp_compute(name, registration, args, kwargs)
        else:
            future = self._dispatched(name, registration, registration.dispatch, args, kwargs)
        return cast("T", future.get() if registration.blocking else future)

    def ask(
        self, rank: int, method: WorkerMethod[OwnP, OwnR, ..., Any], *args: OwnP.args, **kwargs: OwnP.kwargs
    ) -> OwnR:
        """Calls a method on one rank alone, whatever its @register says; from any thread, also between other calls.

        Raises as `call`.
        """
        name = method.__name__
        limit = self.limit(name)
        try:
            return ray.get(self.ranks[rank].run.remote(name, *args, **kwargs), timeout=limit.seconds)
        except GetTimeoutError:
            raise WorkerError(
                f"{name}: rank {rank} did not answer within {limit.key}={limit.seconds:.0f} s; "
                f"{last_words(self.ranks[rank])}"
            ) from None
        except (RayTaskError, RayActorError, OutOfMemoryError) as error:
            raise self.failures.explained(name, rank, error) from None

    def limit(self, name: str) -> Limit:
        """The limit of the method of that name."""
        return self.limits.get(name, Limit("trainer.timeout_s", self.timeout_s))

    def _dispatched(
        self, name: str, registration: Registration[..., Any], mode: DispatchMode[..., Any], args: Any, kwargs: Any
    ) -> Future[Any]:
        one_each = registration.execute_mode is Execute.ALL
        if mode["dispatch_fn"] is the_same_for_all and not any(
            isinstance(arg, ray.ObjectRef) for arg in (*args, *kwargs.values())
        ):
            # Once for all ranks, as in `_dp_compute`; a reference Ray must see, to resolve it.
            packed: Any = cloudpickle.dumps((name, args, kwargs))
            if len(packed) > MAX_BYTES_OF_EACH:
                packed = ray.put(packed)
            refs = [actor.run_packed.remote(packed) for actor in self.ranks]
        else:
            positional, named = called(mode["dispatch_fn"], f"dispatch_fn of {name}", self, *args, **kwargs)
            if one_each:
                self._check_one_each(name, mode, {**dict(enumerate(positional)), **named})
            refs = [
                actor.run.remote(
                    name,
                    *(value[rank] if one_each else value for value in positional),
                    **{key: value[rank] if one_each else value for key, value in named.items()},
                )
                for rank, actor in enumerate(self.ranks if one_each else self.ranks[:1])
            ]

        def collected() -> Any:
            values = self._wait(name, refs)
            return called(mode["collect_fn"], f"collect_fn of {name}", self, values if one_each else values[0])

        return Future(collected)

    def _check_one_each(self, name: str, mode: DispatchMode[..., Any], arguments: dict[Any, Any]) -> None:
        for argument, values in arguments.items():
            if not isinstance(values, (list, tuple)) or len(values) != self.world_size:
                what = f"{len(values)} values" if isinstance(values, (list, tuple)) else f"a {type(values).__name__}"
                raise ValueError(
                    f"{name}: argument {argument!r} that {place_of(mode['dispatch_fn'])} made is {what}; give a "
                    f"list of one value for each of the {self.world_size} ranks"
                )

    def _dp_compute(self, name: str, registration: Registration[..., Any], args: Any, kwargs: Any) -> Future[Collected]:
        batch: ShardedBatch
        (batch,) = args
        # Once for each data-parallel rank; its tp, pp and cp ranks get references.
        shards = [self._shard(batch, dp_rank) for dp_rank in range(self.layout.dp_size)]
        # Once for all ranks: they are configurations, which cost more to pickle than to send.
        packed = cloudpickle.dumps((name, kwargs))
        refs, columns = [], []
        for rank, actor in enumerate(self.ranks):
            dp_rank = self.layout.coordinates(rank).dp_rank
            # Ray resolves references among the arguments themselves, not inside of them.
            references = [column[dp_rank] for column in batch.columns]
            answer, tokens = actor.run_on_shard.remote(packed, shards[dp_rank], *references)
            refs.append(answer)
            columns.append(tokens)
        outputs = self.layout.output_ranks()

        def collected() -> Collected:
            answers: list[Answer] = self._wait(name, refs)
            merged = merge_metrics(metrics for metrics, _ in answers)
            joined = batch.joined_samples([answers[rank][1] for rank in outputs])
            return Collected(merged, joined, [columns[rank] for rank in outputs])

        return Future(collected)

    def _shard(self, batch: ShardedBatch, dp_rank: int) -> Any:
        """The micro-batches and sample columns of a data-parallel rank, pickled, or a reference to that."""
        # Numbers and arrays: the pickle of C, several times as fast as Ray's, which also takes functions.
        shard = batch.plan.local_micro_batches(dp_rank), batch.shard_samples(dp_rank)
        packed = pickle.dumps(shard, protocol=pickle.HIGHEST_PROTOCOL)
        return ray.put(packed) if self.layout.world_size > self.layout.dp_size else packed

    def _wait(self, name: str, refs: list[Any]) -> list[Any]:
        """Waits for the values, in rank order. Raises WorkerError for the first rank that fails or the late ones."""
        name = name.rpartition(":")[2]
        limit = self.limit(name)
        deadline = time.monotonic() + limit.seconds
        pending, look_s = list(refs), FIRST_LOOK_S
        values: dict[Any, Any] = {}
        while pending:
            # Not rank by rank: each look costs as much as there are ranks. A failure is seen in the next one.
            left_s = max(0.0, deadline - time.monotonic())
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=min(look_s, left_s))
            look_s = min(2 * look_s, LAST_LOOK_S)
            if not done and time.monotonic() >= deadline:
                late = set(pending)
                missing = [rank for rank, ref in enumerate(refs) if ref in late]
                raise WorkerError(
                    f"{name}: ranks {missing} did not answer within {limit.key}={limit.seconds:.0f} s; "
                    f"{self.failures.hang(name, missing[0])}"
                )
            try:
                values.update(zip(done, ray.get(done), strict=True))
            except RayError:
                self._raise_first(name, refs, done)
        return [values[ref] for ref in refs]

    def _raise_first(self, name: str, refs: list[Any], done: list[Any]) -> NoReturn:
        """Raises the failure of the first rank in `done` that failed."""
        for ref in done:
            try:
                ray.get(ref)
            except RayError as error:
                raise self.failures.explained(name, refs.index(ref), error) from None
        raise AssertionError("unreachable: one of them failed")


def join_ranks(groups: Iterable[WorkerGroup]) -> None:
    """Makes the ranks of each group import what they need and join torch.distributed, all groups side by side."""
    joining = [(group, group.begin_join()) for group in groups]
    for group, calls in joining:
        group.end_join(calls)
