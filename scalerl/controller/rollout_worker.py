"""`RolloutWorker`: a Ray actor that turns prompts into scored samples and keeps their tokens for the trainer."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from scalerl.protocol import DataProto, Jagged

if TYPE_CHECKING:
    from scalerl.config.schema import CustomRewardFunctionConfig, RewardModelConfig, RolloutConfig
    from scalerl.controller.replacements import LostServer
    from scalerl.data import PromptRow
    from scalerl.hybrid.replicas import Replica
    from scalerl.rollout.client import GenerateOutput, RolloutClient, SamplingParams


@dataclass(frozen=True)
class Generated:
    """What the controller learns of a batch. samples: column -> [S]; gen_s, reward_wait_s: seconds.

    num_resubmitted: samples that were asked again because of their server.  missing: servers that were lost and have no
    successor yet.
    """

    batch_id: int
    samples: dict[str, np.ndarray]
    gen_s: float
    # Scoring runs while other samples generate; this is what was left when the last one had come.
    reward_wait_s: float
    num_resubmitted: int
    missing: list[LostServer]


class RolloutWorker:
    def __init__(
        self,
        datasets: dict[str, Any],
        tokenizer_path: str,
        *,
        reward: RewardModelConfig,
        custom_reward: CustomRewardFunctionConfig,
        trust_remote_code: bool,
    ) -> None:
        """datasets: `train` and `val` -> [reference to an RLHFDataset] (in a list, so that Ray does not copy it)."""
        import ray

        from scalerl.data import load_tokenizer
        from scalerl.rewards import build_reward_manager

        self.datasets = {name: ray.get(ref) for name, (ref,) in datasets.items()}
        self.tokenizer = load_tokenizer(tokenizer_path, trust_remote_code)
        self.rewards = build_reward_manager(reward, custom_reward)
        self.model_scores = reward.enable
        self.batches: dict[int, DataProto] = {}
        self.batch_ids = itertools.count()

    def connect(self, replicas: Sequence[Replica], rollout: RolloutConfig, max_model_len: int) -> None:
        from scalerl.controller.replacements import Replacements

        self.seed, self.rollout, self.max_model_len = rollout.seed, rollout, max_model_len
        self.clients = [self._client(replica) for replica in replicas]
        self.replacements = Replacements(self.clients)

    def _client(self, replica: Replica) -> RolloutClient:
        from scalerl.rollout.client import RolloutClient

        return RolloutClient(
            replica.url,
            replica.kind,
            max_model_len=self.max_model_len,
            timeout_s=self.rollout.request_timeout_s,
            max_concurrency=self.rollout.max_num_seqs,
        )

    async def next_lost(self) -> list[LostServer]:
        """Servers that a generation lost; waits for it. Each is told once."""
        return await self.replacements.next_lost()

    def replace(self, successors: dict[int, Replica]) -> None:
        """Restarted servers; no generation uses them before `in_service`."""
        for index, replica in successors.items():
            self.replacements.put(index, self._client(replica))

    async def in_service(self, indices: Sequence[int]) -> None:
        """Restarted servers have the trainer's weights: generations that wait for them go on."""
        await self.replacements.in_service(list(indices))

    async def are_well(self, indices: Sequence[int]) -> list[bool]:
        return list(await asyncio.gather(*(self.clients[index].is_well() for index in indices)))

    async def generate(
        self, dataset: str, uids: Sequence[int], n: int, sampling: SamplingParams, *, step: int, keep: bool
    ) -> Generated:
        """n samples for each prompt, scored as they finish. keep: hold the tokens for `shard` until `drop`.

        A server that is lost is told by `next_lost`; what it had goes to the others, and to its successor.

        Raises RewardError as the reward manager does, RolloutError when a server refuses, ValueError for a prompt that
        asks for a sampling that it cannot have.
        """
        from scalerl.controller.replacements import Resubmissions
        from scalerl.rollout.client import GenerateRequest
        from scalerl.rollout.generation import generate_samples

        start = time.perf_counter()
        prompts = {uid: self.datasets[dataset][uid] for uid in uids}
        # A prompt may come twice in a step that runs over the end of an epoch.
        owners = list(uids)
        requests = [
            GenerateRequest(
                request_id=position,
                input_ids=prompts[uid].input_ids,
                n=n,
                sampling=sampling_of(dataset, prompts[uid], sampling),
                seeds=[sample_seed(self.seed, step, position, sample) for sample in range(n)],
            )
            for position, uid in enumerate(owners)
        ]
        scoring: dict[tuple[int, int], asyncio.Task] = {}

        def score(output: GenerateOutput) -> None:
            prompt = prompts[owners[output.request_id]]
            scoring[output.request_id, output.sample_index] = asyncio.ensure_future(
                self._score(dataset, prompt, output)
            )

        again = Resubmissions(self.replacements)
        try:
            outputs = await generate_samples(self.clients, requests, score, recovery=again)
            gen_s = time.perf_counter() - start
            results = await asyncio.gather(*(scoring[o.request_id, o.sample_index] for o in outputs))
        finally:
            for task in scoring.values():
                task.cancel()
        batch = _to_batch(outputs, [prompts[owners[o.request_id]] for o in outputs], results)
        batch_id = next(self.batch_ids)
        if keep:
            self.batches[batch_id] = batch
        reward_wait_s = time.perf_counter() - start - gen_s
        missing = list(self.replacements.missing.values())
        return Generated(batch_id, batch.samples, gen_s, reward_wait_s, again.num_samples, missing)

    async def _score(self, dataset: str, prompt: PromptRow, output: GenerateOutput) -> Any:
        from scalerl.rewards import ScoreRequest, ScoreResult

        if self.model_scores and prompt.reward_style == "model":
            # Until the reward model has seen it: no advantage can be made of it.
            return ScoreResult(float("nan"))
        return await self.rewards.score(
            ScoreRequest(
                sample_name=f"{dataset} prompt {prompt.uid} sample {output.sample_index}",
                data_source=prompt.data_source,
                prompt_str=prompt.messages[-1]["content"],
                solution_str=self.tokenizer.decode(output.output_ids, skip_special_tokens=True),
                ground_truth=prompt.ground_truth,
                extra_info=prompt.extra_info,
                response_length=len(output.output_ids),
            )
        )

    def shard(self, batch_id: int, rows: Sequence[int]) -> DataProto:
        """The token columns of these rows: what one data-parallel rank trains on."""
        return DataProto(self.batches[batch_id].select(rows).tokens)

    def drop(self, batch_id: int) -> None:
        self.batches.pop(batch_id, None)

    def texts(self, batch_id: int, rows: Sequence[int]) -> list[tuple[str, str]]:
        """(prompt, response) as text, special tokens kept."""
        batch = self.batches[batch_id].select(rows)
        decoded = []
        for row, prompt_length in enumerate(batch.samples["prompt_length"]):
            ids = batch.tokens["input_ids"][row].tolist()
            decoded.append((self.tokenizer.decode(ids[:prompt_length]), self.tokenizer.decode(ids[prompt_length:])))
        return decoded

    def dump(self, batch_id: int, samples: dict[str, np.ndarray], path: str) -> None:
        """One parquet of the batch: texts, token ids, log-probs, scores, versions. Written whole or not at all.

        samples: the sample columns as they are by now.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        batch = self.batches[batch_id]
        texts = self.texts(batch_id, range(len(batch)))
        columns: dict[str, Any] = {name: list(column) for name, column in samples.items() if name != "reward_extra"}
        columns |= {name: [column[row].tolist() for row in range(len(batch))] for name, column in batch.tokens.items()}
        columns |= {"prompt": [prompt for prompt, _ in texts], "response": [response for _, response in texts]}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        partial = f"{path}.tmp"
        pq.write_table(pa.table(columns), partial)
        Path(partial).rename(path)

    def release(self) -> dict[int, str]:
        """Frees the servers' device memory (KV cache and weights). -> index: error of those that did not."""
        return self._tell_all(lambda client: client.release(["kv_cache", "weights"]))

    def resume(self, tags: Sequence[str]) -> dict[int, str]:
        """Of what each server released: one that was restarted since has all of it. -> as `release`."""

        def resume(client: RolloutClient) -> None:
            if released := [tag for tag in tags if tag in client.released]:
                client.resume(released)

        return self._tell_all(resume)

    def _tell_all(self, call: Callable[[RolloutClient], None]) -> dict[int, str]:
        from scalerl.rollout.requests import RolloutError

        failed = {}
        for index, client in enumerate(self.clients):
            try:
                call(client)
            except RolloutError as error:
                failed[index] = str(error)
        return failed


