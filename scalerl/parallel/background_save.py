"""Saves in the background: a thread of each rank writes a copy of its share while the rank continues training."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.checkpoint.pieces import WrittenFile
from scalerl.checkpoint.store import CheckpointWriteError
from scalerl.parallel.checkpoint import Share, own_share
from scalerl.parallel.host_copy import HostCopy

if TYPE_CHECKING:
    from scalerl.parallel.engine import MegatronEngine


class BackgroundSave:
    """Writes one rank's shares of checkpoints, of the model of each of its roles, in a background thread."""

    def __init__(self) -> None:
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._memory: dict[str, HostCopy] = {}
        self._writing: dict[str, tuple[Share, Future[WrittenFile]]] = {}

    def begin(self, role: str, engine: MegatronEngine, directory: str | Path) -> None:
        """Copies what this rank saves of a role's model and starts writing it; after that the weights may change.

        Waits first for a save of the role that is still being written. A missing directory is made.
        """
        self.wait(role)
        share = own_share(engine, self._memory.setdefault(role, HostCopy()))
        self._writing[role] = share, self._writer.submit(share.write, Path(directory))

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
        self._writer.shutdown()
        for memory in self._memory.values():
            memory.release()
