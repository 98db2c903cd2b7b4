"""Trainer weights, of dense models and of mixtures, reach a real SGLang server by CUDA IPC; its checksums prove it.

    python -m pytest tests/gpu/test_weight_sync.py -q

Ran on one H100 (docs/gpu.md). Experts shared over ranks need
two GPUs. That buckets are asked for outside of expandable segments, tests/unit/rollout/servers/test_checksums.py shows
on a CPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from scalerl.cluster.probes.gpu import check_ipc
from scalerl.rollout.servers.client import GenerateOutput, RolloutClient
from tests.gpu.conftest import MIXTURE, PROMPTS, generate, make_gpu_model
from tests.gpu.isolated import run_isolated_ranks

# Several buckets, the largest tensor (the embedding, 32 MiB) in one of its own.
BUCKET_BYTES = 8 * 2**20
# Nats. bfloat16 logits of a few units are off by some hundredths; those of another model by units.
LOGPROB_BOUND = 0.15


def sync_then_move_on(
    model_path: str, url: str, key: str, dtype: str, changed: str, own: Mapping[str, Any], quantization: str | None
) -> dict[str, Any]:
    """Runs on each rank: syncs an engine's weights, then changes them; the first asks whether the checksums notice.

    The server has as many ranks.  own: its own arguments.  quantization: of its weights.
    """
    from scalerl.config.schema import MegatronConfig
    from scalerl.parallel import platform
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize
    from scalerl.rollout.servers.checksums import checksum_differences
    from scalerl.rollout.servers.client import Replica
    from scalerl.rollout.sync.quantized import quantized_tensors
    from scalerl.rollout.sync.weight_sync import WeightSync
    from tests.served_weights import expected_checksums

    num_ranks, kwargs = int(os.environ["WORLD_SIZE"]), {"sglang": own}
    groups = initialize(Layout(num_ranks), backend=platform.backend(), timeout_s=120, seed=1)
    engine = MegatronEngine(model_path, MegatronConfig(dtype=dtype), groups, optim=None)
    config = json.loads((Path(model_path) / "config.json").read_text())
    sync = WeightSync(
        engine,
        [Replica(url, "sglang", num_ranks, key, kwargs, quantization)],
        config,
        bucket_bytes=BUCKET_BYTES,
        timeout_s=300,
    )
    report = dict(vars(sync.sync(7, verify=True)))

    with torch.no_grad():
        dict(engine.chunks[0].named_parameters())[changed].view(-1)[0] += 1.0
    stream = [named for bucket in engine.export_buckets(BUCKET_BYTES) for named in bucket]
    if quantization is not None:
        stream = list(quantized_tensors(stream))
    segments = torch.cuda.memory_snapshot() if engine.device == "cuda" else []
    report |= {
        "devices": {tensor.device.type for _, tensor in stream},
        "is_expandable": any(segment["is_expandable"] for segment in segments),
    }
    if url not in sync.clients:
        return report
    expected = expected_checksums(stream, config, num_ranks, "sglang", engine_kwargs=kwargs)
    return report | {"wrong": checksum_differences(expected, sync.clients[url].checksums())}


def logprob_difference(model_path: Path, outputs: list[GenerateOutput], quantile: float) -> float:
    """Of the server's log-probs of its own tokens to those of transformers in float32, a quantile over the tokens.

    quantile: 1 for the worst token; of a mixture the median, as rounding sends some tokens to other experts.
    """
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    differences = []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt + output.output_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(output.output_ids)[:, None])[:, 0]
        differences.append((torch.tensor(output.logprobs) - expected).abs())
    return float(torch.cat(differences).quantile(quantile))


def check_sync(
    client: RolloutClient,
    model_a: Path,
    model_b: Path,
    *,
    device: str,
    dtype: str,
    changed: str = "decoder.layers.1.mlp.linear_fc2.weight",
    named: str = "layers.1.mlp.down_proj",
    quantile: float = 1.0,
    num_ranks: int = 1,
    own: Mapping[str, Any] | None = None,
    is_expandable: bool = False,
    quantization: str | None = None,
) -> None:
    """changed: a parameter of the trainer's.  named: what the server has it in.  quantile: as `logprob_difference`.

    num_ranks: of the trainer and of the server, side by side on as many GPUs.  own: the server's own arguments.
    is_expandable: whether the trainer has expandable segments.  quantization: of the server's weights, which has none
    before the sync.
    """
    if quantization is None:
        assert logprob_difference(model_a, generate(client), quantile) < LOGPROB_BOUND
    assert logprob_difference(model_b, generate(client), quantile) > 3 * LOGPROB_BOUND

    report, *_ = run_isolated_ranks(
        num_ranks,
        sync_then_move_on,
        *(str(model_b), client.url, client.key, dtype, changed, own or {}, quantization),
        device=device,
    )

    assert report["devices"] == {device} and report["is_expandable"] == is_expandable
    assert report["num_bytes"] > 2 * BUCKET_BYTES
    # One changed number in one tensor, and only that one is named.
    (wrong,) = report["wrong"]
    assert named in wrong
    outputs = generate(client)
    assert {output.policy_version for output in outputs} == {7}
    assert logprob_difference(model_b, outputs, quantile) < LOGPROB_BOUND


def test_the_server_serves_the_trainers_weights(
    start_server: Callable[..., RolloutClient], model_a: Path, model_b: Path
) -> None:
    check_sync(start_server(model_a), model_a, model_b, device="cuda", dtype="bfloat16")


def test_the_server_serves_the_weights_of_a_trainer_with_expandable_segments(
    start_server: Callable[..., RolloutClient], model_a: Path, model_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buckets are outside of them. The server, which is started in the same environment, has none."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:True")
    check_sync(start_server(model_a), model_a, model_b, device="cuda", dtype="bfloat16", is_expandable=True)


def test_doctors_probe_hands_memory_over_with_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    finding = check_ipc("cuda")
    assert finding.ok, finding


@pytest.mark.parametrize(
    ("family", "named"),
    [("qwen3_moe", "mlp.experts.w2_weight"), ("mixtral", "block_sparse_moe.experts.w2_weight")],
)
def test_a_server_of_a_mixture_serves_the_trainers_weights(
    start_server: Callable[..., RolloutClient], tmp_path: Path, family: str, named: str
) -> None:
    """All experts of a layer are one tensor of the server's, as it is loaded."""
    models = [make_gpu_model(tmp_path / str(seed), seed, family, **MIXTURE) for seed in (0, 1)]
    changed = "decoder.layers.1.mlp.experts.linear_fc2.weight"
    client = start_server(models[0], synced=True)
    named = f"layers.1.{named}"
    check_sync(client, *models, device="cuda", dtype="bfloat16", changed=changed, named=named, quantile=0.5)


