"""Servers in fp8: the blocks that a trainer makes arrive, are cut as the servers cut, and mean what they shall mean."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from scalerl.models.block_scales import SCALE_SUFFIX
from scalerl.rollout.servers.checksums import checksum_differences
from scalerl.rollout.servers.client import GenerateRequest, SamplingParams
from scalerl.rollout.sync.quantized import quantized_tensors
from tests.served_weights import expected_checksums
from tests.sglang.conftest import PROMPTS, Engine, Model, make_model

TWO_CORES = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="SGLang on CPU binds each rank to a core of its own"
)
# Each rank of two has whole blocks; the head's rows are no multiple of a block.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "ffn_size": 512,
    "head_dim": 128,
    "vocab_size": 483,
    "initializer_range": 0.05,
}
EXPERTS = {"moe_intermediate_size": 256}
LATENT = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    # SGLang's has heads of hidden size / heads.
    "mixtral": {"num_heads": 2, "head_dim": None},
    "glm4_moe": EXPERTS,
    "deepseek_v3": EXPERTS | LATENT,
    "qwen3_5_moe_text": EXPERTS | {"shared_expert_intermediate_size": 256},
}


def meant(named: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The weights that quantized ones stand for, multiplied out number by number."""
    tensors = dict(named)
    for name in dict(named):
        if name.endswith(SCALE_SUFFIX):
            numbers = tensors[weight := name.removesuffix(SCALE_SUFFIX)].float()
            rows, columns = (torch.arange(size) // 128 for size in numbers.shape)
            tensors[weight] = numbers * tensors.pop(name)[rows[:, None], columns]
    return tensors


def served(model: Model, path: Path, named: list[tuple[str, Tensor]]) -> Model:
    """The model that a server in fp8 has, for transformers."""
    path.mkdir()
    for file in model.path.iterdir():
        if file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
    save_file({name: t.contiguous() for name, t in meant(named).items()}, path / "model.safetensors", {"format": "pt"})
    return Model.load(path)


@pytest.mark.shows("sync", "serve", server="sglang in fp8")
@pytest.mark.parametrize(("family", "tp_size"), [
    ("qwen3", 1),
    pytest.param("qwen3", 2, marks=[TWO_CORES, pytest.mark.full]),
    pytest.param("qwen3_moe", 2, marks=[TWO_CORES, pytest.mark.full]),
    pytest.param("mixtral", 1, marks=pytest.mark.full),
    pytest.param("glm4_moe", 1, marks=pytest.mark.full),
    pytest.param("deepseek_v3", 1, marks=pytest.mark.full),
    pytest.param("deepseek_v3", 2, marks=[TWO_CORES, pytest.mark.full]),
    pytest.param("qwen3_5_moe_text", 1, marks=pytest.mark.full),
])  # fmt: skip
def test_a_server_has_the_blocks_and_computes_with_what_they_mean(
    start_engine: Callable[..., Engine], tmp_path: Path, family: str, tp_size: int
) -> None:
    models = [
        Model.load(make_model(tmp_path / str(seed), family, seed, **SIZES | OF_FAMILY[family])) for seed in (0, 1)
    ]
    config = models[0].hf.config.to_dict()
    engine = start_engine("sglang", models[0].path, tp_size=tp_size, synced=True, quantization="fp8")
    try:
        for version, model in enumerate(models):
            blocks = list(quantized_tensors(model.weights()))
            sent, plain = (sum(tensor.nbytes for _, tensor in named) for named in (blocks, model.weights()))
            assert sent < 0.6 * plain, "of float32 a quarter, but for embedding, head and what stays whole"
            engine.load(blocks, policy_version=version, tp_size=tp_size)
            expected = expected_checksums(blocks, config, tp_size, "sglang", torch.float32)
            assert checksum_differences(expected, engine.client.checksums()) == []

            oracle = served(model, tmp_path / f"meant_{version}", blocks)
            requests = [GenerateRequest(row, p, 1, SamplingParams(8, temperature=1.0)) for row, p in enumerate(PROMPTS)]
            mismatch = []
            for prompt, output in zip(PROMPTS, engine.generate(requests), strict=True):
                theirs = torch.tensor(output.logprobs)
                torch.testing.assert_close(theirs, oracle.logprobs(prompt, output.output_ids, 1.0), atol=1e-5, rtol=0)
                mismatch.append((theirs - model.logprobs(prompt, output.output_ids, 1.0)).abs().max())
            # What is compared above is not the model before its rounding.
            assert max(mismatch) > 1e-3

        # The scale of one block.
        spoiled = [(name, tensor.clone()) for name, tensor in blocks]
        name = next(name for name, _ in spoiled if name.endswith("layers.1.self_attn.o_proj.weight"))
        dict(spoiled)[name + SCALE_SUFFIX][1, 0] *= 1.01
        engine.load(spoiled, policy_version=4, tp_size=tp_size)
        (line,) = checksum_differences(expected, engine.client.checksums())
        # SGLang's layers of a model with gated delta nets are their attention.
        assert re.match(r"rank 0 model\.layers\.1\.(self_attn\.)?o_proj\.weight: trainer ", line)

        # SGLang takes weights that are not quantized too, and keeps the scales of before.
        engine.load(model.weights(), policy_version=5, tp_size=tp_size)
        of_plain = expected_checksums(model.weights(), config, tp_size, "sglang", torch.float32)
        assert any(
            "o_proj.weight: trainer " in line for line in checksum_differences(of_plain, engine.client.checksums())
        )
    finally:
        engine.server.stop()
