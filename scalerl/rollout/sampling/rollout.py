"""`HybridRollout`: generations on the policy's servers, and their samples. A training loop of the user may call it."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from scalerl.algorithms import policy_loss_columns
from scalerl.base.user_code import absolute
from scalerl.batch import StepPlan, episodes
from scalerl.batch.columns import COLUMNS, ROUTED_EXPERTS
from scalerl.cluster.batch import TOKENS, HeldRows, PlacedBatch
from scalerl.cluster.failures import WorkerError, values_of
from scalerl.cluster.pools import ActorSpec
from scalerl.cluster.worker_group import WorkerGroup
from scalerl.config.schema import CustomRewardFunctionConfig, PPOConfig
from scalerl.rollout.load_program import from_anywhere
from scalerl.rollout.program import ENVIRONMENT
from scalerl.rollout.sampling.dump import even_ranges, files_at, update_columns
from scalerl.rollout.sampling.groups import EarlyEnd, SampleGroup
from scalerl.rollout.sampling.judge import JudgeServers
from scalerl.rollout.sampling.policy_servers import PolicyServers
from scalerl.rollout.sampling.rollout_workers import (
    RolloutWorkers,
    default_num_workers,
    share_servers,
)
from scalerl.rollout.sampling.worker import GeneratedBatch, RolloutWorker
from scalerl.rollout.servers.client import SamplingParams
from scalerl.rollout.servers.server_set import plan_replicas
from scalerl.tracking.metrics import Metric, Metrics, merge_metrics
from scalerl.tracking.metrics.failed_samples import as_wrong
from scalerl.tracking.timeline import Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from scalerl.data.pictures import PictureProcessor

log = logging.getLogger(__name__)

# Reasons that are told of samples without a result.
_MOST_WHYS = 3
GENERATION_TIMEOUT = "actor_rollout_ref.rollout.generation_timeout_s"


@dataclass(eq=False)
class Generation:
    """A generation in progress. calls: rollout worker -> the result of its groups.

    finished: the result of all workers; None before somebody has waited for it.
    """

    groups: list[SampleGroup]
    calls: dict[int, ray.ObjectRef]
    finished: Finished | None = None


@dataclass(frozen=True)
class Finished:
    """The result of a generation.  samples: of finished groups.  unfinished: groups that an early end left."""

    samples: HeldRows
    metrics: Metrics
    unfinished: list[SampleGroup]


class HybridRollout:
    """Generates samples on the servers, and scores, joins and dumps them; they stay with the rollout workers.

    The training loop sees one row of numbers for each sample.
    """

    def __init__(
        self,
        config: PPOConfig,
        servers: PolicyServers,
        datasets: dict[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        *,
        judge: JudgeServers | None = None,
        processor: PictureProcessor | None = None,
    ) -> None:
        """Starts the rollout workers; `wait_ready` returns when everybody answers.

        datasets: name -> RLHFDataset.  tokenizer: the policy's.  judge: with reward_model.judge.
        processor: of the policy's pictures; None: it takes none.
        """
        self.config, self.servers, self.judge = config, servers, judge
        self.rollout, self.timeout_s = servers.rollout, config.trainer.timeout_s
        self.val, self.val_uids = datasets["val"], list(range(len(datasets["val"])))
        self.running: list[Generation] = []
        # Counts at the last call of `faults`.
        self.num_restarts = self.num_judge_restarts = 0
        # Samples asked again since that call.
        self.num_resubmitted = 0
        # For the run's timeline, since somebody took them.
        self.spans: list[Span] = []
        # Why samples failed, as far as it was said.
        self.said: set[str] = set()
        self.numbers = itertools.count()
        nodes = [plan.nodes[0] for plan in plan_replicas(servers.pool, self.rollout)]
        shares = share_servers(len(nodes), self.rollout.num_workers or default_num_workers(len(nodes)))
        shared = {name: [ray.put(dataset)] for name, dataset in datasets.items()}
        model, loss_mode = config.actor_rollout_ref.model, config.actor_rollout_ref.actor.policy_loss.loss_mode
        # A tokenizer with code of its own cannot be sent: it is imported from its directory.
        policy_tokenizer = model.path if model.trust_remote_code else [ray.put(tokenizer)]
        processes = [
            servers.pool.start(
                # On the node of the worker's first server.
                ActorSpec(RolloutWorker, node=nodes[mine[0]], num_devices=0),
                {"max_concurrency": 64},
                shared,
                policy_tokenizer,
                reward=config.reward_model,
                custom_reward=_found_from_anywhere(config.custom_reward_function),
                program=from_anywhere(self.rollout.program),
                trust_remote_code=model.trust_remote_code,
                user_files=absolute(config.trainer.import_files),
                loss_columns=[name for name in policy_loss_columns(loss_mode) if name not in COLUMNS],
                routing=servers.routing,
                data=config.data,
                processor=processor,
            )
            for mine in shares
        ]
        self.workers = RolloutWorkers(processes, shares, self.timeout_s)

    def wait_ready(self, workers: WorkerGroup) -> None:
        """Blocks until every server answers, then connects them to the trainer ranks that feed them."""
        self.workers.wait_ready()
        self.servers.wait_ready(workers, self.workers)
        if self.judge is not None:
            self.judge.connect(self.workers.handles)

    def lend_device(self) -> AbstractContextManager[None]:
        """Frees device memory for a save or a load of the trainer inside the block, between two generations."""
        return self.servers.lend_device()

    def begin(
        self, groups: Sequence[SampleGroup], *, enough: EarlyEnd | None = None, carry: bool = False
    ) -> Generation:
        """Starts n samples for each group of training prompts; `finish` waits for them.

        enough, carry: as `RolloutWorker.generate` has them.
        """
        config = self.rollout
        sampling = SamplingParams(
            self.config.data.max_response_length, config.temperature, config.top_p, config.top_k, config.ignore_eos
        )
        return self._begin("train", groups, config.n, sampling, keep=True, enough=enough, carry=carry)

    def greedy_scores(self, samples: HeldRows) -> tuple[np.ndarray, Metrics]:
        """The rewards [S] of one greedy response to each sample's prompt, NaN where that failed; none is kept."""
        prompts = dict(zip(samples.samples["uid"].tolist(), samples.samples["prompt_uid"].tolist(), strict=True))
        groups = [SampleGroup(prompt, *SampleGroup.step_and_position(uid)) for uid, prompt in prompts.items()]
        sampling = SamplingParams(
            self.config.data.max_response_length, temperature=0.0, ignore_eos=self.rollout.ignore_eos
        )
        finished = self.finish(self._begin("train", groups, 1, sampling, keep=False))
        greedy = finished.samples.samples
        rewards = np.where(greedy["reward_failed"], np.nan, greedy["score"] + greedy["reward_penalty"])
        reward_of = dict(zip(_uids_and_agents(greedy), rewards.tolist(), strict=True))
        # An agent that the greedy sample has not needed has no baseline, as if it had failed.
        return np.array([reward_of.get(key, np.nan) for key in _uids_and_agents(samples.samples)]), finished.metrics

    def validate(self, *, step: int) -> tuple[HeldRows, Metrics]:
        """Draws samples for every validation prompt by rollout.val_kwargs, and scores them."""
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
        self.servers.mark_serving()
        number = next(self.numbers)
        calls = {
            worker: self.workers.handles[worker].generate.remote(
                dataset, mine, n, sampling, generation=number, **kwargs
            )
            for worker, mine in self.workers.dealt(groups).items()
        }
        generation = Generation(list(groups), calls)
        self.running.append(generation)
        return generation

    def finish(self, generation: Generation) -> Finished:
        """Waits for a generation; returns its scored samples, its metrics and the groups that were left unfinished."""
        finished = self._finished(generation)
        samples = finished.samples.samples
        failed = samples["reward_failed"]
        self._say_why_failed(samples)
        num_left_out = self._count_left_out(samples)
        held = finished.samples.with_samples(score=as_wrong(samples["score"], samples["data_source"], failed))
        num_failed = float(failed[episodes.starts(samples)].sum()) - num_left_out
        counts = {"reward/num_failed": num_failed, "rollout/num_left_out": float(num_left_out)}
        counted = {name: Metric(count, "sum") for name, count in counts.items()}
        return replace(finished, samples=held, metrics=finished.metrics | counted)

    def _count_left_out(self, samples: Mapping[str, np.ndarray]) -> int:
        """The number of samples whose surroundings failed. Raises WorkerError where they are too many."""
        errors = samples["reward_error"][episodes.sample_starts(samples)].tolist()
        whys = Counter(error.removeprefix(ENVIRONMENT) for error in errors if error.startswith(ENVIRONMENT))
        limit, num_left_out = self.rollout.program.max_failed_frac, whys.total()
        if num_left_out > limit * len(errors):
            shown = "; ".join(f"{count} x {why}" for why, count in whys.most_common(_MOST_WHYS))
            raise WorkerError(
                f"{num_left_out} of {len(errors)} samples have no result, more than "
                f"actor_rollout_ref.rollout.program.max_failed_frac={limit:g}: {shown}"
            )
        return num_left_out

    def _say_why_failed(self, samples: Mapping[str, np.ndarray]) -> None:
        """Logs why the first failed sample has no score, where no earlier one had the same cause."""
        is_left_out = [error.startswith(ENVIRONMENT) for error in samples["reward_error"].tolist()]
        failed_rows = np.flatnonzero(samples["reward_failed"] & ~np.array(is_left_out, dtype=bool))
        causes = samples["reward_error"][failed_rows[:1]].tolist()
        if self.said.issuperset(causes):
            return
        self.said.update(causes)
        starts_E = episodes.starts(samples)
        log.warning(
            "%d of %d samples have no score and count as wrong (reward_model.on_error=zero); the first, of prompt %d: "
            "%s",
            np.isin(starts_E, failed_rows).sum(),
            len(starts_E),
            samples["prompt_uid"][failed_rows[0]],
            *causes,
        )

    def _finished(self, generation: Generation) -> Finished:
        """Waits for a generation. Servers that are lost meanwhile are replaced."""
        if generation.finished is None:
            made = self._attend(generation.calls)
            generation.finished = merged(generation.groups, made)
            self.running.remove(generation)
            missing = [server for batch in made.values() for server in batch.missing]
            self.servers.replace(missing, generating=bool(self.running))
            self.num_resubmitted += sum(batch.num_resubmitted for batch in made.values())
            self.spans += [span for batch in made.values() for span in batch.spans]
            if not self.running:
                # A server that replaced a lost one meanwhile is still idle, or generates like the others.
                self.servers.mark_drained()
        return generation.finished

    def join(self, batches: Sequence[tuple[HeldRows, Sequence[int]]]) -> HeldRows:
        """Joins rows of several batches, in order, into one; the batches themselves are dropped."""
        return self.workers.join(batches)

    def forget(self, groups: Sequence[SampleGroup]) -> None:
        """Drops the unfinished samples of interrupted groups that will not be asked for again."""
        self.workers.forget(groups)

    def _attend(self, calls: Mapping[int, ray.ObjectRef]) -> dict[int, GeneratedBatch]:
        """Waits for the result of each worker; servers that they lose are replaced while the others generate."""
        limit_s = self.rollout.generation_timeout_s
        deadline = time.monotonic() + limit_s
        worker_of = {call: worker for worker, call in calls.items()}
        results: dict[int, GeneratedBatch] = {}
        while len(results) < len(calls):
            judge_news = [] if self.judge is None else list(self.judge.news)
            waited_for = [
                *(call for call in worker_of if worker_of[call] not in results),
                *self.workers.news,
                *judge_news,
            ]
            ready, _ = ray.wait(waited_for, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorkerError(f"generation: not all samples came within {GENERATION_TIMEOUT}={limit_s:.0f} s")
            (told,) = ready
            if told in worker_of:
                (results[worker_of[told]],) = values_of("generation", [told], limit_s, GENERATION_TIMEOUT)
                continue
            began = time.monotonic()
            if told in self.workers.news:
                self.servers.replace(self.workers.read_news(told), generating=bool(self.running))
            elif self.judge is not None:
                self.judge.replace_lost(told)
            deadline += time.monotonic() - began
        return {worker: results[worker] for worker in calls}

    def place(self, samples: HeldRows, plans: Mapping[str, StepPlan]) -> PlacedBatch:
        """Makes shards of the samples by the first plan; for ranks of other plans the rollout workers reshard them."""
        role, plan = next(iter(plans.items()))
        batch = PlacedBatch(samples.samples, plans, reshard=self.workers.reshard)
        batch = batch.with_column(TOKENS, role, self.workers.shards(samples, plan))
        if self.servers.routing is None:
            return batch
        return batch.with_column(ROUTED_EXPERTS, role, self.workers.shards(samples, plan, ROUTED_EXPERTS.name))

    def drop(self, samples: HeldRows) -> None:
        """Frees the samples, which are no longer needed."""
        self.workers.drop(samples)

    def dump(self, samples: HeldRows, batch: PlacedBatch, path: Path) -> None:
        """Writes the samples as parquet, with the trainer's columns of `batch`, which holds the same rows. Each rollout
        worker writes a file with some of the rows."""
        made = [column for name, column in batch.columns.items() if name not in (TOKENS, ROUTED_EXPERTS.name)]
        columns = batch.samples | update_columns(batch.plans["actor"])
        ranges = even_ranges(len(samples), self.workers.num_dump_files)
        with files_at(path, len(ranges)) as files:
            self.workers.dump(samples, made, columns, dict(zip(files, ranges, strict=True)))

    def val_images(self, uids: Sequence[int]) -> list[list[bytes]]:
        """The images of prompts of the validation, as the contents of their files."""
        prompts = (self.val[uid] for uid in uids)
        return [
            [image if isinstance(image, bytes) else Path(image).read_bytes() for image in prompt.images]
            for prompt in prompts
        ]

    def texts(
        self, samples: HeldRows, rows: Sequence[int], dataset: str, *, with_special_tokens: bool
    ) -> list[tuple[str, str, str]]:
        """The texts (prompt, response, ground truth) of these rows.  dataset: that of the prompts, `train` or `val`."""
        return self.workers.texts(samples, rows, dataset, with_special_tokens)

    def release_device(self) -> None:
        """Frees the device for the trainer after a generation, as `PolicyServers.release_device`."""
        self.servers.release_device()

    def sync_weights(self, policy_version: int) -> Metrics:
        """Gives the servers the trainer's weights. Running samples are interrupted before and continued after it, or
        waited for (`rollout.partial_rollout`)."""
        began = time.monotonic()
        interrupted = self._interrupt()
        wait_s = time.monotonic() - began
        metrics = self.servers.sync(policy_version)
        if interrupted:
            self.servers.resume_interrupted()
        return {"timing_s/update_weights/wait": Metric(wait_s, "max"), **metrics}

    def _interrupt(self) -> bool:
        """Stops all running samples, or waits for them. Returns whether samples wait to be continued."""
        if not self.rollout.partial_rollout:
            for generation in list(self.running):
                self._finished(generation)
        if not self.running:
            return False
        failed = self.servers.pause()
        down = self.servers.server_set.down
        lost = self.workers.news_so_far()
        failed |= {server.index: server.why for server in lost if server.index not in down}
        self.servers.server_set.end_failed(failed)
        return True

    def faults(self) -> Metrics:
        """Metrics since the last call: restarts of servers, the judge's apart, and samples that were asked again."""
        before, self.num_restarts = self.num_restarts, self.servers.num_restarts
        resubmitted, self.num_resubmitted = self.num_resubmitted, 0
        metrics = {
            "rollout/num_restarts": Metric(float(self.num_restarts - before), "sum"),
            "rollout/num_resubmitted": Metric(float(resubmitted), "sum"),
        }
        if self.judge is not None:
            before, self.num_judge_restarts = self.num_judge_restarts, self.judge.num_restarts
            metrics["reward/num_judge_restarts"] = Metric(float(self.num_judge_restarts - before), "sum")
        return metrics

    def recorded_spans(self) -> list[Span]:
        """What samples and servers did in the generations that ended since the last call."""
        spans, self.spans = self.spans, []
        return spans

    def leave(self) -> None:
        """Ends running generations; the rollout workers' processes wait for another run."""
        self.workers.leave()
        self.servers.pool.keep(self.workers.processes)

    def stop(self) -> None:
        """Stops the rollout workers; the servers are stopped by whoever started them."""
        self.workers.stop()


def merged(groups: Sequence[SampleGroup], made: Mapping[int, GeneratedBatch]) -> Finished:
    """Merges the workers' results of a generation, with rows in the order of the groups. made: worker -> its result."""
    workers, position_of = list(made), {group.uid: position for position, group in enumerate(groups)}
    # A result without a finished group has columns of no type.
    filled = [worker for worker in workers if len(made[worker].samples["uid"])] or workers[:1]
    columns = [made[worker].samples for worker in filled]
    sizes = [len(column["uid"]) for column in columns]
    # All batches are named, so that all are dropped.
    batches = tuple((worker, batch.batch_id) for worker, batch in made.items())
    batch_S = np.repeat([workers.index(worker) for worker in filled], sizes)
    row_S, samples = np.concatenate([np.arange(size) for size in sizes]), columns[0]
    if len(columns) > 1:
        samples = {name: np.concatenate([column[name] for column in columns]) for name in columns[0]}
        order = np.argsort([position_of[uid] for uid in samples["uid"].tolist()], kind="stable")
        samples = {name: column[order] for name, column in samples.items()}
        batch_S, row_S = batch_S[order], row_S[order]
    unfinished = [group for batch in made.values() for group in batch.unfinished]
    reward_wait_s = max(batch.reward_wait_s for batch in made.values())
    return Finished(
        HeldRows(samples, batches, batch_S, row_S),
        {"timing_s/gen/reward_wait": Metric(reward_wait_s, "max")}
        | merge_metrics(batch.metrics for batch in made.values()),
        sorted(unfinished, key=lambda group: position_of[group.uid]),
    )


def _uids_and_agents(samples: Mapping[str, np.ndarray]) -> list[tuple[int, str]]:
    return list(zip(samples["uid"].tolist(), samples["agent"].tolist(), strict=True))


def _found_from_anywhere(config: CustomRewardFunctionConfig) -> CustomRewardFunctionConfig:
    """The configuration with an absolute path, by which a process on another node finds the file."""
    return config if config.path is None else replace(config, path=absolute([config.path])[0])
