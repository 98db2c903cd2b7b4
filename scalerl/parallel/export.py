"""Export of a model: this layout's parameters -> full HF tensors in a static order, bucket by bucket.

`export_buckets` joins them on the ranks that need them, by a few collectives for each bucket. `BucketWriter` has each
rank copy what it holds into memory that all ranks see, so that every byte is copied once whatever the layout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from scalerl.models import Family, ModelShape, Param, padded_vocab_size
from scalerl.parallel.expert_weights import named_tensors
from scalerl.parallel.layout import Groups
from scalerl.parallel.loading import place
from scalerl.parallel.lora import adapters_of

# Number of a bucket -> the ranks that need its tensors; the same on every rank.
Needed = Callable[[int], Collection[int]]
# Share of a bucket that one gather of shards holds at most.
GATHER_FRAC = 0.25
# Bytes, a multiple of the size of every dtype.
ALIGNMENT = 16


def plan_buckets(params: Iterable[Param], shape: ModelShape, itemsize: int, bucket_bytes: int) -> list[list[Param]]:
    """The parameters of each bucket: in their order, cut where a bucket would pass bucket_bytes; none is empty.

    Those that an engine joins (`Param.joins_previous`) are in one bucket. The same on every rank.
    """
    buckets: list[list[Param]] = [[]]
    filled = 0
    for joined in _joined_params(params):
        num_bytes = sum(_hf_bytes(param, shape, itemsize) for param in joined)
        if buckets[-1] and filled + num_bytes > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1] += joined
        filled += num_bytes
    return buckets


def _joined_params(params: Iterable[Param]) -> Iterator[list[Param]]:
    """The parameters in their order, those that belong in one bucket in one list."""
    joined: list[Param] = []
    for param in params:
        if joined and not param.joins_previous:
            yield joined
            joined = []
        joined.append(param)
    yield joined


def largest_bytes(family: Family, shape: ModelShape, itemsize: int) -> int:
    """Bytes of the largest parameter, unsharded; parameters that must share a bucket count together.

    itemsize: bytes of a number.
    """
    joined_params = _joined_params(family.params(shape))
    return max(sum(_hf_bytes(param, shape, itemsize) for param in joined) for joined in joined_params)


def _hf_bytes(param: Param, shape: ModelShape, itemsize: int) -> int:
    return itemsize * math.prod(param.joined_shape(shape))


@torch.no_grad()
def export_buckets(
    chunks: Sequence[torch.nn.Module],
    params: Sequence[Param],
    shape: ModelShape,
    groups: Groups,
    *,
    bucket_bytes: int,
    needed: Needed | None = None,
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields the buckets as lists of (HF name, full tensor): weights with their adapters, where they have some.

    params: of the model, or of its adapters, in order.
    Collective over tp, etp, ep, pp: every rank must consume all buckets.
    needed: None: every rank needs every bucket. A rank that does not need one gets an empty list; it hands over its
    shards, and takes part in broadcasts, only where those that need it depend on that.
    Beside a bucket this takes GATHER_FRAC of one; for a tensor that is larger than that, the size of the tensor.
    """
    rank, layout = dist.get_rank(), groups.layout
    held = Held(chunks, params, shape, groups)
    example = next(chunks[0].parameters())
    own = {"dtype": example.dtype, "device": example.device, "gather_bytes": int(bucket_bytes * GATHER_FRAC)}
    for number, bucket in enumerate(plan_buckets(params, shape, example.element_size(), bucket_bytes)):
        ranks = range(layout.world_size) if needed is None else needed(number)
        joined = _Joining(bucket, held, shape, groups, {other % layout.stage_size for other in ranks}, **own).joined
        mine = bucket if rank in ranks else ()
        tensors: dict[str, Tensor] = {}
        for param in mine:
            param.add_to_hf(joined.pop(param.name), shape, tensors)
        yield list(tensors.items())


