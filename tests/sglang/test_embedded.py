"""What only the embedded engine promises: exact replay, and refusals where SGLang stays silent."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from scalerl.rollout.dispatcher import generate_samples
from scalerl.rollout.servers.buckets import Bucket
from scalerl.rollout.servers.client import GenerateOutput, GenerateRequest, RolloutClient, RolloutError, SamplingParams
from scalerl.rollout.servers.engines import ENGINES
from scalerl.rollout.servers.requests import unfinished_requests
from tests.sglang.conftest import MAX_MODEL_LEN, PROMPTS, Engine, Model
from tests.unit.rollout.servers.test_buckets import place_of

SAMPLED = SamplingParams(max_new_tokens=16, temperature=1.0, ignore_eos=True)


pytestmark = pytest.mark.parametrize("shared_engine", ["embedded"], indirect=True)


@pytest.fixture
def embedded(engine: Engine) -> Engine:
    return engine


def test_a_step_replays_bitwise_whatever_the_order_the_batching_and_the_number_of_servers(embedded: Engine) -> None:
    mixed = [SAMPLED, replace(SAMPLED, temperature=0.6, top_p=0.8), replace(SAMPLED, temperature=0.0)]
    requests = [
        GenerateRequest(row, PROMPTS[row % 5] + [row], 3, mixed[row % 3], [row, 50 + row, 99 + row])
        for row in range(15)
    ]
    together = bits(embedded.generate(requests))
    assert bits(embedded.generate(requests[::-1])) == together
    alone = [output for request in requests[:4] for output in embedded.generate([request])]
    assert bits(alone).items() <= together.items()
    clients = [
        RolloutClient(
            embedded.client.url, "embedded", key=embedded.server.key, max_model_len=MAX_MODEL_LEN, max_concurrency=limit
        )
        for limit in (3, 5, 40)
    ]
    assert bits(asyncio.run(generate_samples(clients, requests))) == together
    sampled = [ids for (request, _), (ids, _) in together.items() if request % 3 < 2]
    assert len(set(sampled)) == len(sampled)


def test_an_interruption_does_not_change_what_is_drawn(embedded: Engine) -> None:
    requests = [GenerateRequest(row, prompt, 2, SAMPLED, [row, 50 + row]) for row, prompt in enumerate(PROMPTS)]
    whole = {output.key: output for output in embedded.generate(requests)}
    cut = [
        replace(o, output_ids=o.output_ids[:k], logprobs=o.logprobs[:k], finish_reason="abort")
        for k, o in enumerate(whole.values())
    ]
    for output in embedded.generate(unfinished_requests(requests, cut)):
        assert output.output_ids == whole[output.key].output_ids
        assert output.logprobs == pytest.approx(whole[output.key].logprobs, abs=1e-5)


def bits(outputs: list[GenerateOutput]) -> dict[tuple[int, int], tuple[tuple[int, ...], tuple[float, ...]]]:
    return {output.key: (tuple(output.output_ids), tuple(output.logprobs)) for output in outputs}


def test_seeds_are_required(embedded: Engine) -> None:
    with pytest.raises(ValueError, match="needs seeds, one per sample"):
        embedded.generate([GenerateRequest("p", [5], 2, SAMPLED)])


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("model.nope.weight", "has no parameter .*model.nope"),
        ("model.norm.weight", r"model.norm.weight has shape \[3\]"),
    ],
)
def test_an_unknown_name_or_a_wrong_shape_is_refused_and_nothing_of_the_bucket_is_loaded(
    embedded: Engine, model_b: Model, bad: str, message: str, is_mapped: bool
) -> None:
    before = embedded.client.checksums()
    embedded.client.begin_weight_update()
    named = [("lm_head.weight", dict(model_b.weights())["lm_head.weight"]), (bad, torch.zeros(3))]
    bucket = Bucket(named, place_of(named) if is_mapped else None)
    try:
        with pytest.raises(RolloutError, match=message):
            embedded.client.update_weights([ENGINES["embedded"].serialize(bucket)], is_mapped=is_mapped)
    finally:
        embedded.client.end_weight_update(0)
    assert embedded.client.checksums() == before


def test_generation_in_an_open_session_or_with_released_memory_is_refused(embedded: Engine) -> None:
    embedded.client.begin_weight_update()
    try:
        with pytest.raises(RolloutError, match="session is open"):
            embedded.generate([GenerateRequest("p", [5], 1, SAMPLED, [1])])
    finally:
        embedded.client.end_weight_update(0)
    embedded.client.release(["kv_cache"])
    with pytest.raises(RolloutError, match="released"):
        embedded.generate([GenerateRequest("p", [5], 1, SAMPLED, [1])])
    embedded.client.resume(["kv_cache"])
