"""SGLang on a CPU attends as transformers does, in batches of several lengths and after a cached prefix."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
import torch

from scalerl.extras.sglang_cpu.plugin import ATTENTION_BACKEND
from scalerl.rollout.servers.client import GenerateRequest, SamplingParams
from scalerl.rollout.servers.connection import authorization
from tests.sglang.conftest import MAX_PREFILL_TOKENS, Engine, Model, server_info

GREEDY = SamplingParams(max_new_tokens=16, temperature=0.0)
on_sglang = pytest.mark.parametrize("shared_engine", ["sglang"], indirect=True)


def batch_call(engine: Engine, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """SGLang's own answers, which say how much of a prompt was cached."""
    sampling = {"max_new_tokens": GREEDY.max_new_tokens, "temperature": GREEDY.temperature}
    body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
    headers = {"Content-Type": "application/json"} | authorization(engine.server.key)
    request = urllib.request.Request(f"{engine.client.url}/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120.0) as response:
        return json.loads(response.read())


@on_sglang
def test_the_server_runs_the_backend_of_the_plugin(engine: Engine) -> None:
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
