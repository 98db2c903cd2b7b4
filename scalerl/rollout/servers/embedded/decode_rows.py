"""Decoding in which the numbers of a sequence depend, bit by bit, on its own tokens only.

A matrix product may add in another order when its shape changes. So a prompt is computed by itself, and decoded tokens
in passes of NUM_ROWS rows, used or not. The sequences of a pass have the same room for keys, which follows from the
length of each. All else of a forward pass is row by row, attention too, whose kernel takes one row and head after the
other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

NUM_ROWS = 32
# Room for keys of the shortest sequences; longer ones have twice, four times... as much.
MIN_KEYS = 32
# transformers' experts whose products have the same shape for every token.
_EXPERTS_BY_TOKEN = "batched_mm"


class SequenceCache:
    """Keys and values of one sequence.  layers: of each layer, [heads, room, d]; they are zero from `length` on."""

    def __init__(self, length: int, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copies keys and values [heads, length, d] of each layer, with room for the next token."""
        self.length = length
        self.layers = [(_with_room(keys, length), _with_room(values, length)) for keys, values in layers]

    @property
    def room(self) -> int:
        return self.layers[0][0].shape[1]

    def make_room(self) -> None:
        """Makes room for one more token."""
        if self.length == self.room:
            self.layers = [
                (_with_room(keys, self.length), _with_room(values, self.length)) for keys, values in self.layers
            ]


def _with_room(states: Tensor, length: int) -> Tensor:
    room = MIN_KEYS
    while room <= length:
        room *= 2
    # Zeros, as a number that is not finite would reach the neighbours of a masked place.
    padded = states.new_zeros(states.shape[0], room, states.shape[2])
    padded[:, :length] = states[:, :length]
    return padded


def prefill(model: PreTrainedModel, prompt: Sequence[int]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Computes a prompt: the logits [V] of its next token, and each layer's keys and values [heads, T, d]."""
    cache = DynamicCache()
    ids = torch.tensor([list(prompt)], device=model.device)
    logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    # All layers of a dynamic cache have keys and values.
    layers: list[Any] = cache.layers
    return logits[0, 0], [(layer.keys[0], layer.values[0]) for layer in layers]


def decode(model: PreTrainedModel, caches: Sequence[SequenceCache], tokens: Sequence[int]) -> Tensor:
    """Appends a token to each sequence; returns the logits [len(tokens), V] after them."""
    by_room: dict[int, list[int]] = {}
    for index, cache in enumerate(caches):
        cache.make_room()
        by_room.setdefault(cache.room, []).append(index)
    order, logits = [], []
    with _experts_by_token(model):
        for indices in by_room.values():
            for first in range(0, len(indices), NUM_ROWS):
                rows = indices[first : first + NUM_ROWS]
                logits.append(_pass(model, [caches[row] for row in rows], [tokens[row] for row in rows]))
                order += rows
    return torch.cat(logits)[torch.tensor(order).argsort()]


def _pass(model: PreTrainedModel, caches: Sequence[SequenceCache], tokens: Sequence[int]) -> Tensor:
    """Logits [len(caches), V] of a forward pass of NUM_ROWS rows: the sequences, and the first one again as padding."""
    padding, device = NUM_ROWS - len(caches), model.device
    lengths_R = torch.tensor([cache.length for cache in caches] + [caches[0].length] * padding, device=device)
    layers = [_PassLayer(caches, number) for number in range(len(caches[0].layers))]
    logits_RV = model(
        input_ids=torch.tensor([*tokens, *[tokens[0]] * padding], device=device)[:, None],
        attention_mask=_mask(model, lengths_R, caches[0].room),
        position_ids=lengths_R[:, None],
        past_key_values=Cache(layers=list(layers)),
        use_cache=True,
    ).logits[:, -1]
    for cache in caches:
        cache.length += 1
    return logits_RV[: len(caches)]


def _mask(model: PreTrainedModel, lengths_R: Tensor, room: int) -> Tensor | dict[str, Tensor]:
    """[R, 1, 1, room], the places that the next token of each row attends to; by layer type if there are types."""
    index_L = torch.arange(room, device=lengths_R.device)
    seen = (index_L[None] <= lengths_R[:, None])[:, None, None]
    window = getattr(model.config, "sliding_window", None)
    near = seen if window is None else seen & (index_L[None] > lengths_R[:, None] - window)[:, None, None]
    if model.config._attn_implementation == "eager":
        # It adds the mask to the scores.
        seen, near = (torch.where(mask, 0.0, torch.finfo(model.dtype).min).to(model.dtype) for mask in (seen, near))
    layer_types = getattr(model.config, "layer_types", None)
    if layer_types is None:
        return near
    return {"full_attention": seen, "sliding_attention": near} if "sliding_attention" in layer_types else seen


@contextlib.contextmanager
def _experts_by_token(model: PreTrainedModel) -> Iterator[None]:
    """Multiplies each token with its experts; products by expert would have shapes that depend on the other rows."""
    if not model._can_set_experts_implementation():
        yield
        return
    before = str(model.config._experts_implementation)
    model.set_experts_implementation(_EXPERTS_BY_TOKEN)
    try:
        yield
    finally:
        model.set_experts_implementation(before)


class _PassLayer(CacheLayerMixin):
    """One layer's cache of a pass: it adds the new token to each sequence, and gives all of them together."""

    def __init__(self, caches: Sequence[SequenceCache], number: int) -> None:
        super().__init__()
        self.is_initialized = True
        self._states = [cache.layers[number] for cache in caches]
        self._lengths = [cache.length for cache in caches]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns keys and values [NUM_ROWS, heads, room, d].  key_states, value_states: [NUM_ROWS, heads, 1, d]."""
        keys, values = zip(*self._states, strict=True)
        return self._joined(keys, key_states), self._joined(values, value_states)

    def _joined(self, mine: Sequence[Tensor], new: Tensor) -> Tensor:
        places = [states[:, length] for states, length in zip(mine, self._lengths, strict=True)]
        torch._foreach_copy_(places, list(new[: len(mine), :, 0]))
        return torch.stack([*mine, *[mine[0]] * (NUM_ROWS - len(mine))])

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the sequences have their keys and values."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._states[0][0].shape[1], 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_cache_shape(self) -> int:
        return self._states[0][0].shape[1]
