"""`WeightSource`: a trainer's rank as the policy's servers need it: it has the weights and shares its device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from scalerl.cluster.dispatch import Dispatch, register
from scalerl.cluster.rank import Worker

if TYPE_CHECKING:
    from scalerl.config.weight_transport import TransportName
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.rollout.servers.replica import Replica
    from scalerl.rollout.sync.handover import Part, Point
    from scalerl.rollout.sync.order import SyncOrder
    from scalerl.rollout.sync.session import RankReport
    from scalerl.rollout.sync.weight_sync import WeightSync
    from scalerl.tracking.metrics import Metric


class WeightSource(Worker):
    """A rank with the policy's weights; the trainer's worker says how its engine takes part in a sync."""

    # Role -> engine, `actor` among them.
    engines: Mapping[str, MegatronEngine]
    # cuda or cpu.
    device: str
    _weight_sync: WeightSync | None = None

    @property
    def weight_sync(self) -> WeightSync:
        assert self._weight_sync is not None, "no servers are connected"
        return self._weight_sync

    @register(Dispatch.ONE_TO_ALL)
    def connect_rollout(
        self,
        replicas: Sequence[Replica],
        model_config: Mapping[str, Any],
        *,
        bucket_bytes: int,
        max_model_len: int,
        timeout_s: float,
        dtype: str | None = None,
        transport: TransportName = "shared",
        directory: str | None = None,
        model_path: str | None = None,
        shares_devices: bool = True,
        hands_over: bool = False,
        keep_less: str | None = None,
    ) -> None:
        """Connects this rank to the servers (`WeightSync`).

        dtype: the dtype that the servers store; None: the engine's.  shares_devices: with the servers.
        hands_over, keep_less: as `DeviceMemory`.
        """
        import torch

        from scalerl.rollout.sync.handover import DeviceMemory, measure
        from scalerl.rollout.sync.weight_sync import WeightSync

        memory = DeviceMemory(
            lambda: measure(self.rank, self.device, self.engines), hands_over=hands_over, keep_less=keep_less
        )
        self._weight_sync = WeightSync(
            self.engines["actor"],
            replicas,
            model_config,
            bucket_bytes=bucket_bytes,
            max_model_len=max_model_len,
            timeout_s=timeout_s,
            dtype=getattr(torch, dtype) if dtype else None,
            transport=transport,
            directory=directory,
            model_path=model_path,
            memory=memory if shares_devices else None,
        )

    @register(Dispatch.ONE_TO_ALL)
    def reconnect_rollout(self, successors: Mapping[int, Replica]) -> None:
        """Connects this rank to restarted servers.  successors: index -> the restarted server."""
        self.weight_sync.reconnect(successors)

    @register(Dispatch.ONE_TO_ALL)
    def sync_weights(
        self,
        policy_version: int,
        *,
        verify: bool,
        orders: Mapping[int, SyncOrder] | None = None,
        with_memory: bool = False,
    ) -> RankReport:
        """Sends this rank's weights to the servers by `WeightSync.sync`.

        with_memory: the report also has the metrics of `memory`.
        """
        report = self.weight_sync.sync(
            policy_version, verify=verify, orders=orders, weights_on_device=self.weights_on_device
        )
        if with_memory:
            report.metrics |= self.memory()
        return report

    @register(Dispatch.ONE_TO_ALL)
    def release_servers(self, points: Mapping[Part, Point], orders: Mapping[int, SyncOrder]) -> RankReport:
        """Has the servers give up parts of their device memory, as `WeightSync.release`."""
        return self.weight_sync.release(points, orders)

    @register(Dispatch.ONE_TO_ALL)
    def resume_caches(self, orders: Mapping[int, SyncOrder]) -> RankReport:
        """Has the servers take back their KV caches, as `WeightSync.resume_caches`."""
        return self.weight_sync.resume_caches(orders)

    def weights_on_device(self) -> AbstractContextManager[None]:
        """Keeps the actor's parameters on this rank's device inside the block."""
        raise NotImplementedError

    @register(Dispatch.ONE_TO_ALL)
    def memory(self) -> dict[str, Metric]:
        """Memory metrics of this rank since the last call."""
        raise NotImplementedError
