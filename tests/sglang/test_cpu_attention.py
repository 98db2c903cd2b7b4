"""SGLang on a CPU attends in batched calls: by SGLang's plugin and registry, with the numbers of its own loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from scalerl.rollout.servers.client import GenerateRequest, SamplingParams
from scalerl.rollout.servers.connection import authorization
from scalerl.rollout.servers.sglang.cpu_shim import shim_environment
from scalerl.rollout.servers.sglang.plugin import ATTENTION_BACKEND
from tests.sglang.conftest import MAX_PREFILL_TOKENS, Engine, Model, server_info

REPOSITORY = Path(__file__).resolve().parents[2]
GREEDY = SamplingParams(max_new_tokens=16, temperature=0.0)
on_sglang = pytest.mark.parametrize("shared_engine", ["sglang"], indirect=True)


@pytest.fixture(scope="module")
def compared() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.sglang.compare_attention"],
        cwd=REPOSITORY, env=os.environ | shim_environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("case", "most_calls", "tolerance"), [
    ("decode", 1, 1e-6), ("extend", 2, 1e-6), ("one decode", 1, 1e-6),
    ("bfloat16 decode", 1, 2e-2), ("bfloat16 extend", 2, 2e-2),
])  # fmt: skip
def test_a_batch_takes_few_calls_and_has_the_numbers_of_sglangs_loop(
    compared: dict[str, Any], case: str, most_calls: int, tolerance: float
) -> None:
    comparison = compared[case]
    assert comparison["ours"] <= most_calls <= comparison["loop"]
    assert comparison["difference"] <= tolerance


@pytest.mark.parametrize("case", [
    "window decode", "window extend", "encoder decode", "encoder extend", "cross decode", "both directions extend",
    "narrow values decode",
])  # fmt: skip
def test_what_the_calls_do_not_honour_is_left_to_sglangs_loop(compared: dict[str, Any], case: str) -> None:
    comparison = compared[case]
    assert (comparison["ours"], comparison["difference"]) == (comparison["loop"], 0.0)


def test_sglang_knows_our_backend_by_a_name_of_its_own(compared: dict[str, Any]) -> None:
    """A user who asks for SGLang's gets that one."""
    assert compared["taken"] == ATTENTION_BACKEND
    assert compared["classes"] == {
        "torch_native": "sglang.srt.layers.attention.torch_native_backend",
        ATTENTION_BACKEND: "scalerl.rollout.servers.sglang.cpu_attention_backend",
    }


def test_nothing_beside_our_backend_runs_in_triton(compared: dict[str, Any]) -> None:
    assert (compared["positions"], compared["last"]) == ([3, 4, 0], [10, -1])


def batch_call(engine: Engine, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """SGLang's own answers, which say how much of a prompt was cached."""
    sampling = {"max_new_tokens": GREEDY.max_new_tokens, "temperature": GREEDY.temperature}
    body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
    headers = {"Content-Type": "application/json"} | authorization(engine.server.key)
    request = urllib.request.Request(f"{engine.client.url}/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120.0) as response:
        return json.loads(response.read())


@on_sglang
def test_the_server_runs_our_backend(engine: Engine) -> None:
    assert server_info(engine.client)["attention_backend"] == ATTENTION_BACKEND


@on_sglang
def test_the_server_has_the_tokens_of_a_prefill_that_a_command_of_verl_asks_for(engine: Engine) -> None:
    assert server_info(engine.client)["max_prefill_tokens"] == MAX_PREFILL_TOKENS


@on_sglang
def test_a_ragged_batch_has_the_tokens_and_logprobs_of_transformers(engine: Engine, model_a: Model) -> None:
    prompts = [[3 + (7 * row + 11 * place) % 500 for place in range(1 + 5 * row)] for row in range(15)]
    requests = [GenerateRequest(row, prompt, 1, GREEDY, [row]) for row, prompt in enumerate(prompts)]
    for prompt, output in zip(prompts, engine.generate(requests), strict=True):
        assert output.output_ids == model_a.greedy(prompt, 16)
        expected = model_a.logprobs(prompt, output.output_ids, 1.0)
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=2.5e-5, rtol=0)


@on_sglang
def test_a_cached_prefix_changes_no_number(engine: Engine, model_a: Model) -> None:
    """Prompts that begin alike: the second call computes what follows the cached prefix only."""
    prefix = [3 + (13 * place) % 500 for place in range(40)]
    prompts = [prefix + [100 + 10 * row + place for place in range(1 + 3 * row)] for row in range(6)]
    for asked in ([prefix], prompts):
        for prompt, answer in zip(asked, batch_call(engine, asked), strict=True):
            meta = answer["meta_info"]
            assert asked is not prompts or meta["cached_tokens"] >= len(prefix)
            assert answer["output_ids"] == model_a.greedy(prompt, 16)
            expected = model_a.logprobs(prompt, answer["output_ids"], 1.0)
            logprobs = torch.tensor([logprob for logprob, *_ in meta["output_token_logprobs"]])
            torch.testing.assert_close(logprobs, expected, atol=2.5e-5, rtol=0)
