"""A judge on a real server: what it is asked, what counts, while others generate, and when its server is lost."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from safetensors.torch import load_file, save_file

from scalerl.cluster.pools import ResourcePool
from scalerl.config.schema import (
    CustomRewardFunctionConfig,
    DataConfig,
    JudgeConfig,
    JudgeModelConfig,
    ProgramConfig,
    RewardModelConfig,
)
from scalerl.data import RLHFDataset, load_tokenizer
from scalerl.rewards import RewardError, ScoreRequest
from scalerl.rewards.judge import fill
from scalerl.rollout.sampling.groups import SampleGroup
from scalerl.rollout.sampling.judge import Judge, JudgeServers, client_settings
from scalerl.rollout.sampling.worker import RolloutWorker
from scalerl.rollout.servers.client import ClientSettings, Replica, RolloutClient, SamplingParams
from scalerl.rollout.servers.process import RolloutServer, start_on_free_port
from scalerl.rollout.servers.purpose import POLICY
from tests.sglang.conftest import MAX_MODEL_LEN, Model, make_server
from tests.tiny_models import make_tiny_model

TIMEOUT_S = 120.0
QUESTION = "{prompt}|{response}|{ground_truth}"
SAMPLING = SamplingParams(max_new_tokens=6, temperature=1.0, ignore_eos=True)
# More than one: the second can wait for the first.
GROUPS = [SampleGroup(uid, step=1, position=uid) for uid in range(3)]
ASKED = ScoreRequest("train prompt 0 sample 0", "chat", "hello", "goodbye", "sun")


@dataclass(frozen=True)
class Bench:
    """A policy and a judge on servers, prompts for them, and what the judge must say."""

    config: JudgeConfig
    servers: JudgeServers
    policy_path: Path
    policy: RolloutServer
    dataset: RLHFDataset
    oracle: Model

    def worker_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        reward = RewardModelConfig(judge=self.config)
        custom = CustomRewardFunctionConfig()
        kwargs = {"reward": reward, "custom_reward": custom, "program": ProgramConfig(), "trust_remote_code": False}
        return ({"train": [ray.put(self.dataset)]}, str(self.policy_path)), kwargs

    @property
    def policy_arguments(self) -> tuple[list[Replica], ClientSettings, int]:
        # One sample at a time.
        clients = ClientSettings(POLICY, MAX_MODEL_LEN, TIMEOUT_S, max_concurrency=1)
        return [Replica(self.policy.url, "embedded", 1, self.policy.key)], clients, 42

    def text(self, request: ScoreRequest) -> str:
        """The judge's, by transformers."""
        tokenizer = load_tokenizer(self.oracle.path)
        messages = [{"role": "user", "content": fill(QUESTION, request)}]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return tokenizer.decode(self.oracle.greedy(ids, self.config.max_response_length), skip_special_tokens=True)


def rows() -> list[dict[str, Any]]:
    """Two for the judge, then one for the rule of its data source."""
    return [
        {
            "data_source": "openai/gsm8k" if style == "rule" else "chat",
            "prompt": [{"role": "user", "content": content}],
            "ability": "",
            "reward_model": {"style": style, "ground_truth": truth},
            "extra_info": {"index": index},
        }
        for index, (content, style, truth) in enumerate(
            [("a?", "judge", "sun"), ("b?", "judge", None), ("1?", "rule", "1")]
        )
    ]


def make_judge(path: Path) -> Model:
    """A model that writes digits, whatever else it could write has logit 0, and that looks at what it is asked."""
    make_tiny_model(path, "qwen3", seed=5, tied=False)
    tokenizer = load_tokenizer(path)
    digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
    tensors = load_file(path / "model.safetensors")
    head = tensors["lm_head.weight"]
    kept = head[digits].clone()
    head.zero_()
    head[digits] = kept
    for name, tensor in tensors.items():
        if "v_proj" in name or "o_proj" in name:
            tensor *= 10
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return Model.load(path)