@pytest.mark.parametrize(
    ("family", "changed", "named"),
    [
        ("qwen3", "decoder.layers.1.mlp.linear_fc2.weight", "layers.1.mlp.down_proj"),
        ("qwen3_moe", "decoder.layers.1.mlp.experts.linear_fc2.weight", "layers.1.mlp.experts.w2_weight"),
    ],
)
def test_a_server_in_fp8_serves_what_the_trainer_has_rounded(
    start_server: Callable[..., RolloutClient], tmp_path: Path, family: str, changed: str, named: str
) -> None:
    """With activations that its kernels round, too."""
    models = [make_gpu_model(tmp_path / str(seed), seed, family, **MIXTURE) for seed in (0, 1)]
    client = start_server(models[0], synced=True, quantization="fp8")
    where = {"changed": changed, "named": named, "quantile": 0.5, "quantization": "fp8"}
    check_sync(client, *models, device="cuda", dtype="bfloat16", **where)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="experts are shared over two GPUs")
@pytest.mark.parametrize(("family", "own"), [
    ("qwen3_moe", {"ep_size": 2}),
    ("mixtral", {"ep_size": 2}),
    ("qwen3_moe", {"moe_a2a_backend": "deepep"}),
])  # fmt: skip
def test_a_server_whose_ranks_share_experts_serves_the_trainers_weights(
    start_server: Callable[..., RolloutClient], tmp_path: Path, family: str, own: dict[str, Any]
) -> None:
    """Each GPU has half of the experts; the changed number is the first expert's, on the first."""
    models = [make_gpu_model(tmp_path / str(seed), seed, family, **MIXTURE) for seed in (0, 1)]
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    check_sync(
        start_server(models[0], synced=True, num_gpus=2, **own),
        *models,
        device="cuda",
        dtype="bfloat16",
        changed="decoder.layers.1.mlp.experts.linear_fc2.weight",
        named=f"rank 0 model.layers.1.{block}.experts.w2_weight",
        quantile=0.5,
        num_ranks=2,
        own=own,
    )
