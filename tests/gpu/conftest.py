"""A model whose sizes the GPU kernels of SGLang take, and a real SGLang server on the GPU.

Ran on one H100 (docs/gpu.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scalerl.config.schema import RolloutConfig
from scalerl.models.adapters import Adapter
from scalerl.rollout.servers.client import GenerateOutput, GenerateRequest, RolloutClient, SamplingParams
from scalerl.rollout.servers.engines import ENGINES, Launch
from scalerl.rollout.servers.process import RolloutServer, start_on_free_port
from tests.tiny_models import make_tiny_model

MAX_MODEL_LEN = 256
# Of the device: enough to see that memory moves, and room for the trainer.
MEMORY_UTILIZATION = 0.3
START_TIMEOUT_S = 600.0
# What makes a mixture of that model.
MIXTURE: dict[str, Any] = {"num_experts": 8}
PROMPTS = [[5, 6, 7, 8], [100, 41, 300], [9, 200, 33, 44, 55, 66, 77, 88, 99, 110]]


def make_gpu_model(path: Path, seed: int, family: str = "qwen3", **changes: Any) -> Path:
    """52 million parameters in bfloat16; head_dim 64 is the smallest that all attention backends of SGLang take."""
    sizes: dict[str, Any] = dict(
        num_layers=4, hidden_size=512, ffn_size=2048, num_heads=8, num_kv_heads=2, head_dim=64, vocab_size=32768
    )
    return make_tiny_model(path, family, seed=seed, dtype=torch.bfloat16, initializer_range=0.05, **(sizes | changes))


@pytest.fixture(scope="session")
def model_a(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gpu_model(tmp_path_factory.mktemp("gpu_model_a"), seed=0)


@pytest.fixture(scope="session")
def model_b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gpu_model(tmp_path_factory.mktemp("gpu_model_b"), seed=1)


def make_server(
    model_path: Path,
    log_path: Path,
    port: int,
    device: str,
    synced: bool = False,
    num_gpus: int = 1,
    quantization: str | None = None,
    adapter: Adapter | None = None,
    **own: Any,
) -> RolloutServer:
    """own: SGLang's own arguments (`engine_kwargs`)."""
    rollout = RolloutConfig(
        dtype="bfloat16",
        max_num_seqs=16,
        gpu_memory_utilization=MEMORY_UTILIZATION,
        tensor_model_parallel_size=num_gpus,
        quantization=quantization,
        engine_kwargs={"sglang": own},
    )
    gpu_ids = list(range(num_gpus)) if device == "cuda" else None
    launch = Launch(
        str(model_path),
        rollout,
        device,
        MAX_MODEL_LEN,
        port=port,
        gpu_ids=gpu_ids,
        releases_memory=True,
        synced=synced,
        adapter=adapter,
    )
    command, env = ENGINES["sglang"].command(launch)
    return RolloutServer(command, env, f"http://127.0.0.1:{port}", log_path, START_TIMEOUT_S)


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[[Path], RolloutClient]]:
    """A server on the first GPUs with that model, and its client."""
    started: list[RolloutServer] = []

    def start(
        model_path: Path, device: str = "cuda", synced: bool = False, num_gpus: int = 1, **own: Any
    ) -> RolloutClient:
        log_path = tmp_path / f"sglang-{len(started)}.log"
        server = start_on_free_port(
            lambda port: make_server(model_path, log_path, port, device, synced, num_gpus, **own)
        )
        started.append(server)
        return RolloutClient(server.url, "sglang", key=server.key, max_model_len=MAX_MODEL_LEN, timeout_s=300.0)

    yield start
    for server in started:
        server.stop()


def generate(client: RolloutClient, max_new_tokens: int = 16) -> list[GenerateOutput]:
    """Greedy, in the order of PROMPTS, side by side."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)

    async def ask(row: int, prompt: list[int]) -> GenerateOutput:
        (output,) = [output async for output in client.generate(GenerateRequest(row, prompt, 1, sampling))]
        return output

    async def collect() -> list[GenerateOutput]:
        return await asyncio.gather(*(ask(row, prompt) for row, prompt in enumerate(PROMPTS)))

    return asyncio.run(collect())
