"""Rules between Hugging Face tensors and Megatron-Core tensors, and the family that is made of them.

Megatron-Core layouts (local layer spec), `tp` tensor-parallel ranks:
  qkv      rows by query group: [q heads of the group, k, v] x head_dim; whole groups per rank; with gated attention
           the rows of each query head are followed by those of its gate
  delta    rows by key head of a gated delta net: those that belong to the head of each part of each tensor, as
           `sections` say; whole key heads per rank
  gate_up  per rank [gate rows; up rows]; joined over ranks [all gate rows; all up rows], which may be one Hugging Face
           tensor, as `sections` say
  vocab    rows, zero padded to `padded_vocab_size`
  column   split over rows (dim 0); row: split over columns (dim 1); replicated: whole on every rank
A tensor of an expert is split over the expert-tensor-parallel ranks instead, and one expert-parallel rank holds it.

A Hugging Face tensor may have the experts of a layer stacked (`Param.stacked`): [experts, columns, rows], or
[experts, rows] of biases. Gate and up then take turns in its last dimension, or with `sections` follow each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any, Literal, Protocol

from scalerl.models.mixture import Mixture

if TYPE_CHECKING:
    import torch

    from scalerl.models.shape import ModelShape
    from scalerl.models.vision import VisionModel

Kind = Literal["replicated", "column", "row", "qkv", "delta", "gate_up", "vocab"]
StagePart = Literal["first", "layer", "last"]
Where = Literal["every", "dense", "mixture", "linear", "full"]

# A model tensor's key in a distributed checkpoint is this and Param.name.
CHECKPOINT_MODEL_PREFIX = "model."
# How the keys of a model begin in a checkpoint of its own; those of its optimizer begin with `optimizer.`.
CHECKPOINT_MODEL_ROOTS = ("embedding.", "vision_tower.", "decoder.", "output_layer.")
# The vision tower's module in the model.
TOWER_MODULE = "vision_tower"
# Beginning of the names of a model's tensors in Hugging Face files.
HF_MODEL = "model."
# Name of a layer's mixture of experts in the models of transformers 5, whatever the files call it.
MIXTURE_MODULE = "mlp"

# Rows of one rank's vocabulary shard are a multiple of this (matmul tiles).
VOCAB_ROWS_MULTIPLE = 64


class LazyTensor(Protocol):
    """A tensor in a file, as safetensors' get_slice returns it: it has a shape, and indexing reads a part."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


Read = Callable[[str], LazyTensor]


