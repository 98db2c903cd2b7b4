"""Releasing a server's memory gives it to the device, resuming takes it back, and the server generates as before.

Ran on one H100 (docs/gpu.md).

    python -m pytest tests/gpu/test_device_handover.py -q
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scalerl.base.files import GIB
from scalerl.rollout.servers.client import RolloutClient
from scalerl.rollout.sync.handover import DeviceMemory, measure
from tests.gpu.conftest import MEMORY_UTILIZATION, generate
from tests.served_weights import serialize_bucket

# CUDA maps memory in pieces of 2 MiB, and what SGLang keeps beside weights and KV cache stays.
SLACK_BYTES = 64 * 2**20


def free_bytes(device: int = 0) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]


def test_release_gives_memory_to_the_device_and_resume_takes_it_back(
    start_server: Callable[..., RolloutClient], model_a: Path
) -> None:
    client = start_server(model_a)
    total = torch.cuda.mem_get_info()[1]
    weights = sorted(load_file(model_a / "model.safetensors").items())
    weight_bytes = sum(tensor.nbytes for _, tensor in weights)
    expected = [output.output_ids for output in generate(client)]
    serving = free_bytes()

    client.release(["kv_cache"])
    without_cache = free_bytes()
    # Weights and KV cache together are gpu_memory_utilization of the device; these weights are a small part.
    assert without_cache - serving > 0.7 * MEMORY_UTILIZATION * total
    client.release(["weights"])
    released = free_bytes()
    assert released - without_cache > weight_bytes - SLACK_BYTES

    client.resume(["weights"])
    assert released - free_bytes() > weight_bytes - SLACK_BYTES
    client.begin_weight_update()
    blob = serialize_bucket([(name, tensor.cuda()) for name, tensor in weights], "sglang")
    client.update_weights([blob])
    client.end_weight_update(1)
    torch.cuda.empty_cache()
    client.resume(["kv_cache"])
    client.flush_cache()
    # This process holds what it sent until the server has let go of it.
    assert abs(free_bytes() - serving) < weight_bytes + 4 * SLACK_BYTES
    assert [output.output_ids for output in generate(client)] == expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a server on two GPUs")
def test_release_returns_when_the_memory_of_all_ranks_of_a_server_is_free(
    start_server: Callable[..., RolloutClient], model_a: Path
) -> None:
    """Again and again: the first rank answers, and the others free theirs when they come to it."""
    client = start_server(model_a, num_gpus=2)
    devices = range(2)
    expected = [output.output_ids for output in generate(client)]
    serving = [free_bytes(device) for device in devices]
    for _ in range(5):
        client.release(["kv_cache", "weights"])
        for device in devices:
            total = torch.cuda.mem_get_info(device)[1]
            assert free_bytes(device) - serving[device] > 0.7 * MEMORY_UTILIZATION * total, f"GPU {device}"
        client.resume(["weights"])
        weights = sorted(load_file(model_a / "model.safetensors").items())
        client.begin_weight_update()
        blobs = [
            serialize_bucket([(name, tensor.cuda(device)) for name, tensor in weights], "sglang") for device in devices
        ]
        client.update_weights(blobs)
        client.end_weight_update(1)
        torch.cuda.empty_cache()
        client.resume(["kv_cache"])
        client.flush_cache()
        assert [output.output_ids for output in generate(client)] == expected


@dataclass
class Parked:
    """A trainer's model whose parameters are in host memory."""

    num_bytes: int = 0

    def away_bytes(self) -> dict[str, int]:
        return {"params": self.num_bytes}


def test_a_hand_over_is_measured_and_refused_where_something_else_has_the_memory(
    start_server: Callable[..., RolloutClient], model_a: Path
) -> None:
    client = start_server(model_a)
    total = torch.cuda.mem_get_info()[1]
    trainer = Parked()
    memory = DeviceMemory(lambda: measure(0, "cuda", {"actor": trainer}))
    before = memory.record("before_release")
    client.release(["kv_cache"])
    without_cache = memory.record_released("kv_cache", "after_release_kv", before)
    client.release(["weights"])
    # The server keeps its context and little else: most of the device is there for the trainer.
    trainer.num_bytes = int(0.8 * total)
    assert memory.lack("after_release", memory.record_released("weights", "after_release", without_cache)) is None
    trainer.num_bytes = 2 * total
    lack = memory.lack("after_release", memory.record("after_release"))
    assert lack is not None and " GPU " in lack[1] and "the trainer's actor" in lack[1]
    trainer.num_bytes = 0

    # What the trainer does not give back: less is left than the KV cache had.
    kept = torch.empty(int((1 - MEMORY_UTILIZATION / 2) * total) - 2 * GIB, dtype=torch.uint8, device="cuda")
    lack = memory.lack("after_sync", memory.record("after_sync"), ["kv_cache"])
    assert lack is not None and "KV cache" in lack[1] and "gpu_memory_utilization" in lack[1]
    # Given back to torch alone it is still gone for the server; measuring gives it to the device.
    del kept
    assert memory.lack("before_sync", memory.record("before_sync"), ["weights"]) is None
    client.resume(["weights"])
    assert memory.lack("after_sync", memory.record("after_sync"), ["kv_cache"]) is None
    client.resume(["kv_cache"])
    num_bytes = {key.removeprefix("perf/handover/"): metric.value * GIB for key, metric in memory.metrics().items()}
    assert num_bytes["kv_gb"] > 0.7 * MEMORY_UTILIZATION * total
    assert num_bytes["free_gb/after_release"] - num_bytes["free_gb/before_release"] == pytest.approx(
        num_bytes["kv_gb"] + num_bytes["weights_gb"], abs=SLACK_BYTES
    )
    assert memory.measure().free_bytes == pytest.approx(before.free_bytes, abs=4 * SLACK_BYTES)
