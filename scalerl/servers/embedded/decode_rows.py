"""Decoding in rows of a fixed shape, so that a row's numbers depend, bit by bit, on its own tokens only.

A matrix product may add in another order when its shape changes. So a prompt is computed by itself, and a decoding step
always has NUM_ROWS rows and the full capacity of keys, used or not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

NUM_ROWS = 32


@dataclass(frozen=True)
class Prefilled:
    """A computed prompt.  logits_V: logits of the next token.  layers: keys and values [heads, T, d] of each layer."""

    logits_V: Tensor
    layers: list[tuple[Tensor, Tensor]]


def prefill(model: PreTrainedModel, ids: Sequence[int]) -> Prefilled:
    cache = DynamicCache()
    input_ids = torch.tensor([list(ids)], device=model.device)
    logits = model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    # All layers of a dynamic cache have keys and values.
    layers: list[Any] = cache.layers
    return Prefilled(logits[0, -1], [(layer.keys[0], layer.values[0]) for layer in layers])


class DecodeRows:
    """NUM_ROWS rows, each empty or with a sequence of at most `capacity` tokens."""

    def __init__(self, model: PreTrainedModel, capacity: int) -> None:
        self._model = model
        self._index_L = torch.arange(capacity, device=model.device)
        self._layers = [_RowLayer(capacity) for _ in range(model.config.num_hidden_layers)]
        self._cache = Cache(layers=list(self._layers))
        self._lengths = torch.zeros(NUM_ROWS, dtype=torch.int64, device=model.device)
        self._has_experts = model._can_set_experts_implementation()

    def put(self, row: int, prefilled: Prefilled) -> None:
        for layer, (keys, values) in zip(self._layers, prefilled.layers, strict=True):
            layer.put(row, keys, values)
        self._lengths[row] = prefilled.layers[0][0].shape[1]

    def step(self, tokens: Sequence[tuple[int, int]]) -> Tensor:
        """Appends tokens, (row, token id) each, and returns the logits [len(tokens), V] after them.

        The other rows are not changed.
        """
        rows = torch.tensor([row for row, _ in tokens], device=self._lengths.device)
        input_ids = torch.zeros(NUM_ROWS, 1, dtype=torch.int64, device=self._lengths.device)
        input_ids[rows, 0] = torch.tensor([token for _, token in tokens], device=self._lengths.device)
        # A row without a new token writes after its last one, where its next token will overwrite that.
        for layer in self._layers:
            layer.positions = self._lengths
        with self._experts_by_token():
            logits = self._model(
                input_ids=input_ids,
                attention_mask=self._mask(),
                position_ids=self._lengths[:, None],
                past_key_values=self._cache,
                use_cache=True,
            ).logits[:, -1]
        self._lengths[rows] += 1
        return logits[rows]

    def clear(self, row: int) -> None:
        self._lengths[row] = 0

    @contextlib.contextmanager
    def _experts_by_token(self) -> Iterator[None]:
        """Computes experts token by token: products by expert would have shapes that depend on the other rows."""
        if not self._has_experts:
            yield
            return
        before = str(self._model.config._experts_implementation)
        self._model.set_experts_implementation("batched_mm")
        try:
            yield
        finally:
            self._model.set_experts_implementation(before)

    def _mask(self) -> Tensor | dict[str, Tensor]:
        """[NUM_ROWS, 1, 1, capacity], True where a row's token attends to a key; by layer type if there are types."""
        config = self._model.config
        layer_types = getattr(config, "layer_types", None)
        seen = self._index_L[None] <= self._lengths[:, None]
        window = getattr(config, "sliding_window", None)
        near = seen if window is None else seen & (self._index_L[None] > self._lengths[:, None] - window)
        if layer_types is None:
            return near[:, None, None]
        if "sliding_attention" in layer_types:
            return {"full_attention": seen[:, None, None], "sliding_attention": near[:, None, None]}
        return seen[:, None, None]


class _RowLayer(CacheLayerMixin):
    """The cache of one layer.

    keys, values: [NUM_ROWS, heads, capacity, d].  positions: [NUM_ROWS] where the current forward pass writes.
    """

    positions: Tensor

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity

    def put(self, row: int, keys: Tensor, values: Tensor) -> None:
        if not self.is_initialized:
            self.lazy_initialization(keys[None], values[None])
        assert self.keys is not None and self.values is not None
        self.keys[row, :, : keys.shape[1]] = keys
        self.values[row, :, : values.shape[1]] = values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            states.new_zeros(NUM_ROWS, states.shape[1], self._capacity, states.shape[3])
            for states in (key_states, value_states)
        )
        self._rows = torch.arange(NUM_ROWS, device=key_states.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        self.keys[self._rows, :, self.positions] = key_states[:, :, 0]
        self.values[self._rows, :, self.positions] = value_states[:, :, 0]
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._capacity, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_cache_shape(self) -> int:
        return self._capacity
