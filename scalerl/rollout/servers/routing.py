"""`RoutedTokens`: the experts that a server's routers chose for the tokens of a sample in the making."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scalerl.models.routing import RoutingShape


@dataclass(frozen=True)
class RoutedTokens:
    """The choices for the tokens of a sample that is asked for, as far as they are known.

    first: position in prompt and response of the first token whose choice this request asks for.
    num_tokens: of prompt and response so far.  rows: [R, L, K] of positions first .. first + R - 1; R may be 0.

    A server has a row for each token that its model has seen: all but the last. A row that is known stays as it is,
    whatever a later answer has for that token: that may be of newer weights, and the token after it was drawn by these.
    """

    shape: RoutingShape
    first: int
    num_tokens: int
    rows: Tensor

    @property
    def next(self) -> int:
        """The position from which on rows are missing."""
        return self.first + len(self.rows)

    def extended(self, encoded: str | None, *, num_sampled: int, num_kept: int) -> Tensor:
        """The rows with those of an answer after them.

        encoded: base64 of int32 [rows, L, K], which end before the answer's last token; None: the answer has none.
        num_sampled: tokens of the answer.  num_kept: those of them that the sample keeps.
        Raises ValueError, without naming the request, for rows that cannot be the answer's.
        """
        if encoded is None or not num_sampled:
            # A request that was aborted before its first token may not have computed its prompt.
            return self.rows
        rows = _decoded(encoded, self.shape)
        end = self.num_tokens + num_sampled - 1
        start = end - len(rows)
        if not 0 <= start <= self.next:
            raise ValueError(
                f"{len(rows)} rows of experts, which end with token {end - 1}, and token {self.next} needs the first"
            )
        return torch.cat([self.rows, self.shape.packed(rows[self.next - start : len(rows) - (num_sampled - num_kept)])])


def _decoded(encoded: str, shape: RoutingShape) -> np.ndarray:
    """[rows, L, K] int32."""
    num_layers = len(shape.moe_layers)
    try:
        return np.frombuffer(base64.b64decode(encoded, validate=True), "<i4").reshape(-1, num_layers, shape.top_k)
    except (ValueError, binascii.Error) as error:
        raise ValueError(f"{len(encoded)} characters are no rows of {num_layers} x {shape.top_k} experts") from error
