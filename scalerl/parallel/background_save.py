"""Saves in the background: threads of each rank copy its share and write the copy while the rank goes on.

Weights and optimizer change in an update, some time after a save began. Only what changes or moves them waits until
they have been copied.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from scalerl.checkpoint.pieces import Piece, WrittenFile
from scalerl.checkpoint.store import CheckpointWriteError
from scalerl.parallel.checkpoint import Share, own_share
from scalerl.parallel.host_copy import HostCopy

if TYPE_CHECKING:
    from scalerl.parallel.engine import MegatronEngine


class BackgroundSave:
    """Writes one rank's shares of checkpoints, of the model of each of its roles, in background threads."""

    def __init__(self) -> None:
        # Two: the copy of one role does not wait for the disk that takes another's.
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="copy")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._memory: dict[str, HostCopy] = {}
        self._writing: dict[str, tuple[Share, Future[WrittenFile]]] = {}

    def begin(self, role: str, engine: MegatronEngine, directory: str | Path) -> None:
        """Begins to save a role's model as it is now; from now on `engine.before_change` waits until it is copied.

        Waits first for a save of the role that is still being written. A missing directory is made.
        """
        self.wait(role)
        share, memory, copied = own_share(engine), self._memory.setdefault(role, HostCopy()), threading.Event()
        ready = None
        if engine.device == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        engine.before_change = copied.wait
        copies: Future[list[Piece]] = Future()
        # Without the pieces: they are the engine's memory, which may leave.
        self._writing[role] = replace(share, pieces=()), self._writer.submit(_write, share, copies, Path(directory))
        # Last, because a thread that copies holds the interpreter for milliseconds.
        self._copier.submit(_copy, memory, share.pieces, ready, copied, copies)

    def wait(self, role: str) -> None:
        """Blocks until no save of that role is being written."""
        if role in self._writing:
            self._writing[role][1].exception()

    def written(self, role: str) -> tuple[WrittenFile, dict[str, Any]] | None:
        """The file that the role's last save wrote, and the state that all ranks share; None while it is being written.

        Raises CheckpointWriteError when the file could not be written.
        """
        share, writing = self._writing[role]
        if not writing.done():
            return None
        try:
            return writing.result(), share.common
        except OSError as error:
            raise CheckpointWriteError(
                f"rank {share.rank} could not write its part of the checkpoint: {error}"
            ) from error

    def close(self) -> None:
        """Waits for the saves that are being written, and releases the memory of their copies."""
        self._copier.shutdown()
        self._writer.shutdown()
        for memory in self._memory.values():
            memory.release()


def _copy(
    memory: HostCopy,
    pieces: Iterable[Piece],
    ready: torch.cuda.Event | None,
    copied: threading.Event,
    copies: Future[list[Piece]],
) -> None:
    try:
        copies.set_result(memory.copy_pieces(pieces, ready))
    except BaseException as error:
        copies.set_exception(error)
    finally:
        copied.set()


def _write(share: Share, copies: Future[list[Piece]], directory: Path) -> WrittenFile:
    return replace(share, pieces=copies.result()).write(directory)
