"""SGLang's checksums of a mixture of experts: all experts of a layer in two parameters, cut over ranks and padded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scalerl.models import family_of
from scalerl.rollout.servers.checksums import checksum_differences
from scalerl.rollout.servers.client import GenerateRequest, SamplingParams
from scalerl.rollout.servers.sglang.placement_arguments import MIXTURES
from tests.served_weights import expected_checksums
from tests.sglang.conftest import PROMPTS, Engine, Model, make_model

TWO_CORES = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="SGLang on CPU binds each rank to a core of its own"
)
# Widths that SGLang pads, by (ranks, ranges of experts): with 40 one rank has 24 zeros; with 48 the second of two has
# 16, and as many zeros; with 24 each of two has 40 zeros, as padding is for both, whoever has the expert.
WIDTH_KEY = {
    "qwen3_moe": "moe_intermediate_size",
    "mixtral": "intermediate_size",
    "glm4_moe": "moe_intermediate_size",
    "gpt_oss": "intermediate_size",
    "minimax_m2": "intermediate_size",
}
WIDTH = {(1, 1): 40, (2, 1): 48, (2, 2): 24}
SPOILED = {
    "minimax_m2": (
        "model.layers.1.block_sparse_moe.experts.2.w2.weight",
        "model.layers.1.block_sparse_moe.experts.w2_weight",
    ),
    "glm4_moe": ("model.layers.1.mlp.experts.2.up_proj.weight", "model.layers.1.mlp.experts.w13_weight"),
    "gpt_oss": ("model.layers.1.mlp.experts.down_proj", "model.layers.1.mlp.experts.w2_weight"),
    "qwen3_moe": ("model.layers.1.mlp.experts.2.up_proj.weight", "model.layers.1.mlp.experts.w13_weight"),
    "mixtral": (
        "model.layers.1.block_sparse_moe.experts.2.w2.weight",
        "model.layers.1.block_sparse_moe.experts.w2_weight",
    ),
}


def make(path: Path, family: str, tp_size: int, ep_size: int, seed: int) -> Model:
    width = {WIDTH_KEY[family]: WIDTH[tp_size, ep_size]}
    model = Model.load(make_model(path, family, seed, vocab_size=483, num_experts=4, **width))
    with torch.no_grad():
        for name, parameter in model.hf.named_parameters():
            if name.endswith(".sinks"):
                # A server keeps them in bfloat16 whatever the model's dtype.
                assert not torch.equal(parameter, parameter.bfloat16().float())
                parameter.copy_(parameter.bfloat16())
    return model


def test_every_family_that_is_said_to_be_known_is_here() -> None:
    """Those with latent attention are in test_sync_latent.py, with gated delta nets in test_sync_delta_net.py, with a
    vision tower in test_vision.py."""
    families = {name: family_of({"model_type": name}) for name in MIXTURES}
    others = {name for name, family in families.items() if family.latent or family.delta_net or family.tower}
    assert set(WIDTH_KEY) == families.keys() - others


@pytest.mark.shows("sync", "serve", server="sglang")
@pytest.mark.parametrize(("family", "tp_size", "ep_size"), [
    ("qwen3_moe", 1, 1),
    pytest.param("qwen3_moe", 2, 1, marks=[TWO_CORES, pytest.mark.full]),
    pytest.param("mixtral", 2, 1, marks=[TWO_CORES, pytest.mark.full]),
    pytest.param("qwen3_moe", 2, 2, marks=[TWO_CORES, pytest.mark.full]),
    pytest.param("mixtral", 2, 2, marks=[TWO_CORES, pytest.mark.full]),
    pytest.param("glm4_moe", 1, 1, marks=pytest.mark.full),
    pytest.param("gpt_oss", 1, 1, marks=pytest.mark.full),
    pytest.param("gpt_oss", 2, 1, marks=[TWO_CORES, pytest.mark.full]),
    pytest.param("glm4_moe", 2, 2, marks=[TWO_CORES, pytest.mark.full]),
    pytest.param("minimax_m2", 1, 1, marks=pytest.mark.full),
    pytest.param("minimax_m2", 2, 2, marks=[TWO_CORES, pytest.mark.full]),
])  # fmt: skip
def test_checksums_of_a_mixture(
    start_engine: Callable[..., Engine], tmp_path: Path, family: str, tp_size: int, ep_size: int
) -> None:
    """With ep_size 2 each rank has two of the four experts, whole."""
    old, new = (make(tmp_path / str(seed), family, tp_size, ep_size, seed) for seed in (0, 1))
    own = {"ep_size": ep_size} if ep_size > 1 else {}

    def checksums_of(model: Model) -> list[dict[str, str]]:
        config = new.hf.config.to_dict()
        weights, own_arguments = model.weights(), {"sglang": own}
        return expected_checksums(weights, config, tp_size, "sglang", torch.float32, engine_kwargs=own_arguments)

    engine = start_engine("sglang", old.path, tp_size=tp_size, **own)
    try:
        assert checksum_differences(checksums_of(old), engine.client.checksums()) == []

        engine.load(new.weights(), policy_version=3, tp_size=tp_size)
        expected = checksums_of(new)
        assert checksum_differences(expected, engine.client.checksums()) == []
        requests = [GenerateRequest(row, p, 1, SamplingParams(8, temperature=0.0)) for row, p in enumerate(PROMPTS)]
        for prompt, output in zip(PROMPTS, engine.generate(requests), strict=True):
            assert output.output_ids == new.greedy(prompt, 8)
            torch.testing.assert_close(
                torch.tensor(output.logprobs), new.logprobs(prompt, output.output_ids, 1.0), atol=1e-4, rtol=0
            )

        # One number of one expert: the parameter that it is in is named, on the one rank that has it.
        name, parameter = SPOILED[family]
        rank = 1 if ep_size == 2 else 0
        spoiled = [(n, tensor.clone()) for n, tensor in new.weights()]
        dict(spoiled)[name][3, 5] += 1e-6
        engine.load(spoiled, policy_version=4, tp_size=tp_size)
        (line,) = checksum_differences(expected, engine.client.checksums())
        assert line.startswith(f"rank {rank} {parameter}: trainer ")
    finally:
        engine.server.stop()
