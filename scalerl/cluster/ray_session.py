"""The Ray session that this process starts itself: its directory, its token, and the signal handlers it replaces."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scalerl.base.scratch import scratch_directory
from scalerl.errors import UserError

logger = logging.getLogger(__name__)

# Prefix of session directories, one per run. Short: they hold sockets, whose paths have at most 107 characters.
PREFIX = "scalerl-ray-"
_COLOURS = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
AUTH_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def sessions_parent() -> Path:
    """The directory in which session directories are made: RAY_TMPDIR, or the system's for temporary files."""
    return Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())


@contextmanager
def session_directory(logs_to: Path | None = None, parent: Path | None = None) -> Iterator[Path]:
    """Makes a directory for Ray's sockets and logs, removed after the block; a killed run's is removed by the next run.

    logs_to: gets Ray's logs when the block ends by an error that the user did not cause.
    parent: where to make the directory; None: `sessions_parent`.
    """
    with scratch_directory(PREFIX, sessions_parent() if parent is None else parent) as directory:
        try:
            yield directory
        except Exception as error:
            if logs_to is not None and not isinstance(error, UserError):
                try:
                    _keep_logs(directory, logs_to)
                except OSError as problem:
                    # A full disk may be what the error is about, which is worth more than the logs.
                    logger.warning("Ray's logs were not kept in %s: %s", logs_to, problem)
            raise


def _keep_logs(directory: Path, logs_to: Path) -> None:
    for logs in directory.glob("session_*/logs"):
        if not logs.parent.is_symlink():
            shutil.copytree(
                logs, logs_to, dirs_exist_ok=True, ignore_dangling_symlinks=True, copy_function=_copy_without_colours
            )


def _copy_without_colours(source: str, target: str) -> None:
    """Copies a file; a text without the escapes that colour Ray's warnings in a terminal."""
    with open(source, "rb") as log, open(target, "wb") as copy:
        is_text = b"\0" not in log.read(8192)
        log.seek(0)
        for line in log:
            copy.write(_COLOURS.sub(b"", line) if is_text else line)
    shutil.copystat(source, target)


@contextmanager
def own_token() -> Iterator[None]:
    """Makes Ray's processes accept only calls with this run's random token; RAY_AUTH_MODE=disabled turns it off.

    A token that the user has set is used as it is.
    """
    # The class is compiled: Ray's types do not have it.
    from ray._raylet import AuthenticationTokenLoader  # pyright: ignore[reportAttributeAccessIssue]

    before = {name: os.environ.get(name) for name in AUTH_VARIABLES}
    if not (before["RAY_AUTH_TOKEN"] or before["RAY_AUTH_TOKEN_PATH"]):
        # Else Ray would make one for all clusters of this user and keep it in the home directory.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # Ray reads the token once in a process's life, unless told.
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Restores the SIGTERM handler after ray.init, which replaces it by two: one in Python, and one below Python that
    ends the process with a crash dump."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        # Raised by Ray's handler.
        if error.code == signal.SIGTERM and callable(handler):
            handler(signal.SIGTERM, None)
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)
