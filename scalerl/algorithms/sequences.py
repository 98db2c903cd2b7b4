"""Reductions over the sampled tokens of each sequence of a packed batch.

Dims: T packed tokens, S sequences, N sampled tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Sequences:
    """The N tokens that a mask selects, and the sequence that each belongs to.

    mask_T: [T] bool or 0/1.  cu_seqlens: [S + 1] integers; tokens past cu_seqlens[-1] (alignment) are not selected.
    keep_T: [T] bool.  sequence_N: [N] int64.  counts_S: [S] int64.
    Raises ValueError when cu_seqlens does not start at 0, falls, or ends past T.
    """

    def __init__(self, mask_T: Tensor, cu_seqlens: Tensor) -> None:
        num_tokens, last = len(mask_T), int(cu_seqlens[-1])
        if int(cu_seqlens[0]) != 0 or last > num_tokens or bool((cu_seqlens.diff() < 0).any()):
            raise ValueError(
                f"cu_seqlens must rise from 0 to at most the {num_tokens} tokens of the batch: it goes from "
                f"{int(cu_seqlens[0])} to {last}"
            )
        self.num_sequences = len(cu_seqlens) - 1
        self.keep_T = mask_T != 0
        self.keep_T[last:] = False
        numbers_S = torch.arange(self.num_sequences, device=mask_T.device)
        sequence_T = torch.repeat_interleave(numbers_S, cu_seqlens.diff().to(mask_T.device))
        self.sequence_N = sequence_T[self.keep_T[:last]]
        self.counts_S = torch.bincount(self.sequence_N, minlength=self.num_sequences)

    def select(self, values_T: Tensor) -> Tensor:
        """[N] the values of the selected tokens."""
        return values_T[self.keep_T]

    def scatter(self, values_N: Tensor) -> Tensor:
        """[T] the values at the selected tokens, 0 at the others."""
        values_T = torch.zeros(len(self.keep_T), dtype=values_N.dtype, device=values_N.device)
        values_T[self.keep_T] = values_N
        return values_T

    def sum(self, values_N: Tensor) -> Tensor:
        """[S] sum of each sequence's values; 0 for a sequence without a token."""
        return self._zeros(values_N).index_add_(0, self.sequence_N, values_N)

    def mean(self, values_N: Tensor) -> Tensor:
        """[S] mean of each sequence's values; 0 for a sequence without a token."""
        return self.sum(values_N) / self.counts_S.clamp(min=1)

    def max(self, values_N: Tensor) -> Tensor:
        """[S] largest of each sequence's values; 0 for a sequence without a token."""
        return self._zeros(values_N).scatter_reduce_(0, self.sequence_N, values_N, "amax", include_self=False)

    def any(self, flags_N: Tensor) -> Tensor:
        """[S] bool, True where any token of the sequence is flagged."""
        return self.sum(flags_N.double()) > 0

    def nonempty(self, values_S: Tensor) -> Tensor:
        """[S or fewer] the values of the sequences that have a token."""
        return values_S[self.counts_S > 0]

    def of_tokens(self, values_S: Tensor) -> Tensor:
        """[N] for each token the value of its sequence."""
        return values_S[self.sequence_N]

    def _zeros(self, values_N: Tensor) -> Tensor:
        return torch.zeros(self.num_sequences, dtype=values_N.dtype, device=values_N.device)
