"""`RolloutWorker`: a Ray actor that turns prompts into scored samples and keeps their tokens for the trainer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl.base.user_code import forget_files, import_files, is_users_own
from scalerl.batch.data_proto import DataProto
from scalerl.cluster.pools import Reusable
from scalerl.data.pictures import text_of
from scalerl.rollout.prompt_sampling import sample_seed, sampling_of
from scalerl.rollout.sampling.dump import decoded, joined_columns, texts_of, write_dump
from scalerl.rollout.sampling.groups import EarlyEndCount, GroupScores, SampleGroup
from scalerl.rollout.sampling.held_batches import HeldBatches
from scalerl.rollout.sampling.sample_columns import to_batch
from scalerl.rollout.sampling.sample_spans import sample_spans
from scalerl.tracking.metrics import Metric, Metrics
from scalerl.tracking.timeline import Span

if TYPE_CHECKING:
    from scalerl.config.schema import CustomRewardFunctionConfig, DataConfig, ProgramConfig, RewardModelConfig
    from scalerl.data import PromptRow
    from scalerl.data.pictures import Picture, PictureProcessor
    from scalerl.models.routing import RoutingShape
    from scalerl.rewards import ScoreResult
    from scalerl.rollout.program import Ask, Program, Sample, Trajectory
    from scalerl.rollout.samples import SampleRequest
    from scalerl.rollout.sampling.groups import EarlyEnd
    from scalerl.rollout.sampling.judge import Judge
    from scalerl.rollout.servers.client import ClientSettings, Replica, RolloutClient, SamplingParams
    from scalerl.rollout.servers.recovery import LostServer, Replacements


@dataclass(frozen=True)
class GeneratedBatch:
    """What the controller gets of a generation from one rollout worker.

    samples: column -> [S], of finished groups.
    num_resubmitted: samples that were asked again because of their server, since the worker's last result.
    missing: servers that were lost and have no successor yet.  unfinished: groups that an early end left.
    """

    batch_id: int
    samples: dict[str, np.ndarray]
    # Scoring runs while other samples generate; this is what remained after the last sample.
    reward_wait_s: float
    num_resubmitted: int
    missing: list[LostServer]
    unfinished: list[SampleGroup]
    # Seconds of the user's own programs (`times_of`).
    metrics: Metrics = field(default_factory=dict)
    # For the run's timeline.
    spans: list[Span] = field(default_factory=list)


def times_of(samples: Sequence[Sample], program: Program) -> Metrics:
    """The metrics timing_s/gen/policy/* and timing_s/gen/tools/*; {} for scalerl's own programs.

    They are the seconds of a sample in which the user's program waited for turns, and the others.
    """
    times = {
        "timing_s/gen/policy": [sample.model_s for sample in samples if sample.error is None],
        "timing_s/gen/tools": [sample.other_s for sample in samples if sample.error is None],
    }
    if not is_users_own(program) or not times["timing_s/gen/tools"]:
        return {}
    metrics: Metrics = {}
    for name, seconds in times.items():
        metrics[f"{name}/mean"] = Metric(float(np.mean(seconds)), "mean", len(seconds))
        metrics[f"{name}/max"] = Metric(max(seconds), "max")
    return metrics


def extra_info_of(prompt: PromptRow, config: CustomRewardFunctionConfig) -> dict[str, Any]:
    """What a reward function is told of the row, which it may change."""
    return prompt.extra_info | ({"images": prompt.images} if config.with_images else {})


def with_turns(result: ScoreResult, episode: Sequence[Trajectory]) -> ScoreResult:
    """The result with the rewards of the episode's turns in its score; one that failed as it is."""
    of_turns = math.fsum(float(turn.reward) for trajectory in episode for turn in trajectory.turns)
    return replace(result, score=result.score + of_turns) if of_turns and result.error is None else result


@dataclass(frozen=True)
class Interrupted:
    """A group that an early end left. asks: index of an unfinished sample -> its turns so far."""

    asks: dict[int, list[Ask]]
    finished: list[Sample]


class RolloutWorker(HeldBatches, Reusable):
    """An actor that generates and scores samples on its servers, and keeps their tokens until `drop`."""

    def __init__(
        self,
        datasets: dict[str, Any],
        tokenizer: str | list[Any],
        *,
        reward: RewardModelConfig,
        custom_reward: CustomRewardFunctionConfig,
        program: ProgramConfig,
        trust_remote_code: bool,
        user_files: Sequence[str] = (),
        loss_columns: Sequence[str] = (),
        routing: RoutingShape | None = None,
        data: DataConfig | None = None,
        processor: PictureProcessor | None = None,
    ) -> None:
        """Loads the tokenizer and the reward functions; servers come with `connect`.

        datasets: `train` and `val` -> [reference to an RLHFDataset] (in a list, so that Ray does not copy it).
        tokenizer: its directory, or [reference to it], which saves the import of all that could be in a directory.
        user_files: register what the configuration names.
        loss_columns: names of the numbers of a training sample that the policy loss needs (`numbers_of`).
        routing: training samples have the column routed_experts; None: they have not.
        data: what prompts of the user's own program are made by.
        processor: of the policy's pictures; None: it takes none.
        """
        import ray

        from scalerl.data import load_tokenizer
        from scalerl.data.chat import use_chat_template
        from scalerl.rewards import build_reward_manager
        from scalerl.rollout.load_program import load_program
        from scalerl.rollout.sampling.judge import Judge

        super().__init__()
        self.datasets: dict[str, Any] = {name: ray.get(ref) for name, (ref,) in datasets.items()}
        if isinstance(tokenizer, str):
            self.tokenizer: Any = load_tokenizer(tokenizer, trust_remote_code)
            use_chat_template(self.tokenizer, None if data is None else data.chat_template_path)
        else:
            self.tokenizer = ray.get(tokenizer[0])
        import_files(user_files)
        self.rewards, self.custom_reward = build_reward_manager(reward, custom_reward), custom_reward
        self.program_config = program
        self.chat_options = None if data is None else data.chat_template_kwargs
        self.program = load_program(program, self.chat_options)
        self.model_scores, self.loss_columns, self.routing = reward.enable, loss_columns, routing
        self.processor = processor
        self.max_prompt_length = None if data is None else data.max_prompt_length
        self._judge = Judge(reward.judge, reward.on_error) if reward.judge.enable else None
        self._replacements: Replacements | None = None
        # Generations that run.
        self.generations: set[asyncio.Task] = set()
        # uid of a group -> where an early end left it.
        self.interrupted: dict[int, Interrupted] = {}
        self.early_ends = EarlyEndCount(0, [])

    @property
    def replacements(self) -> Replacements:
        """The worker's view of the servers, which `connect` sets."""
        assert self._replacements is not None
        return self._replacements

    @property
    def judge(self) -> Judge:
        """The judge, which exists with reward_model.judge."""
        assert self._judge is not None
        return self._judge

    async def enter(self, *args: Any, **kwargs: Any) -> None:
        # In a thread, as what it reads may take long.
        await asyncio.to_thread(super().enter, *args, **kwargs)

    async def leave(self) -> None:
        """Ends running generations, and the wait for news of lost servers."""
        generations = list(self.generations)
        for generation in generations:
            generation.cancel()
        await asyncio.gather(*generations, return_exceptions=True)
        self.rewards.close()
        for waited_for in (self._replacements, self._judge):
            if waited_for is not None:
                waited_for.close()
        super().leave()
        forget_files()

    def connect(
        self,
        replicas: Sequence[Replica],
        clients: ClientSettings,
        seed: int,
        *,
        servers: Sequence[int] | None = None,
        workers: Sequence[Any] = (),
        number: int = 0,
    ) -> None:
        """Connects the worker to servers.  seed: of the samples (rollout.seed).

        servers: indices of the replicas that this worker asks; None: all.  workers: handles of all rollout workers,
        where there are several.  number: of this worker.
        """
        from scalerl.rollout.servers.recovery import Replacements

        self.seed = seed
        self.servers = list(range(len(replicas))) if servers is None else list(servers)
        self.early_ends = EarlyEndCount(number, workers)
        self._replacements = Replacements(clients, replicas)

    @property
    def clients(self) -> list[RolloutClient]:
        """Clients of the servers that this worker asks."""
        return [self.replacements.clients[index] for index in self.servers]

    async def count_kept(self, generation: int, worker: int, num_kept: int, num_groups: int) -> None:
        """Counts the groups of a worker (`EarlyEndCount.count`); on the first worker."""
        self.early_ends.count(generation, worker, num_kept, num_groups)

    async def end_early(self, generation: int) -> None:
        """Ends a generation of which all workers together have enough groups."""
        self.early_ends.over.add(generation)

    async def connect_judge(self, replicas: Sequence[Replica], clients: ClientSettings) -> None:
        self.judge.connect(replicas, clients)

    async def next_lost_judge(self) -> list[LostServer]:
        """Waits for lost servers of the judge, as `next_lost`."""
        return await self.judge.replacements.next_lost()

    async def replace_judge(self, successors: Mapping[int, Replica]) -> None:
        """Puts restarted servers of the judge into service."""
        self.judge.replacements.put(successors)
        await self.judge.replacements.in_service(successors)

    async def next_lost(self) -> list[LostServer]:
        """Waits for servers that a generation lost, and returns them; each is returned once."""
        return await self.replacements.next_lost()

    def replace(self, successors: dict[int, Replica]) -> None:
        """Takes restarted servers; no generation uses them before `in_service`."""
        self.replacements.put(successors)

    async def in_service(self, indices: Sequence[int]) -> None:
        """Puts restarted servers with the trainer's weights into service: generations that wait for them continue."""
        await self.replacements.in_service(indices)

    async def generate(
        self,
        dataset: str,
        groups: Sequence[SampleGroup],
        n: int,
        sampling: SamplingParams,
        *,
        keep: bool,
        enough: EarlyEnd | None = None,
        carry: bool = False,
        generation: int = 0,
    ) -> GeneratedBatch:
        """Makes n samples for each group, scored as they finish; an interrupted group continues where it was.

        keep: hold the tokens for `select` until `drop`.
        enough: ends the generation early, counted over all workers that have a part of it.  generation: its number,
        the same for all of them.  carry: groups that are unfinished then may be asked for again; else their tokens
        are given up.

        `next_lost` returns servers that are lost; their requests go to the others, and to their successors.

        Raises RewardError as the reward manager does, RolloutError when a server refuses, ValueError for a prompt with
        sampling parameters that it cannot have.
        """
        from scalerl.rollout.samples import make_samples

        task = asyncio.current_task()
        assert task is not None, "not in an event loop"
        self.generations.add(task)
        task.add_done_callback(self.generations.discard)
        prompts = {group.uid: self.datasets[dataset][group.prompt_uid] for group in groups}
        scores = GroupScores(n, lambda sample: self._score(dataset, prompts[sample.uid], sample), enough)
        # What nobody trains on needs no experts.
        routing = self.routing if dataset == "train" and keep else None
        requests, finished = self._requests(dataset, groups, prompts, n, sampling, routing)
        reading = {request.pictures for request in requests if request.pictures is not None}
        try:
            for sample in finished:
                scores.add(sample)
            left_over = await make_samples(
                self.clients,
                requests,
                self.program,
                self.tokenizer,
                scores.add,
                config=self.program_config,
                stop_when=None if enough is None else lambda: self.early_ends.is_over(generation, scores),
                replacements=self.replacements,
                processor=self.processor,
            )
            generated_at = time.perf_counter()
            whole = [group for group in groups if scores.is_finished(group.uid)]
            results = {group.uid: await scores.of(group.uid) for group in whole}
        finally:
            scores.cancel()
            for pictures in reading:
                pictures.cancel()
            self.early_ends.forget(generation)
        rows = [row for group in whole for row in results[group.uid]]
        # Only what a model computes needs pixels.
        is_computed = keep and (dataset == "train" or self.model_scores)
        # In a thread: of images it is gigabytes.
        batch = await asyncio.to_thread(
            to_batch,
            [trajectory for trajectory, _ in rows],
            [prompts[trajectory.uid] for trajectory, _ in rows],
            [result for _, result in rows],
            seeds=[self._seed(trajectory.uid, trajectory.sample_index) for trajectory, _ in rows],
            more=self.loss_columns if dataset == "train" else (),
            routing=routing,
            vision=self.processor.vision if self.processor is not None and is_computed else None,
        )
        batch_id = self.hold(batch) if keep else next(self.batch_ids)
        if carry:
            for (uid, index), turns in left_over.items():
                self.interrupted.setdefault(uid, Interrupted({}, scores.finished(uid))).asks[index] = turns
        num_resubmitted, self.replacements.num_resubmitted = self.replacements.num_resubmitted, 0
        made = [sample for uid in results for sample in scores.finished(uid)]
        return GeneratedBatch(
            batch_id=batch_id,
            samples=batch.samples,
            reward_wait_s=time.perf_counter() - generated_at,
            metrics=times_of(made, self.program),
            spans=sample_spans(made, self.servers) if dataset == "train" and keep else [],
            num_resubmitted=num_resubmitted,
            missing=list(self.replacements.missing.values()),
            unfinished=[group for group in groups if group.uid not in results],
        )

    def _requests(
        self,
        dataset: str,
        groups: Sequence[SampleGroup],
        prompts: Mapping[int, PromptRow],
        n: int,
        sampling: SamplingParams,
        routing: RoutingShape | None,
    ) -> tuple[list[SampleRequest], list[Sample]]:
        """The samples to make, and those that interrupted groups have already.  prompts: uid of a group -> prompt."""
        from scalerl.rollout.samples import SampleRequest

        requests: list[SampleRequest] = []
        finished: list[Sample] = []
        for group in groups:
            begun = self.interrupted.pop(group.uid, None) or Interrupted({index: [] for index in range(n)}, [])
            finished += begun.finished
            prompt = prompts[group.uid]
            own = self._without_placeholders(sampling_of(dataset, prompt, sampling))
            pictures = self._read(dataset, prompt)
            requests += [
                SampleRequest(
                    group.uid,
                    index,
                    prompt,
                    own,
                    self._seed(group.uid, index),
                    turns,
                    routing,
                    self.max_prompt_length,
                    pictures,
                )
                for index, turns in begun.asks.items()
            ]
        return requests, finished

    def _without_placeholders(self, sampling: SamplingParams) -> SamplingParams:
        """The parameters with which a sample also ends at a token that stands for a picture: it has none of its own."""
        if self.processor is None or sampling.ignore_eos:
            return sampling
        ends = dict.fromkeys([*sampling.stop_token_ids, *sorted(self.processor.placeholders)])
        return replace(sampling, stop_token_ids=tuple(ends))

    def _read(self, dataset: str, prompt: PromptRow) -> asyncio.Future[list[Picture]] | None:
        """Begins to decode the pictures of a prompt, in a thread."""
        processor = self.processor
        if processor is None or not prompt.images:
            return None

        def read() -> list[Picture]:
            try:
                return [processor.read(image) for image in prompt.images]
            except ValueError as error:
                raise ValueError(f"{dataset} prompt {prompt.uid}: {error}") from error

        return asyncio.ensure_future(asyncio.to_thread(read))

    def _seed(self, uid: int, sample_index: int) -> int:
        return sample_seed(self.seed, *SampleGroup.step_and_position(uid), sample_index)

    def forget(self, uids: Sequence[int]) -> None:
        """Drops what is kept of interrupted groups that will not be asked for again."""
        for uid in uids:
            self.interrupted.pop(uid, None)

    async def _score(self, dataset: str, prompt: PromptRow, sample: Sample) -> list[ScoreResult]:
        """The result of each trajectory: that of its episode."""
        from scalerl.rewards import ScoreResult

        if sample.error is not None:
            return [ScoreResult(0.0, error=sample.error) for _ in sample.trajectories]
        with sample.spans("reward"):
            results = await asyncio.gather(*(self._score_episode(dataset, prompt, own) for own in sample.episodes))
        scored = [with_turns(result, episode) for result, episode in zip(results, sample.episodes, strict=True)]
        return [result for result, episode in zip(scored, sample.episodes, strict=True) for _ in episode]

    async def _score_episode(self, dataset: str, prompt: PromptRow, episode: Sequence[Trajectory]) -> ScoreResult:
        """The result of an episode without its turns: what its program set, or that of its last response."""
        from scalerl.rewards import ScoreRequest, ScoreResult
        from scalerl.rewards.judge import STYLE

        extra = {name: value for trajectory in episode for name, value in trajectory.extra.items()}
        last = episode[-1]
        if self.model_scores and prompt.reward_style == "model":
            # NaN until the reward model has scored the sample: no advantage can be computed from it.
            return ScoreResult(float("nan"), extra)
        reward = next((trajectory.reward for trajectory in episode if trajectory.reward is not None), None)
        if reward is not None:
            return ScoreResult(float(reward), extra)
        agent = f" agent {last.agent}" if last.agent else ""
        request = ScoreRequest(
            sample_name=f"{dataset} prompt {prompt.uid} sample {last.sample_index}{agent}",
            data_source=prompt.data_source,
            prompt_str=text_of(prompt.messages[-1]),
            solution_str=self.tokenizer.decode(last.token_ids, skip_special_tokens=True),
            ground_truth=prompt.ground_truth,
            extra_info=extra_info_of(prompt, self.custom_reward) | extra,
            response_length=last.num_tokens,
        )
        if self._judge is not None and prompt.reward_style == STYLE:
            step_and_position = SampleGroup.step_and_position(last.uid)
            seed = sample_seed(self.judge.config.seed, *step_and_position, last.sample_index)
            result = await self.judge.score(request, seed)
        else:
            result = await self.rewards.scored(request)
        return replace(result, extra=extra | result.extra) if extra else result

    def texts(
        self, batch_id: int, rows: Sequence[int], dataset: str, with_special_tokens: bool
    ) -> list[tuple[str, str, str]]:
        """Decodes each row to (prompt, response, ground truth).  dataset: data set of the prompts, `train` or `val`."""
        batch = self.batches[batch_id].select(rows)
        return texts_of(self.tokenizer, batch, self.datasets[dataset], with_special_tokens, self.chat_options)

    async def dump(
        self,
        path: str,
        samples: dict[str, np.ndarray],
        own: list[tuple[int, list[int], np.ndarray]],
        rows: list[np.ndarray],
        *made: DataProto,
    ) -> None:
        """Writes rows of a step's batch by `dump.write_dump`.  samples: their sample columns.

        own: (batch of this worker, rows of it, which rows of the step they are).  made[i]: token columns of rows[i],
        the trainer's or those that other workers have.
        """

        def write() -> None:
            held = [self.all_tokens(batch_id).select(batch_rows) for batch_id, batch_rows, _ in own]
            tokens = joined_columns([*(step_rows for _, _, step_rows in own), *rows], [*held, *made])
            texts = decoded(self.tokenizer, tokens, samples["prompt_length"], options=self.chat_options)
            write_dump(Path(path), tokens, samples, texts)

        # In a thread, as a generation may run in the event loop.
        await asyncio.to_thread(write)
