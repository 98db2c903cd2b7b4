"""The ranks' side of a call: `@register` says how a `WorkerGroup` calls a method, and `RankProcess` runs the method.

The declaration gives the call through the group its types. `Worker` is the object in a rank's process with the methods.
"""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    cast,
    overload,
)

import numpy as np
import ray

from scalerl.batch.data_proto import DataProto
from scalerl.cluster.heartbeat import heartbeat
from scalerl.cluster.pools import Reusable
from scalerl.tracking.metrics import Metric

if TYPE_CHECKING:
    from scalerl.cluster.batch import ShardedBatch
    from scalerl.cluster.worker_group import WorkerGroup
    from scalerl.parallel.layout import Layout

# [mini-batch][micro-batch] -> positions in the shard's rows.
MicroBatches = Sequence[Sequence[Sequence[int]]]
# What a DP_COMPUTE_PROTO method returns on its rank: metrics, and token and sample columns of the shard's rows.
Result = tuple[dict[str, Metric], DataProto | None]

# What the driver fetches of it: metrics, and sample columns, which are empty except on an output rank.
Answer = tuple[dict[str, Metric], dict[str, np.ndarray]]

# Own: arguments and result of the method on its rank. P, R: of the call through the group.
OwnP = ParamSpec("OwnP")
OwnR = TypeVar("OwnR", covariant=True)
P = ParamSpec("P")
R = TypeVar("R", covariant=True)
T = TypeVar("T")
OwnT = TypeVar("OwnT")


class Collected(NamedTuple):
    """The results of a DP_COMPUTE_PROTO method, collected from the ranks.

    metrics: merged over all ranks.  samples: sample column -> [S] in the batch's order.
    columns[dp_rank]: a reference to the token columns, which the driver never fetches.
    Columns come from the output rank of each dp rank.
    """

    metrics: dict[str, Metric]
    samples: dict[str, np.ndarray]
    columns: list[Any]


class Dispatch(Enum):
    """Built-in dispatch modes: which arguments each rank gets, and what the call through the group returns."""

    # Rank 0 alone runs the method; the call returns its value.
    RANK_ZERO = auto()
    # Every rank gets the same arguments; the call returns the list of their values in rank order.
    ONE_TO_ALL = auto()
    # The first argument is a ShardedBatch: every rank gets its dp rank's part. The method returns a Result on each
    # rank, the call one Collected.
    DP_COMPUTE_PROTO = auto()


class DispatchMode(TypedDict, Generic[P, T]):
    """A user-defined dispatch mode for `register`. Both functions run on the driver.

    dispatch_fn(group, *args, **kwargs) -> (args, kwargs), each argument a list or tuple of one value per rank. With
    Execute.RANK_ZERO each argument is what rank 0 gets.
    collect_fn(group, values) -> what the call returns. values: in rank order; with Execute.RANK_ZERO rank 0's alone.
    """

    dispatch_fn: Callable[Concatenate[WorkerGroup, P], tuple[Sequence[Any], Mapping[str, Any]]]
    collect_fn: Callable[[WorkerGroup, Any], T]


class Execute(Enum):
    """Which ranks run a method."""

    ALL = auto()
    RANK_ZERO = auto()


class Future(Generic[R]):
    """A call that was sent to the ranks, and whose result `get` waits for."""

    def __init__(self, wait: Callable[[], R]) -> None:
        self._wait = functools.cache(wait)

    def get(self) -> R:
        """Waits for the result. Raises what a blocking call would have raised."""
        return self._wait()


@dataclass(frozen=True)
class Registration(Generic[P, R]):
    """How a group calls a registered method. dispatch: None for Dispatch.DP_COMPUTE_PROTO."""

    dispatch: DispatchMode[..., Any] | None
    execute_mode: Execute
    blocking: bool


class WorkerMethod(Protocol[OwnP, OwnR, P, R]):
    """A method that carries @register. Called on a worker itself, it is a method like any other."""

    __name__: str
    __qualname__: str
    __module__: str

    @property
    def registration(self) -> Registration[P, R]: ...

    @overload
    def __get__(self, worker: None, cls: type) -> WorkerMethod[OwnP, OwnR, P, R]: ...
    @overload
    def __get__(self, worker: object, cls: type | None = None) -> Callable[OwnP, OwnR]: ...


