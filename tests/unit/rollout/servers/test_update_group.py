"""The order of the bytes of a broadcast bucket, and where its members meet."""

from __future__ import annotations

import math
import socket

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalerl.rollout.servers.update_group import (
    address_towards,
    in_sending_order,
    num_bytes,
    open_store,
    pack_bytes,
    reach_store,
    unpack_bytes,
)

DTYPES = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64])
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@given(st.lists(st.tuples(DTYPES, SHAPES), min_size=1, max_size=6))
def test_a_bucket_of_any_dtypes_and_shapes_is_packed_without_gaps(content: list[tuple[torch.dtype, list[int]]]) -> None:
    named = [
        (str(at), torch.arange(math.prod(shape)).reshape(shape).to(dtype)) for at, (dtype, shape) in enumerate(content)
    ]
    ordered = in_sending_order(named)
    assert sorted(name for name, _ in ordered) == sorted(name for name, _ in named)
    layout = [(name, x.dtype, x.shape) for name, x in ordered]
    flat = pack_bytes(ordered)
    assert flat.dtype == torch.uint8 and flat.numel() == num_bytes(layout) == sum(x.nbytes for _, x in named)
    for (name, unpacked), (_, tensor) in zip(unpack_bytes(flat, layout), ordered, strict=True):
        assert unpacked.dtype == tensor.dtype and torch.equal(unpacked, tensor), name


def test_tensors_of_other_strides_are_packed_by_value() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    named = [("columns", whole[:, 1:3]), ("transposed", whole.t()), ("reversed rows", whole[[3, 0]])]
    layout = [(name, x.dtype, x.shape) for name, x in named]
    for (_, unpacked), (_, tensor) in zip(unpack_bytes(pack_bytes(named), layout), named, strict=True):
        assert torch.equal(unpacked, tensor)


@pytest.mark.parametrize(("url", "family"), [
    ("http://127.0.0.1:30000", socket.AF_INET),
    ("http://[::1]:30000", socket.AF_INET6),
])  # fmt: skip
def test_the_address_that_a_server_reaches_us_at(url: str, family: int) -> None:
    try:
        address = address_towards(url)
    except OSError:
        pytest.skip("this machine has no route there")
    assert socket.inet_pton(family, address) == socket.inet_pton(family, "::1" if "::" in url else "127.0.0.1")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_trainer_and_a_server_meet_at_the_address_that_the_trainer_gives(address: str) -> None:
    try:
        opened = open_store(address, timeout_s=20)
    except OSError:
        pytest.skip("this machine has no such address")
    reached = reach_store(address, opened.port, timeout_s=20)
    reached.set("key", "value")
    assert opened.get("key") == b"value"
    if address == "127.0.0.1":
        # Nobody else's address of this machine answers.
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", opened.port), timeout=5)
