"""Rollout (`scalerl.roles`) over replicas of a rollout server, on the trainer's devices."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from scalerl.balance import StepPlan
from scalerl.config.schema import PPOConfig
from scalerl.controller.batch import BatchRef, PlacedBatch
from scalerl.controller.calls import values_of
from scalerl.controller.pools import ResourcePool
from scalerl.controller.replacements import LostServer
from scalerl.controller.replica_set import ReplicaSet
from scalerl.controller.rollout_worker import Generated, RolloutWorker
from scalerl.controller.trainer_roles import TOKENS
from scalerl.controller.worker_group import WorkerGroup
from scalerl.hybrid.order import Step, SyncOrder
from scalerl.metrics import Metric
from scalerl.rollout.client import RolloutError, SamplingParams

Metrics = dict[str, Metric]


class HybridRollout:
    """Servers that hold the device between the trainer's phases (`free_cache_engine`) or share the CPU with it."""

    def __init__(
        self,
        config: PPOConfig,
        pool: ResourcePool,
        datasets: dict[str, Any],
        *,
        gpu_ids: Sequence[str] | None,
        log_dir: Path,
    ) -> None:
        """Starts servers and rollout worker; `wait_ready` returns when they answer.

        datasets: name -> RLHFDataset.  gpu_ids: of each trainer rank's device on its node; None on the CPU.
        """
        self.config, self.pool = config, pool
        self.rollout = config.actor_rollout_ref.rollout
        self.model = config.actor_rollout_ref.model
        self.max_model_len = config.data.max_prompt_length + config.data.max_response_length
        self.timeout_s = config.trainer.timeout_s
        self.num_syncs = 0
        self.policy_version = 0
        self.val_uids = list(range(len(datasets["val"])))
        # Since `faults` was asked.
        self.num_restarts = self.num_resubmitted = 0
        self.servers = ReplicaSet(
            pool,
            self.model,
            self.rollout,
            gpu_ids=gpu_ids,
            max_model_len=self.max_model_len,
            log_dir=log_dir,
            timeout_s=self.timeout_s,
        )
        self.worker = (
            ray.remote(RolloutWorker)
            .options(**pool.place(0, num_devices=0), max_concurrency=64)
            .remote(
                {name: [ray.put(dataset)] for name, dataset in datasets.items()},
                self.model.path,
                reward=config.reward_model,
                custom_reward=config.custom_reward_function,
                trust_remote_code=self.model.trust_remote_code,
            )
        )

    def wait_ready(self, workers: WorkerGroup) -> None:
        """Blocks until every server answers, then connects them to the trainer ranks that feed them."""
        self.servers.wait_ready()
        self.orders = {index: self._new_order(index) for index in range(len(self.servers.replicas))}
        self._ask(self.worker.connect, self.servers.replicas, self.rollout, self.max_model_len)
        self.lost = self.worker.next_lost.remote()
        self.workers = workers
        workers.connect_rollout(
            self.servers.replicas,
            json.loads((Path(self.model.path) / "config.json").read_text()),
            bucket_bytes=self.rollout.update_weights_bucket_megabytes * 2**20,
            max_model_len=self.max_model_len,
            # Less than that of the collectives in which the other ranks wait for the one that asks a server.
            timeout_s=min(self.rollout.request_timeout_s, self.timeout_s / 2),
            dtype=self.rollout.dtype,
        )

    def generate(self, uids: Sequence[int], *, step: int) -> tuple[BatchRef, Metrics]:
        config = self.rollout
        sampling = SamplingParams(
            self.config.data.max_response_length, config.temperature, config.top_p, config.top_k, config.ignore_eos
        )
        return self._generate("train", uids, config.n, sampling, step=step, keep=True)

    def validate(self, *, step: int) -> tuple[BatchRef, Metrics]:
        config = self.rollout.val_kwargs
        sampling = SamplingParams(
            self.config.data.max_response_length,
            config.temperature if config.do_sample else 0.0,
            config.top_p,
            config.top_k,
        )
        keep = self.config.trainer.log_val_generations > 0 or self.config.reward_model.enable
        return self._generate("val", self.val_uids, config.n, sampling, step=step, keep=keep)

    def _generate(
        self, dataset: str, uids: Sequence[int], n: int, sampling: SamplingParams, *, step: int, keep: bool
    ) -> tuple[BatchRef, Metrics]:
        self._take("continue", self.orders)
        call = self.worker.generate.remote(dataset, list(uids), n, sampling, step=step, keep=keep)
        generated = self._attend(call)
        self._replace(generated.missing)
        # One that took the place of a lost server meanwhile is idle as it was made, or generates like the others.
        self._take("drain", [index for index, order in self.orders.items() if order.serving])
        self.num_resubmitted += generated.num_resubmitted
        failed = float(generated.samples["reward_failed"].sum())
        metrics = {
            "timing_s/gen/reward_wait": Metric(generated.reward_wait_s, "max"),
            "reward/num_failed": Metric(failed, "sum"),
        }
        return BatchRef(generated.batch_id, generated.samples), metrics

    def _attend(self, call: ray.ObjectRef) -> Generated:
        """What the generation gives; the servers that it loses are replaced while the others go on."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            ready, _ = ray.wait([call, self.lost], timeout=max(0.0, deadline - time.monotonic()))
            if self.lost not in ready or call in ready:
                return values_of("generation", [call], 0.0 if not ready else self.timeout_s)[0]
            (lost,) = values_of("generation", [self.lost], self.timeout_s)
            self.lost = self.worker.next_lost.remote()
            began = time.monotonic()
            self._replace(lost)
            deadline += time.monotonic() - began

    def _replace(self, lost: Sequence[LostServer]) -> None:
        """Ends what is left of these servers, starts others, gives them the weights that the generation began with."""
        # The news of one that was replaced already may come late.
        lost = [server for server in lost if self.servers.replicas[server.index].url == server.url]
        for server in lost:
            self.servers.end(server.index, server.why)
        if lost:
            self._serve(set())

    def place(self, samples: BatchRef, plans: Mapping[str, StepPlan]) -> PlacedBatch:
        """Cut by the first plan; ranks of the others put their rows together from these pieces."""
        role, plan = next(iter(plans.items()))
        shards = [self.worker.shard.remote(samples.batch_id, plan.rows(dp_rank)) for dp_rank in range(plan.dp_size)]
        return PlacedBatch(samples.samples, plans).with_column(TOKENS, role, shards)

    def drop(self, samples: BatchRef) -> None:
        self._ask(self.worker.drop, samples.batch_id)

    def dump(self, samples: BatchRef, path: Path) -> None:
        self._ask(self.worker.dump, samples.batch_id, samples.samples, str(path))

    def texts(self, samples: BatchRef, rows: Sequence[int]) -> list[tuple[str, str]]:
        return self._ask(self.worker.texts, samples.batch_id, list(rows))

    @property
    def _hands_over(self) -> bool:
        return self.rollout.free_cache_engine and self.pool.device == "cuda"

    def release_device(self) -> None:
        """After generation: KV cache and weights leave the device, the trainer has it to itself.

        A server that is lost now is restarted when the trainer has left the device.
        """
        if self._hands_over:
            self._take("release_kv", self.orders)
            self._take("release_weights", self.orders)
            self._end_lost(self._ask(self.worker.release))

    def sync_weights(self, policy_version: int) -> Metrics:
        """weights back on the device -> sync -> KV cache back."""
        self.policy_version = policy_version
        rounds = self._serve(set(range(len(self.servers.replicas))))
        self.num_syncs += 1
        slowest = [max(parts, key=lambda part: part["sync_s"]) for parts in rounds]
        send_s, num_bytes = (sum(part[name] for part in slowest) for name in ("sync_s", "num_bytes"))
        return {
            "timing_s/update_weights/send": Metric(send_s, "max"),
            "timing_s/update_weights/verify": Metric(
                sum(max(part["verify_s"] for part in parts) for parts in rounds), "max"
            ),
            "perf/update_weights_gb": Metric(max(part["num_bytes"] for part in slowest) / 1e9, "max"),
            "perf/update_weights_gb_per_s": Metric(num_bytes / 1e9 / send_s, "max"),
            "perf/update_weights_buckets": Metric(max(part["num_buckets"] for part in slowest), "max"),
        }

    def faults(self) -> Metrics:
        """Servers restarted, and samples asked again, since the last call."""
        restarts, self.num_restarts = self.num_restarts, 0
        resubmitted, self.num_resubmitted = self.num_resubmitted, 0
        return {
            "rollout/num_restarts": Metric(float(restarts), "sum"),
            "rollout/num_resubmitted": Metric(float(resubmitted), "sum"),
        }

    def _serve(self, indices: set[int]) -> list[list[dict[str, Any]]]:
        """These replicas, and those that are down, then serve the trainer's weights as self.policy_version.

        One that is lost meanwhile is restarted and gets them again. -> what the ranks reported of each round.
        """
        every = self.rollout.verify_weights_every
        rounds = []
        while indices or self.servers.down:
            restarted = self._restart_down()
            # Those were not there before, or what they served is not known.
            verify = every > 0 and (self.num_syncs % every == 0 or bool(restarted))
            running = indices - set(restarted)
            failed = self._resume("weights", running) if running else {}
            synced = sorted(running.union(restarted) - failed.keys())
            self._take("begin", synced)
            rounds.append(
                self.workers.sync_weights(self.policy_version, verify=verify, only=synced, raise_errors=False)
            )
            failed |= {index: why for part in rounds[-1] for index, why in part["failed"].items()}
            synced = sorted(set(synced) - failed.keys())
            for step in ("bucket", "end", *(["check"] if verify else [])):
                self._take(step, synced)
            failed |= self._resume("kv_cache", running.intersection(synced)) if running else {}
            self._end_lost(failed)
            self._ask(self.worker.in_service, sorted(running.union(restarted) - failed.keys()))
            indices = set()
        return rounds

    def _resume(self, tag: str, indices: set[int]) -> dict[int, str]:
        if not (self._hands_over and self.num_syncs):
            return {}
        self._take("resume_weights" if tag == "weights" else "resume_kv", indices)
        return self._ask(self.worker.resume, [tag])

    def _take(self, step: Step, indices: Iterable[int]) -> None:
        """Raises WrongOrderError, before a server is asked, where one of these may not take this step."""
        for index in indices:
            self.orders[index].take(step)

    def _new_order(self, index: int) -> SyncOrder:
        return SyncOrder(self.servers.replicas[index].url, serving=False)

    def _restart_down(self) -> list[int]:
        before = sum(self.servers.num_restarts.values())
        restarted = self.servers.restart_down()
        self.num_restarts += sum(self.servers.num_restarts.values()) - before
        if restarted:
            successors = {index: self.servers.replicas[index] for index in restarted}
            self.orders |= {index: self._new_order(index) for index in restarted}
            self.workers.reconnect_rollout(successors)
            self._ask(self.worker.replace, successors)
        return restarted

    def _end_lost(self, failed: Mapping[int, str]) -> None:
        """Raises RolloutError for a server that failed and is well: it refused, and would again."""
        indices = sorted(failed)
        for index, is_well in zip(indices, self._ask(self.worker.are_well, indices), strict=True):
            if is_well:
                raise RolloutError(failed[index])
            self.servers.end(index, failed[index])

    def stop(self) -> None:
        self.servers.stop()
        ray.kill(self.worker)

    def _ask(self, method: Any, *args: Any) -> Any:
        """Of the rollout worker."""
        return values_of(f"rollout worker {method._method_name}", [method.remote(*args)], self.timeout_s)[0]
