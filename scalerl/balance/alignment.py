"""Tokens that a layout adds to what it packs, so that its ranks can share them evenly."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Alignment:
    """A packed sequence takes a multiple of `sequence` tokens, a micro-batch one of `micro_batch`."""

    sequence: int = 1
    micro_batch: int = 1

    def __post_init__(self) -> None:
        if self.sequence < 1 or self.micro_batch < 1 or self.micro_batch % self.sequence:
            raise ValueError(f"{self}: both must be at least 1, and micro_batch a multiple of sequence")

    @classmethod
    def of_layout(cls, *, tp_size: int, cp_size: int, sequence_parallel: bool) -> Alignment:
        """Context parallelism cuts every sequence into 2 * cp_size pieces; sequence parallelism splits the tokens of
        each of its ranks over tp_size."""
        sequence = 2 * cp_size if cp_size > 1 else 1
        return cls(sequence, math.lcm(sequence, cp_size * tp_size if sequence_parallel else 1))

    def of_sequences(self, num_tokens_S: np.ndarray) -> np.ndarray:
        """[S] tokens that each sequence takes."""
        return -(-num_tokens_S // self.sequence) * self.sequence

    def of_micro_batch(self, num_tokens: int) -> int:
        """Tokens that a micro-batch takes whose sequences take num_tokens together."""
        return -(-num_tokens // self.micro_batch) * self.micro_batch