@pytest.fixture(scope="module")
def bench(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    directory = tmp_path_factory.mktemp("judge")
    make_tiny_model(directory / "policy", "qwen3", seed=0)
    oracle = make_judge(directory / "judge")
    (directory / "question.txt").write_text(QUESTION)
    pq.write_table(pa.Table.from_pylist(rows()), directory / "rows.parquet")
    rows_file = str(directory / "rows.parquet")
    data = DataConfig(train_files=rows_file, val_files=rows_file, max_prompt_length=64)
    config = JudgeConfig(
        enable=True,
        model=JudgeModelConfig(path=str(directory / "judge")),
        prompt_path=str(directory / "question.txt"),
        pattern=r"^(\d)",
        max_score=9,
        scale=0.5,
        max_prompt_length=200,
        max_response_length=6,
        keep_text=True,
        name="embedded",
        dtype="float32",
        num_replicas=1,
    )
    pool = ResourcePool.create(nnodes=1, devices_per_node=1, device="cpu", timeout_s=TIMEOUT_S)
    servers = JudgeServers(pool, config, log_dir=directory / "logs", timeout_s=TIMEOUT_S, single_node=True)
    policy = start_on_free_port(
        lambda port: make_server("embedded", directory / "policy", directory / "policy.log", port)
    )
    try:
        servers.servers.wait_ready()
        dataset = RLHFDataset(data.train_files, load_tokenizer(directory / "policy"), data)
        yield Bench(config, servers, directory / "policy", policy, dataset, oracle)
    finally:
        policy.stop()
        servers.stop()
        pool.release()


def check(bench: Bench, samples: dict[str, Any], responses: list[str]) -> None:
    """The samples of GROUPS: the judge's numbers are those of its texts, which are those of transformers."""
    assert samples["reward_style"].tolist() == ["judge", "judge", "rule"]
    for index, response in enumerate(responses[:2]):
        row = rows()[index]
        request = replace(
            ASKED,
            prompt_str=row["prompt"][0]["content"],
            solution_str=response,
            ground_truth=row["reward_model"]["ground_truth"],
        )
        text = bench.text(request)
        number = float(text[0])
        extra = {"judge_score": number, "judge_length": 6, "judge_response": text}
        assert samples["reward_extra"][index] == extra
        assert samples["score"][index] == number * 0.5
    assert samples["score"][2] == 0.0 and samples["reward_extra"][2] == {}
    assert not samples["reward_failed"].any()


def test_a_sample_is_judged_while_others_wait_to_be_generated(bench: Bench) -> None:
    """The policy's server stands still until the first sample has its score: no sample could come before that."""
    args, kwargs = bench.worker_arguments()
    policy = RolloutClient(bench.policy.url, "embedded", key=bench.policy.key, max_model_len=MAX_MODEL_LEN)
    order: list[str] = []

    async def run() -> tuple[dict[str, Any], list[str]]:
        worker = RolloutWorker(*args, **kwargs)
        worker.connect(*bench.policy_arguments)
        await worker.connect_judge(bench.servers.servers.replicas, bench.servers.servers.settings)
        score = worker._score

        async def gated(dataset: str, prompt: Any, output: Any) -> Any:
            order.append(f"generated {prompt.uid}")
            if prompt.uid == 0:
                policy.pause()
            result = await score(dataset, prompt, output)
            order.append(f"scored {prompt.uid}")
            if prompt.uid == 0:
                policy.continue_generation()
            return result

        worker._score = gated
        generation = worker.generate("train", GROUPS, 1, SAMPLING, keep=True)
        generated = await asyncio.wait_for(generation, TIMEOUT_S)
        ids = worker.batches[generated.batch_id].tokens["input_ids"]
        lengths = generated.samples["prompt_length"]
        responses = [ids[row].tolist()[lengths[row] :] for row in range(3)]
        return generated.samples, [worker.tokenizer.decode(part, skip_special_tokens=True) for part in responses]

    samples, responses = asyncio.run(run())
    assert order[:2] == ["generated 0", "scored 0"], order
    check(bench, samples, responses)


@pytest.mark.full
def test_a_lost_server_is_replaced_and_asked_again(bench: Bench) -> None:
    """Two rollout workers share the judge; one notices the loss, both go on with the successor."""
    args, kwargs = bench.worker_arguments()
    workers = [
        ray.remote(RolloutWorker).options(num_cpus=0, max_concurrency=64).remote(*args, **kwargs) for _ in range(2)
    ]
    try:
        for worker in workers:
            ray.get(worker.connect.remote(*bench.policy_arguments), timeout=TIMEOUT_S)
        bench.servers.connect(workers)
        ray.get(bench.servers.servers.hosts[0].end.remote(), timeout=TIMEOUT_S)
        call = workers[0].generate.remote("train", GROUPS, 1, SAMPLING, keep=True)
        (told,), _ = ray.wait([call, *bench.servers.news], timeout=TIMEOUT_S)
        assert bench.servers.news[told] is workers[0]
        bench.servers.replace_lost(told)
        later = workers[1].generate.remote("train", GROUPS, 1, SAMPLING, keep=True)
        tokenizer = load_tokenizer(bench.policy_path)
        for worker, made in zip(workers, (call, later), strict=True):
            generated = ray.get(made, timeout=TIMEOUT_S)
            lengths = generated.samples["prompt_length"]
            selected = ray.get(worker.select.remote([(generated.batch_id, range(3))]), timeout=TIMEOUT_S)
            columns = selected.tokens["input_ids"]
            ids = [columns[row].tolist()[lengths[row] :] for row in range(3)]
            check(bench, generated.samples, [tokenizer.decode(part, skip_special_tokens=True) for part in ids])
        assert bench.servers.num_restarts == 1 and len(bench.servers.news) == 2
    finally:
        for worker in workers:
            ray.kill(worker)


PROGRAM = """
async def program(prompt, servers, tools):
    trajectory = servers.begin()
    turn = await servers.generate(trajectory, max_new_tokens=2)
    trajectory.observe(tools.encode("ab"))
    trajectory.extra["said"] = tools.decode(turn.output_ids)
    if prompt.uid:
        trajectory.reward = 7.5
    return trajectory
"""


def test_a_program_may_score_its_own_sample(bench: Bench, tmp_path: Path) -> None:
    """What it leaves without a score the judge reads, observations too; its own values are kept in both cases."""
    (tmp_path / "scoring.py").write_text(PROGRAM)
    args, kwargs = bench.worker_arguments()
    kwargs["program"] = ProgramConfig(str(tmp_path / "scoring.py"))

    async def run() -> tuple[dict[str, Any], list[list[int]], list[list[bool]]]:
        worker = RolloutWorker(*args, **kwargs)
        worker.connect(*bench.policy_arguments)
        await worker.connect_judge(bench.servers.servers.replicas, bench.servers.servers.settings)
        generated = await asyncio.wait_for(worker.generate("train", GROUPS, 1, SAMPLING, keep=True), TIMEOUT_S)
        tokens = worker.batches[generated.batch_id].tokens
        starts = generated.samples["prompt_length"]
        ids, masks = (
            [tokens[name][row].tolist()[starts[row] :] for row in range(3)] for name in ("input_ids", "response_mask")
        )
        return generated.samples, ids, masks

    samples, ids, masks = asyncio.run(run())
    tokenizer = load_tokenizer(bench.policy_path)
    added = len(tokenizer.encode("ab", add_special_tokens=False))
    assert masks == [[True] * 2 + [False] * added] * 3
    assert samples["num_sampled_tokens"].tolist() == [2] * 3
    assert samples["response_length"].tolist() == [2 + added] * 3
    said = [tokenizer.decode(row[:2], skip_special_tokens=True) for row in ids]
    assert samples["score"].tolist()[1:] == [7.5, 7.5]
    assert [extra["said"] for extra in samples["reward_extra"]] == said
    judged_text = bench.text(
        replace(
            ASKED,
            prompt_str="a?",
            solution_str=tokenizer.decode(ids[0], skip_special_tokens=True),
            ground_truth=rows()[0]["reward_model"]["ground_truth"],
        )
    )
    assert samples["reward_extra"][0]["judge_response"] == judged_text
    assert samples["score"][0] == float(judged_text[0]) * 0.5


def judged(bench: Bench, on_error: str, *requests: ScoreRequest, **changes: Any) -> list[Any]:
    """All at the same time."""

    async def run() -> list[Any]:
        judge = Judge(replace(bench.config, **changes), on_error)
        judge.connect(bench.servers.servers.replicas, client_settings(judge.config))
        asked = asyncio.gather(*(judge.score(request, seed=7) for request in requests), return_exceptions=True)
        results_or_errors = await asyncio.wait_for(asked, TIMEOUT_S)
        assert judge.num_running == [0]
        return results_or_errors

    return asyncio.run(run())


def test_a_sample_without_a_number_has_failed(bench: Bench) -> None:
    text = bench.text(ASKED)
    (shown,) = judged(bench, "stop", ASKED, pattern="Score: (.)")
    assert isinstance(shown, RewardError)
    assert re.search("cause: nothing in the judge's text matches .*max_response_length=6", str(shown))
    assert f"judge's text: {text!r}" in str(shown) and "sample train prompt 0 sample 0" in str(shown)
    (counted,) = judged(bench, "zero", ASKED, pattern="Score: (.)", keep_text=False)
    assert (counted.score, counted.extra) == (0.0, {"judge_length": 6}) and "matches" in counted.error


def test_a_sample_whose_question_is_too_long_fails_alone(bench: Bench) -> None:
    long = replace(ASKED, solution_str="x" * 200)
    fine, failed = judged(bench, "zero", ASKED, long)
    assert fine.error is None and fine.score == float(bench.text(ASKED)[0]) * 0.5
    assert failed.extra == {} and "more than reward_model.judge.max_prompt_length=200" in failed.error


@pytest.mark.full
def test_a_server_that_is_well_and_late_is_no_reason_to_end_the_run(bench: Bench) -> None:
    """The engine is busy for longer than the request may take."""
    replica = bench.servers.servers.replicas[0]
    client = RolloutClient(replica.url, "embedded", key=replica.key, max_model_len=206)
    client.pause()
    try:
        (failed,) = judged(bench, "zero", ASKED, request_timeout_s=5.0)
    finally:
        client.continue_generation()
    assert failed.score == 0.0 and "raise reward_model.judge.request_timeout_s" in failed.error


def test_more_samples_than_the_server_takes_wait_for_their_turn(bench: Bench) -> None:
    requests = [replace(ASKED, solution_str=f"{number}") for number in range(12)]
    results = judged(bench, "stop", *requests, max_num_seqs=2)
    assert [result.score for result in results] == [float(bench.text(request)[0]) * 0.5 for request in requests]
    assert len({result.score for result in results}) > 1