@dataclass(frozen=True)
class InMemory:
    """A tensor in memory with the interface of LazyTensor."""

    tensor: torch.Tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.tensor[index]


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Vocabulary rows with padding: the smallest multiple of 64 * tp_size that is not below vocab_size."""
    multiple = VOCAB_ROWS_MULTIPLE * tp_size
    return -(-vocab_size // multiple) * multiple


def dim_sizes(shape: ModelShape) -> dict[str, int]:
    """Sizes of the named dimensions that rules refer to."""
    sizes = {
        "hidden": shape.hidden_size,
        "ffn": shape.ffn_hidden_size,
        "vocab": shape.vocab_size,
        "q": shape.num_attention_heads * shape.head_dim,
        "kv": shape.num_kv_heads * shape.head_dim,
        "head_dim": shape.head_dim,
        "heads": shape.num_attention_heads,
        "experts": shape.num_experts,
        "expert_ffn": shape.moe_ffn_hidden_size,
        "shared_ffn": shape.shared_expert_ffn_hidden_size,
        "value": 1,
        "gate_up_ffn": 2 * shape.ffn_hidden_size,
        "lora_rank": shape.adapter.rank if shape.adapter else 0,
    }
    if shape.linear_layers:
        sizes |= _delta_sizes(shape)
    if shape.vision:
        sizes |= _tower_sizes(shape.vision)
    if shape.kv_lora_rank is None:
        return sizes
    heads = shape.num_attention_heads
    nope, rope, value = shape.qk_nope_head_dim, shape.qk_rope_head_dim, shape.v_head_dim
    assert nope is not None and rope is not None and value is not None
    return sizes | {
        "q_lora": shape.q_lora_rank or 0,
        "kv_lora": shape.kv_lora_rank,
        "kv_lora_rope": shape.kv_lora_rank + rope,
        "q_latent": heads * (nope + rope),
        "kv_latent": heads * (nope + value),
        "v_latent": heads * value,
    }


def _delta_sizes(shape: ModelShape) -> dict[str, int]:
    """Sizes of gated delta nets, and of the gated attention between them."""
    heads, value_heads = shape.linear_num_key_heads, shape.linear_num_value_heads
    key, value = heads * shape.linear_key_head_dim, value_heads * shape.linear_value_head_dim
    return {
        "q_gate": 2 * shape.num_attention_heads * shape.head_dim,
        "delta_key": key,
        "delta_value": value,
        "delta_heads": value_heads,
        "delta_head_dim": shape.linear_value_head_dim,
        "delta_qkv": 2 * key + value,
        "delta_qkvz": 2 * key + 2 * value,
        "delta_ba": 2 * value_heads,
        "delta_taps": shape.linear_conv_kernel_dim,
        "one": 1,
    }


def _tower_sizes(vision: VisionModel) -> dict[str, int]:
    """Sizes of a vision tower."""
    return {
        "tower": vision.hidden_size,
        "tower_qkv": 3 * vision.hidden_size,
        "tower_ffn": vision.intermediate_size,
        "tower_merged": vision.merge_size**2 * vision.hidden_size,
        "tower_out": vision.out_hidden_size,
        "tower_positions": vision.num_positions,
        "channels": vision.in_channels,
        "frames": vision.temporal_patch_size,
        "patch": vision.patch_size,
    }


@dataclass(frozen=True)
class RowRange:
    """`count` rows of the joined tensor from `start` on: those of Hugging Face's tensor `name` from `hf_start` on."""

    name: str
    hf_start: int
    start: int
    count: int