@overload
def register(
    dispatch_mode: Literal[Dispatch.RANK_ZERO],
    execute_mode: Execute = ...,
    *,
    blocking: Literal[True] = True,
) -> Callable[[Callable[Concatenate[Any, P], T]], WorkerMethod[P, T, P, T]]: ...
@overload
def register(
    dispatch_mode: Literal[Dispatch.RANK_ZERO],
    execute_mode: Execute = ...,
    *,
    blocking: Literal[False],
) -> Callable[[Callable[Concatenate[Any, P], T]], WorkerMethod[P, T, P, Future[T]]]: ...
@overload
def register(
    dispatch_mode: Literal[Dispatch.ONE_TO_ALL],
    execute_mode: Literal[Execute.ALL] = Execute.ALL,
    *,
    blocking: Literal[True] = True,
) -> Callable[[Callable[Concatenate[Any, P], T]], WorkerMethod[P, T, P, list[T]]]: ...
@overload
def register(
    dispatch_mode: Literal[Dispatch.ONE_TO_ALL],
    execute_mode: Literal[Execute.ALL] = Execute.ALL,
    *,
    blocking: Literal[False],
) -> Callable[[Callable[Concatenate[Any, P], T]], WorkerMethod[P, T, P, Future[list[T]]]]: ...
@overload
def register(
    dispatch_mode: Literal[Dispatch.DP_COMPUTE_PROTO],
    execute_mode: Literal[Execute.ALL] = Execute.ALL,
    *,
    blocking: Literal[True] = True,
) -> Callable[
    [Callable[Concatenate[Any, DataProto, MicroBatches, P], Result]],
    WorkerMethod[Concatenate[DataProto, MicroBatches, P], Result, Concatenate[ShardedBatch, P], Collected],
]: ...
@overload
def register(
    dispatch_mode: Literal[Dispatch.DP_COMPUTE_PROTO],
    execute_mode: Literal[Execute.ALL] = Execute.ALL,
    *,
    blocking: Literal[False],
) -> Callable[
    [Callable[Concatenate[Any, DataProto, MicroBatches, P], Result]],
    WorkerMethod[Concatenate[DataProto, MicroBatches, P], Result, Concatenate[ShardedBatch, P], Future[Collected]],
]: ...
@overload
def register(
    dispatch_mode: DispatchMode[P, T],
    execute_mode: Execute = Execute.ALL,
    *,
    blocking: Literal[True] = True,
) -> Callable[[Callable[Concatenate[Any, OwnP], OwnT]], WorkerMethod[OwnP, OwnT, P, T]]: ...
@overload
def register(
    dispatch_mode: DispatchMode[P, T],
    execute_mode: Execute = Execute.ALL,
    *,
    blocking: Literal[False],
) -> Callable[[Callable[Concatenate[Any, OwnP], OwnT]], WorkerMethod[OwnP, OwnT, P, Future[T]]]: ...
def register(dispatch_mode: Any, execute_mode: Execute = Execute.ALL, *, blocking: bool = True) -> Callable[[Any], Any]:
    """Marks a method of a worker, so that `WorkerGroup.call` takes it.

    blocking=False: the call returns a `Future` at once. A rank does its calls in the order in which they were made.
    """
    registration = Registration(*_dispatch(dispatch_mode, execute_mode), blocking)

    def mark(method: Any) -> Any:
        method.registration = registration
        return method

    return mark


def _dispatch(mode: Any, execute_mode: Execute) -> tuple[DispatchMode[..., Any] | None, Execute]:
    if mode is Dispatch.DP_COMPUTE_PROTO:
        if execute_mode is Execute.RANK_ZERO:
            raise ValueError("DP_COMPUTE_PROTO gives every rank its part; set execute_mode=Execute.ALL")
        return None, execute_mode
    if mode is Dispatch.RANK_ZERO or (mode is Dispatch.ONE_TO_ALL and execute_mode is Execute.RANK_ZERO):
        return DispatchMode(dispatch_fn=_as_given, collect_fn=_as_it_is), Execute.RANK_ZERO
    if mode is Dispatch.ONE_TO_ALL:
        return DispatchMode(dispatch_fn=the_same_for_all, collect_fn=_as_it_is), execute_mode
    functions = ("dispatch_fn", "collect_fn")
    if not (isinstance(mode, dict) and mode.keys() == set(functions) and all(map(callable, mode.values()))):
        raise ValueError(
            f"dispatch_mode={mode!r}: one of {[known.name for known in Dispatch]}, or a dict of the functions "
            f"{' and '.join(functions)}"
        )
    return cast("DispatchMode[..., Any]", mode), execute_mode


