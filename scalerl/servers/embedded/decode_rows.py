"""Decoding in rows of a fixed shape: a row's numbers depend on its own tokens, bit by bit, and on no neighbour.

A matrix product may add in another order when its shape changes. So a prompt is computed alone, and a decoding step
always has NUM_ROWS rows and the full capacity of keys, whatever is in them.
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
    """logits_V: of the token behind the sequence.  layers: per layer its keys and values [heads, T, d]."""

    logits_V: Tensor
    layers: list[tuple[Tensor, Tensor]]


def prefill(model: PreTrainedModel, ids: Sequence[int]) -> Prefilled:
    cache = DynamicCache()
    input_ids = torch.tensor([list(ids)], device=model.device)
    logits = model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    # A dynamic cache has layers of keys and values alone.
    layers: list[Any] = cache.layers
    return Prefilled(logits[0, -1], [(layer.keys[0], layer.values[0]) for layer in layers])


class DecodeRows:
    """NUM_ROWS places, each empty or with a sequence of at most `capacity` tokens."""

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
        """-> logits [len(tokens), V] after one more token each. tokens: (row, token id); the other rows stay."""
        rows = torch.tensor([row for row, _ in tokens], device=self._lengths.device)
        input_ids = torch.zeros(NUM_ROWS, 1, dtype=torch.int64, device=self._lengths.device)
        input_ids[rows, 0] = torch.tensor([token for _, token in tokens], device=self._lengths.device)
        # A row that stays writes behind its last token, where the next one overwrites it.
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
        """Each token by its experts, not each expert by its tokens: how many those are is the neighbours' doing."""
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
        """True where a row's token sees a key: [NUM_ROWS, 1, 1, capacity], per layer type where the model has types."""
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
    """keys, values: [NUM_ROWS, heads, capacity, d].  positions: [NUM_ROWS] where the forward at hand writes."""

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
