"""`PolicyServers`: the policy's servers on the driver, with weight sync, device hand-over and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.cluster.pools import ResourcePool
from scalerl.cluster.worker_group import WorkerGroup
from scalerl.config import sends_adapter, transport_of
from scalerl.config.schema import PPOConfig
from scalerl.config.servers import weight_directory
from scalerl.errors import UserError
from scalerl.models import ModelShape
from scalerl.models.routing import RoutingShape
from scalerl.rollout.dispatcher import generate_samples, max_in_flight
from scalerl.rollout.sampling.rollout_workers import RolloutWorkers
from scalerl.rollout.servers.client import ClientSettings, Replica, RolloutClient
from scalerl.rollout.servers.engines import ENGINES
from scalerl.rollout.servers.purpose import POLICY
from scalerl.rollout.servers.recovery import LostServer
from scalerl.rollout.servers.requests import GenerateRequest, RolloutError, SamplingParams
from scalerl.rollout.servers.server_set import ServerSet, continue_generation, pause
from scalerl.rollout.sync.handover import Part, Point, check_room
from scalerl.rollout.sync.session import Step, SyncOrder
from scalerl.rollout.sync.weight_sync import WeightSource
from scalerl.tracking.metrics import Metric, Metrics, merge_metrics

if TYPE_CHECKING:
    from scalerl.rollout.sync.session import RankReport

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
        shape: ModelShape,
        *,
        gpu_ids: Sequence[str] | None,
        log_dir: Path,
        single_node: bool,
        first_step: int = 0,
    ) -> None:
        """Prepares the servers; `start` starts them, and `wait_ready` returns when they answer.

        shape: of the policy's model, with its adapter.
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
        # None: nobody asks for the experts of tokens.
        self.routing = None
        if config.algorithm.routing_replay is not None:
            self.routing = RoutingShape.of(shape)
        # None: they take all weights.
        self.adapter = None
        if sends_adapter(config) and shape.adapter is not None:
            self.adapter = ENGINES[self.rollout.name].served_adapter(shape.adapter, shape)
        max_model_len = config.data.max_prompt_length + config.data.max_response_length
        self.timeout_s = config.trainer.timeout_s
        self.num_syncs = 0
        self.policy_version = 0
        # Metrics of releases and saves, until the next sync reports them.
        self.metrics: Metrics = {}
        clients = ClientSettings(
            POLICY, max_model_len, self.rollout.request_timeout_s, max_in_flight(self.rollout.max_num_seqs)
        )
        self.server_set = ServerSet(
            clients,
            pool,
            self.model,
            self.rollout,
            gpu_ids=gpu_ids,
            log_dir=log_dir,
            timeout_s=self.timeout_s,
            owns_devices=self.owns_devices,
            single_node=single_node,
            synced=True,
            returns_experts=self.routing is not None,
            adapter=self.adapter,
            releases_memory=self.rollout.free_cache_engine,
            first_step=first_step,
        )
        # Index -> where that server is in the order of its steps, from `wait_ready` on. During a call of `_ask_ranks`
        # the ranks have the orders.
        self.orders: dict[int, SyncOrder] = {}

    def start(self) -> None:
        self.server_set.start()

    def wait_ready(self, workers: WorkerGroup, rollout_workers: RolloutWorkers) -> None:
        """Waits until all servers answer, then connects them to the rollout workers and the trainer's ranks."""
        self.server_set.wait_ready()
        if self.routing is not None:
            # No adapter has been loaded yet.
            client = self.server_set.settings.client(replace(self.replicas[0], adapter=None))
            require_experts(client, self.routing, self.model.path)
        self.workers, self.rollout_workers = workers, rollout_workers
        self.orders = {index: self._new_order(index) for index in range(len(self.replicas))}
        rollout_workers.connect(self.replicas, self.server_set.settings, self.rollout.seed)
        workers.call(
            WeightSource.connect_rollout,
            self.replicas,
            json.loads((Path(self.model.path) / "config.json").read_text()),
            bucket_bytes=self.rollout.update_weights_bucket_megabytes * 2**20,
            # Less than the limit of the collectives in which other ranks wait for the rank that asks a server.
            timeout_s=min(self.rollout.request_timeout_s, self.timeout_s / 2),
            dtype=self.rollout.dtype,
            transport=transport_of(self.config),
            directory=self._weights_directory(),
            model_path=self.model.path,
            shares_devices=not self.owns_devices,
            hands_over=self._hands_over,
            keep_less=ENGINES[self.rollout.name].keep_less,
            adapter=self.adapter,
        )

    def _weights_directory(self) -> str | None:
        shared = self.rollout.weight_transport_dir
        return None if shared is None else str(weight_directory(shared, self.config.trainer.default_local_dir))

    @property
    def replicas(self) -> list[Replica]:
        """The servers that run now; a restarted server has another url."""
        return self.server_set.replicas

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
        self.server_set.stop()
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
        return pause(self.server_set.clients)

    def resume_interrupted(self) -> None:
        """Continues the samples that `pause` interrupted; servers that cannot continue are replaced."""
        # First, for a server with weights that are not defined must not be asked.
        self.mark_serving()
        self.server_set.end_failed(continue_generation(self.server_set.clients))
        self.restart_down()
        # The successors of those that could not.
        self.mark_serving()

    def replace(self, lost: Sequence[LostServer], *, generating: bool) -> None:
        """Ends what is left of lost servers, and starts successors with the weights that the generation began with."""
        if self.server_set.end_lost(lost):
            self.restart_down()
            if generating:
                self.mark_serving()

    # --- weights ---

    def sync(self, policy_version: int) -> Metrics:
        """Gives all drained servers the trainer's weights, those that are down as well; returns the sync's metrics."""
        self.policy_version = policy_version
        # What the ranks measured before the first sync is reported in the first step.
        with_memory = self.num_syncs > 0
        rounds = [self.send_weights(self._up, verify=self._is_verified, with_memory=with_memory)] if self._up else []
        rounds += self.restart_down()
        self.num_syncs += 1
        metrics, self.metrics = self.metrics, {}
        return metrics | sync_metrics(rounds)

    def send_weights(self, indices: Collection[int], *, verify: bool, with_memory: bool = False) -> list[RankReport]:
        """Gives servers the trainer's weights as self.policy_version: memory back -> send -> verify -> KV cache back.

        indices: of servers that are drained.  verify: compares checksums.  with_memory: as `WeightSource.sync_weights`.
        A server that fails is ended, and down then. Returns the ranks' reports.
        """
        return self._ask_ranks(
            WeightSource.sync_weights, self.policy_version, indices=indices, verify=verify, with_memory=with_memory
        )

    def restart_down(self) -> list[list[RankReport]]:
        """Brings the servers that are down into service: restarts them, connects them and sends them the weights.

        Returns the ranks' reports of each round of restarts: a server that fails once more is restarted again.
        """
        rounds = []
        while self.server_set.down:
            successors = self.server_set.restart_down()
            self.rollout_workers.replace(successors)
            self.workers.call(WeightSource.reconnect_rollout, successors)
            self.orders |= {index: self._new_order(index) for index in successors}
            # They are new, or what they served is not known.
            rounds.append(self.send_weights(successors, verify=self.rollout.verify_weights_every > 0))
            if serving := sorted(successors.keys() - self.server_set.down.keys()):
                self.rollout_workers.in_service(serving)
        return rounds

    @property
    def _is_verified(self) -> bool:
        """Whether the next sync is verified."""
        return verification_is_due(self.num_syncs, self.rollout.verify_weights_every)

    @property
    def _up(self) -> list[int]:
        """Indices of the servers that run."""
        return [index for index in range(len(self.replicas)) if index not in self.server_set.down]

    def _ask_ranks(self, method: Any, *args: Any, indices: Collection[int], **options: Any) -> list[RankReport]:
        """Has the ranks make a call about these servers, whose orders each server's lead has meanwhile.

        Servers that failed are ended. Raises RolloutError for one that is well and refuses.
        """
        orders = {index: self.orders.pop(index) for index in indices}
        reports: list[RankReport] = self.workers.call(method, *args, orders=orders, **options)
        failed: dict[int, str] = {}
        for report in reports:
            self.orders |= report.orders
            failed |= report.failed
        self.server_set.end_failed(failed)
        return reports

    # --- the device ---

    @property
    def _hands_over(self) -> bool:
        return self.rollout.free_cache_engine and self.pool.device == "cuda"

    def release_device(self) -> None:
        """Makes the servers give up KV cache and weights after a generation, so that the trainer has the device.

        A server that is lost now is restarted when the trainer has left the device. Raises HandoverError where the
        trainer's parts have no room.
        """
        if not self._hands_over:
            return
        reports = self._release({"kv_cache": "after_release_kv", "weights": "after_release"})
        check_room(report.lack for report in reports)
        self.metrics |= seconds_of("gen", reports)

    def _release(self, points: Mapping[Part, Point]) -> list[RankReport]:
        reports = self._ask_ranks(WeightSource.release_servers, points, indices=self._up)
        self.metrics |= merge_metrics(report.metrics for report in reports)
        return reports

    @contextlib.contextmanager
    def lend_device(self) -> Iterator[None]:
        """Keeps the KV caches off the trainer's devices inside the block, between two generations.

        A save or a load needs it: parameters and optimizer come to the devices while servers have their weights there.
        Where the servers' weights leave no room for them, the weights leave too; the servers get the trainer's weights
        after the block, or before the first sync in that sync. Raises HandoverError.
        """
        if not self._hands_over:
            yield
            return
        have_room = not any(report.lack for report in self._release({"kv_cache": "before_save"}))
        if not have_room:
            check_room(report.lack for report in self._release({"weights": "before_save_alone"}))
        yield
        if have_room:
            reports = self._ask_ranks(WeightSource.resume_caches, indices=self._up)
            self.metrics |= merge_metrics(report.metrics for report in reports)
        elif self.num_syncs:
            # Its seconds are the save's.
            self.send_weights(self._up, verify=self._is_verified)
        if self.num_syncs:
            self.restart_down()

    def _advance(self, step: Step, indices: Iterable[int]) -> None:
        """Takes a step in the order of these servers; raises WrongOrderError if one of them may not take it."""
        for index in indices:
            self.orders[index].advance(step)

    def _new_order(self, index: int) -> SyncOrder:
        return SyncOrder(self.replicas[index].url, serving=False)


