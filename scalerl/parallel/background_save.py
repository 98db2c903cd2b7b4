"""What one rank writes of its checkpoints while it goes on training: a copy of its share, by a thread of its own."""

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
    """One rank's side of saves in the background, of the models of its roles."""

    def __init__(self) -> None:
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._memory: dict[str, HostCopy] = {}
        self._writing: dict[str, tuple[Share, Future[WrittenFile]]] = {}

    def begin(self, role: str, engine: MegatronEngine, directory: str | Path) -> None:
        """Copies what this rank saves; when it returns the weights may change. Waits for a save that is still written.

        The directory is made where it is missing.
        """
        self.wait(role)
        share = own_share(engine, self._memory.setdefault(role, HostCopy()))
        self._writing[role] = share, self._writer.submit(share.write, Path(directory))

    def wait(self, role: str) -> None:
        """Until nothing of that role is being written."""
        if role in self._writing:
            self._writing[role][1].exception()

    def written(self, role: str) -> tuple[WrittenFile, dict[str, Any]] | None:
        """The file of the save that was begun last, and what all ranks have alike; None while it is being written.

        Raises CheckpointWriteError when it could not be written.
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
        """Waits for what is being written, and gives the memory back."""
        self._writer.shutdown()
        for memory in self._memory.values():
            memory.release()
