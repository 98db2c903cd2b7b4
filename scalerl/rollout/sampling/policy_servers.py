"""`PolicyServers`: the policy's servers on the driver, with weight sync, device hand-over and restarts."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from scalerl.cluster.pools import ResourcePool
from scalerl.cluster.worker_group import WorkerGroup
from scalerl.config import transport_of
from scalerl.config.schema import PPOConfig
from scalerl.config.servers import weight_directory
from scalerl.rollout.sampling.rollout_workers import RolloutWorkers
from scalerl.rollout.server_choice import max_in_flight
from scalerl.rollout.servers.control import ServerControl
from scalerl.rollout.servers.engines import ENGINES
from scalerl.rollout.servers.purpose import POLICY
from scalerl.rollout.servers.recovery import LostServer, ServerRecovery
from scalerl.rollout.servers.replica import ClientSettings, Replica
from scalerl.rollout.servers.server_set import ServerSet
from scalerl.rollout.sync.feeds import plan_feeds
from scalerl.rollout.sync.handover import RELEASE_WAIT_S, Handover, HandoverError, HandoverPoint, RankMemory
from scalerl.rollout.sync.order import Step, SyncOrder
from scalerl.rollout.sync.weight_source import WeightSource
from scalerl.tracking.metrics import Metric, Metrics, merge_metrics

# The number of syncs at the start of a run that are all verified.
VERIFIED_FIRST = 3


def verification_is_due(num_syncs: int, every: int) -> bool:
    """Whether a weight sync is verified.  num_syncs: syncs before it.  every: rollout.verify_weights_every."""
    return every > 0 and (num_syncs < VERIFIED_FIRST or num_syncs % every == 0)


class PolicyServers:
    """The servers of the policy: which of them serve, have the weights, and have the device.

    They hold the device between the trainer's phases (`free_cache_engine`), share the CPU with it, or have a pool of
    their own. They generate between `mark_serving` and `mark_drained`. The rollout workers send them prompts; this
    object makes all other requests.
    """

    def __init__(
        self,
        config: PPOConfig,
        pool: ResourcePool,
        *,
        gpu_ids: Sequence[str] | None,
        log_dir: Path,
        single_node: bool,
        first_step: int = 0,
    ) -> None:
        """Prepares the servers; `start` starts them, and `wait_ready` returns when they answer.

        gpu_ids: of each trainer rank's device on its node; None on the CPU, and where `pool` is the servers' own.
        single_node, first_step: as `ServerSet` has them.
        """
        self.config, self.pool = config, pool
        self.rollout = config.actor_rollout_ref.rollout
        self.owns_devices = not config.actor_rollout_ref.hybrid_engine
        if self.owns_devices:
            # Nobody else uses the memory that they could release.
            self.rollout = replace(self.rollout, free_cache_engine=False)
        self.model = config.actor_rollout_ref.model
        self.max_model_len = config.data.max_prompt_length + config.data.max_response_length
        self.timeout_s = config.trainer.timeout_s
        self.num_syncs = 0
        self.policy_version = 0
        self.handover = Handover(ENGINES[self.rollout.name].keep_less)
        # Part of a phase -> seconds, until the next sync reports them.
        self.parts_s: dict[str, float] = {}
        self.gpu_ids, self.log_dir = gpu_ids, log_dir
        self.single_node, self.first_step = single_node, first_step
        # From `start` on.
        self._server_set: ServerSet | None = None
        # Index -> where that server is in the order of its steps, from `wait_ready` on. In a sync the ranks have them.
        self.orders: dict[int, SyncOrder] = {}

    def start(self) -> None:
        clients = ClientSettings(
            POLICY, self.max_model_len, self.rollout.request_timeout_s, max_in_flight(self.rollout.max_num_seqs)
        )
        self._server_set = ServerSet(
            clients,
            self.pool,
            self.model,
            self.rollout,
            gpu_ids=self.gpu_ids,
            log_dir=self.log_dir,
            timeout_s=self.timeout_s,
            owns_devices=self.owns_devices,
            single_node=self.single_node,
            synced=True,
            releases_memory=self.rollout.free_cache_engine,
            first_step=self.first_step,
        )

    @property
    def server_set(self) -> ServerSet:
        assert self._server_set is not None, "the servers were not started"
        return self._server_set

    def wait_ready(self, workers: WorkerGroup, rollout_workers: RolloutWorkers) -> None:
        """Waits until all servers answer, then connects them to the rollout workers and the trainer's ranks."""
        self.server_set.wait_ready()
        self.workers, self.rollout_workers = workers, rollout_workers
        self.recovery = ServerRecovery(self.server_set, rollout_workers, self._give_weights)
        self.orders = {index: self._new_order(index) for index in range(len(self.replicas))}
        rollout_workers.connect(self.replicas, self.server_set.clients, self.rollout.seed)
        workers.call(
            WeightSource.connect_rollout,
            self.replicas,
            json.loads((Path(self.model.path) / "config.json").read_text()),
            bucket_bytes=self.rollout.update_weights_bucket_megabytes * 2**20,
            max_model_len=self.max_model_len,
            # Less than the limit of the collectives in which other ranks wait for the rank that asks a server.
            timeout_s=min(self.rollout.request_timeout_s, self.timeout_s / 2),
            dtype=self.rollout.dtype,
            transport=transport_of(self.config),
            directory=self._weights_directory(),
            model_path=self.model.path,
        )

    def _weights_directory(self) -> str | None:
        shared = self.rollout.weight_transport_dir
        return None if shared is None else str(weight_directory(shared, self.config.trainer.default_local_dir))

    @property
    def replicas(self) -> list[Replica]:
        """The servers that run now; a restarted server has another url."""
        return self.server_set.replicas

    @property
    def control(self) -> ServerControl:
        return self.server_set.control

    @property
    def num_restarts(self) -> int:
        """Restarts of servers in this run."""
        return self.server_set.num_restarts

    def leave(self) -> None:
        """Leaves the servers to the next run if its weights can reach them in the same way; else ends them."""
        # An order that is missing is with a rank that did not answer.
        is_settled = len(self.orders) == len(self.replicas) and all(order.is_settled for order in self.orders.values())
        # By broadcast the servers are in process groups with this run's ranks.
        if transport_of(self.config) == "broadcast" or not is_settled:
            self.server_set.stop()
        else:
            self.server_set.leave()
        self._remove_weights()

    def stop(self) -> None:
        if self._server_set is not None:
            self._server_set.stop()
        self._remove_weights()

    def _remove_weights(self) -> None:
        if (directory := self._weights_directory()) is not None:
            shutil.rmtree(directory, ignore_errors=True)

    # --- generating, or not ---

    def mark_serving(self) -> None:
        """Marks every server as serving, before samples are asked for."""
        self._advance("continue", [index for index, order in self.orders.items() if not order.serving])

    def mark_drained(self) -> None:
        """Marks every server as drained: no sample runs any more."""
        self._advance("drain", [index for index, order in self.orders.items() if order.serving])

    def pause(self) -> dict[int, str]:
        """Interrupts running samples where they are: every server is drained.

        Returns index -> error of servers that failed.
        """
        self.mark_drained()
        return self.control.pause()

    def resume_interrupted(self) -> None:
        """Continues the samples that `pause` interrupted; servers that cannot continue are replaced."""
        # First, for a server with weights that are not defined must not be asked.
        self.mark_serving()
        self.server_set.end_failed(self.control.continue_generation())
        self.recovery.serve()
        # The successors of those that could not.
        self.mark_serving()

    def replace(self, lost: Sequence[LostServer], *, generating: bool) -> None:
        """Ends what is left of lost servers, and starts successors with the weights that the generation began with."""
        if self.recovery.replace(lost) and generating:
            self.mark_serving()

    # --- the device ---

    @property
    def _hands_over(self) -> bool:
        return self.rollout.free_cache_engine and self.pool.device == "cuda"

    def release_device(self) -> None:
        """Makes the servers give up KV cache and weights after a generation, so that the trainer has the device.

        A server that is lost now is restarted when the trainer has left the device. Raises HandoverError where the
        trainer's parts have no room.
        """
        failed: dict[int, str] = {}
        if self._hands_over:
            self.workers.readings = None
            self._measure_memory("before_release")
            self._advance("release_kv", self.orders)
            with self._timed("gen/release_kv"):
                failed |= self.control.release("kv_cache")
            self._measure_memory("after_release_kv", wait_s=self._release_wait_s)
            self._advance("release_weights", self.orders)
            with self._timed("gen/release_weights"):
                failed |= self.control.release("weights", skip=failed)
            self.server_set.end_failed(failed)
        self._measure_memory("after_release", wait_s=self._release_wait_s if self._hands_over else 0.0)

    @contextlib.contextmanager
    def lend_device(self) -> Iterator[None]:
        """Keeps the KV caches off the trainer's devices inside the block, between two generations.

        A save or a load needs it: parameters and optimizer come to the devices while servers have their weights there.
        Where these have no room beside each other, the weights leave too; after the block servers get the trainer's
        again, or, before the first sync, with that. Raises HandoverError.
        """
        if not self._hands_over:
            yield
            return
        self._advance("release_kv", self.orders)
        failed = self.control.release("kv_cache")
        beside_weights = self._have_room("before_save")
        if not beside_weights:
            self._advance("release_weights", self.orders)
            self.server_set.end_failed(failed | self.control.release("weights", skip=failed))
            self._measure_memory("before_save_alone", wait_s=self._release_wait_s)
        yield
        self.workers.readings = None
        if not beside_weights:
            if self.num_syncs:
                # Its seconds are the save's.
                parts_s, self.parts_s = self.parts_s, {}
                self.recovery.serve(range(len(self.replicas)))
                self.parts_s = parts_s
            return
        self._measure_memory("after_save")
        self._advance("resume_kv", self.orders)
        self.server_set.end_failed(failed | self.control.resume("kv_cache"))
        if self.num_syncs:
            self.recovery.serve()

    def _have_room(self, point: HandoverPoint) -> bool:
        try:
            self._measure_memory(point, wait_s=self._release_wait_s)
        except HandoverError:
            return False
        return True

    # Seconds within which released memory is free on every rank.
    _release_wait_s = RELEASE_WAIT_S

    def _measure_memory(
        self, point: HandoverPoint, indices: Iterable[int] | None = None, *, wait_s: float = 0.0
    ) -> None:
        """Measures free memory on the trainer's devices; does nothing for servers with a pool of their own.

        indices: of the replicas that next take back what they released; None: all.
        wait_s: most seconds to wait for released memory to be free; above 0 after a release.
        """
        if not self.config.actor_rollout_ref.hybrid_engine:
            return

        def measure() -> list[RankMemory]:
            return self.workers.call(WeightSource.device_memory)

        if wait_s:
            self.handover.record_released(point, measure, wait_s=wait_s)
            return
        feeds = plan_feeds(self.replicas, self.workers.layout.world_size)
        servers = None if indices is None else {rank for index in indices for rank in feeds[index]}
        # The last call's readings hold as long as no server took or gave back memory since.
        self.handover.record(point, self.workers.readings or measure(), servers=servers)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.parts_s[name] = self.parts_s.get(name, 0.0) + time.monotonic() - began

    # --- weights ---

    def sync(self, policy_version: int) -> Metrics:
        """Gives all drained servers the trainer's weights: weights back on the device -> sync -> KV cache back."""
        self.policy_version = policy_version
        rounds: list[list[dict[str, Any]]] = []
        # What the ranks measured before the first sync is reported in the first step.
        give_weights = partial(self._give_weights, rounds=rounds, with_memory=self.num_syncs > 0)
        self.recovery.serve(range(len(self.replicas)), before_service=give_weights)
        self.num_syncs += 1
        slowest = [max(parts, key=lambda part: part["sync_s"]) for parts in rounds]
        send_s = sum(part["sync_s"] for part in slowest)
        # Ranks on which no server depends have no buckets.
        bytes_of_rounds = [max(part["num_bytes"] for part in parts) for parts in rounds]
        verify_s = sum(max(part["verify_s"] for part in parts) for parts in rounds)
        parts_s, self.parts_s = self.parts_s, {}
        return {
            "timing_s/update_weights/send": Metric(send_s, "max"),
            "timing_s/update_weights/verify": Metric(verify_s, "max"),
            "perf/update_weights_gb": Metric(max(bytes_of_rounds) / 1e9, "max"),
            "perf/update_weights_gb_per_s": Metric(sum(bytes_of_rounds) / 1e9 / send_s, "max"),
            "perf/update_weights_buckets": Metric(max(part["num_buckets"] for part in slowest), "max"),
            "perf/update_weights_bucket_mb": Metric(min(part["bucket_bytes"] for part in slowest) / 2**20, "min"),
            **{f"timing_s/{name}": Metric(seconds, "max") for name, seconds in parts_s.items()},
            **self.handover.metrics(),
            **merge_metrics(part.get("memory", {}) for parts in rounds for part in parts),
        }

    def _give_weights(
        self,
        successors: Mapping[int, Replica],
        running: Collection[int],
        *,
        rounds: list[list[dict[str, Any]]] | None = None,
        with_memory: bool = False,
    ) -> dict[int, str]:
        """Gives servers the trainer's weights as self.policy_version, before they serve (`ServerRecovery`).

        rounds: gets the ranks' reports.  with_memory: as `WeightSource.sync_weights` has it.
        Returns index -> why, of servers that failed.
        """
        if successors:
            self.orders |= {index: self._new_order(index) for index in successors}
            self.workers.call(WeightSource.reconnect_rollout, successors)
        every = self.rollout.verify_weights_every
        # Restarted servers are new, or what they served is not known.
        verify = verification_is_due(self.num_syncs, every) or (bool(successors) and every > 0)
        self._measure_memory("before_sync", running)
        failed = self._resume("weights", running) if running else {}
        synced = sorted({*running, *successors} - failed.keys())
        reports = self.workers.call(
            WeightSource.sync_weights,
            self.policy_version,
            verify=verify,
            # Each goes to the rank that asks its server now, and comes back with the report.
            orders={index: self.orders.pop(index) for index in synced},
            raise_errors=False,
            with_memory=with_memory,
        )
        for report in reports:
            self.orders |= report["orders"]
            failed |= report["failed"]
        if rounds is not None:
            rounds.append(reports)
        synced = set(running) - failed.keys()
        self._measure_memory("after_sync", synced)
        return failed | (self._resume("kv_cache", synced) if running else {})

    def _resume(self, part: str, indices: Collection[int]) -> dict[int, str]:
        step: Step = "resume_weights" if part == "weights" else "resume_kv"
        # Before the first sync only a load has released anything, and that only where memory is short.
        if not self._hands_over or not any(step in self.orders[index].allowed for index in indices):
            return {}
        point: HandoverPoint = "after_resume_weights" if part == "weights" else "after_resume_kv"
        self._advance(step, indices)
        with self._timed(f"update_weights/{step}"):
            failed = self.control.resume(part)
        self.workers.readings = None
        self._measure_memory(point)
        return failed

    def _advance(self, step: Step, indices: Iterable[int]) -> None:
        """Takes a step in the order of these servers; raises WrongOrderError if one of them may not take it."""
        for index in indices:
            self.orders[index].advance(step)

    def _new_order(self, index: int) -> SyncOrder:
        return SyncOrder(self.replicas[index].url, serving=False)