def _as_given(group: WorkerGroup, *args: Any, **kwargs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    return args, kwargs


def the_same_for_all(group: WorkerGroup, *args: Any, **kwargs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Gives every rank the same arguments: the dispatch_fn of Dispatch.ONE_TO_ALL."""
    return [[arg] * group.world_size for arg in args], {key: [arg] * group.world_size for key, arg in kwargs.items()}


def _as_it_is(group: WorkerGroup, values: Any) -> Any:
    return values


def registration_of(method: Any) -> Registration[..., Any]:
    """The registration of a method. Raises TypeError for a method without @register."""
    registration = getattr(method, "registration", None)
    if not isinstance(registration, Registration):
        raise TypeError(f"{getattr(method, '__qualname__', method)} carries no @register: a group cannot call it")
    return registration


# --- the process of a rank ---


class Worker(Reusable):
    """The object that serves one run on a rank. `WorkerGroup.call` calls the methods that carry @register.

    A subclass says how its ranks meet: rank 0's `rendezvous` returns an address, which every rank's `join` gets.
    """

    def __init__(self, rank: int, layout: Layout, **init: Any) -> None:
        self.rank, self.layout = rank, layout

    def rendezvous(self) -> Any:
        raise NotImplementedError

    def join(self, address: Any) -> None:
        raise NotImplementedError


class RankProcess(Reusable):
    """The actor process of one rank, which may serve several runs with workers of different classes."""

    def __init__(self, cls: type[Worker], rank: int, layout: Layout, **init: Any) -> None:
        """Makes the worker.  cls: the worker's class.  init: arguments of the class after rank and layout."""
        with heartbeat().phase("start"):
            self.worker = cls(rank, layout, **init)

    def rendezvous(self) -> Any:
        return self.worker.rendezvous()

    def join(self, address: Any) -> None:
        with heartbeat().phase("join"):
            self.worker.join(address)

    def leave(self) -> None:
        with heartbeat().phase("leave"):
            self.worker.leave()
            super().leave()

    def run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a registered method and returns its value.

        method: of the worker, or `module:function` of a file of the user's own that this process imported.
        """
        function = self._method(method)
        with heartbeat().phase(method):
            return function(*args, **kwargs)

    def run_packed(self, call: bytes) -> Any:
        """`run` with its arguments, all pickled together: (method, args, kwargs)."""
        method, args, kwargs = pickle.loads(call)
        return self.run(method, *args, **kwargs)

    # Two return values: the driver fetches the first, and keeps only a reference to the second.
    @ray.method(num_returns=2)
    def run_on_shard(self, call: bytes, shard: bytes, *tokens: DataProto) -> tuple[Answer, DataProto | None]:
        """Puts the shard of a DP_COMPUTE_PROTO call together, then calls the method.

        call: the method's name and its keyword arguments, pickled.  shard: its micro-batches, as positions in the
        shard's rows, and its sample columns, pickled.  tokens: its token columns.
        Returns the answer and the token columns; only an output rank returns columns, as the group collects its alone.
        """
        method, kwargs = pickle.loads(call)
        micro_batches, samples = pickle.loads(shard)
        batch = DataProto(samples=samples)
        for column in tokens:
            batch = batch.union(DataProto(column.tokens))
        function = self._method(method)
        metrics: dict[str, Metric]
        with heartbeat().phase(method):
            metrics, columns = function(batch, micro_batches, **kwargs)
        if columns is None or not self.worker.layout.is_output_rank(self.worker.rank):
            return (metrics, {}), None
        return (metrics, columns.samples), DataProto(columns.tokens) if columns.tokens else None

    def _method(self, name: str) -> Callable[..., Any]:
        module, _, function = name.rpartition(":")
        if module:
            return functools.partial(getattr(sys.modules[module], function), self.worker)
        return getattr(self.worker, name)
