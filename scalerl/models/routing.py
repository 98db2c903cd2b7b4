"""`RoutingShape`: the numbers of the column `routed_experts`, the experts that routers chose for each token.

T tokens, L layers, K experts of each token in a layer with experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from scalerl.models.shape import ModelShape


@dataclass(frozen=True)
class RoutingShape:
    """What a model's column `routed_experts` [T, L, K] is like.

    moe_layers: [L] whether each layer has experts.  top_k: K.

    A choice that is not known, and each layer without experts, has K times the number with all bits set: 255 or -1. No
    choice is that: the experts of a token differ, and a single expert of that number has a wider dtype.
    """

    moe_layers: tuple[bool, ...]
    num_experts: int
    top_k: int

    @classmethod
    def of(cls, shape: ModelShape) -> RoutingShape:
        assert shape.num_experts, "a dense model has no routers"
        return cls(shape.moe_layers, shape.num_experts, shape.num_experts_per_token)

    @property
    def dtype(self) -> torch.dtype:
        """uint8, or int16 for more experts than it counts."""
        return torch.uint8 if self.num_experts <= (256 if self.top_k > 1 else 255) else torch.int16

    @property
    def token_bytes(self) -> int:
        return len(self.moe_layers) * self.top_k * self.dtype.itemsize

    def unknown(self, num_tokens: int) -> Tensor:
        """[num_tokens, L, K] without any choice."""
        column = torch.empty(num_tokens, len(self.moe_layers), self.top_k, dtype=self.dtype)
        return column.fill_(unknown_number(self.dtype))

    def packed(self, experts_TLK: np.ndarray) -> Tensor:
        """The choices of some tokens [T, L, K], in this column's dtype, without those of layers without experts.

        Raises ValueError for what no router chooses: a number that is no expert's, or the same expert twice in the
        first two places.
        """
        chosen = experts_TLK[:, list(self.moe_layers)]
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < self.num_experts:
            raise ValueError(f"experts {chosen.min()} to {chosen.max()} of {self.num_experts}")
        if self.top_k > 1 and (twice := np.argwhere(chosen[..., 0] == chosen[..., 1])).size:
            token, layer = twice[0].tolist()
            layer = np.flatnonzero(self.moe_layers)[layer]
            raise ValueError(f"row {token} of {len(chosen)}: layer {layer} has {experts_TLK[token, layer].tolist()}")
        column = self.unknown(len(experts_TLK))
        column[:, list(self.moe_layers)] = torch.from_numpy(chosen).to(self.dtype)
        return column


def unknown_number(dtype: torch.dtype) -> int:
    """The number of a choice that is not known: all bits of the dtype set."""
    return torch.iinfo(dtype).max if dtype == torch.uint8 else -1


def is_known(experts: Tensor) -> Tensor:
    """[..., K] choices -> [...] bool, whether each is known."""
    return (experts != unknown_number(experts.dtype)).any(-1)
