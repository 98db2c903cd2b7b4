"""Weights through files on a file system that trainer and servers share."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from scalerl.base.files import NO_ROOM
from scalerl.checkpoint.pieces import TensorSpec
from scalerl.errors import UserError
from scalerl.merge.writer import SafetensorsFile, file_name, write_safetensors_index
from scalerl.models import copy_beside_weights
from scalerl.rollout.servers.buckets import NamedTensors
from scalerl.rollout.sync.quantized import Layout
from scalerl.rollout.sync.session import Export, SyncSession, Transport

DIRECTORY_KEY = "actor_rollout_ref.rollout.weight_transport_dir"
PREFIX = "weights-of-version-"
PARTIAL = ".tmp"
# Room for the tensors' names and for the files that are not weights.
SPARE_BYTES = 64 * 2**20


class WeightFilesError(UserError, RuntimeError):
    """Raised when the weights could not be written; no server has been asked to load anything."""


class DiskTransport(Transport):
    """Weights as a Hugging Face model on disk: it gets its name once it is complete, then servers load it.

    Buckets are dealt over the ranks, each writes its own. The directory (`weight_directory`) keeps the newest model.
    """

    has_session = False

    def __init__(self, export: Export, layout: Layout, *, directory: str | Path, model_path: str | Path) -> None:
        """Writes below `directory`.  model_path: model whose configuration and tokenizer are copied."""
        self.export, self.layout = export, layout
        self.directory, self.model_path = Path(directory).expanduser().absolute(), Path(model_path)

    def send(self, session: SyncSession) -> tuple[int, int]:
        buckets = self.layout(session.bucket_bytes)
        specs = [{name: TensorSpec(tuple(shape), dtype) for name, shape, dtype in bucket} for bucket in buckets]
        num_bytes = sum(spec.num_bytes for bucket in specs for spec in bucket.values())
        target = self._begin(session.policy_version, num_bytes)
        partial = target.with_name(target.name + PARTIAL)
        error = None
        world_size, hashing = dist.get_world_size(), {feed.lead for feed in session.feeds if session.verify}
        for number, named in enumerate(
            self.export(session.bucket_bytes, lambda bucket: hashing | {bucket % world_size})
        ):
            if number % world_size == session.rank and error is None:
                # The other ranks wait for this one in the next bucket's collectives.
                error = self._failure(num_bytes, lambda n=number, named=named: _write(partial, specs, n, named))
            session.hash(named)
        self._agree(error, partial)
        error = self._failure(num_bytes, lambda: self._complete(partial, target, specs)) if _is_first() else None
        self._agree(error, partial)
        self._load(session, target)
        # No server reads an older model now.
        dist.barrier()
        if _is_first():
            self._remove_all_but(target)
        return num_bytes, len(buckets)

    def _begin(self, policy_version: int, num_bytes: int) -> Path:
        """Makes room and returns where the weights will be; collective. Raises WeightFilesError without room."""
        name, error = None, None
        if _is_first():
            name = f"{PREFIX}{policy_version}-{secrets.token_hex(4)}"
            error = self._failure(num_bytes, lambda: self._make_room(name, num_bytes))
        message: list[Any] = [name]
        dist.broadcast_object_list(message, src=0)
        self._agree(error)
        return self.directory / message[0]

    def _make_room(self, name: str, num_bytes: int) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        # Models that a killed run left half written; the newest whole one stays until the next is complete.
        for leftover in self.directory.glob(f"{PREFIX}*{PARTIAL}"):
            shutil.rmtree(leftover)
        if shutil.disk_usage(self.directory).free < num_bytes + SPARE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        (self.directory / (name + PARTIAL)).mkdir()

    def _complete(self, partial: Path, target: Path, specs: Sequence[dict[str, TensorSpec]]) -> None:
        copy_beside_weights(self.model_path, partial)
        if len(specs) > 1:
            files = {name: file_name(number, len(specs)) for number, bucket in enumerate(specs) for name in bucket}
            write_safetensors_index(partial, files, {name: spec for bucket in specs for name, spec in bucket.items()})
        for path in [*partial.iterdir(), partial]:
            with _opened(path) as descriptor:
                os.fsync(descriptor)
        partial.rename(target)
        with _opened(self.directory) as descriptor:
            os.fsync(descriptor)

    def _load(self, session: SyncSession, target: Path) -> None:
        session.call_all(
            "bucket",
            lambda client: client.update_weights_from_disk(str(target), policy_version=session.policy_version),
        )

    def _remove_all_but(self, target: Path) -> None:
        for path in self.directory.glob(f"{PREFIX}*"):
            if path != target:
                shutil.rmtree(path, ignore_errors=True)

    def _failure(self, num_bytes: int, work: Callable[[], None]) -> str | None:
        """Does the work; returns the message of an OSError, for the person who has to make room, else None."""
        try:
            work()
        except OSError as error:
            what = f"{DIRECTORY_KEY}: the weights of {num_bytes:,} bytes cannot be written to {self.directory}"
            if error.errno not in NO_ROOM:
                return f"{what}: {error}"
            existing = next(path for path in (self.directory, *self.directory.parents) if path.exists())
            return (
                f"{what}: {os.strerror(error.errno)}. {num_bytes + SPARE_BYTES:,} bytes are needed beside what is "
                f"there, {shutil.disk_usage(existing).free:,} are free. Free some, or give a directory with room"
            )
        return None

    def _agree(self, error: str | None, partial: Path | None = None) -> None:
        """Raises WeightFilesError on every rank if any of them has an error; collective."""
        by_rank: list = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, error)
        errors = [text for text in by_rank if text is not None]
        if errors:
            if partial is not None and _is_first():
                shutil.rmtree(partial, ignore_errors=True)
            raise WeightFilesError(errors[0])


def _write(directory: Path, specs: Sequence[dict[str, TensorSpec]], number: int, named: NamedTensors) -> None:
    with SafetensorsFile(directory / file_name(number, len(specs)), specs[number]) as file:
        for name, tensor in named:
            # A copy: numpy, through which it is written, would forbid a parameter's storage to leave its device.
            file.write(name, 0, tensor.detach().to("cpu", copy=True).contiguous())


def _is_first() -> bool:
    return dist.get_rank() == 0


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