@dataclass(frozen=True)
class Param:
    """One Megatron-Core tensor and the Hugging Face tensors it is made of.

    name: key in the model (local layer spec) and in the distributed checkpoint, with the global indices of layer and
    expert. dims: named dimensions of each tensor in `hf` (see dim_sizes).
    layer: global index, None outside the layers.
    stage_part: which pipeline stage owns it: first (embedding), last (final norm, head) or the one with the layer.
    expert: global index of the expert that it belongs to, else None. For an expert, `tp_rank` and `tp_size` below are
    those of expert-tensor parallelism.
    keeps_float32: stored, kept and exported as float32 whatever the model's dtype.
    joins_previous: an engine joins it with the tensor before it, and needs both in one bucket.
    sections: the named dimensions of the parts that the rows of each tensor in `hf` consist of: of kind delta, and of
    kind gate_up where gate and up are one tensor; of a stacked one that they follow each other there.
    stacked: its one Hugging Face tensor has all experts of the layer; `hf` names it once for each part, and `dims` are
    those of the parts.
    """

    name: str
    hf: tuple[str, ...]
    kind: Kind
    dims: tuple[tuple[str, ...], ...]
    layer: int | None
    stage_part: StagePart
    expert: int | None = None
    keeps_float32: bool = False
    joins_previous: bool = False
    sections: tuple[tuple[str, ...], ...] = ()
    stacked: bool = False

    @property
    def has_gradient(self) -> bool:
        """Whether an optimizer updates it: all but the biases of routers, which move by counts of tokens."""
        return not self.name.endswith(".expert_bias")

    def hf_shapes(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        """The shape of each of its Hugging Face tensors."""
        parts = self.part_shapes(shape)
        if self.stacked:
            rows, *columns = parts[0]
            return {self.hf[0]: (shape.num_experts, *columns, len(parts) * rows)}
        return dict(zip(self.hf, parts, strict=True))

    @property
    def of_tower(self) -> bool:
        """Whether it is of the vision tower."""
        return self.name.startswith(f"{TOWER_MODULE}.")

    def part_shapes(self, shape: ModelShape) -> list[tuple[int, ...]]:
        """The shapes of what it consists of: Hugging Face tensors, or one expert's parts of a stacked one."""
        sizes = dim_sizes(shape)
        return [tuple(sizes[d] for d in dims) for dims in self.dims]

    def joined_shape(self, shape: ModelShape, vocab_rows: int | None = None) -> tuple[int, ...]:
        """The shape once tensor-parallel shards are joined.  vocab_rows: stored rows (None: unpadded)."""
        parts = self.part_shapes(shape)
        rows = sum(s[0] for s in parts)
        if self.kind == "vocab" and vocab_rows is not None:
            rows = vocab_rows
        return (rows, *parts[0][1:])

    def mcore_shape(self, shape: ModelShape, tp_size: int) -> tuple[int, ...]:
        """The local shape on one tensor-parallel rank.  Raises ValueError if tp_size does not divide it."""
        self._check_divides(shape, tp_size)
        full = self.joined_shape(shape, padded_vocab_size(shape.vocab_size, tp_size))
        if self.kind == "replicated":
            return full
        if self.kind == "row":
            return (full[0], full[1] // tp_size, *full[2:])
        return (full[0] // tp_size, *full[1:])

    def shard(
        self, read: Read, shape: ModelShape, tp_rank: int, tp_size: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Reads this rank's Megatron-Core shard into `out`, in its dtype; None: a new one in the stored dtype.

        Only the slices that the shard needs are read, one Hugging Face tensor after the other, directly into place.
        Raises ValueError naming every Hugging Face tensor whose shape is wrong.
        """
        self._check_divides(shape, tp_size)
        self._check_sources(read, shape)
        for number, parts in enumerate(self._parts(read, shape, tp_rank, tp_size)):
            out = self._fill(out, number, parts, shape, tp_size)
        assert out is not None
        return out

    def _fill(
        self, out: torch.Tensor | None, number: int, parts: Sequence[torch.Tensor], shape: ModelShape, tp_size: int
    ) -> torch.Tensor:
        """Copies this rank's parts of the Hugging Face tensor number `number` into the shard."""
        if out is None:
            out = parts[0].new_empty(self.mcore_shape(shape, tp_size))
        for place, part in zip(self._places(out, shape)[number], parts, strict=True):
            place[: len(part)].copy_(part)
        if self.kind == "vocab":
            out[len(parts[0]) :].zero_()
        return out

    def write(
        self, shard: torch.Tensor, out: Mapping[str, torch.Tensor], shape: ModelShape, tp_rank: int, tp_size: int
    ) -> None:
        """Writes this rank's shard into its part of the whole Hugging Face tensors: the inverse of `shard`."""
        for number, parts in enumerate(self._parts(lambda hf: InMemory(out[hf]), shape, tp_rank, tp_size)):
            for part, place in zip(parts, self._places(shard, shape)[number], strict=True):
                part.copy_(place[: len(part)])

    def _parts(self, read: Read, shape: ModelShape, tp_rank: int, tp_size: int) -> Iterator[list[torch.Tensor]]:
        """Yields this rank's parts of each entry of `hf`; views where the tensors are in memory."""
        if self.stacked:
            yield from ([part] for part in self._parts_of_stack(read(self.hf[0]), tp_rank, tp_size))
            return
        for number, hf in enumerate(self.hf):
            yield self._slices(read(hf), number, shape, tp_rank, tp_size)

    def _parts_of_stack(self, source: LazyTensor, tp_rank: int, tp_size: int) -> Iterator[torch.Tensor]:
        """Yields this rank's parts of its expert, each [rows, columns] or [rows]; what is read is read once."""
        assert self.expert is not None, self.name
        *columns, rows = source.get_shape()[1:]
        num_parts = len(self.hf)
        of_rank = _span(columns[0], tp_rank, tp_size) if self.kind == "row" else slice(None)

        def read(span: slice) -> torch.Tensor:
            return source[self.expert, of_rank, span].transpose(0, 1) if columns else source[self.expert, span]

        if self.sections:
            size = rows // num_parts
            span = _span(size, tp_rank, tp_size)
            for start in range(0, rows, size):
                yield read(slice(start + span.start, start + span.stop))
            return
        by_rows = self.kind in ("gate_up", "column")
        expert = read(_span(rows, tp_rank, tp_size) if by_rows else slice(None))
        for part in range(num_parts):
            yield expert[part::num_parts]

    def of_stack(self, full: torch.Tensor, shape: ModelShape) -> torch.Tensor:
        """The joined tensor as its expert has it in the stacked Hugging Face tensor: [columns, rows] or [rows]."""
        (size,) = self.hf_shapes(shape).values()
        stored = full.new_empty(size[1:])
        # One expert alone, as if it were this one.
        self.write(full, {self.hf[0]: stored.expand(size)}, shape, 0, 1)
        return stored

    def _slices(
        self, source: LazyTensor, number: int, shape: ModelShape, tp_rank: int, tp_size: int
    ) -> list[torch.Tensor]:
        """This rank's parts of the Hugging Face tensor number `number`; views if the tensor is in memory."""
        if self._is_grouped:
            groups, counts = self._group_rows(shape)
            parts, start = [], 0
            for count in counts[number]:
                rows = groups // tp_size * count
                first = start + tp_rank * rows
                parts.append(source[first : first + rows].unflatten(0, (-1, count)))
                start += groups * count
            return parts
        if self.kind == "gate_up" and self.sections:
            return _halves(source, tp_rank, tp_size)
        if self.kind in ("gate_up", "column"):
            return [_rows(source, tp_rank, tp_size)]
        if self.kind == "vocab":
            return [_vocab_rows(source, shape.vocab_size, tp_rank, tp_size)]
        if self.kind == "row":
            columns = source.get_shape()[1] // tp_size
            return [source[:, tp_rank * columns : (tp_rank + 1) * columns]]
        return [source[:]]

    def _places(self, out: torch.Tensor, shape: ModelShape) -> list[list[torch.Tensor]]:
        """Views of the shard for each Hugging Face tensor in it, in the order of `_slices`."""
        if self._is_grouped:
            return self._of_groups(out, shape)
        if self.kind == "gate_up":
            halves = list(out.chunk(2))
            return [halves] if self.sections and not self.stacked else [[half] for half in halves]
        return [[out]]

    @property
    def _is_grouped(self) -> bool:
        """Whether the rows come group by group: of query heads, or of a delta net's key heads."""
        return self.kind in ("qkv", "delta")

    def row_groups(self, shape: ModelShape) -> int:
        """The number of groups that the rows come in, those of each Hugging Face tensor in turn; 1: in no groups."""
        return self._group_rows(shape)[0] if self._is_grouped else 1

    def _group_rows(self, shape: ModelShape) -> tuple[int, list[list[int]]]:
        """The number of groups of the whole tensor, and for each Hugging Face tensor the rows of a group by section."""
        sizes = dim_sizes(shape)
        groups = shape.num_kv_heads if self.kind == "qkv" else shape.linear_num_key_heads
        sections = self.sections or tuple((dims[0],) for dims in self.dims)
        return groups, [[sizes[name] // groups for name in names] for names in sections]

    def _of_groups(self, out: torch.Tensor, shape: ModelShape) -> list[list[torch.Tensor]]:
        """Views [groups here, rows of a group, ...] of a tensor of whole groups, by Hugging Face tensor and section."""
        counts = self._group_rows(shape)[1]
        views = iter(out.unflatten(0, (-1, sum(map(sum, counts)))).split([n for part in counts for n in part], dim=1))
        return [[next(views) for _ in part] for part in counts]

    def join(self, shards: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor:
        """Joins tensor-parallel shards, in rank order, to the whole tensor as a distributed checkpoint stores it.

        Raises ValueError for a shard of the wrong shape.
        """
        import torch

        expected = self.mcore_shape(shape, len(shards))
        wrong = [f"tp rank {r}: {tuple(s.shape)}" for r, s in enumerate(shards) if tuple(s.shape) != expected]
        if wrong:
            raise ValueError(f"{self.name}: shards should be {expected}, got {'; '.join(wrong)}")
        if self.kind == "replicated" or len(shards) == 1:
            return shards[0]
        if self.kind == "row":
            return torch.cat(list(shards), dim=1)
        if self.kind == "gate_up":
            halves = [s.chunk(2) for s in shards]
            return torch.cat([h[0] for h in halves] + [h[1] for h in halves])
        return torch.cat(list(shards))

    def boxes(
        self, shape: ModelShape, tp_rank: int, tp_size: int
    ) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """A rank's shard of a matrix as boxes of the joined tensor: (its start in the shard, offsets, sizes)."""
        rows, columns = self.mcore_shape(shape, tp_size)
        if self.kind == "row":
            return [(0, (0, tp_rank * columns), (rows, columns))]
        if self.kind == "replicated":
            return [(0, (0, 0), (rows, columns))]
        # Gate rows of all ranks come before the up rows of all.
        parts = 2 if self.kind == "gate_up" else 1
        rows //= parts
        places = ((part, (part * tp_size + tp_rank) * rows) for part in range(parts))
        return [(part * rows * columns, (first, 0), (rows, columns)) for part, first in places]

    def to_hf(self, full: torch.Tensor, shape: ModelShape) -> dict[str, torch.Tensor]:
        """Splits a joined tensor into contiguous Hugging Face tensors, without vocabulary padding.

        Not of a stacked one (`of_stack`).  Raises ValueError when `full` has the wrong shape.
        """
        assert not self.stacked, self.name
        self.check_joined(full.shape, shape)
        if self._is_grouped:
            import torch

            of_tensors = self._of_groups(full, shape)
            parts = [torch.cat([part.flatten(0, 1) for part in views]) for views in of_tensors]
        elif self.kind == "gate_up" and not self.sections:
            parts = list(full.chunk(2))
        elif self.kind == "vocab":
            parts = [full[: shape.vocab_size]]
        else:
            parts = [full]
        return {hf: part.contiguous() for hf, part in zip(self.hf, parts, strict=True)}

    def add_to_hf(self, full: torch.Tensor, shape: ModelShape, out: dict[str, torch.Tensor]) -> None:
        """Adds the Hugging Face tensors of a joined tensor to `out`; a stacked one is whole with its last expert's.

        Raises ValueError when `full` has the wrong shape.
        """
        if not self.stacked:
            out |= self.to_hf(full, shape)
            return
        self.check_joined(full.shape, shape)
        for name, size in self.hf_shapes(shape).items():
            if name not in out:
                out[name] = full.new_empty(size)
        self.write(full, out, shape, 0, 1)

    def rows_of(self, shape: ModelShape) -> list[RowRange]:
        """The split of `to_hf` as row ranges (of numbers, if it has one dimension); each Hugging Face row once."""
        assert not self.stacked, self.name
        sizes = [size[0] for size in self.hf_shapes(shape).values()]
        if self._is_grouped:
            groups, counts = self._group_rows(shape)
            ranges, start = [], 0
            for group in range(groups):
                for name, of_tensor in zip(self.hf, counts, strict=True):
                    # Rows of the tensor before the section.
                    before = 0
                    for count in of_tensor:
                        ranges.append(RowRange(name, before + group * count, start, count))
                        before, start = before + groups * count, start + count
            return ranges
        starts = accumulate([0, *sizes[:-1]])
        return [RowRange(name, 0, start, size) for name, start, size in zip(self.hf, starts, sizes, strict=True)]

    def check_joined(self, stored: Sequence[int], shape: ModelShape) -> None:
        """Raises ValueError unless `stored` is the joined shape (of a vocab tensor: or has more, padded, rows)."""
        expected = self.joined_shape(shape)
        stored = tuple(stored)
        if stored == expected:
            return
        if self.kind == "vocab" and stored[1:] == expected[1:] and stored[0] > expected[0]:
            return
        more = " or more rows" if self.kind == "vocab" else ""
        raise ValueError(f"{self.name}: shape {stored}, should be {expected}{more}")

    def _check_divides(self, shape: ModelShape, tp_size: int) -> None:
        sizes = {
            "qkv": {"num_attention_heads": shape.num_attention_heads, "num_key_value_heads": shape.num_kv_heads},
            "delta": {"linear_num_key_heads": shape.linear_num_key_heads},
            "gate_up": {"intermediate_size": self.joined_shape(shape)[0] // 2},
            "column": {"rows": self.joined_shape(shape)[0]},
            "row": {"columns": self.joined_shape(shape)[-1]},
        }
        over = "tp_size" if self.expert is None else "etp_size"
        for dimension, size in sizes.get(self.kind, {}).items():
            if size % tp_size:
                raise ValueError(f"{self.name}: {dimension} {size} is not divisible by {over} {tp_size}")

    def _check_sources(self, read: Read, shape: ModelShape) -> None:
        sizes = {hf: (tuple(read(hf).get_shape()), expected) for hf, expected in self.hf_shapes(shape).items()}
        wrong = [f"{hf}: shape {size}, config.json says {want}" for hf, (size, want) in sizes.items() if size != want]
        if wrong:
            raise ValueError("wrong tensor shapes: " + "; ".join(wrong))


def _rows(source: LazyTensor, rank: int, num_parts: int) -> torch.Tensor:
    return source[_span(source.get_shape()[0], rank, num_parts)]


def _halves(source: LazyTensor, rank: int, num_parts: int) -> list[torch.Tensor]:
    """A rank's rows of the first half of a tensor, and of the second."""
    half = source.get_shape()[0] // 2
    span = _span(half, rank, num_parts)
    return [source[start + span.start : start + span.stop] for start in (0, half)]


def _span(size: int, rank: int, num_parts: int) -> slice:
    return slice(rank * size // num_parts, (rank + 1) * size // num_parts)


def _vocab_rows(source: LazyTensor, vocab_size: int, tp_rank: int, tp_size: int) -> torch.Tensor:
    """A rank's vocabulary rows, without padding."""
    rows = padded_vocab_size(vocab_size, tp_size) // tp_size
    start, stop = min(tp_rank * rows, vocab_size), min((tp_rank + 1) * rows, vocab_size)
    # A rank that holds only padding gets no row, but the dtype and width of one.
    return source[start:stop] if start < stop else source[:1][:0]


@dataclass(frozen=True)
class ParamPattern:
    """A Param without its indices: in name and hf `{i}` stands for the layer and `{e}` for the expert.

    where: the layers that have the tensor: every one, those with a dense MLP or with a mixture of experts, those with
    a gated delta net (linear) or with attention (full).
    given, absent: fields of ModelShape; the tensor exists only if `given` is set and `absent` is not.
    """

    name: str
    hf: tuple[str, ...]
    kind: Kind
    dims: tuple[tuple[str, ...], ...]
    where: Where = "every"
    given: str = ""
    absent: str = ""
    keeps_float32: bool = False
    joins_previous: bool = False
    sections: tuple[tuple[str, ...], ...] = ()
    stacked: bool = False

    @property
    def of_expert(self) -> bool:
        """Whether the tensor belongs to one expert."""
        return "{e}" in self.name

    def exists(self, shape: ModelShape, layer: int) -> bool:
        """Whether a model of this shape has the tensor in that layer."""
        is_mixture = bool(shape.moe_layers) and shape.moe_layers[layer]
        is_linear = bool(shape.linear_layers) and shape.linear_layers[layer]
        if self.where in ("dense", "mixture") and is_mixture != (self.where == "mixture"):
            return False
        if self.where in ("linear", "full") and is_linear != (self.where == "linear"):
            return False
        return bool(not self.given or getattr(shape, self.given)) and not (self.absent and getattr(shape, self.absent))

    def param(self, layer: int | None, stage_part: StagePart, expert: int | None = None) -> Param:
        """The tensor with these indices in its names."""

        def fill(text: str) -> str:
            return text.replace("{i}", str(layer)).replace("{e}", str(expert))

        hf = tuple(fill(name) for name in self.hf)
        # Stacked tensors are sent whole.
        joins_previous = self.joins_previous or (self.stacked and expert != 0)
        flags = self.keeps_float32, joins_previous, self.sections, self.stacked
        return Param(fill(self.name), hf, self.kind, self.dims, layer, stage_part, expert, *flags)


# A tensor of a vision tower: its name in the module, or in a block of it, and its named dimensions.
TowerTensor = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class Tower:
    """A vision tower, which is transformers' module, as data.

    prefix: how the names of its tensors in the files begin.
    tensors: those of no block.  block, deepstack: those of each block, and of each that feeds a layer of the language
    model.
    defaults: what transformers takes for keys that vision_config leaves out.
    image_token_id, sections, interleaved: of `VisionModel`; the first two where config.json has none.
    transformers_class: its class below transformers.models.
    is_optional: transformers has a class of the language model alone, and a run without pictures may leave the tower
    as it is.
    """

    prefix: str
    transformers_class: str
    tensors: tuple[TowerTensor, ...]
    block: tuple[TowerTensor, ...]
    defaults: Mapping[str, Any]
    image_token_id: int
    sections: tuple[int, int, int]
    interleaved: bool
    deepstack: tuple[TowerTensor, ...] = ()
    is_optional: bool = False

    def params(self, vision: VisionModel) -> Iterator[Param]:
        """The tower's tensors; each rank of the first stage has them whole."""
        parts = [("", self.tensors)]
        parts += [(f"blocks.{block}.", self.block) for block in range(vision.depth)]
        parts += [(f"deepstack_merger_list.{i}.", self.deepstack) for i in range(len(vision.deepstack_blocks))]
        for path, tensors in parts:
            for name, dims in tensors:
                hf = (f"{self.prefix}{path}{name}",)
                yield Param(f"{TOWER_MODULE}.{path}{name}", hf, "replicated", (dims,), None, "first")


# Head of critics and reward models: transformers' *ForSequenceClassification with one label.
VALUE_HEAD = ParamPattern("output_layer.weight", ("score.weight",), "replicated", (("value", "hidden"),))


@dataclass(frozen=True)
class Family:
    """A model family as data: the rules of its parameters, and the facts that its config.json leaves out.

    defaults: what transformers takes for keys that config.json leaves out, by key; a value that is given has the type
    of its default (None: a positive integer, or null).
    refused: config.json keys that must be absent, null or false.
    window: config.json key of a sliding window that applies whenever it is set ("": none).
    mixture: how config.json describes the experts (None: dense).
    latent: multi-head latent attention.
    prefix: how the names of the tensors in the files begin, but the head's.
    text_config: the key of config.json that holds the language model's keys; those of other parts are outside of it.
    untrained: beginnings of the names of further tensors, which are neither trained nor sent.
    stacks_experts: the files have the experts of a layer in two tensors (`stacked_place`).
    delta_net: some layers have a gated delta net in the place of attention (key layer_types, or
    full_attention_interval); attention has an output gate, and norms multiply with 1 + weight.
    qk_norm, qkv_bias: norms of each query and key head, biases of queries, keys and values; a text is the config.json
    key that says whether a model has them.
    nope_layers: no_rope_layers, or no_rope_layer_interval, says which layers have no rotary embedding.
    sliding_layers: layer_types says which layers see `sliding_window` tokens alone.
    facts: fields of ModelShape that are the same for every model of the family.
    tower: the vision tower of the files (None: they have none).
    """

    model_type: str
    first: tuple[ParamPattern, ...]
    layer: tuple[ParamPattern, ...]
    last: tuple[ParamPattern, ...]
    head: ParamPattern
    qk_norm: bool | str
    qkv_bias: bool | str
    defaults: Mapping[str, Any]
    refused: tuple[str, ...] = ()
    window: str = ""
    mixture: Mixture | None = None
    latent: bool = False
    delta_net: bool = False
    prefix: str = HF_MODEL
    text_config: str = ""
    untrained: tuple[str, ...] = ()
    stacks_experts: bool = False
    sliding_layers: bool = False
    nope_layers: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    tower: Tower | None = None

    def untrained_in(self, shape: ModelShape) -> tuple[str, ...]:
        """Beginnings of the names of tensors in the files that a model of this shape neither trains nor sends."""
        tower = (self.tower.prefix,) if self.tower and shape.vision is None else ()
        return (*tower, *self.untrained)

    @property
    def expert_names(self) -> tuple[str, ...]:
        """Names, in the files, of an expert's gate, up and down matrix inside a layer, with `{e}`.

        () if the family is dense, or all its models have their experts stacked.
        """
        rules = [rule for rule in self.layer if rule.of_expert and not rule.stacked]
        return tuple(name.rpartition("{i}.")[2].removesuffix(".weight") for rule in rules for name in rule.hf)

    @property
    def mixture_name(self) -> str:
        """Name, in the files, of a layer's mixture of experts inside a layer; MIXTURE_MODULE if dense or stacked."""
        return self.expert_names[0].partition(".")[0] if self.expert_names else MIXTURE_MODULE

    def params(self, shape: ModelShape) -> list[Param]:
        """All parameters in the static export order: embedding, vision tower, layers 0.., final norm, head.

        With tied embeddings there is no head (Hugging Face stores none).  shape.head "value": VALUE_HEAD.
        """
        params = [rule.param(None, "first") for rule in self.first]
        if self.tower and shape.vision:
            params += self.tower.params(shape.vision)
        for i in range(shape.num_layers):
            rules = [rule for rule in self.layer if rule.exists(shape, i)]
            params += [rule.param(i, "layer") for rule in rules if not rule.of_expert]
            of_experts = [rule for rule in rules if rule.of_expert]
            # A stacked tensor is sent with all of its experts.
            apart = [rule for rule in of_experts if not rule.stacked]
            params += [rule.param(i, "layer", e) for e, rule in product(range(shape.num_experts), apart)]
            stacks = [rule for rule in of_experts if rule.stacked]
            params += [rule.param(i, "layer", e) for rule, e in product(stacks, range(shape.num_experts))]
        params += [rule.param(None, "last") for rule in self.last]
        if shape.head == "value":
            params.append(VALUE_HEAD.param(None, "last"))
        elif not shape.tie_word_embeddings:
            params.append(self.head.param(None, "last"))
        return params

    def hf_shapes(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        """Every Hugging Face tensor of the model and its shape, in export order, each expert by itself."""
        return {name: size for param in self.params(shape) for name, size in param.hf_shapes(shape).items()}

    def stored_shapes(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model as the files have it, and its shape."""
        sizes = self.hf_shapes(shape)
        return stacked_shapes(sizes) if self.stacks_experts else sizes

    def stored_rows(self, param: Param, shape: ModelShape) -> list[RowRange]:
        """The rows of one parameter as `rows_of`, in the tensors of the files: of stacked experts counted over all."""
        rows = param.rows_of(shape)
        if not self.stacks_experts or param.expert is None:
            return rows
        stacked, sizes = [], param.hf_shapes(shape)
        for part_rows in rows:
            place = stacked_place(part_rows.name)
            assert place is not None, part_rows.name
            whole, expert, part, parts = place
            before = (expert * parts + part) * sizes[part_rows.name][0]
            stacked.append(replace(part_rows, name=whole, hf_start=before + part_rows.hf_start))
        return stacked


_EXPERT_OF_STACK = re.compile(r"(?P<prefix>.*\.experts\.)(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight")


def stacked_place(name: str) -> tuple[str, int, int, int] | None:
    """The place of an expert's tensor in files that stack experts; None if `name` is of no expert.

    Returns (stacked tensor, expert, which of its parts, parts): experts.gate_up_proj [experts, 2 * ffn, hidden], gate
    rows then up rows, and experts.down_proj [experts, hidden, ffn].
    """
    match = _EXPERT_OF_STACK.fullmatch(name)
    if match is None:
        return None
    expert, part = int(match["expert"]), match["part"]
    if part == "down":
        return f"{match['prefix']}down_proj", expert, 0, 1
    return f"{match['prefix']}gate_up_proj", expert, ("gate", "up").index(part), 2


def stacked_shapes(sizes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors with its experts stacked.  sizes: with each expert by itself."""
    stacked: dict[str, tuple[int, ...]] = {}
    for name, (rows, *columns) in sizes.items():
        if (place := stacked_place(name)) is None:
            stacked[name] = (rows, *columns)
        else:
            whole, expert, _, parts = place
            stacked[whole] = (expert + 1, parts * rows, *columns)
    return stacked