def sampling_of(dataset: str, prompt: PromptRow, base: SamplingParams) -> SamplingParams:
    """With what the prompt's extra_info["sampling"] changes. Raises ValueError naming the prompt."""
    from scalerl.rollout.overrides import override_sampling

    name = f"{dataset} prompt {prompt.uid}"
    sampling = override_sampling(base, prompt.extra_info, name)
    if dataset == "train" and sampling.temperature != base.temperature:
        raise ValueError(
            f"{name}: extra_info.sampling.temperature is {sampling.temperature}, the run trains at {base.temperature}: "
            "the log-probs of a step are all at one temperature; leave it out, or set "
            f"actor_rollout_ref.rollout.temperature={sampling.temperature}"
        )
    return sampling


def sample_seed(seed: int, step: int, position: int, sample: int) -> int:
    """63 bits from the four numbers: the same sample of the same step always draws the same."""
    return int(np.random.SeedSequence([seed, step, position, sample]).generate_state(1, np.uint64)[0] >> 1)


def _to_batch(outputs: list[GenerateOutput], prompts: list[PromptRow], results: list[Any]) -> DataProto:
    prompt_lengths = [len(prompt.input_ids) for prompt in prompts]
    rows = list(zip(outputs, prompts, strict=True))
    tokens = {
        "input_ids": Jagged.from_list([p.input_ids + o.output_ids for o, p in rows], torch.int64),
        "response_mask": Jagged.from_list(
            [[False] * len(p.input_ids) + [True] * len(o.output_ids) for o, p in rows], torch.bool
        ),
        "rollout_logprobs": Jagged.from_list([[0.0] * len(p.input_ids) + o.logprobs for o, p in rows], torch.float32),
    }
    samples = {
        "uid": np.array([o.request_id for o in outputs]),
        "prompt_uid": np.array([p.uid for p in prompts]),
        "sample_index": np.array([o.sample_index for o in outputs]),
        "prompt_length": np.array(prompt_lengths),
        "prompt_length_before": np.array([p.prompt_length_before for p in prompts]),
        "response_length": np.array([len(o.output_ids) for o in outputs]),
        "score": np.array([result.score for result in results], dtype=np.float64),
        "reward_failed": np.array([result.error is not None for result in results]),
        "policy_version": np.array([o.policy_version for o in outputs]),
    }
    for name, values in {
        "finish_reason": [o.finish_reason for o in outputs],
        "data_source": [p.data_source for p in prompts],
        "reward_style": [p.reward_style for p in prompts],
        "reward_extra": [result.extra for result in results],
    }.items():
        samples[name] = np.empty(len(outputs), dtype=object)
        samples[name][:] = values
    return DataProto(tokens, samples)
