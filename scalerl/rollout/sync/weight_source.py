"""`WeightSource`: what the policy's servers ask of a trainer's rank, which has the weights and shares the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scalerl.cluster.dispatch import Dispatch, register
from scalerl.cluster.rank import Worker

if TYPE_CHECKING:
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.rollout.servers.replica import Replica
    from scalerl.rollout.sync.handover import RankMemory
    from scalerl.rollout.sync.order import SyncOrder
    from scalerl.rollout.sync.transports import TransportName
    from scalerl.rollout.sync.weight_sync import WeightSync


class WeightSource(Worker):
    """A rank with the policy's weights; the trainer's worker says how its engine and its device take part in a sync."""

    # Role -> engine, `actor` among them.
    engines: Mapping[str, MegatronEngine]
    # Set by `connect_rollout`.
    weight_sync: WeightSync | None = None

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
    ) -> None:
        """Connects this rank to the servers (`WeightSync`).  dtype: what the servers store; None: as the engine's."""
        import torch

        from scalerl.rollout.sync.weight_sync import WeightSync

        self.weight_sync = WeightSync(
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
        )

    @register(Dispatch.ONE_TO_ALL)
    def reconnect_rollout(self, successors: Mapping[int, Replica]) -> None:
        """Connects this rank to restarted servers.  successors: index -> the restarted server."""
        assert self.weight_sync is not None, "no servers are connected"
        self.weight_sync.reconnect(successors)

    @register(Dispatch.ONE_TO_ALL, with_reading=True)
    def sync_weights(
        self,
        policy_version: int,
        *,
        verify: bool,
        orders: Mapping[int, SyncOrder] | None = None,
        raise_errors: bool = True,
        with_memory: bool = False,
    ) -> dict[str, Any]:
        """Sends this rank's weights to the servers by `WeightSync.sync`, and returns its report.

        with_memory: the report also has the memory metrics of this rank, as `memory`.
        """
        raise NotImplementedError

    @register(Dispatch.ONE_TO_ALL)
    def device_memory(self) -> RankMemory:
        """Free memory of this rank's device, and the bytes that its models take there when they come back."""
        raise NotImplementedError
