"""Padding tokens that a layout adds to sequences and micro-batches, so that its ranks can share them evenly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from scalerl.config import alignment

T = TypeVar("T", int, np.ndarray)


@dataclass(frozen=True)
class Alignment:
    """Multiples of tokens that a packed sequence (`sequence`) and a micro-batch (`micro_batch`) are padded to."""

    sequence: int = 1
    micro_batch: int = 1

    def __post_init__(self) -> None:
        if self.sequence < 1 or self.micro_batch < 1 or self.micro_batch % self.sequence:
            raise ValueError(f"{self}: both must be at least 1, and micro_batch a multiple of sequence")

    @classmethod
    def of_layout(cls, *, tp_size: int, cp_size: int, sequence_parallel: bool) -> Alignment:
        """The alignment that a layout needs, by `config.alignment`."""
        return cls(*alignment(tp_size=tp_size, cp_size=cp_size, sequence_parallel=sequence_parallel))

    def of_sequences(self, num_tokens_S: np.ndarray) -> np.ndarray:
        """[S] tokens of each sequence with its padding."""
        return -(-num_tokens_S // self.sequence) * self.sequence

    def of_micro_batch(self, num_tokens: T) -> T:
        """Tokens of a micro-batch (or of each of [M]) with its padding.

        num_tokens: the tokens of its padded sequences together.
        """
        return -(-num_tokens // self.micro_batch) * self.micro_batch


NO_ALIGNMENT = Alignment()
