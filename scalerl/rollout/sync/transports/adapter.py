"""The policy's adapter alone, on its way to servers that have the model below it from the model's files."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from scalerl.models.adapters import Adapter, adapter_config, adapter_shapes
from scalerl.parallel.engine import MegatronEngine
from scalerl.rollout.servers.buckets import Bucket, NamedTensors
from scalerl.rollout.servers.requests import POLICY_ADAPTER, VERSION_MARK
from scalerl.rollout.servers.sglang.adapters import TENSOR_MARK
from scalerl.rollout.sync.session import Feed, SyncSession, Transport, wait_all
from scalerl.rollout.sync.transports.memory import serialized


class AdapterTransport(Transport):
    """The adapter as one bucket, which a server loads under the name of its version. The model itself is never sent.

    Where checksums are compared the ranks hash the model too, as it is without the adapter.
    """

    has_session = False

    def __init__(self, engine: MegatronEngine, adapter: Adapter, *, dtype: torch.dtype | None, by_value: bool) -> None:
        """adapter: as servers take it (`Engine.served_adapter`).  dtype: of the servers; None: the engine's.

        by_value: servers may be on other machines than the ranks that lead them.
        """
        self.engine, self.adapter, self.dtype, self.by_value = engine, adapter, dtype, by_value

    def send(self, session: SyncSession) -> tuple[int, int]:
        feeding = {rank for feed in session.feeds for rank in feed.ranks}
        if session.verify:
            with self.engine.without_adapter():
                for named in self.engine.export_buckets(session.bucket_bytes, lambda number: feeding):
                    session.hash(named)
        exported = dict(self.engine.export_adapter(feeding))
        if session.rank not in feeding:
            return 0, 0
        named = self._served(exported)
        version = f"{POLICY_ADAPTER}{VERSION_MARK}{session.policy_version}"
        session.hash([(f"{version}{TENSOR_MARK}{name}", tensor) for name, tensor in named])
        bucket = Bucket(named, by_value=self.by_value)
        mine = [feed for feed in session.feeds if session.rank in feed.ranks]
        with ThreadPoolExecutor(len(mine)) as threads:
            loading = []
            for feed in mine:
                blobs = feed.gather(serialized(bucket, feed, session.rank))
                if feed.lead == session.rank:
                    in_order = [blobs[rank] for rank in range(feed.replica.tp_size)]
                    loading.append(threads.submit(self._load, session, feed, in_order))
            wait_all(loading)
        for feed in mine:
            # The ranks' memory must live until the server has read it.
            feed.wait()
        return bucket.num_bytes, 1

    def _served(self, exported: dict[str, torch.Tensor]) -> NamedTensors:
        """The tensors that servers take, on the host: zeros for those that the trainer has not.

        A server would take tensors of other names or shapes without a word, and end at the first request.
        """
        shapes = adapter_shapes(self.engine.shape, self.adapter)
        wrong = [name for name, tensor in exported.items() if shapes.get(name) != tuple(tensor.shape)]
        assert not wrong, f"tensors that no server takes: {wrong[:5]}"
        example = next(iter(exported.values()))
        dtype = self.dtype or example.dtype
        return [
            (name, exported[name].detach().to("cpu", dtype) if name in exported else torch.zeros(size, dtype=dtype))
            for name, size in shapes.items()
        ]

    def _load(self, session: SyncSession, feed: Feed, blobs: Sequence[str]) -> None:
        config = adapter_config(self.adapter)
        session.call(
            feed,
            "bucket",
            lambda client: client.load_adapter(POLICY_ADAPTER, session.policy_version, config, blobs),
        )
