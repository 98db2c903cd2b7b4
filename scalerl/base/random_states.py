"""The generators that all code of a process shares: those of Python's `random`, of `numpy.random` and of torch on CPUs.

scalerl itself draws from other generators; these are for code of the user, and of libraries.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

# numpy's generator takes no larger seed.
_NUMPY_SEEDS = 2**32


def seed_generators(seed: int) -> None:
    """Seeds the three generators, and those of torch's devices; seed: at least 0."""
    random.seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)
    torch.manual_seed(seed)


def generator_states() -> dict[str, str]:
    """The states of the three generators as text: `python`, `numpy` and `torch`."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": json.dumps(random.getstate(), separators=(",", ":")),
        "numpy": json.dumps([name, np.asarray(keys).tolist(), *rest], separators=(",", ":")),
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode("ascii"),
    }


def restore_generators(states: Mapping[str, str]) -> None:
    """Restores states of `generator_states`; a generator that has none there stays as it is."""
    if "python" in states:
        version, numbers, gauss = json.loads(states["python"])
        random.setstate((version, tuple(numbers), gauss))
    if "numpy" in states:
        np.random.set_state(tuple(json.loads(states["numpy"])))
    if "torch" in states:
        torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(states["torch"])), dtype=torch.uint8))


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Seeds the three generators for the block; afterwards they have their earlier states again."""
    before = generator_states()
    seed_generators(seed)
    try:
        yield
    finally:
        restore_generators(before)
