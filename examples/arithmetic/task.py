"""The task: a two-digit number plus a one-digit number, written character by character.

The demonstrations for SFT come from a careless teacher who forgets the carry most of the time it is needed, so SFT
teaches the format and the sums without carry. The reward knows the right answer, so RL can teach the rest.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

DATA_SOURCE = "arithmetic/add"
NUM_VALIDATION = 120
# Share of the sums with a carry in which the teacher forgets it.
FORGETS_CARRY = 0.65


@dataclass(frozen=True)
class Problem:
    a: int
    b: int

    @property
    def question(self) -> str:
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        return str(self.a + self.b)

    @property
    def answer_without_carry(self) -> str:
        return str(self.a - self.a % 10 + (self.a + self.b) % 10)


def problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """(train, validation): every sum of 10..99 and 3..9 once, disjoint, in an order that the seed fixes."""
    everything = [Problem(a, b) for a in range(10, 100) for b in range(3, 10)]
    random.Random(seed).shuffle(everything)
    return everything[NUM_VALIDATION:], everything[:NUM_VALIDATION]


def demonstrations(train: list[Problem], seed: int, copies: int) -> list[tuple[Problem, str]]:
    """`copies` answers of the careless teacher to every problem."""
    teacher = random.Random(seed + 1)
    return [
        (problem, problem.answer_without_carry if teacher.random() < FORGETS_CARRY else problem.answer)
        for _ in range(copies)
        for problem in train
    ]
