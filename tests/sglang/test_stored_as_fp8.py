"""Quantized files: the server of a run takes the trainer's weights, and answers as transformers. Of fp8, with YaRN.

At four times the original length the trainer's log-probs are transformers', too (tests/dist/test_yarn.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from scalerl.models import copy_beside_weights, read_config
from scalerl.rollout.servers.checksums import checksum_differences
from scalerl.rollout.servers.client import GenerateRequest, SamplingParams
from tests.lanes import full
from tests.served_weights import expected_checksums
from tests.sglang.conftest import MAX_MODEL_LEN, Engine, Model, make_model
from tests.tiny_models import store_as_fp8, store_as_mxfp4

ORIGINAL, FACTOR = 24, 4
YARN = {"rope_type": "yarn", "factor": float(FACTOR), "original_max_position_embeddings": ORIGINAL}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("stored"),
        "qwen3",
        seed=4,
        head_dim=32,
        max_position_embeddings=ORIGINAL * FACTOR,
        rope_parameters=YARN | {"rope_theta": 10000.0},
    )


@pytest.fixture(scope="module")
def meant(stored: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """What the trainer has of it, and sends."""
    tensors = store_as_fp8(stored)
    path = tmp_path_factory.mktemp("meant")
    copy_beside_weights(stored, path)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return Model.load(path)


@pytest.mark.parametrize("kind", [full("sglang"), "embedded"])
def test_four_times_the_original_length(
    start_engine: Callable[..., Engine], stored: Path, meant: Model, kind: str
) -> None:
    assert MAX_MODEL_LEN == ORIGINAL * FACTOR
    engine = start_engine(kind, stored, synced=True)
    engine.load(meant.weights(), policy_version=3)
    expected = expected_checksums(meant.weights(), read_config(meant.path), 1, kind)
    assert checksum_differences(expected, engine.client.checksums()) == []
    prompt = [7 + i % 400 for i in range(ORIGINAL)]
    sampling = SamplingParams(max_new_tokens=MAX_MODEL_LEN - ORIGINAL, temperature=1.0, ignore_eos=True)
    (output,) = engine.generate([GenerateRequest("p", prompt, 1, sampling, [1])])
    assert len(output.output_ids) == MAX_MODEL_LEN - ORIGINAL and output.policy_version == 3
    ours = torch.tensor(output.logprobs)
    torch.testing.assert_close(ours, meant.logprobs(prompt, output.output_ids, 1.0), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [full("sglang"), "embedded"])
def test_experts_in_mxfp4(start_engine: Callable[..., Engine], tmp_path: Path, kind: str) -> None:
    """As gpt-oss is published."""
    stored = make_model(tmp_path / "stored", "gpt_oss", seed=5, dtype=torch.bfloat16)
    tensors = store_as_mxfp4(stored)
    (tmp_path / "meant").mkdir()
    copy_beside_weights(stored, tmp_path / "meant")
    save_file(tensors, tmp_path / "meant" / "model.safetensors", metadata={"format": "pt"})
    meant = Model.load(tmp_path / "meant")
    engine = start_engine(kind, stored, synced=True)
    engine.load(meant.weights(), policy_version=3)
    expected = expected_checksums(meant.weights(), read_config(meant.path), 1, kind, torch.float32)
    assert checksum_differences(expected, engine.client.checksums()) == []
    prompt, sampling = [7 + i for i in range(30)], SamplingParams(max_new_tokens=16, temperature=1.0, ignore_eos=True)
    (output,) = engine.generate([GenerateRequest("p", prompt, 1, sampling, [1])])
    ours = torch.tensor(output.logprobs)
    torch.testing.assert_close(ours, meant.logprobs(prompt, output.output_ids, 1.0), atol=1e-4, rtol=0)
