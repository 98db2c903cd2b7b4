"""Rollout (`trainer.contracts`): generations on the policy's servers, and the samples that come of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from scalerl.balance import StepPlan
from scalerl.cluster.ask import answer_of, values_of
from scalerl.cluster.batch import BatchRef, PlacedBatch
from scalerl.cluster.pools import ActorSpec
from scalerl.cluster.worker_group import WorkerError, WorkerGroup
from scalerl.config.schema import PPOConfig, ProgramConfig
from scalerl.controller.sampling.dump import placed_fragments, update_columns
from scalerl.controller.sampling.groups import Enough, SampleGroup
from scalerl.controller.sampling.judge import JudgeServers
from scalerl.controller.sampling.policy_servers import PolicyServers
from scalerl.controller.sampling.worker import Generated, RolloutWorker
from scalerl.controller.training.roles import TOKENS
from scalerl.metrics import Metric
from scalerl.servers.client import SamplingParams
from scalerl.servers.recovery import LostServer
from scalerl.user_code import absolute

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Metrics = dict[str, Metric]
GENERATION_TIMEOUT = "actor_rollout_ref.rollout.generation_timeout_s"


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
    """What the servers are asked and what becomes of their samples; the samples stay with the rollout worker."""

    def __init__(
        self,
        config: PPOConfig,
        servers: PolicyServers,
        datasets: dict[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        *,
        judge: JudgeServers | None = None,
    ) -> None:
        """Starts the rollout worker; `wait_ready` returns when everybody answers.

        datasets: name -> RLHFDataset.  tokenizer: the policy's.  judge: with reward_model.judge.
        """
        self.config, self.servers, self.judge = config, servers, judge
        self.rollout, self.timeout_s = servers.rollout, config.trainer.timeout_s
        self.val_uids = list(range(len(datasets["val"])))
        self.running: list[Generation] = []
        # When `faults` was asked last.
        self.num_restarts = self.num_judge_restarts = 0
        # Since then.
        self.num_resubmitted = 0
        model = config.actor_rollout_ref.model
        self.process = servers.pool.start(
            ActorSpec(RolloutWorker, node=0, num_devices=0),
            {"max_concurrency": 64},
            {name: [ray.put(dataset)] for name, dataset in datasets.items()},
            # Code of its own cannot be sent: it is imported from its directory.
            model.path if model.trust_remote_code else [ray.put(tokenizer)],
            reward=config.reward_model,
            custom_reward=config.custom_reward_function,
            program=self._program(),
            trust_remote_code=model.trust_remote_code,
            user_files=absolute(config.trainer.import_files),
        )
        self.worker = self.process.actor

    def _program(self) -> ProgramConfig:
        program = self.rollout.program
        return program if program.path is None else replace(program, path=absolute([program.path])[0])

    def wait_ready(self, workers: WorkerGroup) -> None:
        """Blocks until every server answers, then connects them to the trainer ranks that feed them."""
        values_of("rollout worker start", [self.process.ready], self.timeout_s)
        self.servers.wait_ready(workers, self.worker)
        self.lost = self.worker.next_lost.remote()
        if self.judge is not None:
            self.judge.connect(self.worker)

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
        self.servers.generate()
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
            self.servers.replace(generation.result.missing, generating=bool(self.running))
            self.num_resubmitted += generation.result.num_resubmitted
            if not self.running:
                # One that took the place of a lost server meanwhile is idle as it was made, or generates like the
                # others.
                self.servers.rest()
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
        limit_s = self.rollout.generation_timeout_s
        deadline = time.monotonic() + limit_s
        while True:
            of_judge = [] if self.judge is None else [self.judge.lost]
            ready, _ = ray.wait([call, self.lost, *of_judge], timeout=max(0.0, deadline - time.monotonic()))
            if self.judge is not None and self.judge.lost in ready:
                began = time.monotonic()
                self.judge.replace_lost()
                deadline += time.monotonic() - began
                continue
            if self.lost not in ready or call in ready:
                if not ready:
                    raise WorkerError(f"generation: not all samples came within {GENERATION_TIMEOUT}={limit_s:.0f} s")
                return values_of("generation", [call], limit_s, GENERATION_TIMEOUT)[0]
            lost = self._news()
            began = time.monotonic()
            self.servers.replace(lost, generating=bool(self.running))
            deadline += time.monotonic() - began

    def _news(self) -> list[LostServer]:
        """Of servers that generations lost; waits for it."""
        (lost,) = values_of("generation", [self.lost], self.timeout_s)
        self.lost = self.worker.next_lost.remote()
        return lost

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

    def release_device(self) -> None:
        """After generation, as `PolicyServers.release_device`."""
        self.servers.release_device()

    def sync_weights(self, policy_version: int) -> Metrics:
        """Running samples are interrupted, or waited for (`rollout.partial_rollout`); then the servers get the
        trainer's weights, and what was interrupted goes on."""
        began = time.monotonic()
        interrupted = self._interrupt()
        wait_s = time.monotonic() - began
        metrics = self.servers.sync(policy_version)
        if interrupted:
            self.servers.go_on()
        return {"timing_s/update_weights/wait": Metric(wait_s, "max"), **metrics}

    def _interrupt(self) -> bool:
        """No sample runs then. -> whether some wait to go on."""
        if not self.rollout.partial_rollout:
            for generation in list(self.running):
                self._result(generation)
        if not self.running:
            return False
        failed = self.servers.pause()
        if ray.wait([self.lost], timeout=0)[0]:
            down = self.servers.server_set.down
            failed |= {server.index: server.why for server in self._news() if server.index not in down}
        self.servers.rest(failed)
        return True

    def faults(self) -> Metrics:
        """Servers restarted, the judge's apart, and samples asked again, since the last call."""
        before, self.num_restarts = self.num_restarts, self.servers.num_restarts
        resubmitted, self.num_resubmitted = self.num_resubmitted, 0
        found = {
            "rollout/num_restarts": Metric(float(self.num_restarts - before), "sum"),
            "rollout/num_resubmitted": Metric(float(resubmitted), "sum"),
        }
        if self.judge is not None:
            before, self.num_judge_restarts = self.num_judge_restarts, self.judge.num_restarts
            found["reward/num_judge_restarts"] = Metric(float(self.num_judge_restarts - before), "sum")
        return found

    def leave(self) -> None:
        """What still generates ends; the rollout worker's process waits for another run."""
        self._ask(self.worker.leave)
        self.servers.pool.keep([self.process])

    def stop(self) -> None:
        """The rollout worker; the servers are stopped by whoever started them."""
        ray.kill(self.worker)

    def _ask(self, method: Any, *args: Any) -> Any:
        return answer_of("rollout worker", method, *args, timeout_s=self.timeout_s)
