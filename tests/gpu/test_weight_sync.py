"""Trainer weights reach a real SGLang server by CUDA IPC, and its checksums prove it.

NOT RUN YET on a GPU: written from the sources of sglang 0.5.21 on a machine without one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from scalerl.servers.client import GenerateOutput, RolloutClient
from tests.gpu.conftest import MAX_MODEL_LEN, PROMPTS, generate
from tests.gpu.isolated import run_isolated

# Several buckets, the largest tensor (the embedding, 32 MiB) in one of its own.
BUCKET_BYTES = 8 * 2**20
# Nats. bfloat16 logits of a few units are off by some hundredths; those of another model by units.
LOGPROB_BOUND = 0.15


def sync_then_move_on(model_path: str, url: str, key: str, dtype: str) -> dict[str, Any]:
    """Runs alone in a process: syncs an engine's weights, then changes them and asks whether the checksums notice."""
    from scalerl.config.schema import MegatronConfig
    from scalerl.hybrid.weight_sync import WeightSync
    from scalerl.parallel import platform
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize
    from scalerl.servers.replica import Replica
    from scalerl.servers.weights import checksum_differences, expected_checksums

    groups = initialize(Layout(1), backend=platform.backend(), timeout_s=120, seed=1)
    engine = MegatronEngine(model_path, MegatronConfig(dtype=dtype), groups, optim=None)
    config = json.loads((Path(model_path) / "config.json").read_text())
    sync = WeightSync(
        engine,
        [Replica(url, "sglang", 1, key)],
        config,
        bucket_bytes=BUCKET_BYTES,
        max_model_len=MAX_MODEL_LEN,
        timeout_s=300,
    )
    report = sync.sync(7, verify=True)

    with torch.no_grad():
        parameter = dict(engine.chunks[0].named_parameters())["decoder.layers.1.mlp.linear_fc2.weight"]
        parameter[0, 0] += 1.0
    stream = [named for bucket in engine.export_buckets(BUCKET_BYTES) for named in bucket]
    devices = {tensor.device.type for _, tensor in stream}
    expected = expected_checksums(stream, config, 1, "sglang")
    return report | {"devices": devices, "wrong": checksum_differences(expected, sync.clients[url].checksums())}


def worst_logprob_difference(model_path: Path, outputs: list[GenerateOutput]) -> float:
    """Of the server's log-probs of its own tokens to those of transformers in float32, largest over tokens."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    worst = 0.0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt + output.output_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(output.output_ids)[:, None])[:, 0]
        worst = max(worst, float((torch.tensor(output.logprobs) - expected).abs().max()))
    return worst


def check_sync(client: RolloutClient, model_a: Path, model_b: Path, *, device: str, dtype: str) -> None:
    assert worst_logprob_difference(model_a, generate(client)) < LOGPROB_BOUND
    assert worst_logprob_difference(model_b, generate(client)) > 3 * LOGPROB_BOUND

    report = run_isolated(sync_then_move_on, str(model_b), client.url, client.key, dtype, device=device)

    assert report["devices"] == {device}
    assert report["num_bytes"] > 2 * BUCKET_BYTES
    # One changed number in one tensor, and only that one is named.
    (wrong,) = report["wrong"]
    assert "layers.1.mlp.down_proj" in wrong
    outputs = generate(client)
    assert {output.policy_version for output in outputs} == {7}
    assert worst_logprob_difference(model_b, outputs) < LOGPROB_BOUND


def test_the_server_serves_the_trainers_weights(
    start_server: Callable[..., RolloutClient], model_a: Path, model_b: Path
) -> None:
    check_sync(start_server(model_a), model_a, model_b, device="cuda", dtype="bfloat16")
