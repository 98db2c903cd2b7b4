"""The checksums that a rollout server's weights must have, computed from a stream of Hugging Face tensors.

`Placement` says where an engine stores each tensor.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scalerl.models.block_scales import SCALE_SUFFIX, multiplied_out


def tensor_checksum(tensor: Tensor) -> str:
    """A tensor's checksum, 16 hex digits, equal to SGLang's: 8 bytes of SHA-256 on CPU, SGLang's own hash on CUDA."""
    if tensor.is_cuda:
        from sglang.srt.managers.mm_utils import tensor_hash

        return f"{tensor_hash(tensor):016x}"
    digest = hashlib.sha256()
    _hash_into(digest, tensor)
    return digest.hexdigest()[:16]


def _hash_into(digest: Any, tensor: Tensor) -> None:
    data = tensor.detach().contiguous()
    if data.nbytes:
        # Not by numpy(), after which the storage could not be resized, as the offload of parameters needs.
        digest.update((ctypes.c_char * data.nbytes).from_address(data.data_ptr()))


@dataclass(frozen=True)
class TensorPlace:
    """The place of a Hugging Face tensor: part `position` of the `count` parts of the server's parameter `name`."""

    name: str
    position: int = 0
    count: int = 1


class _Parameter:
    """A parameter of a server rank, which is hashed part by part in the order of its memory.

    A part that arrives early is kept as a copy, since the sender may reuse its buffer. The hash on CUDA needs whole
    tensors, so there all parts are kept until the last has arrived.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.checksum: str | None = None
        self._digest = hashlib.sha256()
        self._next = 0
        self._kept: dict[int, Tensor] = {}

    @property
    def missing(self) -> list[int]:
        return [position for position in range(self._next, self.count) if position not in self._kept]

    def add(self, position: int, part: Tensor) -> None:
        if part.is_cuda and self.count > 1:
            self._kept[position] = part.clone()
            if len(self._kept) == self.count:
                self.checksum = tensor_checksum(torch.cat([self._kept[i].flatten() for i in range(self.count)]))
                self._kept.clear()
                self._next = self.count
            return
        if position != self._next:
            self._kept[position] = part.clone()
            return
        if part.is_cuda:
            self.checksum = tensor_checksum(part)
            self._next = 1
            return
        _hash_into(self._digest, part)
        self._next += 1
        while self._next in self._kept:
            _hash_into(self._digest, self._kept.pop(self._next))
            self._next += 1
        if self._next == self.count:
            self.checksum = self._digest.hexdigest()[:16]


class Placement:
    """The places where an engine stores Hugging Face tensors.  num_ranks: ranks of a server.

    This one is of an engine with one rank, which stores every tensor under its own name. Such an engine hashes the
    bytes on the host, on whatever device its weights are. Other engines override it.
    """

    num_ranks = 1

    def stored_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype that the engine stores this tensor in.  dtype: of the model."""
        return dtype

    def parts(self, name: str, tensor: Tensor, ranks: Sequence[int]) -> Iterator[tuple[int, TensorPlace, Tensor]]:
        """Yields (rank, place, part of the tensor) for every one of these ranks that stores a part of it."""
        on_host = tensor.cpu()
        for rank in ranks:
            yield rank, TensorPlace(name), on_host


class ExpectedChecksums:
    """The checksums that `RolloutClient.checksums` must return once a stream of Hugging Face tensors is loaded.

    Parts are hashed as they arrive; on a CPU, a stream in the order of the family's table is never copied.
    """

    def __init__(
        self, placement: Placement, dtype: torch.dtype | None = None, ranks: Collection[int] | None = None
    ) -> None:
        """Starts without tensors.

        dtype: the dtype that the engine stores; None: that of the tensors.
        ranks: the engine ranks whose checksums are asked for; None: all. Only their parts are hashed, and kept.
        """
        self._placement, self._dtype = placement, dtype
        self.ranks = [rank for rank in range(placement.num_ranks) if ranks is None or rank in ranks]
        self._parameters: dict[int, dict[str, _Parameter]] = {rank: {} for rank in self.ranks}

    def add(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Adds tensors; those in fp8 together with their scales."""
        tensors = dict(named_tensors)
        for name, tensor in tensors.items():
            scales = tensors.get(name + SCALE_SUFFIX)
            if scales is not None:
                # What a server's checksum is of, whatever its dtype.
                tensor = multiplied_out(tensor.detach(), scales.detach()).bfloat16()
            elif name.endswith(SCALE_SUFFIX):
                continue
            elif self._dtype is not None:
                tensor = tensor.to(self._placement.stored_dtype(name, self._dtype))
            for rank, place, part in self._placement.parts(name, tensor.detach(), self.ranks):
                self._parameters[rank].setdefault(place.name, _Parameter(place.count)).add(place.position, part)

    def by_rank(self) -> dict[int, dict[str, str]]:
        """The checksums of each of `ranks`, by the server's parameter names.

        Raises ValueError when a part of a fused parameter is missing.
        """
        for parameters in self._parameters.values():
            missing = {name: p.missing[:8] for name, p in parameters.items() if p.checksum is None}
            if missing:
                raise ValueError(f"expected checksums: parts of fused parameters were not sent: {missing}")
        return {
            rank: {name: str(parameter.checksum) for name, parameter in parameters.items()}
            for rank, parameters in self._parameters.items()
        }

    def result(self) -> list[dict[str, str]]:
        """`by_rank` as the list that `RolloutClient.checksums` returns, where `ranks` are all of the engine's."""
        return list(self.by_rank().values())


def checksum_differences(expected: Sequence[dict[str, str]], actual: Sequence[dict[str, str]]) -> list[str]:
    """One line per parameter that differs, is missing or unexpected; empty if the server has exactly these weights."""
    if len(expected) != len(actual):
        return [f"{len(actual)} engine ranks answered, {len(expected)} expected"]
    lines = []
    for rank, (want, got) in enumerate(zip(expected, actual, strict=True)):
        for name in sorted(want.keys() | got.keys()):
            if want.get(name) != got.get(name):
                lines.append(
                    f"rank {rank} {name}: trainer {want.get(name, 'absent')}, server {got.get(name, 'absent')}"
                )
    return lines
