"""What only the embedded engine promises: exact replay, and refusals where SGLang stays silent."""

from __future__ import annotations

import pytest
import torch

from scalerl.rollout.client import GenerateRequest, RolloutError, SamplingParams
from scalerl.rollout.weights import serialize_bucket
from tests.sglang.conftest import PROMPTS, Engine, Model

SAMPLED = SamplingParams(max_new_tokens=16, temperature=1.0, ignore_eos=True)


pytestmark = pytest.mark.parametrize("shared_engine", ["embedded"], indirect=True)


@pytest.fixture
def embedded(engine: Engine) -> Engine:
    return engine


def test_a_sample_depends_on_its_seed_and_not_on_its_batch(embedded: Engine) -> None:
    requests = [GenerateRequest(row, prompt, 3, SAMPLED, [row, 50 + row, 99]) for row, prompt in enumerate(PROMPTS)]
    together = embedded.generate(requests)
    reversed_order = embedded.generate(requests[::-1])
    alone = [output for request in requests for output in embedded.generate([request])]
    key = lambda output: (output.request_id, output.sample_index)  # noqa: E731
    tokens = {key(output): output.output_ids for output in together}
    assert {key(output): output.output_ids for output in reversed_order} == tokens
    assert {key(output): output.output_ids for output in alone} == tokens
    assert len({tuple(ids) for ids in tokens.values()}) == len(tokens)


def test_seeds_are_required(embedded: Engine) -> None:
    with pytest.raises(ValueError, match="needs seeds"):
        embedded.generate([GenerateRequest("p", [5], 2, SAMPLED, [1])])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("model.nope.weight", "has no parameter .*model.nope"),
        ("model.norm.weight", r"model.norm.weight has shape \[3\]"),
    ],
)
def test_an_unknown_name_or_a_wrong_shape_is_refused_and_nothing_of_the_bucket_is_loaded(
    embedded: Engine, model_b: Model, bad: str, message: str
) -> None:
    before = embedded.client.checksums()
    embedded.client.begin_weight_update()
    bucket = [("lm_head.weight", dict(model_b.weights())["lm_head.weight"]), (bad, torch.zeros(3))]
    try:
        with pytest.raises(RolloutError, match=message):
            embedded.client.update_weights([serialize_bucket(bucket, "embedded")], flush_cache=True)
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
