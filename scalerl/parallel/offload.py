"""Parameters, gradients and optimizer state of one engine: on the device, or in host memory while others use it.

Parameters and optimizer state travel as flat copies. What came to be read alone leaves without one, where the host has
kept that of the time before (for a GPU, whose pinned memory stays). Gradients are not copied: an update zeroes them
before it starts, so megatron's own `offload_grad_buffers` releases their memory and gives it back as zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from scalerl.parallel.optimizer import optimizer_parts

PARAMS, GRADS, OPTIMIZER = "params", "grads", "optimizer"
PARTS = (PARAMS, GRADS, OPTIMIZER)

# Tensors start at multiples of this many bytes in a flat copy: what any vectorised kernel wants.
_ALIGN_BYTES = 256
# Pinned memory comes in powers of two; pieces of a buffer waste at most this share of it.
_PINNED_WASTE = 1 / 16


class OffloadedError(RuntimeError):
    """A part of a model is in host memory, and the requested work needs it on the device."""


class Offload:
    """Moves the parts of one model to host memory and back.

    A part that is away has storages of size 0: touching it would read nothing.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], ddp_chunks: Sequence[Any], optimizer: Any | None) -> None:
        """Finds everything on the device.

        chunks: this stage's models; ddp_chunks: the same wrapped by megatron's DDP, empty for a frozen model.
        """
        self._chunks, self._ddp_chunks, self._optimizer = list(chunks), list(ddp_chunks), optimizer
        self._flat: dict[str, list[_FlatTensors]] = {}
        self.away: frozenset[str] = frozenset()
        # Whether the host keeps its copy of a part that is on the device; to pin memory anew takes longer than to copy.
        self.keeps_copies = any(parameter.is_cuda for chunk in self._chunks for parameter in chunk.parameters())
        # Parts on the device of which the host has the very same copy.
        self._unchanged: set[str] = set()
        # Of the parts that are away: the bytes of device memory that they had.
        self.away_bytes: dict[str, int] = {}

    def to_host(self, *parts: str) -> None:
        """Frees the device memory of these parts; nothing happens to those that are away already."""
        leaving = self._had(parts) - self.away
        if not leaving:
            return
        sizes = self.device_bytes()
        for part in sorted(leaving - {GRADS}):
            groups = self._flat.setdefault(part, [])
            for group, tensors in itertools.zip_longest(groups, self._tensors(part)):
                if group is None:
                    groups.append(group := _FlatTensors())
                group.leave(tensors, is_copied=part in self._unchanged)
        if GRADS in leaving:
            for ddp in self._ddp_chunks:
                ddp.offload_grad_buffers(empty_cache=False)
        self.away |= leaving
        self._unchanged -= leaving
        self.away_bytes |= {part: sizes[part] for part in leaving}
        # Memory that torch keeps for reuse is not available to the other processes on the device.
        torch.cuda.empty_cache()

    def to_device(self, *parts: str, reads: bool = False) -> None:
        """Brings these parts back, each view of them as it was; gradients as zeros.

        reads: they will not change before they leave, unless `require` is told so.
        """
        named = self._had(parts)
        coming = named & self.away
        for part in sorted(coming - {GRADS}):
            for group in self._flat[part]:
                group.come_back(keeps_copy=self.keeps_copies)
        if not reads:
            self._unchanged -= named
        elif self.keeps_copies:
            self._unchanged |= coming - {GRADS}
        if GRADS in coming:
            for ddp in self._ddp_chunks:
                ddp.restore_grad_buffers(synchronize=False)
        if coming:
            torch.cuda.synchronize()
        self.away -= coming
        self.away_bytes = {part: size for part, size in self.away_bytes.items() if part in self.away}

    def require(self, *parts: str, work: str, reads: bool = False) -> None:
        """Raises OffloadedError unless the parts are on the device. work: what needs them, to begin the message.

        reads: the work does not change them.
        """
        if not reads:
            self._unchanged.difference_update(parts)
        missing = [part for part in parts if part in self.away]
        if missing:
            away = ", ".join(missing)
            raise OffloadedError(f"{work} needs on the device what is in host memory: {away}; call to_device() first")

    def device_bytes(self) -> dict[str, int]:
        """Bytes that each part holds on the device now; 0 for a part that is away or that the model does not have."""
        bytes_by_part = {part: _total_bytes(itertools.chain(*self._tensors(part))) for part in (PARAMS, OPTIMIZER)}
        return bytes_by_part | {GRADS: _total_bytes(buffer.grad_data for buffer in self._buffers())}

    def _had(self, parts: Sequence[str]) -> frozenset[str]:
        """Those of the parts that the model has: a frozen one has its parameters alone."""
        has = {PARAMS: True, GRADS: bool(self._ddp_chunks), OPTIMIZER: self._optimizer is not None}
        return frozenset(part for part in parts if has[part])

    def _buffers(self) -> Iterator[Any]:
        for ddp in self._ddp_chunks:
            yield from [*ddp.buffers, *ddp.expert_parallel_buffers]

    def _tensors(self, part: str) -> list[list[Tensor]]:
        """The tensors of a part in groups that travel together, the same groups at each call."""
        return self._param_tensors() if part == PARAMS else self._optimizer_tensors()

    def _param_tensors(self) -> list[list[Tensor]]:
        """Each flat parameter buffer of DDP (the distributed optimizer has them) by itself, then what is in none."""
        flat = [buffer.param_data for buffer in self._buffers() if buffer.param_data is not None]
        held = {_storage_id(tensor) for tensor in flat}
        loose = [
            parameter
            for chunk in self._chunks
            for parameter in chunk.parameters()
            if _storage_id(parameter) not in held
        ]
        return [[tensor] for tensor in flat] + _by_dtype(loose)

    def _optimizer_tensors(self) -> list[list[Tensor]]:
        """Main parameters and Adam's moments; not the model's own parameters, which an fp32 optimizer updates."""
        held = {_storage_id(tensor) for tensor in itertools.chain(*self._param_tensors())}
        tensors: list[Tensor] = []
        for part in optimizer_parts(self._optimizer) if self._optimizer is not None else []:
            if part.is_stub_optimizer:
                continue
            tensors += [
                p for group in part.optimizer.param_groups for p in group["params"] if _storage_id(p) not in held
            ]
            # A count of steps is one number: it stays where torch's Adam wants it, the fused one on the device.
            tensors += [
                value
                for state in part.optimizer.state.values()
                for value in state.values()
                if torch.is_tensor(value) and value.dim() > 0
            ]
        return _by_dtype(tensors)


