"""Gated delta nets in SGLang: samples and log-probs are transformers', and checksums what the trainer expects."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scalerl.rollout.servers.checksums import checksum_differences
from scalerl.rollout.servers.client import GenerateRequest, SamplingParams
from tests.served_weights import expected_checksums
from tests.sglang.conftest import PROMPTS, Engine, Model, make_model
from tests.tiny_models import WITH_DELTA_NETS

TWO_CORES = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="SGLang on CPU binds each rank to a core of its own"
)
CASES = [(family, tp_size) for family in WITH_DELTA_NETS for tp_size in (1, 2)]


@pytest.mark.shows("sync", "serve", server="sglang")
@pytest.mark.parametrize(("family", "tp_size"), [
    pytest.param(*case, marks=[TWO_CORES, *([] if case == ("qwen3_5_moe_text", 1) else [pytest.mark.full])])
    for case in CASES
])  # fmt: skip
def test_a_server_holds_and_computes_what_the_trainer_says(
    start_engine: Callable[..., Engine], tmp_path: Path, family: str, tp_size: int
) -> None:
    old, new = (
        Model.load(make_model(tmp_path / str(seed), family, seed, vocab_size=483, num_layers=4)) for seed in (0, 1)
    )

    def checksums_of(model: Model) -> list[dict[str, str]]:
        return expected_checksums(model.weights(), model.hf.config.to_dict(), tp_size, "sglang")

    engine = start_engine("sglang", old.path, tp_size=tp_size)
    try:
        assert checksum_differences(checksums_of(old), engine.client.checksums()) == []

        engine.load(new.weights(), policy_version=3, tp_size=tp_size)
        expected = checksums_of(new)
        assert checksum_differences(expected, engine.client.checksums()) == []
        # Longer than the convolution sees, and several at a time.
        prompts = [*PROMPTS, list(range(40, 75))]
        requests = [GenerateRequest(row, p, 1, SamplingParams(8, temperature=0.0)) for row, p in enumerate(prompts)]
        for prompt, output in zip(prompts, engine.generate(requests), strict=True):
            assert output.output_ids == new.greedy(prompt, 8)
            torch.testing.assert_close(
                torch.tensor(output.logprobs), new.logprobs(prompt, output.output_ids, 1.0), atol=1e-4, rtol=0
            )

        # One number of the keys of the last head: on the last rank.
        name = "model.layers.0.linear_attn.conv1d.weight"
        spoiled = [(n, tensor.clone()) for n, tensor in new.weights()]
        dict(spoiled)[name][63, 0, 1] += 1e-6
        engine.load(spoiled, policy_version=4, tp_size=tp_size)
        (line,) = checksum_differences(expected, engine.client.checksums())
        assert line.startswith(f"rank {tp_size - 1} {name}: trainer ")
    finally:
        engine.server.stop()
