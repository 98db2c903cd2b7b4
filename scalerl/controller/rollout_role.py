"""Rollout (`scalerl.roles`) over replicas of a rollout server, on the trainer's devices or on their own."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from scalerl.balance import StepPlan
from scalerl.config import transport_of
from scalerl.config.schema import PPOConfig
from scalerl.controller.batch import BatchRef, PlacedBatch
from scalerl.controller.calls import values_of
from scalerl.controller.groups import Enough, SampleGroup
from scalerl.controller.judge import JudgeServers
from scalerl.controller.pools import ResourcePool
from scalerl.controller.replacements import LostServer
from scalerl.controller.replica_set import ReplicaSet
from scalerl.controller.rollout_dump import placed_fragments, update_columns
from scalerl.controller.rollout_worker import Generated, RolloutWorker
from scalerl.controller.trainer_roles import TOKENS
from scalerl.controller.worker_group import WorkerGroup
from scalerl.hybrid.handover import Handover, Point
from scalerl.hybrid.order import Step, SyncOrder
from scalerl.hybrid.replicas import plan_feeds
from scalerl.metrics import Metric
from scalerl.rollout.client import RolloutError, SamplingParams
from scalerl.user_code import absolute

Metrics = dict[str, Metric]
# Syncs at the start of a run that are all verified.
VERIFIED_FIRST = 3


def verification_is_due(num_syncs: int, every: int) -> bool:
    """num_syncs: before this one.  every: rollout.verify_weights_every."""
    return every > 0 and (num_syncs < VERIFIED_FIRST or num_syncs % every == 0)


@dataclass(eq=False)
class Generation:
    """Samples on their way. result: once somebody waited for them."""

    call: ray.ObjectRef
    result: Generated | None = None


@dataclass(frozen=True)
class Finished:
    """samples: of finished groups.  unfinished: groups that an early end left."""

    samples: BatchRef
    metrics: Metrics
    unfinished: list[SampleGroup]


class HybridRollout:
    """Servers that hold the device between the trainer's phases (`free_cache_engine`), share the CPU with it, or have
    a pool of their own."""

    def __init__(
        self,
        config: PPOConfig,
        pool: ResourcePool,
        datasets: dict[str, Any],
        *,
        gpu_ids: Sequence[str] | None,
        log_dir: Path,
        single_node: bool | None = None,
        judge: JudgeServers | None = None,
    ) -> None:
        """Starts servers and rollout worker; `wait_ready` returns when they answer.

        datasets: name -> RLHFDataset.  gpu_ids: of each trainer rank's device on its node; None on the CPU,
        and where `pool` is the servers' own.  single_node: as `ReplicaSet` has it.  judge: with reward_model.judge.
        """
        self.config, self.pool, self.judge = config, pool, judge
        self.rollout = config.actor_rollout_ref.rollout
        owns_devices = not config.actor_rollout_ref.hybrid_engine
        if owns_devices:
            # Nobody else needs what they would release.
            self.rollout = replace(self.rollout, free_cache_engine=False)
        self.model = config.actor_rollout_ref.model
        self.max_model_len = config.data.max_prompt_length + config.data.max_response_length
        self.timeout_s = config.trainer.timeout_s
        self.num_syncs = 0
        self.policy_version = 0
        self.val_uids = list(range(len(datasets["val"])))
        self.running: list[Generation] = []
        self.handover = Handover()
        # Part of a phase -> seconds, until the next sync reports them.
        self.parts_s: dict[str, float] = {}
        # Since `faults` was asked.
        self.num_restarts = self.num_resubmitted = self.num_judge_restarts = 0
        self.servers = ReplicaSet(
            pool,
            self.model,
            self.rollout,
            gpu_ids=gpu_ids,
            max_model_len=self.max_model_len,
            log_dir=log_dir,
            timeout_s=self.timeout_s,
            owns_devices=owns_devices,
            single_node=single_node,
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
                user_files=absolute(config.trainer.import_files),
            )
        )

    def wait_ready(self, workers: WorkerGroup) -> None:
        """Blocks until every server answers, then connects them to the trainer ranks that feed them."""
        self.servers.wait_ready()
        self.orders = {index: self._new_order(index) for index in range(len(self.servers.replicas))}
        self._ask(self.worker.connect, self.servers.replicas, self.rollout, self.max_model_len)
        self.lost = self.worker.next_lost.remote()
        if self.judge is not None:
            self.judge.connect(self.worker)
        self.workers = workers
        workers.connect_rollout(
            self.servers.replicas,
            json.loads((Path(self.model.path) / "config.json").read_text()),
            bucket_bytes=self.rollout.update_weights_bucket_megabytes * 2**20,
            max_model_len=self.max_model_len,
            # Less than that of the collectives in which the other ranks wait for the one that asks a server.
            timeout_s=min(self.rollout.request_timeout_s, self.timeout_s / 2),
            dtype=self.rollout.dtype,
            transport=transport_of(self.config),
            directory=self.rollout.weight_transport_dir,
            model_path=self.model.path,
        )

    def begin(self, groups: Sequence[SampleGroup], *, enough: Enough | None = None, carry: bool = False) -> Generation:
        """Starts n samples for each group of training prompts; `finish` waits for them.

        enough, carry: as `RolloutWorker.generate` has them.
        """
        config = self.rollout
        sampling = SamplingParams(
            self.config.data.max_response_length, config.temperature, config.top_p, config.top_k, config.ignore_eos
        )
        return self._begin("train", groups, config.n, sampling, keep=True, enough=enough, carry=carry)

    def greedy_scores(self, samples: BatchRef) -> tuple[np.ndarray, Metrics]:
        """[S]: score of one greedy response to each sample's prompt. The responses are not kept."""
        prompts = dict(zip(samples.samples["uid"].tolist(), samples.samples["prompt_uid"].tolist(), strict=True))
        groups = [SampleGroup(prompt, *SampleGroup.step_and_position(uid)) for uid, prompt in prompts.items()]
        sampling = SamplingParams(
            self.config.data.max_response_length, temperature=0.0, ignore_eos=self.rollout.ignore_eos
        )
        finished = self.finish(self._begin("train", groups, 1, sampling, keep=False))
        found = finished.samples.samples
        scores = dict(zip(found["uid"].tolist(), found["score"].tolist(), strict=True))
        return np.array([scores[uid] for uid in samples.samples["uid"].tolist()]), finished.metrics

    def validate(self, *, step: int) -> tuple[BatchRef, Metrics]:
        config = self.rollout.val_kwargs
        sampling = SamplingParams(
            self.config.data.max_response_length,
            config.temperature if config.do_sample else 0.0,
            config.top_p,
            config.top_k,
        )
        keep = self.config.trainer.log_val_generations > 0 or self.config.reward_model.enable
        groups = [SampleGroup(uid, step, position) for position, uid in enumerate(self.val_uids)]
        finished = self.finish(self._begin("val", groups, config.n, sampling, keep=keep))
        return finished.samples, finished.metrics

    def _begin(
        self, dataset: str, groups: Sequence[SampleGroup], n: int, sampling: SamplingParams, **kwargs: Any
    ) -> Generation:
        self._take("continue", self._idle())
        generation = Generation(self.worker.generate.remote(dataset, list(groups), n, sampling, **kwargs))
        self.running.append(generation)
        return generation

    def finish(self, generation: Generation) -> Finished:
        generated = self._result(generation)
        failed = float(generated.samples["reward_failed"].sum())
        metrics = {
            "timing_s/gen/reward_wait": Metric(generated.reward_wait_s, "max"),
            "reward/num_failed": Metric(failed, "sum"),
        }
        return Finished(BatchRef(generated.batch_id, generated.samples), metrics, generated.unfinished)

    def _result(self, generation: Generation) -> Generated:
        """Waits for it. Servers that are lost meanwhile are replaced."""
        if generation.result is None:
            generation.result = self._attend(generation.call)
            self.running.remove(generation)
            self._replace(generation.result.missing)
            self.num_resubmitted += generation.result.num_resubmitted
            if not self.running:
                # One that took the place of a lost server meanwhile is idle as it was made, or generates like the
                # others.
                self._take("drain", self._serving())
        return generation.result

    def join(self, parts: Sequence[tuple[BatchRef, Sequence[int]]]) -> BatchRef:
        """Rows of several batches, in order, as one; the batches are gone then."""
        batch_id = self._ask(self.worker.join, [(part.batch_id, list(rows)) for part, rows in parts])
        columns = {
            name: np.concatenate([part.samples[name][list(rows)] for part, rows in parts])
            for name in parts[0][0].samples
        }
        return BatchRef(batch_id, columns)

    def forget(self, groups: Sequence[SampleGroup]) -> None:
        """Interrupted groups that will not come again."""
        self._ask(self.worker.forget, [group.uid for group in groups])

    def _attend(self, call: ray.ObjectRef) -> Generated:
        """What the generation gives; the servers that it loses are replaced while the others go on."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            of_judge = [] if self.judge is None else [self.judge.lost]
            ready, _ = ray.wait([call, self.lost, *of_judge], timeout=max(0.0, deadline - time.monotonic()))
            if self.judge is not None and self.judge.lost in ready:
                began = time.monotonic()
                self.judge.replace_lost()
                deadline += time.monotonic() - began
                continue
            if self.lost not in ready or call in ready:
                return values_of("generation", [call], 0.0 if not ready else self.timeout_s)[0]
            lost = self._news()
            began = time.monotonic()
            self._replace(lost)
            deadline += time.monotonic() - began

    def _news(self) -> list[LostServer]:
        """Of servers that generations lost; waits for it."""
        (lost,) = values_of("generation", [self.lost], self.timeout_s)
        self.lost = self.worker.next_lost.remote()
        return lost

    def _replace(self, lost: Sequence[LostServer]) -> None:
        """Ends what is left of these servers, starts others, gives them the weights that the generation began with."""
        # The news of one that was replaced already may come late.
        lost = [server for server in lost if self.servers.replicas[server.index].url == server.url]
        for server in lost:
            if server.index not in self.servers.down:
                self.servers.end(server.index, server.why)
        if lost:
            self._serve(set())
            self._take(
                "continue", [index for index, order in self.orders.items() if self.running and not order.serving]
            )

    def place(self, samples: BatchRef, plans: Mapping[str, StepPlan]) -> PlacedBatch:
        """Cut by the first plan; ranks of the others put their rows together from these pieces."""
        role, plan = next(iter(plans.items()))
        shards = [self.worker.shard.remote(samples.batch_id, plan.rows(dp_rank)) for dp_rank in range(plan.dp_size)]
        return PlacedBatch(samples.samples, plans).with_column(TOKENS, role, shards)

    def drop(self, samples: BatchRef) -> None:
        self._ask(self.worker.drop, samples.batch_id)

    def dump(self, samples: BatchRef, batch: PlacedBatch, path: Path) -> None:
        """One parquet of the samples, with what the trainer made of them: the columns of `batch`, which holds the same
        rows. The trainer's tokens go to the rollout worker, which has the others."""
        rows, fragments = placed_fragments(batch, leave_out=TOKENS)
        columns = batch.samples | update_columns(batch.plans["actor"])
        self._ask(self.worker.dump, samples.batch_id, columns, str(path), rows, *fragments)

    def texts(self, samples: BatchRef, rows: Sequence[int]) -> list[tuple[str, str]]:
        return self._ask(self.worker.texts, samples.batch_id, list(rows))

    @property
    def _hands_over(self) -> bool:
        return self.rollout.free_cache_engine and self.pool.device == "cuda"

    def release_device(self) -> None:
        """After generation: KV cache and weights leave the device, the trainer has it to itself.

        A server that is lost now is restarted when the trainer has left the device. Raises HandoverError where the
        trainer's parts have no room.
        """
        failed: dict[int, str] = {}
        if self._hands_over:
            self._see("before_release")
            self._take("release_kv", self.orders)
            with self._timed("gen/release_kv"):
                failed |= self._ask(self.worker.release, "kv_cache")
            self._see("after_release_kv")
            self._take("release_weights", self.orders)
            with self._timed("gen/release_weights"):
                failed |= self._ask(self.worker.release, "weights", list(failed))
            self._end_lost(failed)
        self._see("after_release")

    def _see(self, point: Point, indices: Iterable[int] | None = None) -> None:
        """Measures free memory on the trainer's devices, which servers of a pool of their own do not share.

        indices: of the replicas that take back next what they released; None: all.
        """
        if self.config.actor_rollout_ref.hybrid_engine:
            feeds = plan_feeds(self.servers.replicas, self.workers.layout.world_size)
            servers = None if indices is None else {rank for index in indices for rank in feeds[index]}
            self.handover.see(point, self.workers.device_memory(), servers=servers)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.parts_s[name] = self.parts_s.get(name, 0.0) + time.monotonic() - began

    def sync_weights(self, policy_version: int) -> Metrics:
        """Running samples are interrupted, or waited for (`rollout.partial_rollout`); then weights back on the device
        -> sync -> KV cache back, and what was interrupted goes on."""
        began = time.monotonic()
        interrupted = self._interrupt()
        wait_s = time.monotonic() - began
        self.policy_version = policy_version
        rounds = self._serve(set(range(len(self.servers.replicas))))
        if interrupted:
            self._end_lost(self._ask(self.worker.go_on))
            if self.servers.down:
                self._serve(set())
            self._take("continue", self._idle())
        self.num_syncs += 1
        parts_s, self.parts_s = self.parts_s, {}
        slowest = [max(parts, key=lambda part: part["sync_s"]) for parts in rounds]
        send_s, num_bytes = (sum(part[name] for part in slowest) for name in ("sync_s", "num_bytes"))
        return {
            "timing_s/update_weights/wait": Metric(wait_s, "max"),
            "timing_s/update_weights/send": Metric(send_s, "max"),
            "timing_s/update_weights/verify": Metric(
                sum(max(part["verify_s"] for part in parts) for parts in rounds), "max"
            ),
            "perf/update_weights_gb": Metric(max(part["num_bytes"] for part in slowest) / 1e9, "max"),
            "perf/update_weights_gb_per_s": Metric(num_bytes / 1e9 / send_s, "max"),
            "perf/update_weights_buckets": Metric(max(part["num_buckets"] for part in slowest), "max"),
            "perf/update_weights_bucket_mb": Metric(min(part["bucket_bytes"] for part in slowest) / 2**20, "min"),
            **{f"timing_s/{name}": Metric(seconds, "max") for name, seconds in parts_s.items()},
            **self.handover.metrics(),
        }

    def _interrupt(self) -> bool:
        """No sample runs then. -> whether some wait to go on."""
        if not self.rollout.partial_rollout:
            for generation in list(self.running):
                self._result(generation)
        if not self.running:
            return False
        failed = self._ask(self.worker.pause)
        if ray.wait([self.lost], timeout=0)[0]:
            failed |= {server.index: server.why for server in self._news() if server.index not in self.servers.down}
        self._take("drain", self._serving())
        self._end_lost(failed)
        return True

    def _serving(self) -> list[int]:
        return [index for index, order in self.orders.items() if order.serving]

    def _idle(self) -> list[int]:
        return [index for index, order in self.orders.items() if not order.serving]

    def faults(self) -> Metrics:
        """Servers restarted, the judge's apart, and samples asked again, since the last call."""
        restarts, self.num_restarts = self.num_restarts, 0
        resubmitted, self.num_resubmitted = self.num_resubmitted, 0
        found = {
            "rollout/num_restarts": Metric(float(restarts), "sum"),
            "rollout/num_resubmitted": Metric(float(resubmitted), "sum"),
        }
        if self.judge is not None:
            before, self.num_judge_restarts = self.num_judge_restarts, self.judge.num_restarts
            found["reward/num_judge_restarts"] = Metric(float(self.num_judge_restarts - before), "sum")
        return found

    def _serve(self, indices: set[int]) -> list[list[dict[str, Any]]]:
        """These replicas, and those that are down, then serve the trainer's weights as self.policy_version.

        One that is lost meanwhile is restarted and gets them again. -> what the ranks reported of each round.
        """
        is_due = verification_is_due(self.num_syncs, self.rollout.verify_weights_every)
        rounds = []
        while indices or self.servers.down:
            restarted = self._restart_down()
            # Those were not there before, or what they served is not known.
            verify = is_due or (bool(restarted) and self.rollout.verify_weights_every > 0)
            running = indices - set(restarted)
            self._see("before_sync", running)
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
            self._see("after_sync", running.intersection(synced))
            failed |= self._resume("kv_cache", running.intersection(synced)) if running else {}
            self._end_lost(failed)
            self._ask(self.worker.in_service, sorted(running.union(restarted) - failed.keys()))
            indices = set()
        return rounds

    def _resume(self, tag: str, indices: set[int]) -> dict[int, str]:
        if not (self._hands_over and self.num_syncs):
            return {}
        step: Step = "resume_weights" if tag == "weights" else "resume_kv"
        self._take(step, indices)
        with self._timed(f"update_weights/{step}"):
            failed = self._ask(self.worker.resume, [tag])
        self._see(f"after_{step}")
        return failed

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
