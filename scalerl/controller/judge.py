"""A generative judge: `Judge` asks its servers, beside the rollout worker; `JudgeServers` starts and restarts them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.config.schema import JudgeConfig, ModelConfig, RolloutConfig
from scalerl.controller.replacements import LostServer, Replacements
from scalerl.rewards.errors import RewardError
from scalerl.rewards.judge import describe_failure, fill, load_question, read_number
from scalerl.rewards.manager import ScoreRequest, ScoreResult
from scalerl.rollout.requests import GenerateOutput, GenerateRequest, RolloutError, SamplingParams

if TYPE_CHECKING:
    from scalerl.controller.pools import ResourcePool
    from scalerl.hybrid.replicas import Replica
    from scalerl.rollout.client import RolloutClient

ROLLOUT_KEYS, JUDGE_KEYS = "actor_rollout_ref.rollout.", "reward_model.judge."


def max_model_len(config: JudgeConfig) -> int:
    """Tokens of question and answer."""
    return config.max_prompt_length + config.max_response_length


class Judge:
    """Scores samples one by one, up to max_num_seqs at a time on each of its servers."""

    def __init__(self, config: JudgeConfig, on_error: str) -> None:
        """on_error: stop | zero, of the samples without a score. Raises RewardError and DataError as its files do."""
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
        """Of `connect`."""
        assert self._replacements is not None
        return self._replacements

    def connect(self, replicas: Sequence[Replica]) -> None:
        self._replacements = Replacements([self._client(replica) for replica in replicas])
        self.num_running = [0] * len(replicas)
        self.room = asyncio.Semaphore(len(replicas) * self.config.max_num_seqs)

    def _client(self, replica: Replica) -> RolloutClient:
        from scalerl.rollout.client import RolloutClient

        return RolloutClient(
            replica.url,
            replica.kind,
            key=replica.key,
            max_model_len=max_model_len(self.config),
            timeout_s=self.config.request_timeout_s,
            max_concurrency=self.config.max_num_seqs,
        )

    def close(self) -> None:
        """Nobody waits for news any more."""
        if self._replacements is not None:
            self._replacements.close()

    async def replace(self, successors: dict[int, Replica]) -> None:
        """Restarted servers: they have the judge's weights, and take what was asked of the lost ones."""
        for index, replica in successors.items():
            self.replacements.put(index, self._client(replica))
        await self.replacements.in_service(list(successors))

    async def score(self, request: ScoreRequest, seed: int) -> ScoreResult:
        """seed: of what the judge draws, at a temperature above 0, on the embedded engine.

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
            cause = in_keys_of_the_judge(str(error))
            if self.on_error == "zero":
                return ScoreResult(0.0, extra, error=cause)
            raise RewardError(describe_failure(request, cause, text)) from None
        return ScoreResult(number * self.config.scale, {"judge_score": number} | extra)

    def _input_ids(self, request: ScoreRequest) -> list[int]:
        """Raises RewardError for a question that is too long."""
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
        """By the server with the fewest samples. Raises RolloutError for one that refuses."""
        from scalerl.rollout.generation import generate_samples

        async with self.room:
            server = min(range(len(self.num_running)), key=self.num_running.__getitem__)
            self.num_running[server] += 1
            try:
                (output,) = await generate_samples(
                    [self.replacements.clients[server]],
                    [GenerateRequest(next(self.request_ids), input_ids, 1, self.sampling, [seed])],
                    recovery=_OneServer(self.replacements, server),
                )
            finally:
                self.num_running[server] -= 1
        return output


@dataclass(frozen=True)
class _OneServer:
    """`rollout.generation.Recovery` of a request to one server, whose index it is."""

    replacements: Replacements
    index: int

    async def restarted(self, server: int, lost: RolloutClient, error: RolloutError) -> RolloutClient:
        return await self.replacements.successor(self.index, lost, error)

    def resubmitted(self, request: GenerateRequest) -> None:
        pass


class JudgeServers:
    """The driver's side: the processes. lost: news of servers that do not answer."""

    def __init__(
        self, pool: ResourcePool, config: JudgeConfig, *, log_dir: Path, timeout_s: float, single_node: bool
    ) -> None:
        """Starts them on devices that nobody else has; `connect` waits until they answer.

        log_dir: gets their logs.  single_node: whether they and the rollout worker are on one machine.
        """
        from scalerl.controller.replica_set import ReplicaSet

        self.timeout_s = timeout_s
        self.servers = ReplicaSet(
            pool,
            ModelConfig(str(config.model.path), config.model.trust_remote_code),
            server_config(config),
            gpu_ids=None,
            max_model_len=max_model_len(config),
            log_dir=log_dir,
            timeout_s=timeout_s,
            owns_devices=True,
            single_node=single_node,
        )

    def connect(self, worker: Any) -> None:
        """worker: the RolloutWorker's handle. Raises ServerStartError with the last log lines of a server."""
        from scalerl.controller.calls import values_of

        with _keys_of_the_judge():
            self.servers.wait_ready()
        self.worker = worker
        values_of("judge", [worker.connect_judge.remote(self.servers.replicas)], self.timeout_s)
        self.lost = worker.next_lost_judge.remote()

    def replace_lost(self) -> None:
        """Restarts the servers that `lost` tells of. Raises RolloutError when one has no restart left."""
        from scalerl.controller.calls import values_of

        lost: list[LostServer]
        (lost,) = values_of("judge", [self.lost], self.timeout_s)
        with _keys_of_the_judge():
            for server in lost:
                self.servers.end(server.index, server.why)
            restarted = self.servers.restart_down()
        successors = {index: self.servers.replicas[index] for index in restarted}
        values_of("judge", [self.worker.replace_judge.remote(successors)], self.timeout_s)
        self.lost = self.worker.next_lost_judge.remote()

    @property
    def num_restarts(self) -> int:
        """In this run."""
        return sum(self.servers.num_restarts.values())

    def leave(self) -> None:
        """No other run has them: a judge of its own is started quickly enough beside the rest."""
        self.stop()

    def stop(self) -> None:
        self.servers.stop()


def server_config(config: JudgeConfig) -> RolloutConfig:
    """What the judge's servers have in common with those of the policy, without what a trainer needs of them."""
    names = {field.name for field in fields(RolloutConfig)} & {field.name for field in fields(config)}
    return RolloutConfig(**{name: getattr(config, name) for name in names - {"resource_pool"}}, free_cache_engine=False)


def in_keys_of_the_judge(text: str) -> str:
    """Errors of servers name the keys of the policy's."""
    return text.replace(ROLLOUT_KEYS, JUDGE_KEYS)


@contextmanager
def _keys_of_the_judge() -> Iterator[None]:
    from scalerl.controller.worker_group import WorkerError
    from scalerl.rollout.server import ServerStartError

    try:
        yield
    except (RolloutError, ServerStartError, WorkerError) as error:
        raise type(error)(in_keys_of_the_judge(str(error)).replace("rollout server", "judge server")) from error
