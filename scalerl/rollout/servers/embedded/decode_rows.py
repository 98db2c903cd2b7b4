"""Decoding in which a row's numbers depend, bit by bit, on its own tokens only.

What depends on shapes is computed in fixed ones (`fixed_shapes`): a prompt's tokens by themselves, decoded tokens in
blocks of NUM_ROWS rows, used or not, with a number of keys that depends on the row's own length.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from scalerl.rollout.servers.embedded.fixed_shapes import (
    IN_BLOCKS,
    NUM_ROWS,
    computes_in_blocks,
    has_experts,
    products_in_blocks,
)

# Keys of the shortest rows; longer ones have twice, four times... as many, up to the capacity.
MIN_KEYS = 32
# Prompts are computed together up to this many tokens.
PREFILL_TOKENS = 2048


@dataclass(frozen=True)
class Prefilled:
    """A computed prompt.  logits_V: logits of the next token.  layers: keys and values [heads, T, d] of each layer."""

    logits_V: Tensor
    layers: list[tuple[Tensor, Tensor]]


def prefill(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> list[Prefilled]:
    """Computes prompts, each with the numbers that it has alone."""
    if not computes_in_blocks(model) or has_experts(model) or _window(model) is not None:
        return [prefilled for ids in prompts for prefilled in _prefill(model, [ids], None)]
    done: list[Prefilled] = []
    while len(done) < len(prompts):
        group: list[Sequence[int]] = []
        for ids in prompts[len(done) :]:
            if group and sum(map(len, group)) + len(ids) > PREFILL_TOKENS:
                break
            group.append(ids)
        lengths = [len(ids) for ids in group]
        # Row by row operations, too, may differ in the last rows of a number that is not a multiple of a vector's.
        padding = -sum(lengths) % NUM_ROWS
        done += _prefill(model, group, [*lengths, *([padding] if padding else [])])
    return done


def _prefill(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], lengths: Sequence[int] | None
) -> list[Prefilled]:
    """One forward pass.  lengths: tokens of each prompt and of the padding after them; None: of one prompt alone."""
    cache = DynamicCache()
    options: dict[str, Any] = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    tokens = [token for ids in prompts for token in ids]
    blocks: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if lengths is not None:
        ends = torch.tensor([len(ids) for ids in prompts]).cumsum(0)
        options |= {
            "prompt_lens": lengths,
            "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
            "logits_to_keep": ends - 1,
        }
        tokens += [0] * (sum(lengths) - len(tokens))
        blocks = products_in_blocks(model, lengths)
    with blocks:
        logits_PV = model(input_ids=torch.tensor([tokens], device=model.device), **options).logits[0]
    # All layers of a dynamic cache have keys and values.
    layers: list[Any] = cache.layers
    sizes = [len(tokens)] if lengths is None else list(lengths)
    by_layer = [
        list(zip(layer.keys[0].split(sizes, 1), layer.values[0].split(sizes, 1), strict=True)) for layer in layers
    ]
    return [Prefilled(logits_PV[i], [of_layer[i] for of_layer in by_layer]) for i in range(len(prompts))]


def _window(model: PreTrainedModel) -> int | None:
    return getattr(model.config, "sliding_window", None)


class DecodeRows:
    """Rows, each with a number and a sequence of at most `capacity` tokens."""

    def __init__(self, model: PreTrainedModel, capacity: int) -> None:
        self._model = model
        self._capacity = capacity
        # By number of keys.
        self._of_length: dict[int, _Rows] = {}

    def put(self, rows: Sequence[int], prefilled: Prefilled) -> None:
        """Begins rows with the same prompt."""
        length = prefilled.layers[0][0].shape[1]
        self._rows(length).add(rows, length, prefilled.layers)

    def step(self, tokens: Mapping[int, int]) -> Tensor:
        """Appends a token to each of some rows, and returns the logits [len(tokens), V] after them.

        The other rows are not changed.
        """
        for before in list(self._of_length.values()):
            if full := before.full():
                length = before.num_keys
                assert length < self._capacity, (length, self._capacity)
                self._rows(length).add(full, length, before.layers(full))
                before.remove(full)
        stepped = [rows for rows in self._of_length.values() if not tokens.keys().isdisjoint(rows.rows)]
        logits_RV = torch.cat([rows.step(tokens) for rows in stepped])
        order = [row for rows in stepped for row in rows.rows]
        if order == list(tokens):
            return logits_RV
        places = {row: place for place, row in enumerate(order)}
        return logits_RV[[places[row] for row in tokens]]

    @torch.inference_mode()
    def clear(self, rows: Collection[int]) -> None:
        """Ends rows; their numbers are free for others."""
        for of_length in self._of_length.values():
            of_length.remove(rows)

    def _rows(self, length: int) -> _Rows:
        """The store of rows that have `length` tokens and get their next one, which is made if there is none."""
        num_keys = MIN_KEYS
        while num_keys <= length:
            num_keys *= 2
        num_keys = min(num_keys, self._capacity)
        if num_keys not in self._of_length:
            self._of_length[num_keys] = _Rows(self._model, num_keys)
        return self._of_length[num_keys]


class _Rows:
    """Rows with the same number of keys, without gaps.

    rows: their numbers.  Behind the last one there is room, which is computed with them and means nothing.
    """

    def __init__(self, model: PreTrainedModel, num_keys: int) -> None:
        self.num_keys = num_keys
        self.rows: list[int] = []
        self._lengths: list[int] = []
        self._model = model
        self._index_L = torch.arange(num_keys, device=model.device)
        self._layers = [_RowLayer(num_keys) for _ in range(model.config.num_hidden_layers)]
        self._cache = Cache(layers=list(self._layers))
        self._has_experts = has_experts(model)
        self._in_blocks = computes_in_blocks(model)

    def full(self) -> list[int]:
        """The rows without room for the key of their next token."""
        return [row for row, length in zip(self.rows, self._lengths, strict=True) if length == self.num_keys]

    def layers(self, rows: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values of these rows, [len(rows), heads, num_keys, d]."""
        places = [self.rows.index(row) for row in rows]
        return [layer.of(places) for layer in self._layers]

    def add(self, rows: Sequence[int], length: int, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Appends rows of this length.  layers: keys and values of each, or, [heads, T, d], of all of them."""
        for layer, (keys, values) in zip(self._layers, layers, strict=True):
            layer.write(len(self.rows), len(rows), keys, values)
        self.rows += rows
        self._lengths += [length] * len(rows)

    def remove(self, rows: Collection[int]) -> None:
        """Fills the places of rows with the last of the rows that stay."""
        rows = set(rows)
        if rows.isdisjoint(self.rows):
            return
        stay = [place for place, row in enumerate(self.rows) if row not in rows]
        gaps = [place for place, row in enumerate(self.rows[: len(stay)]) if row in rows]
        moved = stay[len(stay) - len(gaps) :]
        if gaps:
            for layer in self._layers:
                layer.move(moved, gaps)
        for old, new in zip(moved, gaps, strict=True):
            self.rows[new], self._lengths[new] = self.rows[old], self._lengths[old]
        del self.rows[len(stay) :], self._lengths[len(stay) :]

    def step(self, tokens: Mapping[int, int]) -> Tensor:
        """Logits [len(rows), V] after tokens by row; those of rows without a token mean nothing."""
        # A row without a token writes after its last one, where its next token will overwrite that.
        padding = [0] * (-len(self.rows) % NUM_ROWS)
        device = self._model.device
        ids_R = torch.tensor([tokens.get(row, 0) for row in self.rows] + padding, device=device)
        lengths_R = torch.tensor(self._lengths + padding, device=device)
        pass_rows = len(ids_R) if self._in_blocks else NUM_ROWS
        with self._in_fixed_shapes():
            logits_RV = torch.cat(
                [
                    self._pass(slice(first, first + pass_rows), ids_R, lengths_R)
                    for first in range(0, len(ids_R), pass_rows)
                ]
            )
        self._lengths = [n + (row in tokens) for row, n in zip(self.rows, self._lengths, strict=True)]
        return logits_RV[: len(self.rows)]

    def _pass(self, rows: slice, ids_R: Tensor, lengths_R: Tensor) -> Tensor:
        # A layer's keys are one list of (row, head, key), as are its values.
        num_heads = self._layers[0].num_heads
        heads_RH = torch.arange(rows.start * num_heads, rows.stop * num_heads, device=lengths_R.device)
        places = (heads_RH.view(-1, num_heads) * self.num_keys + lengths_R[rows, None]).view(-1)
        for layer in self._layers:
            layer.computed, layer.places = rows, places
        return self._model(
            input_ids=ids_R[rows, None],
            attention_mask=self._mask(lengths_R[rows]),
            position_ids=lengths_R[rows, None],
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]

    @contextlib.contextmanager
    def _in_fixed_shapes(self) -> Iterator[None]:
        """Gives the passes in the block of code fixed shapes.

        Products with weights are in blocks of rows where the model allows it, experts by token:
        products by expert would have shapes that depend on the other rows.
        """
        with products_in_blocks(self._model) if self._in_blocks else contextlib.nullcontext():
            if not self._has_experts:
                yield
                return
            before = str(self._model.config._experts_implementation)
            self._model.set_experts_implementation(IN_BLOCKS)
            try:
                yield
            finally:
                self._model.set_experts_implementation(before)

    def _mask(self, lengths_R: Tensor) -> Tensor | dict[str, Tensor]:
        """[R, 1, 1, num_keys], what a row's token attends to; by layer type if there are types."""
        seen = self._index_L[None] <= lengths_R[:, None]
        window = _window(self._model)
        near = seen if window is None else seen & (self._index_L[None] > lengths_R[:, None] - window)
        layer_types = getattr(self._model.config, "layer_types", None)
        if layer_types is None:
            return self._added(near)
        if "sliding_attention" in layer_types:
            return {"full_attention": self._added(seen), "sliding_attention": self._added(near)}
        return self._added(seen)

    def _added(self, seen_RL: Tensor) -> Tensor:
        """A mask as torch's attention takes it; added to scores it has not to be converted in every layer."""
        if not self._in_blocks:
            return seen_RL[:, None, None]
        mask = torch.zeros(seen_RL.shape, dtype=self._model.dtype, device=seen_RL.device)
        return mask.masked_fill_(~seen_RL, -torch.inf)[:, None, None]


class _RowLayer(CacheLayerMixin):
    """The cache of one layer.

    keys, values: [room, heads, num_keys, d], room a multiple of NUM_ROWS.  computed: rows of the current forward pass.
    places: [rows * heads] where it writes, of all places [room * heads * num_keys].
    """

    computed: slice
    places: Tensor

    def __init__(self, num_keys: int) -> None:
        super().__init__()
        self._num_keys = num_keys

    def write(self, first: int, num_rows: int, keys: Tensor, values: Tensor) -> None:
        """Fills rows from `first` on with keys and values [num_rows, heads, T, d], or the same [heads, T, d] in all."""
        self.keys = self._with_room(self.keys, first + num_rows, keys)
        self.values = self._with_room(self.values, first + num_rows, values)
        self.is_initialized = True
        self.num_heads = keys.shape[-3]
        for mine, states in ((self.keys, keys), (self.values, values)):
            mine[first : first + num_rows, :, : states.shape[-2]] = states
            # A number that is not finite would reach a masked place's neighbours.
            mine[first : first + num_rows, :, states.shape[-2] :] = 0

    def _with_room(self, mine: Tensor | None, num_rows: int, states: Tensor) -> Tensor:
        room = 0 if mine is None else mine.shape[0]
        if num_rows <= room:
            assert mine is not None
            return mine
        grown = states.new_zeros(
            max(2 * room, num_rows + -num_rows % NUM_ROWS), states.shape[-3], self._num_keys, states.shape[-1]
        )
        if mine is not None:
            grown[:room] = mine
        return grown

    def of(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        return self.keys[list(rows)], self.values[list(rows)]

    def move(self, sources: Sequence[int], places: Sequence[int]) -> None:
        assert self.keys is not None and self.values is not None
        for mine in (self.keys, self.values):
            mine[list(places)] = mine[list(sources)]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass  # `write` comes first

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        for mine, states in ((self.keys, key_states), (self.values, value_states)):
            mine.view(-1, states.shape[-1]).index_copy_(0, self.places, states.reshape(-1, states.shape[-1]))
        return self.keys[self.computed], self.values[self.computed]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._num_keys, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_cache_shape(self) -> int:
        return self._num_keys
