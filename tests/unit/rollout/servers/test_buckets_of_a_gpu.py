"""Buckets that the embedded engine opens by CUDA IPC.

Storages of a CPU stand in for those of a GPU: what torch asks of CUDA for a handle is answered by the test. tests/gpu
and `make gpu` have the rest.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from scalerl.rollout.servers import buckets
from scalerl.rollout.servers.buckets import flat_bucket
from scalerl.rollout.servers.checksums import ExpectedChecksums, Placement, tensor_checksum
from scalerl.rollout.servers.engines import ENGINES

NAMED = [
    ("model.norm.weight", torch.arange(5, dtype=torch.bfloat16)),
    ("lm_head.weight", torch.arange(12, dtype=torch.float32).view(3, 4)),
    ("scale", torch.tensor(2.5)),
]
# device, handle, bytes, offset, reference counter and its offset, event, whether to wait for it
SHARED = (0, b"\x00handle\xff", 4096, 512, b"counter\x80", 8, b"event\x00", True)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was opened, by the arguments of torch's call."""
    storages: list[torch.UntypedStorage] = []
    calls: list[tuple[Any, ...]] = []

    def share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
        storages.append(storage)
        return SHARED

    def open_shared(*arguments: Any) -> torch.UntypedStorage:
        calls.append(arguments)
        return storages[-1]

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", share)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(open_shared))
    monkeypatch.setattr(buckets, "_uuid", lambda device: f"GPU-{device.index or 0}")
    return calls


def test_a_bucket_is_opened_by_what_its_sender_shares(opened: list[tuple[Any, ...]]) -> None:
    text = buckets.cuda_handle(*flat_bucket(NAMED))
    named = buckets.read_cuda(json.loads(text), torch.device("cpu"))
    assert opened == [SHARED]
    assert [name for name, _ in named] == [name for name, _ in NAMED]
    for (_, mine), (_, theirs) in zip(named, NAMED, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


def test_a_server_on_another_gpu_refuses_it(opened: list[tuple[Any, ...]]) -> None:
    handle = json.loads(buckets.cuda_handle(*flat_bucket(NAMED)))
    with pytest.raises(ValueError, match=r"GPU-0.*GPU-3"):
        buckets.read_cuda(handle, torch.device("cuda", 3))
    assert opened == []


class OnGpu(torch.Tensor):
    """A tensor of a CPU that says that it is on a GPU."""

    is_cuda = True

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_the_embedded_engine_gets_tensors_of_a_gpu_by_handle(opened: list[tuple[Any, ...]]) -> None:
    from scalerl.rollout.servers.buckets import Bucket

    text = ENGINES["embedded"].serialize(Bucket([(name, tensor.as_subclass(OnGpu)) for name, tensor in NAMED]))
    assert json.loads(text)["gpu"] == "GPU-0"


def test_weights_on_a_gpu_are_expected_as_the_embedded_engine_hashes_them() -> None:
    expected = ExpectedChecksums(Placement())
    expected.add([(name, tensor.as_subclass(OnGpu)) for name, tensor in NAMED])
    assert expected.result() == [{name: tensor_checksum(tensor) for name, tensor in NAMED}]
