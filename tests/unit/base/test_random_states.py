"""The generators that all code of a process shares: saved as text, restored to the next number, seeded for a block."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from scalerl.base.random_states import generator_states, restore_generators, seed_generators, seeded_generators


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    states = generator_states()
    yield
    restore_generators(states)


def draw() -> list[float]:
    """One of each kind of number; of a pair of normal ones the second is remembered."""
    return [
        *(random.random(), random.gauss(0, 1), random.getrandbits(64)),
        *(np.random.rand(), np.random.standard_normal(), np.random.randint(2**31)),
        *(float(torch.rand(())), float(torch.randn(()))),
    ]


@pytest.mark.parametrize("num_draws", [0, 1, 2, 1000])
def test_states_go_through_json_and_give_the_next_numbers(num_draws: int) -> None:
    seed_generators(5)
    for _ in range(num_draws):
        draw()
    states = json.loads(json.dumps(generator_states()))
    expected = [draw() for _ in range(3)]
    seed_generators(6)
    draw()
    restore_generators(states)
    assert generator_states() == states
    assert [draw() for _ in range(3)] == expected


def test_a_seed_decides_every_number() -> None:
    drawn = []
    for seed in (7, 7, 8, 2**40, 2**40):
        seed_generators(seed)
        drawn.append(draw())
    assert drawn[0] == drawn[1] and drawn[3] == drawn[4]
    # Of numpy's generator, larger seeds are taken modulo 2^32.
    assert all(one != other for one, other in zip(drawn[0], drawn[2], strict=True))


def test_a_generator_without_a_state_stays_as_it_is() -> None:
    seed_generators(7)
    states = generator_states()
    drawn = draw()
    restore_generators({"numpy": states["numpy"]})
    again = draw()
    assert [one == other for one, other in zip(drawn, again, strict=True)] == [*[False] * 3, *[True] * 3, *[False] * 2]
    restore_generators({})


def test_seeded_for_a_block_alone() -> None:
    seed_generators(7)
    expected = [draw(), draw()]
    seed_generators(7)
    drawn = [draw()]
    blocks = []
    for _ in range(2):
        with pytest.raises(ValueError, match="of the block"), seeded_generators(9):
            blocks.append(draw())
            raise ValueError("of the block")
    drawn.append(draw())
    assert drawn == expected and blocks[0] == blocks[1] != expected[0]
