"""Decoding in which the numbers of a sequence depend, bit by bit, on its own tokens only.

A matrix product may add in another order when its shape changes. So a prompt is computed by itself, and decoded tokens
in passes of NUM_ROWS rows, used or not. The sequences of a pass have the same room for keys, which follows from the
length of each. All else of a forward pass is row by row, attention too, whose kernel takes one row and head after the
other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

NUM_ROWS = 32
# Room for keys of the shortest sequences; longer ones have twice, four times... as much.
MIN_KEYS = 32
# transformers' experts whose products have the same shape for every token.
_EXPERTS_BY_TOKEN = "batched_mm"


class DeltaStates(NamedTuple):
    """What a gated delta net keeps of a sequence, whatever its length: tokens of the convolution, and the state."""

    conv: Tensor
    state: Tensor


class SequenceCache:
    """Keys and values of one sequence, or the states of a gated delta net.

    layers: of each layer, [heads, room, d]; they are zero from `length` on.
    """

    def __init__(self, length: int, layers: Sequence[tuple[Tensor, Tensor] | DeltaStates]) -> None:
        """Copies keys and values [heads, length, d] of each layer, with room for the next token."""
        self.length, self.layers = length, list(layers)
        self._give_room()

    def make_room(self) -> None:
        """Makes room for one more token."""
        if self.length == self.room:
            self._give_room()

    def _give_room(self) -> None:
        self.room = _room(self.length)
        self.layers = [
            layer if isinstance(layer, DeltaStates) else (self._with_room(layer[0]), self._with_room(layer[1]))
            for layer in self.layers
        ]

    def _with_room(self, states: Tensor) -> Tensor:
        return _with_room(states, self.length, self.room)


def _room(length: int) -> int:
    room = MIN_KEYS
    while room <= length:
        room *= 2
    return room


def _with_room(states: Tensor, length: int, room: int) -> Tensor:
    # Zeros, as a number that is not finite would reach the neighbours of a masked place.
    padded = states.new_zeros(states.shape[0], room, states.shape[2])
    padded[:, :length] = states[:, :length]
    return padded


def prefill(model: PreTrainedModel, prompt: Sequence[int]) -> tuple[Tensor, list[tuple[Tensor, Tensor] | DeltaStates]]:
    """Computes a prompt: the logits [V] of its next token, and each layer's keys and values [heads, T, d] or states."""
    has_states = "linear_attention" in (getattr(model.config, "layer_types", None) or ())
    cache = DynamicCache(config=model.config) if has_states else DynamicCache()
    ids = torch.tensor([list(prompt)], device=model.device)
    logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits[0, 0], [_kept(layer) for layer in cache.layers]


def _kept(layer: Any) -> tuple[Tensor, Tensor] | DeltaStates:
    """What a layer of a dynamic cache has of its one sequence: states, or keys and values."""
    if isinstance(layer, LinearAttentionLayer):
        both: Any = layer.conv_states, layer.recurrent_states
        return DeltaStates(both[0][0], both[1][0])
    return layer.keys[0], layer.values[0]


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
    layers: list[Any] = [
        (_PassStates if isinstance(layer, DeltaStates) else _PassLayer)(caches, number)
        for number, layer in enumerate(caches[0].layers)
    ]
    logits_RV = model(
        input_ids=torch.tensor([*tokens, *[tokens[0]] * padding], device=device)[:, None],
        attention_mask=_mask(model, lengths_R, caches[0].room),
        position_ids=lengths_R[:, None],
        past_key_values=Cache(layers=layers),
        use_cache=True,
    ).logits[:, -1]
    for layer in layers:
        if isinstance(layer, _PassStates):
            layer.give_back()
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


class _PassStates(LinearAttentionLayer):
    """One gated delta net's states of a pass, [NUM_ROWS, ...], which the pass changes."""

    def __init__(self, caches: Sequence[SequenceCache], number: int) -> None:
        super().__init__()
        self._caches, self._number = caches, number
        mine: list[Any] = [cache.layers[number] for cache in caches]
        conv, states = zip(*mine, *[mine[0]] * (NUM_ROWS - len(mine)), strict=True)
        self.conv_states, self.recurrent_states = torch.stack(conv), torch.stack(states)
        self.dtype, self.device = self.conv_states.dtype, self.conv_states.device
        self.is_conv_states_initialized = self.is_recurrent_states_initialized = self.has_previous_state = True

    def give_back(self) -> None:
        """Gives each sequence its states after the pass."""
        assert self.conv_states is not None and self.recurrent_states is not None
        for cache, conv, state in zip(self._caches, self.conv_states, self.recurrent_states, strict=False):
            cache.layers[self._number] = DeltaStates(conv, state)
