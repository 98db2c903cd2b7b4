"""A directory that appears under its name when everything is in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from scalerl.base.files import flush, fsync


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """Gives a directory to write to, which takes the name of `target` if the block raises nothing; it is removed
    otherwise. An existing `target` is replaced."""
    target.parent.mkdir(parents=True, exist_ok=True)
    tmp = _beside(target, "tmp")
    tmp.mkdir()
    try:
        yield tmp
        # Or a power failure could leave empty files under the name.
        flush([*tmp.rglob("*"), tmp])
        old = _beside(target, "old") if target.exists() else None
        try:
            if old is not None:
                target.rename(old)
            tmp.rename(target)
        # Ctrl-C too.
        except BaseException:
            if old is not None and old.exists() and not target.exists():
                old.rename(target)
            raise
        fsync(target.parent)
        if old is not None:
            shutil.rmtree(old)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def _beside(target: Path, purpose: str) -> Path:
    return target.with_name(f".{target.name}.{purpose}-{os.getpid()}-{token_hex(4)}")