def require_experts(client: RolloutClient, routing: RoutingShape, model_path: str) -> None:
    """Asks a server for one token with its experts. Raises UserError where it cannot say them.

    Such a server may answer every other request, or end at the first one that asks for experts.
    """
    request = GenerateRequest("experts", [0, 0], 1, SamplingParams(1, ignore_eos=True), seeds=[0], routing=routing)
    try:
        asyncio.run(generate_samples([client], [request]))
    except RolloutError as error:
        raise UserError(
            f"algorithm.routing_replay = rollout: the rollout server does not say which experts the routers of "
            f"{model_path} choose: {error}; set algorithm.routing_replay=null, or look in the server's log for what "
            "ended it"
        ) from error


def sync_metrics(rounds: Sequence[Sequence[RankReport]]) -> Metrics:
    """The metrics of a sync.  rounds: the ranks' reports of each round: first all servers, then those restarted."""
    slowest = [max(reports, key=lambda report: report.seconds["send"]) for reports in rounds]
    send_s = sum(report.seconds["send"] for report in slowest)
    verify_s = sum(max(report.seconds.get("verify", 0.0) for report in reports) for reports in rounds)
    # Ranks on which no server depends have no buckets.
    bytes_of_rounds = [max(report.num_bytes for report in reports) for reports in rounds]
    reports = [report for of_round in rounds for report in of_round]
    return {
        **seconds_of("update_weights", reports),
        "timing_s/update_weights/send": Metric(send_s, "max"),
        "timing_s/update_weights/verify": Metric(verify_s, "max"),
        "perf/update_weights_gb": Metric(max(bytes_of_rounds) / 1e9, "max"),
        "perf/update_weights_gb_per_s": Metric(sum(bytes_of_rounds) / 1e9 / send_s, "max"),
        "perf/update_weights_buckets": Metric(float(max(report.num_buckets for report in slowest)), "max"),
        "perf/update_weights_bucket_mb": Metric(min(report.bucket_bytes for report in slowest) / 2**20, "min"),
        **merge_metrics(report.metrics for report in reports),
    }


def seconds_of(phase: str, reports: Iterable[RankReport]) -> Metrics:
    """The seconds of the parts of a call, each of the slowest rank."""
    parts = [{f"timing_s/{phase}/{name}": Metric(s, "max") for name, s in report.seconds.items()} for report in reports]
    return merge_metrics(parts)
