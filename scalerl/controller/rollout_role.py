"""Rollout (`scalerl.roles`) over replicas of a rollout server, on the trainer's devices."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from scalerl.balance import StepPlan
from scalerl.config.schema import PPOConfig, RolloutConfig
from scalerl.controller.batch import BatchRef, PlacedBatch
from scalerl.controller.pools import ResourcePool
from scalerl.controller.replica import ReplicaHost
from scalerl.controller.rollout_worker import Generated, RolloutWorker
from scalerl.controller.trainer_roles import TOKENS
from scalerl.controller.worker_group import WorkerError, WorkerGroup
from scalerl.hybrid.replicas import Replica
from scalerl.metrics import Metric
from scalerl.rollout.client import SamplingParams

logger = logging.getLogger(__name__)

Metrics = dict[str, Metric]


@dataclass(frozen=True)
class ReplicaPlan:
    """Where one server runs. devices: numbers of the node's devices that it shares with the trainer ranks."""

    index: int
    node: int
    devices: tuple[int, ...]


def plan_replicas(pool: ResourcePool, rollout: RolloutConfig) -> list[ReplicaPlan]:
    """Replicas in device order, each on one node. On CPU any number of them, dealt over the nodes."""
    tp_size = rollout.tensor_model_parallel_size
    count = rollout.num_replicas or max(1, pool.world_size // tp_size)
    plans = []
    for index in range(count):
        first = index * tp_size
        node = first // pool.devices_per_node % pool.nnodes
        start = first % pool.devices_per_node
        plans.append(ReplicaPlan(index, node, tuple(range(start, start + tp_size))))
    return plans


class HybridRollout:
    """Servers that hold the device between the trainer's phases (`free_cache_engine`) or share the CPU with it."""

    def __init__(self, config: PPOConfig, pool: ResourcePool, datasets: dict[str, Any], *, log_dir: Path) -> None:
        """Starts servers and rollout worker; `wait_ready` returns when they answer. datasets: name -> RLHFDataset."""
        self.config, self.pool = config, pool
        self.rollout = config.actor_rollout_ref.rollout
        self.model = config.actor_rollout_ref.model
        self.max_model_len = config.data.max_prompt_length + config.data.max_response_length
        self.timeout_s = config.trainer.timeout_s
        self.num_syncs = 0
        self.val_uids = list(range(len(datasets["val"])))
        self.hosts, self.starting = [], []
        for plan in plan_replicas(pool, self.rollout):
            options = pool.place(plan.node, num_devices=0)
            host = (
                ray.remote(ReplicaHost)
                .options(**options, max_concurrency=2)
                .remote(plan.index, log_path=str(log_dir / f"rollout-{plan.index}.log"))
            )
            self.hosts.append(host)
            self.starting.append(
                host.start.remote(
                    model_path=self.model.path,
                    rollout=self.rollout,
                    device=pool.device,
                    gpu_ids=list(plan.devices) if pool.device == "cuda" else None,
                    max_model_len=self.max_model_len,
                    single_node=pool.nnodes == 1,
                    trust_remote_code=self.model.trust_remote_code,
                )
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
        kind, tp_size = self.rollout.name, self.rollout.tensor_model_parallel_size
        urls = self._get("rollout server start", self.starting)
        replicas = [Replica(url, kind, tp_size if kind == "sglang" else 1) for url in urls]
        self._get("rollout worker", [self.worker.connect.remote(replicas, self.rollout, self.max_model_len)])
        self.workers = workers
        workers.connect_rollout(
            replicas,
            json.loads((Path(self.model.path) / "config.json").read_text()),
            bucket_bytes=self.rollout.update_weights_bucket_megabytes * 2**20,
            max_model_len=self.max_model_len,
            timeout_s=self.timeout_s,
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
        call = self.worker.generate.remote(dataset, list(uids), n, sampling, step=step, keep=keep)
        generated: Generated = self._get("generation", [call])[0]
        failed = float(generated.samples["reward_failed"].sum())
        metrics = {
            "timing_s/gen/reward_wait": Metric(generated.reward_wait_s, "max"),
            "reward/num_failed": Metric(failed, "sum"),
        }
        return BatchRef(generated.batch_id, generated.samples), metrics

    def place(self, samples: BatchRef, plans: Mapping[str, StepPlan]) -> PlacedBatch:
        """Cut by the first plan; ranks of the others put their rows together from these pieces."""
        role, plan = next(iter(plans.items()))
        shards = [self.worker.shard.remote(samples.batch_id, plan.rows(dp_rank)) for dp_rank in range(plan.dp_size)]
        return PlacedBatch(samples.samples, plans).with_column(TOKENS, role, shards)

    def drop(self, samples: BatchRef) -> None:
        self._get("drop", [self.worker.drop.remote(samples.batch_id)])

    def dump(self, samples: BatchRef, path: Path) -> None:
        self._get("rollout dump", [self.worker.dump.remote(samples.batch_id, samples.samples, str(path))])

    def texts(self, samples: BatchRef, rows: Sequence[int]) -> list[tuple[str, str]]:
        return self._get("texts", [self.worker.texts.remote(samples.batch_id, list(rows))])[0]

    @property
    def _hands_over(self) -> bool:
        return self.rollout.free_cache_engine and self.pool.device == "cuda"

    def release_device(self) -> None:
        """After generation: KV cache and weights leave the device, the trainer has it to itself."""
        if self._hands_over:
            self._get("release", [self.worker.release.remote()])

    def sync_weights(self, policy_version: int) -> Metrics:
        """weights back on the device -> sync -> KV cache back."""
        if self._hands_over and self.num_syncs:
            self._get("resume", [self.worker.resume.remote(["weights"])])
        every = self.rollout.verify_weights_every
        verify = every > 0 and self.num_syncs % every == 0
        parts = self.workers.sync_weights(policy_version, verify=verify)
        if self._hands_over and self.num_syncs:
            self._get("resume", [self.worker.resume.remote(["kv_cache"])])
        self.num_syncs += 1
        slowest = max(parts, key=lambda part: part["sync_s"])
        return {
            "timing_s/update_weights/send": Metric(slowest["sync_s"], "max"),
            "timing_s/update_weights/verify": Metric(max(part["verify_s"] for part in parts), "max"),
            "perf/update_weights_gb": Metric(slowest["num_bytes"] / 1e9, "max"),
        }

    def stop(self) -> None:
        for host in self.hosts:
            try:
                ray.get(host.stop.remote(), timeout=20)
            except Exception as error:
                logger.warning("rollout server did not stop by itself: %s", error)
            ray.kill(host)
        ray.kill(self.worker)

    def _get(self, what: str, refs: list[Any]) -> list[Any]:
        """Values; a failure as the cause the user can read."""
        try:
            return ray.get(refs, timeout=self.timeout_s)
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            raise WorkerError(f"{what}: the process died: {str(error).splitlines()[0]}") from None
        except ray.exceptions.GetTimeoutError:
            raise WorkerError(f"{what}: no answer within trainer.timeout_s={self.timeout_s:.0f} s") from None
