"""A second copy of a run's checkpoints at a URL of fsspec, such as s3://bucket/run or file:///scratch/run.

An object store has no rename. So a checkpoint is there when its COMPLETE is, which is uploaded last and removed first,
and nothing without one is ever fetched.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from scalerl.checkpoint.store import (
    COMPLETE_NAME,
    DIRECTORY_FORMAT,
    TRACKER_NAME,
    TRAINER_STATE_NAME,
    CheckpointWriteError,
    Kept,
    abandoned_steps,
    adopt,
    begin_save,
    step_of,
)
from scalerl.errors import RunError, UserError

# Objects that are uploaded or fetched at a time, where the store's driver does several.
_AT_A_TIME = 16


class Mirror:
    """The checkpoints at a URL.

    Raises UserError where the URL is of no known store, or the store's driver is not installed or cannot be reached.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        try:
            self._connect()
            # Without user and password.
            self.name = str(self._fs.unstrip_protocol(self._root))
            self._exists(self._root)
        except ImportError as error:
            raise UserError(f"the driver of its store is not installed: {error}") from error
        except Exception as error:  # each store raises its own errors
            raise UserError(f"cannot be reached: {type(error).__name__}: {error}") from error

    def upload(self, directory: Path) -> None:
        """Copies a checkpoint there; it counts once all of it is there. Raises CheckpointWriteError."""
        try:
            self._connect()
            manifest = json.loads((directory / COMPLETE_NAME).read_text(encoding="utf-8"))
            there = f"{self._root}/{directory.name}"
            # One of the same step, which this one replaces.
            self._remove_file(f"{there}/{COMPLETE_NAME}")
            names = list(manifest["files"])
            self._fs.makedirs(there, exist_ok=True)
            for parent in sorted({f"{there}/{name}".rpartition("/")[0] for name in names}):
                self._fs.makedirs(parent, exist_ok=True)
            self._fs.put(
                [str(directory / name) for name in names], [f"{there}/{name}" for name in names], batch_size=_AT_A_TIME
            )
            self._check_sizes(there, manifest["files"])
            self._fs.put_file(str(directory / COMPLETE_NAME), f"{there}/{COMPLETE_NAME}")
            self._fs.pipe_file(f"{self._root}/{TRACKER_NAME}", str(manifest["step"]).encode())
        except Exception as error:  # each store raises its own errors
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointWriteError(f"{directory.name} was not copied to {self.name}: {reason}") from error

    def rotate(self, kept: Kept) -> list[str]:
        """Removes all whole checkpoints but those that a rule keeps there; returns their names."""
        try:
            self._connect()
            states = {}
            for step in self.steps():
                with suppress(ValueError, FileNotFoundError):
                    # One whose state is damaged is neither counted nor removed.
                    states[step] = {} if kept.best is None else self._state(step)
            removed = [DIRECTORY_FORMAT.format(step) for step in kept.surplus(list(states), self._tracked(), states)]
            for name in removed:
                self._remove_file(f"{self._root}/{name}/{COMPLETE_NAME}")
                self._fs.rm(f"{self._root}/{name}", recursive=True)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointWriteError(f"old checkpoints at {self.name} were not removed: {reason}") from error
        return removed

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints there, ascending."""
        self._fs.invalidate_cache()
        if not self._exists(self._root):
            return []
        names = {str(path).rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._root, detail=False)}
        steps = sorted(step for name in names if (step := step_of(name)) is not None)
        return [step for step in steps if self._exists(self._complete(step))]

    def fetch_newer(self, root: str | Path, step: int) -> Path | None:
        """Fetches the newest checkpoint into a run's directory if it is of a later step than `step`; else None.

        step: the newest that can be loaded from the directory; 0: none, and then one is fetched if there is any.
        Every byte is compared with its digest; a damaged one is passed over with a warning, for the next older. Later
        steps than the one uploaded last, and those that the directory's tracker was set back from, are of a run that
        went back: they are not fetched, the former only where there is nothing else.
        Raises UserError where the store does not list them, RunError where one cannot be fetched for another reason
        than damage, and ValueError, naming each, where all are damaged and `step` is 0.
        """
        try:
            self._connect()
            later = [candidate for candidate in self.steps() if candidate > step]
            tracked = self._tracked()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"the checkpoints at {self.name} cannot be listed: {reason}") from error
        # As in a directory: from the one that was uploaded last on, and those that were abandoned at the end.
        own = [candidate for candidate in later if tracked is None or candidate <= tracked]
        abandoned = [] if step else [candidate for candidate in later if candidate not in own]
        gone_back_from = abandoned_steps(root) if step else []
        problems = []
        for candidate in [*reversed(own), *reversed(abandoned)]:
            if candidate in gone_back_from:
                continue
            where = f"{self.name}/{DIRECTORY_FORMAT.format(candidate)}"
            tmp = begin_save(root, candidate)
            try:
                self._fetch(candidate, tmp)
                return adopt(tmp, root, candidate)
            except (ValueError, FileNotFoundError) as error:
                problems.append(f"{where}: {type(error).__name__}: {error}")
                warnings.warn(f"skipping checkpoint {problems[-1]}", stacklevel=2)
            except OSError as error:
                raise RunError(f"{where} was not fetched: {type(error).__name__}: {error}") from error
            finally:
                # It is not there any more if it was adopted.
                shutil.rmtree(tmp, ignore_errors=True)
        if problems and not step:
            raise ValueError(
                f"no checkpoint at {self.name} can be loaded: {'; '.join(problems)}. To begin anew give another "
                "trainer.checkpoint_mirror; trainer.resume_mode=disable begins anew and replaces them"
            )
        return None

    def _fetch(self, step: int, tmp: Path) -> None:
        """Copies a checkpoint to `tmp`.

        Raises ValueError for a damaged manifest, FileNotFoundError for a file that is missing, RunError for all other
        answers of the store, OSError if it cannot be written.
        """
        there = f"{self._root}/{DIRECTORY_FORMAT.format(step)}"
        with self._answering(step):
            content = self._fs.cat_file(f"{there}/{COMPLETE_NAME}")
        try:
            names = list(map(str, json.loads(content)["files"]))
        except (KeyError, TypeError):
            raise ValueError(f"{COMPLETE_NAME} is not a manifest") from None
        for name in names:
            # A manifest that is not ours could name a file elsewhere.
            if not (tmp / name).resolve().is_relative_to(tmp.resolve()):
                raise ValueError(f"{COMPLETE_NAME} names {name!r}")
            (tmp / name).parent.mkdir(parents=True, exist_ok=True)
        here = [str(tmp / name) for name in names]
        with self._answering(step):
            self._fs.get([f"{there}/{name}" for name in names], here, batch_size=_AT_A_TIME)
        (tmp / COMPLETE_NAME).write_bytes(content)

    @contextmanager
    def _answering(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError:
            raise
        except Exception as error:  # each store raises its own errors, and some are a ValueError
            where = f"{self.name}/{DIRECTORY_FORMAT.format(step)}"
            raise RunError(f"{where} was not fetched: {type(error).__name__}: {error}") from error

    def _check_sizes(self, there: str, sizes: dict[str, int]) -> None:
        self._fs.invalidate_cache()
        for name, size in sizes.items():
            num_bytes = self._fs.info(f"{there}/{name}")["size"]
            if num_bytes != size:
                raise OSError(f"{name} has {num_bytes} bytes there, {size} here")

    def _complete(self, step: int) -> str:
        return f"{self._root}/{DIRECTORY_FORMAT.format(step)}/{COMPLETE_NAME}"

    def _tracked(self) -> int | None:
        try:
            text = self._fs.cat_file(f"{self._root}/{TRACKER_NAME}").decode(errors="replace").strip()
        except FileNotFoundError:
            return None
        return int(text) if text.isdecimal() else None

    def _state(self, step: int) -> dict[str, Any]:
        return json.loads(self._fs.cat_file(f"{self._root}/{DIRECTORY_FORMAT.format(step)}/{TRAINER_STATE_NAME}"))

    def _remove_file(self, path: str) -> None:
        self._fs.invalidate_cache()
        if self._exists(path):
            self._fs.rm_file(path)

    def _connect(self) -> None:
        """Opens the store anew: a connection that was lost, or was idle for hours, is not used again."""
        import fsspec

        self._fs, root = fsspec.core.url_to_fs(self._url, skip_instance_cache=True)
        self._root = str(root).rstrip("/")

    def _exists(self, path: str) -> bool:
        # fsspec's own `exists` says False of a store that does not answer.
        try:
            self._fs.info(path)
        except FileNotFoundError:
            return False
        return True


class Uploads:
    """Copies checkpoints to a mirror, one at a time; of several that wait only the newest is copied."""

    def __init__(self, mirror: Mirror, kept: Kept) -> None:
        self._mirror, self._kept = mirror, kept
        self._lock = threading.Lock()
        self._copying: Path | None = None
        self._waiting: Path | None = None
        self._thread: threading.Thread | None = None
        self._news: dict[str, float] = {}
        self._failures: list[CheckpointWriteError] = []

    def add(self, directory: Path) -> None:
        """Copies a checkpoint as soon as the one before it is copied."""
        with self._lock:
            self._waiting = directory
            if self._thread is None:
                # A daemon thread: a process that an interrupt ends does not wait for it.
                self._thread = threading.Thread(target=self._run, name="checkpoint-mirror", daemon=True)
                self._thread.start()

    @property
    def steps(self) -> set[int]:
        """Steps of the checkpoints that are still read."""
        with self._lock:
            names = [path.name for path in (self._copying, self._waiting) if path is not None]
        return {step for name in names if (step := step_of(name)) is not None}

    def wait(self, limit_s: float | None = None) -> None:
        """Waits until all is copied, or for `limit_s`."""
        thread = self._thread
        if thread is not None:
            thread.join(limit_s)

    def news(self) -> tuple[dict[str, float], list[CheckpointWriteError]]:
        """Metrics and failures since the last call."""
        with self._lock:
            news, self._news = self._news, {}
            failures, self._failures = self._failures, []
        return news, failures

    def _run(self) -> None:
        while True:
            with self._lock:
                directory = self._copying = self._waiting
                self._waiting = None
                if directory is None:
                    self._thread = None
                    return
            began = time.monotonic()
            failure = None
            try:
                self._mirror.upload(directory)
                self._mirror.rotate(self._kept)
            except CheckpointWriteError as error:
                failure = error
            with self._lock:
                self._news["checkpoint/upload_s"] = time.monotonic() - began
                if failure is not None:
                    self._news["checkpoint/failed_uploads"] = self._news.get("checkpoint/failed_uploads", 0.0) + 1
                    self._failures.append(failure)
