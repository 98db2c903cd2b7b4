"""Trainer weights reach a real SGLang server on a GPU by broadcast and by disk, and its checksums prove it.

    python -m pytest tests/gpu/test_weight_transports.py -q

Ran on one H100 (docs/gpu.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scalerl.config.schema import RolloutConfig
from scalerl.rollout.servers.client import RolloutClient
from scalerl.rollout.servers.engines import ENGINES, Launch
from scalerl.rollout.servers.process import RolloutServer, start_on_free_port
from tests.gpu.conftest import MAX_MODEL_LEN, MEMORY_UTILIZATION, START_TIMEOUT_S, generate
from tests.gpu.isolated import run_isolated
from tests.gpu.test_weight_sync import BUCKET_BYTES, LOGPROB_BOUND, logprob_difference


def sync_twice(
    model_path: str, url: str, key: str, transport: str, backend: str | None, directory: str
) -> list[dict[str, Any]]:
    """Runs alone in a process; checksums are compared by the sync itself."""
    from scalerl.config.schema import MegatronConfig
    from scalerl.parallel import platform
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize
    from scalerl.rollout.servers.client import Replica
    from scalerl.rollout.sync.weight_sync import WeightSync

    groups = initialize(Layout(1), backend=platform.backend(), timeout_s=120, seed=1)
    engine = MegatronEngine(model_path, MegatronConfig(dtype="bfloat16"), groups, optim=None)
    sync = WeightSync(
        engine,
        [Replica(url, "sglang", 1, key)],
        json.loads((Path(model_path) / "config.json").read_text()),
        bucket_bytes=BUCKET_BYTES,
        timeout_s=300,
        transport=transport,
        directory=directory,
        model_path=model_path,
    )
    if backend is not None:
        sync.transport.backend = backend
    return [vars(sync.sync(version, verify=True)) for version in (7, 8)]


def check(client: RolloutClient, model_a: Path, model_b: Path, transport: str, backend: str | None, out: Path) -> None:
    assert logprob_difference(model_a, generate(client), 1.0) < LOGPROB_BOUND
    assert logprob_difference(model_b, generate(client), 1.0) > 3 * LOGPROB_BOUND
    reports = run_isolated(
        sync_twice, str(model_b), client.url, client.key, transport, backend, str(out), device="cuda"
    )
    assert [report["failed"] for report in reports] == [{}, {}]
    assert all(report["num_bytes"] > 2 * BUCKET_BYTES for report in reports)
    outputs = generate(client)
    assert {output.policy_version for output in outputs} == {8}
    assert logprob_difference(model_b, outputs, 1.0) < LOGPROB_BOUND


# NCCL refuses two processes on one GPU; gloo takes tensors on a GPU through the host.
@pytest.mark.parametrize(("transport", "backend"), [("broadcast", "gloo"), ("disk", None)])
def test_on_one_gpu(
    start_server: Callable[..., RolloutClient],
    model_a: Path,
    model_b: Path,
    tmp_path: Path,
    transport: str,
    backend: str | None,
) -> None:
    check(start_server(model_a), model_a, model_b, transport, backend, tmp_path / "weights")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for the trainer and one for the server")
def test_nccl_between_two_gpus(model_a: Path, model_b: Path, tmp_path: Path) -> None:
    rollout = RolloutConfig(dtype="bfloat16", max_num_seqs=16, gpu_memory_utilization=MEMORY_UTILIZATION)

    def make(port: int) -> RolloutServer:
        launch = Launch(str(model_a), rollout, "cuda", MAX_MODEL_LEN, port=port, gpu_ids=[1])
        command, env = ENGINES["sglang"].command(launch)
        return RolloutServer(command, env, f"http://127.0.0.1:{port}", tmp_path / "server.log", START_TIMEOUT_S)

    with start_on_free_port(make) as server:
        client = RolloutClient(server.url, "sglang", key=server.key, max_model_len=MAX_MODEL_LEN, timeout_s=300)
        check(client, model_a, model_b, "broadcast", None, tmp_path / "weights")
