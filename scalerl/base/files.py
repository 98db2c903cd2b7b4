"""Files: written whole or not at all, temporary directories, the files of a model, and where copies are kept."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO

# Units in which sizes in bytes are printed and parsed.
GIB = 1 << 30
# Threads that wait for the disk at the same time.
_MAX_THREADS = 16
_libc: Any = ctypes.CDLL(None, use_errno=True)
# sync_file_range(2): start to write what is dirty, and do not wait.
_WRITE = 2
# Bytes that are written between two starts.
_EVERY_BYTES = 32 * 2**20
# What a system says of a disk, a quota or a file that can take no more.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# File that the process which owns the directory keeps locked.
_LOCK = "lock"
REMOVE_ATTEMPTS = 20
REMOVE_PAUSE_S = 0.1
# Suffixes of the files that are not weights: configuration, tokenizer, chat template, code.
_BESIDE_WEIGHTS = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
# Beginnings of the names of texts, which the licence of a model may ask to be passed on; their suffixes.
_TEXTS = ("README", "LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
_TEXT_SUFFIXES = ("", ".md", ".txt", ".rst")
# The directory where transformers looks for further chat templates.
_CHAT_TEMPLATES = "additional_chat_templates"
# The file of the default template, and the file with an entry that counts where there is no such file.
_CHAT_TEMPLATE, _TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
CONFIG_NAME = "config.json"
# The files of a model that are fetched; other formats of the same weights are not.
FETCHED = ["*.safetensors", *(f"*{suffix}" for suffix in _BESIDE_WEIGHTS)]
FETCHED += [f"{name}{suffix}" for name in _TEXTS for suffix in _TEXT_SUFFIXES]
# The directory for copies of files at URLs (`data.local_copy`), for a job of several machines one that all share
# (ray.sbatch sets it).
CACHE_DIR_ENV = "SCALERL_CACHE_DIR"


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """Opens a file that takes the place of `path`, and is on the disk, when the block ends.

    A block that raises leaves `path` as it was. Missing parent directories are made. Raises OSError.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{token_hex(4)}.tmp")
    try:
        with unfinished.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    # Otherwise a power failure may lose the new name.
    fsync(path.parent)


def flush(paths: Iterable[Path]) -> None:
    """Forces files and directories onto the disk, several at a time: what waits together takes the disk once."""
    paths = list(paths)
    if paths:
        with ThreadPoolExecutor(min(_MAX_THREADS, len(paths))) as pool:
            list(pool.map(fsync, paths))


def fsync(path: Path) -> None:
    """Forces what was written to a file or directory onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reserve(file: int, num_bytes: int) -> None:
    """Reserves the disk's room for a file, so that writing it costs less. file: a descriptor.

    Raises OSError where there is no room; does nothing where the filesystem cannot reserve any.
    """
    if hasattr(_libc, "fallocate") and _libc.fallocate(file, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)):
        number = ctypes.get_errno()
        if number in NO_ROOM:
            raise OSError(number, os.strerror(number))


class Writeback:
    """Makes the kernel write a file to the disk while it grows, so that little is left for the fsync at its end.

    Several threads may write the file. Errors are not reported here, but by fsync.
    """

    def __init__(self, file: int) -> None:
        """Begins to count.  file: a descriptor."""
        self._file = file
        self._waiting_bytes = 0
        self._lock = threading.Lock()

    def written(self, num_bytes: int) -> None:
        """Counts bytes that were written."""
        with self._lock:
            self._waiting_bytes += num_bytes
            is_due = self._waiting_bytes >= _EVERY_BYTES
            if is_due:
                self._waiting_bytes = 0
        if is_due and hasattr(_libc, "sync_file_range"):
            # The whole file: the kernel passes over pages that are on their way.
            _libc.sync_file_range(self._file, ctypes.c_int64(0), ctypes.c_int64(0), _WRITE)


@contextmanager
def scratch_directory(
    prefix: str, parent: Path, clean: Callable[[Path], None] = lambda directory: None
) -> Iterator[Path]:
    """Yields an empty directory with a random name, accessible to this user only, and removes it after the block.

    clean: called before a directory is removed, also before one of a killed process is.
    """
    remove_abandoned(prefix, parent, clean)
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    with open(directory / _LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield directory
        finally:
            clean(directory)
            _remove(directory)


def remove_abandoned(prefix: str, parent: Path, clean: Callable[[Path], None] = lambda directory: None) -> None:
    """Removes this user's directories whose process was killed, which nobody has locked."""
    for directory in parent.glob(f"{prefix}*"):
        try:
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                continue
            with open(directory / _LOCK) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                clean(directory)
                shutil.rmtree(directory, ignore_errors=True)
        except OSError:  # the owner is alive, or another process was quicker
            continue


def _remove(directory: Path) -> None:
    """Removes a directory, with retries, as processes that are ending may still write files there."""
    for _ in range(REMOVE_ATTEMPTS):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(REMOVE_PAUSE_S)


def files_beside_weights(model_dir: str | Path) -> list[Path]:
    """The files of a model that a copy of it with other weights needs: paths within the directory, sorted.

    Not weights and their index, in whatever format, nor what is hidden or in a directory that transformers ignores.
    """
    model_dir = Path(model_dir)
    names = [path.relative_to(model_dir) for path in (*model_dir.iterdir(), *model_dir.glob(f"{_CHAT_TEMPLATES}/*"))]
    return sorted(name for name in names if _is_beside_weights(name) and (model_dir / name).is_file())


def _is_beside_weights(name: Path) -> bool:
    if name.name.startswith(".") or name.name.endswith(".index.json"):
        return False
    if len(name.parts) > 1:
        return name.suffix == ".jinja"
    is_text = name.name.upper().startswith(_TEXTS) and name.suffix.lower() in _TEXT_SUFFIXES
    return is_text or name.suffix in _BESIDE_WEIGHTS


def set_chat_template(model_dir: str | Path, template: str) -> None:
    """Makes a text the chat template of a model directory for every reader, in the place of all that it has.

    The directory is one that nothing reads yet: what is written does not appear at once.
    """
    model_dir = Path(model_dir)
    if (model_dir / _CHAT_TEMPLATES).is_dir():
        # Of several templates transformers takes tool_use for a conversation with tools.
        shutil.rmtree(model_dir / _CHAT_TEMPLATES)
    _write_anew(model_dir / _CHAT_TEMPLATE, template)
    tokenizer_config = model_dir / _TOKENIZER_CONFIG
    if not tokenizer_config.is_file():
        return
    entries = json.loads(tokenizer_config.read_text(encoding="utf-8"))
    if "chat_template" in entries:
        # transformers takes the file before it; other readers know the entry alone.
        entries["chat_template"] = template
        _write_anew(tokenizer_config, json.dumps(entries, indent=2, ensure_ascii=False) + "\n")


def _write_anew(file: Path, text: str) -> None:
    """Writes a file that may be there already, as the copy of one that may not be written to."""
    file.unlink(missing_ok=True)
    file.write_text(text, encoding="utf-8")