class _FlatTensors:
    """Tensors of one dtype that leave as one flat copy, and come back into the storages that they left.

    The first time each may have a storage of its own; they then come back into a common one, so that from the second
    time on each direction is one large copy and no second set of them is ever on the device.
    """

    def __init__(self) -> None:
        self._host: _HostBuffer | None = None
        self._tensors: list[Tensor] = []
        self._storages: list[torch.UntypedStorage] = []
        self._sizes: list[int] = []

    @property
    def _offsets(self) -> list[int]:
        """Bytes: where each storage begins in the flat copy, and its end."""
        return [0, *itertools.accumulate(-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in self._sizes)]

    def leave(self, tensors: Sequence[Tensor], *, is_copied: bool = False) -> None:
        """Frees the tensors' memory.  is_copied: they are what the host's copy has."""
        self._tensors = list(tensors)
        self._storages = _storages(tensors)
        self._sizes = [storage.nbytes() for storage in self._storages]
        num_bytes = self._offsets[-1]
        if self._host is None or self._host.num_bytes != num_bytes:
            self._host = _HostBuffer(num_bytes, pin=any(tensor.is_cuda for tensor in tensors))
            is_copied = False
        for offset, storage in zip(self._offsets, self._storages, strict=False) if not is_copied else ():
            self._host.write(offset, _bytes_of(storage))
        # The copies run behind Python's back: only now the memory may go.
        torch.cuda.synchronize()
        for storage in self._storages:
            storage.resize_(0)

    def come_back(self, *, keeps_copy: bool) -> None:
        assert self._host is not None, "nothing has left"
        if len(self._storages) == 1:
            self._storages[0].resize_(self._sizes[0])
            self._host.read(0, _bytes_of(self._storages[0]))
        elif self._storages:
            self._join(self._host)
        if not keeps_copy:
            self._host = None
        self._tensors, self._storages = [], []

    def _join(self, host: _HostBuffer) -> None:
        """Moves all tensors into one new storage. Whoever holds a tensor keeps it, but not a view made of it."""
        first = self._tensors[0]
        flat = torch.empty(self._offsets[-1], dtype=torch.uint8, device=first.device)
        host.read(0, flat)
        begins = dict(zip(map(_id, self._storages), self._offsets, strict=False))
        elements = flat.view(first.dtype)
        for tensor in self._tensors:
            begin = begins[_storage_id(tensor)] // tensor.element_size() + tensor.storage_offset()
            tensor.data = elements.as_strided(tensor.size(), tensor.stride(), begin)


class _HostBuffer:
    """Flat bytes in host memory. Pinned where the other side is a GPU, whose copies then run at full speed."""

    def __init__(self, num_bytes: int, *, pin: bool) -> None:
        self.num_bytes, self.pinned = num_bytes, pin
        sizes = pinned_pieces(num_bytes) if pin else [num_bytes]
        starts = [0, *itertools.accumulate(sizes)]
        self._pieces = [
            (start, torch.empty(size, dtype=torch.uint8, pin_memory=pin))
            for start, size in zip(starts, sizes, strict=False)
        ]

    def write(self, offset: int, source: Tensor) -> None:
        """Copies `source`, uint8, into the buffer from that byte on."""
        for mine, theirs in self._overlaps(offset, source):
            mine.copy_(theirs, non_blocking=self.pinned)

    def read(self, offset: int, target: Tensor) -> None:
        for mine, theirs in self._overlaps(offset, target):
            theirs.copy_(mine, non_blocking=self.pinned)

    def _overlaps(self, offset: int, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for start, piece in self._pieces:
            begin, end = max(offset, start), min(offset + other.numel(), start + piece.numel())
            if begin < end:
                yield piece[begin - start : end - start], other[begin - offset : end - offset]


def pinned_pieces(num_bytes: int) -> list[int]:
    """Sizes that add up to num_bytes and waste little when torch rounds each up to a power of two (pinned memory)."""
    pieces, remaining = [], num_bytes
    while remaining > num_bytes * _PINNED_WASTE:
        pieces.append(1 << (remaining.bit_length() - 1))
        remaining -= pieces[-1]
    return [*pieces, remaining] if remaining else pieces


def _by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def _id(storage: torch.UntypedStorage) -> int:
    # An address would do while it has memory; this one stays when it has none.
    return storage._cdata


def _storage_id(tensor: Tensor) -> int:
    return _id(tensor.untyped_storage())


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages of the tensors, each once."""
    return list({_storage_id(tensor): tensor.untyped_storage() for tensor in tensors}.values())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """[nbytes] uint8, the storage's own memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _total_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(storage.nbytes() for storage in _storages(tensors))