class BucketWriter:
    """Copies what this rank holds of a bucket into memory that all ranks share.

    tensors[bucket]: (HF name, shape, dtype) of what `write` writes; the same on every rank.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        family: Family,
        shape: ModelShape,
        groups: Groups,
        *,
        bucket_bytes: int,
    ) -> None:
        self._chunks, self._shape, self._groups = chunks, shape, groups
        dtype = next(chunks[0].parameters()).dtype
        self._params = family.params(shape)
        self._buckets = plan_buckets(self._params, shape, dtype.itemsize, bucket_bytes)
        self._numbers = {param.name: number for number, param in enumerate(self._params)}
        self.tensors = [
            [
                (name, torch.Size(size), torch.float32 if param.keeps_float32 else dtype)
                for param in bucket
                if not param.stacked or param.expert == 0
                for name, size in param.hf_shapes(shape).items()
            ]
            for bucket in self._buckets
        ]

    @torch.no_grad()
    def write(self, bucket: int, out: Mapping[str, Tensor]) -> None:
        """Writes this rank's part of the bucket's tensors into `out` (HF name -> whole tensor), which all ranks share.

        Ranks that hold the same parts divide the parameters among them, so that each part is written once.
        """
        held = Held(self._chunks, self._params, self._shape, self._groups)
        layout, at = self._groups.layout, self._groups.coordinates
        for param in self._buckets[bucket]:
            if not self._is_mine(param):
                continue
            rank, size = (at.etp_rank, layout.etp_size) if param.expert is not None else (at.tp_rank, layout.tp_size)
            param.write(held[param.name], out, self._shape, rank, size)

    def _is_mine(self, param: Param) -> bool:
        layout, at = self._groups.layout, self._groups.coordinates
        if at.pp_rank != _owner_stage(param, self._shape, self._groups):
            return False
        copy, num_copies = at.dp_rank * layout.cp_size + at.cp_rank, layout.dp_size * layout.cp_size
        if param.expert is not None or param.kind == "replicated":
            # Counted over all ranks of the stage.
            copy, num_copies = copy * layout.tp_size + at.tp_rank, num_copies * layout.tp_size
        if param.expert is not None:
            if at.ep_rank != _owner_ep(param, self._shape, self._groups):
                return False
            if param.kind == "replicated" and at.etp_rank > 0:
                return False
            experts_apart = layout.etp_size * layout.ep_size
            copy, num_copies = copy // experts_apart, num_copies // experts_apart
        return self._numbers[param.name] % num_copies == copy


class Held:
    """This rank's shards, by name in the table; of tied weights the first. Weights have their adapters merged."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], params: Iterable[Param], shape: ModelShape, groups: Groups
    ) -> None:
        self._chunks = chunks
        self._tensors = [named_tensors(chunk) for chunk in chunks]
        self._places: dict[str, tuple[int, str]] = {}
        for param, chunk, name in place(params, shape, groups):
            self._places.setdefault(param.name, (chunk, name))

    def num_bytes(self, name: str) -> int:
        chunk, name = self._places[name]
        return self._tensors[chunk][name].nbytes

    def __getitem__(self, name: str) -> Tensor:
        """A weight that has an adapter is a new tensor at each call."""
        chunk, name = self._places[name]
        weight, adapters = self._tensors[chunk][name].detach(), adapters_of(self._chunks[chunk])
        return weight if adapters is None else adapters.merged(name, weight)


