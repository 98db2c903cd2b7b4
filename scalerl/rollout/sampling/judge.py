"""A generative judge: `Judge`, in a rollout worker, asks its servers; `JudgeServers` starts and restarts them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.config.schema import JudgeConfig, ModelConfig
from scalerl.rewards.errors import RewardError
from scalerl.rewards.judge import describe_failure, fill, load_question, read_number
from scalerl.rewards.manager import ScoreRequest, ScoreResult
from scalerl.rollout.servers.client import ClientSettings, Replica
from scalerl.rollout.servers.purpose import JUDGE
from scalerl.rollout.servers.recovery import LostServer, Replacements
from scalerl.rollout.servers.requests import GenerateOutput, GenerateRequest, RolloutError, SamplingParams

if TYPE_CHECKING:
    from scalerl.cluster.pools import ResourcePool


def max_model_len(config: JudgeConfig) -> int:
    """The most tokens of question and answer together."""
    return config.max_prompt_length + config.max_response_length


def client_settings(config: JudgeConfig) -> ClientSettings:
    return ClientSettings(JUDGE, max_model_len(config), config.request_timeout_s, config.max_num_seqs)


class Judge:
    """Scores samples one by one, up to max_num_seqs at a time on each of its servers."""

    def __init__(self, config: JudgeConfig, on_error: str) -> None:
        """Loads the judge's tokenizer and question.  on_error: stop | zero, for samples without a score.

        Raises RewardError or DataError for files that cannot be used.
        """
        from scalerl.data import load_tokenizer

        self.config, self.on_error = config, on_error
        assert config.model.path is not None, "validated"
        self.tokenizer: Any = load_tokenizer(config.model.path, config.model.trust_remote_code)
        self.question = load_question(config.prompt_path)
        self.sampling = SamplingParams(config.max_response_length, config.temperature, config.top_p, config.top_k)
        self.request_ids = itertools.count()
        self._replacements: Replacements | None = None

    @property
    def replacements(self) -> Replacements:
        """The judge's servers, which `connect` sets."""
        assert self._replacements is not None
        return self._replacements

    def connect(self, replicas: Sequence[Replica], clients: ClientSettings) -> None:
        self._replacements = Replacements(clients, replicas)
        self.num_running = [0] * len(replicas)
        self.room = asyncio.Semaphore(len(replicas) * clients.max_concurrency)

    def close(self) -> None:
        """Ends the wait for news of lost servers."""
        if self._replacements is not None:
            self._replacements.close()

    async def score(self, request: ScoreRequest, seed: int) -> ScoreResult:
        """Asks the judge for the score of one sample.

        seed: seed of the judge's answer on the embedded engine, at a temperature above 0.
        extra: judge_score, the number before it is scaled; judge_length, tokens of the judge's text; with keep_text
        judge_response, the text. Raises RewardError, showing the sample and the text, for a sample without a score
        when on_error is "stop".
        """
        text: str | None = None
        extra: dict[str, Any] = {}
        try:
            output = await self._ask(self._input_ids(request), seed)
            text = str(self.tokenizer.decode(output.output_ids, skip_special_tokens=True))
            extra = {"judge_length": len(output.output_ids)}
            if self.config.keep_text:
                extra["judge_response"] = text
            number = read_number(text, self.config, is_cut=output.finish_reason == "length")
        except (RewardError, RolloutError) as error:
            cause = str(error)
            if self.on_error == "zero":
                return ScoreResult(0.0, extra, error=cause)
            raise RewardError(describe_failure(request, cause, text)) from None
        return ScoreResult(number * self.config.scale, {"judge_score": number} | extra)

    def _input_ids(self, request: ScoreRequest) -> list[int]:
        """The tokens of the question. Raises RewardError if there are too many."""
        from scalerl.data.chat import encode, render

        messages = [{"role": "user", "content": fill(self.question, request)}]
        (input_ids,) = encode(self.tokenizer, [render(self.tokenizer, messages, add_generation_prompt=True)])
        if len(input_ids) > self.config.max_prompt_length:
            raise RewardError(
                f"the question has {len(input_ids)} tokens, more than reward_model.judge.max_prompt_length="
                f"{self.config.max_prompt_length}"
            )
        return input_ids

    async def _ask(self, input_ids: list[int], seed: int) -> GenerateOutput:
        """Asks the server with the fewest samples. Raises RolloutError if it refuses."""
        from scalerl.rollout.dispatcher import generate_samples

        async with self.room:
            server = min(range(len(self.num_running)), key=self.num_running.__getitem__)
            self.num_running[server] += 1
            try:
                (output,) = await generate_samples(
                    [self.replacements.clients[server]],
                    [GenerateRequest(next(self.request_ids), input_ids, 1, self.sampling, [seed])],
                    replacements=self.replacements,
                )
            finally:
                self.num_running[server] -= 1
        return output


class JudgeServers:
    """The judge's server processes, on the driver; all rollout workers ask them. news: pending report of lost servers
    -> worker that reports."""

    def __init__(
        self, pool: ResourcePool, config: JudgeConfig, *, log_dir: Path, timeout_s: float, single_node: bool
    ) -> None:
        """Starts the servers on devices that nobody else has; `connect` waits until they answer.

        log_dir: gets their logs.  single_node: whether they, the rollout workers and this process are on one machine.
        """
        from scalerl.rollout.servers.server_set import ServerSet

        self.timeout_s = timeout_s
        self.servers = ServerSet(
            client_settings(config),
            pool,
            ModelConfig(path=str(config.model.path), trust_remote_code=config.model.trust_remote_code),
            config,
            gpu_ids=None,
            log_dir=log_dir,
            timeout_s=timeout_s,
            owns_devices=True,
            single_node=single_node,
        )
        self.servers.start()

    def connect(self, workers: Sequence[Any]) -> None:
        """Waits until the servers answer, and connects the rollout workers to them. workers: their handles, which share
        each server's places. Raises ServerStartError with the last log lines of a server."""
        self.servers.wait_ready()
        self.workers = list(workers)
        settings = self.servers.settings
        share = replace(settings, max_concurrency=-(-settings.max_concurrency // len(self.workers)))
        self._ask([worker.connect_judge.remote(self.servers.replicas, share) for worker in self.workers])
        self.news = {worker.next_lost_judge.remote(): worker for worker in self.workers}

    def replace_lost(self, told: Any) -> None:
        """Restarts the servers that a report in `news` names. Raises RolloutError when a server has no restart left."""
        worker = self.news.pop(told)
        lost: list[LostServer] = self._ask([told])[0]
        if self.servers.end_lost(lost):
            successors = self.servers.restart_down()
            # The workers send the requests of the lost servers again.
            self._ask([each.replace_judge.remote(successors) for each in self.workers])
        self.news[worker.next_lost_judge.remote()] = worker

    def _ask(self, calls: list[Any]) -> list[Any]:
        from scalerl.cluster.failures import values_of

        return values_of("judge", calls, self.timeout_s)

    @property
    def num_restarts(self) -> int:
        """The number of restarts in this run."""
        return self.servers.num_restarts

    def leave(self) -> None:
        """Ends the servers: the next run starts its judge while its other processes start."""
        self.stop()

    def stop(self) -> None:
        self.servers.stop()
