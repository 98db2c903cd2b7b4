"""`RankProcess`: the Ray actor of one rank, and `Worker`, the object in it that does the calls of one run."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import ray

from scalerl.batch.data_proto import DataProto
from scalerl.cluster.heartbeat import heartbeat
from scalerl.cluster.pools import Reusable
from scalerl.tracking.metrics import Metric

if TYPE_CHECKING:
    from scalerl.parallel.layout import Layout


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


class Answer(NamedTuple):
    """What the driver fetches of a rank's DP_COMPUTE_PROTO call; token columns stay where they are.

    samples: sample columns, empty except on an output rank.
    """

    metrics: dict[str, Metric]
    samples: dict[str, np.ndarray]


class RankProcess(Reusable):
    """The actor process of one rank, which may serve several runs with workers of different classes."""

    def __init__(self, cls: type[Worker], rank: int, layout: Layout, **init: Any) -> None:
        """Makes the worker.  cls, **init: its class, and what its constructor takes beside rank and layout."""
        heartbeat().rank = rank
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
            return Answer(metrics, {}), None
        return Answer(metrics, columns.samples), DataProto(columns.tokens) if columns.tokens else None

    def _method(self, name: str) -> Callable[..., Any]:
        module, _, function = name.rpartition(":")
        if module:
            return functools.partial(getattr(sys.modules[module], function), self.worker)
        return getattr(self.worker, name)