class _Joining:
    """The parameters of one bucket on their way from the ranks that hold them to those that need them.

    First the ranks of an owner (a pipeline stage; of an expert the expert rank there) join the shards that they split.
    Then each owner sends all of its tensors, end to end, to the other expert ranks of its stage, and each stage to the
    other stages. So the number of collectives depends on the layout, not on the number of tensors.

    All stages number their ranks alike, and ranks of one number (place) send to each other. So a rank receives what its
    place needs and, of the experts of its stage, what a place of its expert group needs; else it hands over its shards.
    """

    def __init__(
        self,
        bucket: Sequence[Param],
        held: Held,
        shape: ModelShape,
        groups: Groups,
        places: Collection[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        gather_bytes: int,
    ) -> None:
        """Starts the exchange of a bucket.

        places: in a stage, of the ranks that need the bucket.
        gather_bytes: of joined tensors that one gather may hold beside the bucket; a larger tensor goes alone.
        """
        self._held, self._shape, self._groups, self._gather_bytes = held, shape, groups, gather_bytes
        layout, at = groups.layout, groups.coordinates
        owners = {param.name: _Owner.of(param, shape, groups) for param in bucket}
        mine = [param for param in bucket if owners[param.name].is_here(groups)]
        # Name -> the whole tensor: of those that travel a view of `flat`.
        self.joined: dict[str, Tensor] = {}
        here = dist.get_rank() % layout.stage_size
        # Places whose ranks receive the experts of their stage, since they or others of their expert group need them.
        expert_places = {other for place in places for other in _expert_group(place, groups)}

        def is_wanted(owner: _Owner) -> bool:
            return here in places or (owner.has_expert and owner.stage == at.pp_rank and here in expert_places)

        owned = [(param, owners[param.name]) for param in bucket]
        travelling = [param for param, owner in owned if owner.sends(groups) and is_wanted(owner)]
        # Owner -> the bytes of its tensors.
        self._ranges: dict[_Owner, slice] = {}
        self.flat = self._lay_out(sorted(travelling, key=lambda param: owners[param.name]), owners, dtype, device)
        self._join([param for param in mine if param.expert is None], groups.tp, places)
        self._join([param for param in mine if param.expert is not None], groups.etp, expert_places)
        for owner, part in self._ranges.items():
            if owner.has_expert and owner.stage == at.pp_rank and layout.ep_size > 1:
                self._send(part, owner.ep_rank, groups.ep)
        for stage in sorted({owner.stage for owner in self._ranges}) if layout.pp_size > 1 and here in places else ():
            parts = [part for owner, part in self._ranges.items() if owner.stage == stage]
            self._send(slice(parts[0].start, parts[-1].stop), stage, groups.pp)

    def _lay_out(
        self, params: Sequence[Param], owners: Mapping[str, _Owner], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocates one tensor of bytes for the parameters, which are sorted by owner, and returns it.

        Fills `joined` (name -> view) and `_ranges` (owner -> its bytes).  dtype: of all that do not keep float32.
        """
        vocab_rows = padded_vocab_size(self._shape.vocab_size, self._groups.layout.tp_size)
        spans, end = [], 0
        for param in params:
            size = param.joined_shape(self._shape, vocab_rows)
            stored = torch.float32 if param.keeps_float32 else dtype
            span = slice(end, end + stored.itemsize * math.prod(size))
            spans.append((param.name, span, stored, size))
            end = _aligned(span.stop)
            owner = owners[param.name]
            self._ranges[owner] = slice(self._ranges.get(owner, span).start, end)
        flat = torch.empty(end, dtype=torch.uint8, device=device)
        for name, span, stored, size in spans:
            self.joined[name] = flat[span].view(stored).view(size)
        return flat

    def _join(self, params: Sequence[Param], group: dist.ProcessGroup, places: Collection[int]) -> None:
        """Joins the shards of these parameters, which the group's ranks hold. Collective.  places: of the receivers."""
        ranks = dist.get_process_group_ranks(group)
        size, receivers = len(ranks), [rank for rank in ranks if rank % self._groups.layout.stage_size in places]
        if not receivers:
            return
        receives = dist.get_rank() in receivers
        for param in params:
            if receives and (size == 1 or param.kind == "replicated"):
                self._put(param, [self._held[param.name]] * size)
        split = [param for param in params if size > 1 and param.kind != "replicated"]
        sizes = [size * self._held.num_bytes(param.name) for param in split]
        for piece in _pieces(split, sizes, self._gather_bytes):
            shards = [self._held[param.name] for param in piece]
            starts = [0, *itertools.accumulate(_aligned(shard.nbytes) for shard in shards)]
            local = shards[0].new_empty(starts[-1], dtype=torch.uint8)
            for shard, start in zip(shards, starts, strict=False):
                _view(local, start, shard).copy_(shard)
            gathered = self._gathered(local, receivers, group)
            for param, shard, start in zip(piece, shards, starts, strict=False) if receives else ():
                self._put(param, [_view(rank_bytes, start, shard) for rank_bytes in gathered])

    def _gathered(self, local: Tensor, receivers: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
        """Gathers each rank's tensor on the receivers; on other ranks the list may be empty."""
        size = dist.get_world_size(group)
        if len(receivers) > 1:
            gathered = [torch.empty_like(local) for _ in range(size)]
            dist.all_gather(gathered, local, group=group)
            return gathered
        gathered = [torch.empty_like(local) for _ in range(size)] if dist.get_rank() in receivers else []
        dist.gather(local, gathered or None, dst=receivers[0], group=group)
        return gathered

    def _put(self, param: Param, shards: Sequence[Tensor]) -> None:
        joined = param.join(shards, self._shape)
        if param.name in self.joined:
            self.joined[param.name].copy_(joined)
        else:
            self.joined[param.name] = joined.contiguous()

    def _send(self, part: slice, rank: int, group: dist.ProcessGroup) -> None:
        dist.broadcast(self.flat[part], src=dist.get_global_rank(group, rank), group=group)


@dataclass(frozen=True, order=True)
class _Owner:
    """The pipeline stage that has a parameter; of an expert's also the expert-parallel rank, of others -1."""

    stage: int
    ep_rank: int

    @classmethod
    def of(cls, param: Param, shape: ModelShape, groups: Groups) -> _Owner:
        ep_rank = -1 if param.expert is None else _owner_ep(param, shape, groups)
        return cls(_owner_stage(param, shape, groups), ep_rank)

    @property
    def has_expert(self) -> bool:
        return self.ep_rank >= 0

    def is_here(self, groups: Groups) -> bool:
        at = groups.coordinates
        return at.pp_rank == self.stage and (not self.has_expert or at.ep_rank == self.ep_rank)

    def sends(self, groups: Groups) -> bool:
        """Whether joined tensors are sent on to ranks that hold no shard of them."""
        return groups.layout.pp_size > 1 or (self.has_expert and groups.layout.ep_size > 1)


def _pieces(params: Sequence[Param], sizes: Sequence[int], limit: int) -> Iterator[list[Param]]:
    """Splits the parameters, in order, into lists of as many as fit into the limit, at least one."""
    piece: list[Param] = []
    filled = 0
    for param, size in zip(params, sizes, strict=True):
        if piece and filled + size > limit:
            yield piece
            piece, filled = [], 0
        piece.append(param)
        filled += size
    if piece:
        yield piece


def _aligned(num_bytes: int) -> int:
    """Rounds a number of bytes up to where a tensor of any dtype may begin."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _view(flat: Tensor, start: int, like: Tensor) -> Tensor:
    return flat[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _expert_group(place: int, groups: Groups) -> range:
    """Places of a stage's ranks that together hold all experts of a layer, in the shards of this place's etp rank."""
    layout = groups.layout
    first = place // layout.experts_size * layout.experts_size + place % layout.etp_size
    return range(first, first + layout.experts_size, layout.etp_size)


def _owner_ep(param: Param, shape: ModelShape, groups: Groups) -> int:
    assert param.expert is not None, param.name
    return param.expert // len(groups.layout.experts(shape.num_experts, 0))


def _owner_stage(param: Param, shape: ModelShape, groups: Groups) -> int:
    if param.layer is not None:
        return groups.layout.owner_of_layer(shape.num_layers, param.layer)[0]
    return 0 if param.stage_part == "first" else groups.layout.pp_size - 1
