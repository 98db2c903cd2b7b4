"""Memory that other processes map, and the handle by which SGLang's loader finds a bucket in it."""

from __future__ import annotations

import base64
import gc
import io
import json
import os
import pickle
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_safetensors

from scalerl.rollout.servers import buckets
from scalerl.rollout.servers.buckets import Bucket, BucketPlace, MappedBytes, flat_layout
from scalerl.rollout.servers.engines import ENGINES
from scalerl.rollout.servers.engines.sglang import MAPPED_LOADER

NAMED = [
    ("a", torch.arange(5, dtype=torch.bfloat16)),
    ("b", torch.randn(3, 2)),
    ("c", torch.randn(2, 6).T),
    ("one", torch.tensor(3.0)),
]


def place_of(named: list[tuple[str, torch.Tensor]], offset: int = 0) -> BucketPlace:
    entries, num_bytes = flat_layout([(name, tensor.shape, tensor.dtype) for name, tensor in named])
    place = BucketPlace(MappedBytes.allocate(offset + num_bytes), offset, entries)
    for (_, view), (_, tensor) in zip(place.memory.views(entries, offset), named, strict=True):
        view.copy_(tensor)
    return place


class Model(torch.nn.Module):
    """Keeps what it was asked to load."""

    def load_weights(self, weights: Any) -> None:
        self.loaded = list(weights)


def loaded(place: BucketPlace) -> dict[str, torch.Tensor]:
    model = Model()
    buckets.load_mapped(model, pickle.loads(base64.b64decode(place.serialize())))
    return dict(model.loaded)


@pytest.fixture(autouse=True)
def _nothing_attached() -> None:
    buckets._attached.clear()


def test_the_name_that_sglang_is_given_is_the_loader() -> None:
    assert f"{buckets.load_mapped.__module__}.{buckets.load_mapped.__name__}" == MAPPED_LOADER


def test_a_bucket_is_read_where_it_lies() -> None:
    """The real server reads one in tests/ray."""
    tensors = loaded(place_of(NAMED, offset=64))
    assert list(tensors) == [name for name, _ in NAMED]
    assert all(tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor) for name, tensor in NAMED)


def test_the_text_needs_no_class_that_sglangs_unpickler_refuses() -> None:
    seen = []

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            seen.append((module, name))
            return super().find_class(module, name)

    ((_, empty),) = Reader(io.BytesIO(base64.b64decode(place_of(NAMED).serialize()))).load()
    assert seen == [("torch", "ByteTensor")] and empty.numel() == 0


def test_a_reader_maps_the_memory_once_and_sees_what_is_written_later() -> None:
    place = place_of(NAMED)
    first = loaded(place)
    attached = next(iter(buckets._attached.values()))
    place.memory.views(place.entries)[1][1].fill_(7.0)
    second = loaded(place)
    assert bool((first["b"] == 7.0).all()) and torch.equal(first["b"], second["b"])
    assert [memory is attached for memory in buckets._attached.values()] == [True]


def test_a_reader_lets_memory_go_that_its_trainer_has_replaced() -> None:
    # What an earlier test left would give its descriptor back in the middle of this one.
    gc.collect()
    place = place_of(NAMED)
    loaded(place)
    path = place.memory.path
    del place
    gc.collect()
    place = place_of([("a", NAMED[0][1] + 1)])
    assert place.memory.path == path, "the same descriptor, free again"
    assert torch.equal(loaded(place)["a"], NAMED[0][1] + 1)
    assert list(buckets._attached) == [path]


def test_a_path_that_has_become_another_memory_is_refused() -> None:
    """As when a process took the number of one that ended."""
    place = place_of(NAMED)
    place.memory.identity = (place.memory.identity[0], place.memory.identity[1] + 1)
    with pytest.raises(FileNotFoundError, match="trainer that sent these weights"):
        loaded(place)


def test_memory_is_given_back() -> None:
    place = place_of(NAMED)
    path = place.memory.path
    assert os.path.exists(path)
    del place
    gc.collect()
    assert not os.path.exists(path)


def test_a_bucket_in_it_is_sent_without_a_copy_or_as_values() -> None:
    place = place_of(NAMED)
    bucket = Bucket(place.memory.views(place.entries), place)
    assert bucket.num_bytes == 10 + 24 + 48 + 4
    assert bucket.is_mapped and ENGINES["sglang"].serialize(bucket) == place.serialize()
    call = ENGINES["sglang"].update_weights(["text"], policy_version=1, is_mapped=True)
    assert call.body is not None and call.body["load_format"] == MAPPED_LOADER
    read = dict(buckets.read_mapped(json.loads(ENGINES["embedded"].serialize(bucket))))
    assert torch.equal(read["c"], NAMED[2][1])
    values = ENGINES["embedded"].serialize(Bucket(bucket.named))
    assert torch.equal(load_safetensors(base64.b64decode(values))["c"], NAMED[2][1])
