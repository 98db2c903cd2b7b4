"""torch's allocator of device memory, where another process opens what it allocates."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from scalerl.base.process import ALLOCATOR, without_expandable_segments

_OFF = "expandable_segments:False"


@contextmanager
def outside_of_expandable_segments() -> Iterator[None]:
    """Allocates device memory outside of expandable segments inside the block, whatever the user has set.

    Another process opens a tensor of such a segment by taking file descriptors from this one (`pidfd_getfd`), which an
    unprivileged container forbids (https://github.com/pytorch/pytorch/issues/165685), and torch 2.13.0 maps the segment
    anew for each tensor that is sent, in 9/8 of the device's size of addresses
    (https://github.com/pytorch/pytorch/issues/198305 and 186213). Memory of cudaMalloc goes by a handle.

    It holds for all threads of the process. Other settings stay as the user has set them.
    """
    given = _settings()
    rest = without_expandable_segments(given)
    if rest == given.strip(", "):
        yield
        return
    # All of them each time: those that a call leaves out torch resets to its defaults.
    torch._C._accelerator_setAllocatorSettings(f"{rest},{_OFF}" if rest else _OFF)
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(given)


def _settings() -> str:
    """The settings of torch's allocator; torch 2.11 tells only what the environment sets."""
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        return torch._C._accelerator_getAllocatorSettings()
    return next((os.environ[name] for name in reversed(ALLOCATOR) if name in os.environ), "")
