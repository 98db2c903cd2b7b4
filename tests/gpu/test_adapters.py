"""An adapter on a real SGLang server on a GPU, beside its model: sent alone, and still there after a release of memory.

Never ran on a GPU.

    python -m pytest tests/gpu/test_adapters.py -q
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scalerl.models import ModelShape
from scalerl.models.adapters import Adapter, projections
from scalerl.rollout.servers.client import Replica, RolloutClient
from scalerl.rollout.servers.requests import POLICY_ADAPTER
from tests.gpu.conftest import MIXTURE, generate, make_gpu_model
from tests.gpu.isolated import run_isolated_ranks
from tests.gpu.test_weight_sync import LOGPROB_BOUND, logprob_difference
from tests.served_adapters import ALPHA, RANK, make_version, sync_adapter


def check_adapter(
    start: Callable[..., RolloutClient], model: Path, directory: Path, device: str, quantile: float
) -> None:
    """quantile: as `logprob_difference`."""
    adapter = Adapter(RANK, ALPHA, projections(ModelShape.from_hf(model)))
    version = make_version(directory, model, 1, size=0.1)
    client = start(model, device=device, adapter=adapter)
    replica = Replica(client.url, "sglang", 1, client.key)
    arguments = str(model), str(directory / "adapter"), adapter, replica, "bfloat16"
    ((num_bytes, error),) = run_isolated_ranks(1, sync_adapter, *arguments, device=device)
    assert num_bytes == 2 * sum(tensor.numel() for tensor in version.tensors.values())
    assert "policy version 42: 1 tensors differ" in error and "layers.1.input_layernorm.weight" in error
    assert logprob_difference(model, generate(client), quantile) < LOGPROB_BOUND
    client.adapter = POLICY_ADAPTER
    before = generate(client)
    assert logprob_difference(directory, before, quantile) < LOGPROB_BOUND
    assert logprob_difference(model, before, quantile) > 3 * LOGPROB_BOUND
    held = client.checksums()
    if device == "cuda":
        for part in ("kv_cache", "weights"):
            client.release(client.engine.memory_tags[part])
        for part in ("weights", "kv_cache"):
            client.resume(client.engine.memory_tags[part])
    assert client.checksums() == held
    assert [output.output_ids for output in generate(client)] == [output.output_ids for output in before]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_an_adapter_sent_alone_outlives_a_release(
    start_server: Callable[..., RolloutClient], tmp_path: Path, family: str
) -> None:
    model = make_gpu_model(tmp_path / "model", 0, family, **(MIXTURE if family == "qwen3_moe" else {}))
    check_adapter(start_server, model, tmp_path / "merged", "cuda", 0.5 if family == "qwen3_moe" else 1.0)
