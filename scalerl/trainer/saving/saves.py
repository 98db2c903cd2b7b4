"""Saves the checkpoints of a run: while the run waits, or while its next steps run (`trainer.async_save`).

A training loop calls `Saves`; `write` and `publish` are the two halves of a save.
"""

from __future__ import annotations

import copy
import functools
import json
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scalerl.base.code_version import code_version
from scalerl.base.files import set_chat_template
from scalerl.checkpoint.mirror import Mirror, Uploads
from scalerl.checkpoint.store import (
    METRICS,
    Best,
    CheckpointWriteError,
    Kept,
    NotNewestError,
    begin_save,
    commit,
    remove_leftovers,
    rotate,
    step_of,
    write_trainer_state,
)
from scalerl.cluster.failures import WorkerError
from scalerl.config import PPOConfig, SFTConfig
from scalerl.config.save import RESOLVED_CONFIG, save_resolved
from scalerl.config.schema import RunConfig
from scalerl.errors import UserError
from scalerl.models import Head, copy_beside_weights, value_model_config
from scalerl.tracking.metrics.validation import NUM_FAILED
from scalerl.trainer.saving import checkpoints
from scalerl.trainer.saving.checkpoints import CODE

# How long the end of a run waits for a save in the background: after a signal, because a scheduler soon kills the run;
# after the loss of a rank, because the save may hang in the process group of that rank.
_AFTER_INTERRUPT_S, _AFTER_LOST_RANK_S = 10.0, 30.0
_GIVE_UP_S = 2.0
# Waits until all of a model is on the disk. The event: the save is given up.
Writing = Callable[[threading.Event], None]


@dataclass(frozen=True)
class SavedModel:
    """A model to save in a checkpoint. write: writes its distributed checkpoint into a directory.

    begin: starts to write the weights as they are now; its result (`Writing`) waits until all files are written.
    model_path: the model that training started from; its configuration and tokenizer are saved with the weights.
    head: the head that the model has now.
    """

    write: Callable[[str], object]
    model_path: str
    head: Head = "lm"
    begin: Callable[[str], Writing] | None = None


class Saves:
    """Saves checkpoints, one at a time. `news` reports a failure in the background, in the step in which it failed.

    config: of the run, which is saved with it.  roles: the models that the run trains; a save without one fails.
    state: keys that every save's state has in addition to those of the step.
    chat_template: the run's own, which every saved model gets; None: each keeps its model directory's.
    commits_on_error: a save that the loop has not committed becomes a checkpoint when the loop ends by an exception, as
    a loop of the user need not call `commit`. Else the save is dropped: nobody logged that step, and it is done again.
    """

    def __init__(
        self,
        trainer: RunConfig,
        *,
        config: PPOConfig | SFTConfig | None = None,
        roles: Collection[str] = (),
        state: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        commits_on_error: bool = False,
    ) -> None:
        self._state, self._commits_on_error = dict(state or {}), commits_on_error
        self._root, self._in_background = trainer.default_local_dir, trainer.async_save
        metric = trainer.best_ckpt_metric
        self._metric = metric
        self._write = functools.partial(
            write,
            root=trainer.default_local_dir,
            config=config,
            roles=frozenset(roles),
            chat_template=chat_template,
        )
        best = None if metric is None else Best(trainer.best_ckpt_to_keep, metric, trainer.best_ckpt_mode)
        self._kept = Kept(trainer.max_actor_ckpt_to_keep, best, trainer.ckpt_every_to_keep)
        self._save_timeout_s = trainer.save_timeout_s
        mirror = trainer.checkpoint_mirror
        self._uploads = None if mirror is None else Uploads(Mirror(mirror), self._kept)
        # (step, value) of trainer.best_ckpt_metric in the last validation.
        self._tested: tuple[int, float] | None = None
        # The newest checkpoint: the one that the run resumed from, until the run saves its own.
        self.latest: Path | None = None
        # Step -> when its state was saved, by time.monotonic.
        self.saved_at: dict[int, float] = {}
        self._running: _Running | None = None
        # Publishes the files that were written while the run waited.
        self._written: Callable[[], Path] | None = None
        self._news: dict[str, float] = {}
        self._failures: list[CheckpointWriteError] = []

    def save(
        self, step: int, models: Mapping[str, SavedModel], state: dict[str, Any], *, wait: bool, commit: bool = True
    ) -> None:
        """Saves a checkpoint of the current state, after a save that is still running has ended.

        With `wait`, or without trainer.async_save, the checkpoint is complete when this returns, and a failure raises
        CheckpointWriteError. Else `latest` becomes the checkpoint later.
        commit: False: it becomes a checkpoint with the next call of `commit`, at the latest when the run ends.
        """
        self._collect(wait=True)
        # This save may need the room that one which was killed, or failed, still takes.
        remove_leftovers(self._root)
        self.saved_at[step] = time.monotonic()
        state = state | self._state
        if self._metric is not None and self._tested is not None and self._tested[0] == step:
            state = state | {METRICS: {self._metric: self._tested[1]}}
        if wait or not self._in_background:
            tmp = begin_save(self._root, step)
            self._write(tmp, step=step, models=models, state=state)
            self._written = functools.partial(self._publish, tmp, step=step)
        else:
            try:
                tmp = begin_save(self._root, step)
                self._running = _Running(tmp, step, models, state, self._write, self._publish)
            except CheckpointWriteError as error:
                self._failed(step, error)
        if commit:
            self.commit()

    def commit(self) -> None:
        """Lets the files of the last `save`, written or being written, become a checkpoint; does nothing a second time.

        A run commits when its trackers have the metrics of the step: one that is killed before does the step again, one
        that is killed afterwards has lost nothing of it. Raises CheckpointWriteError as `save` does.
        """
        if self._running is not None:
            self._running.may_commit.set()
        if self._written is not None:
            publish, self._written = self._written, None
            self.latest = publish()

    def has(self, step: int) -> bool:
        """Whether the state of a step is the newest that was saved or is being saved."""
        newest = max(self.saved_at, default=None)
        return step == newest if newest is not None else self.latest is not None and step_of(self.latest.name) == step

    @property
    def is_uncommitted(self) -> bool:
        """Whether `commit` would do anything."""
        return self._written is not None or (self._running is not None and not self._running.may_commit.is_set())

    def tested(self, step: int, validation: Mapping[str, float]) -> None:
        """Records the validation of a step. Raises UserError when it lacks trainer.best_ckpt_metric.

        Of several metrics that match a name with * their mean counts. A validation that lacks it because samples failed
        is not compared with others.
        """
        if self._metric is None:
            return
        values = [validation[name] for name in checkpoints.matching(self._metric, validation)]
        if not values and any(validation[name] for name in checkpoints.matching(f"*/{NUM_FAILED}", validation)):
            # Every response of a data source failed: there are scores alone.
            return
        if not values:
            raise UserError(
                f"trainer.best_ckpt_metric = {self._metric}: no metric of the validation; set it to one of "
                f"{', '.join(sorted(validation))}"
            )
        self._tested = step, sum(values) / len(values)

    def news(self) -> tuple[dict[str, float], list[str]]:
        """Metrics and lines about saves that ended in the background since the last call."""
        self._collect(wait=False)
        metrics, self._news = self._news, {}
        lines, self._failures = [f"{error}; the run goes on{self._stays()}" for error in self._failures], []
        if self._uploads is not None:
            uploaded, failures = self._uploads.news()
            metrics |= uploaded
            lines += [f"{error}; the run goes on" for error in failures]
        return metrics, lines

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Waits for the running save at the end of the block; after an interrupt or a lost rank only for a while.

        Raises CheckpointWriteError if a save failed and `news` has not reported it.
        """
        try:
            yield
        except BaseException as error:
            limit_s = _AFTER_LOST_RANK_S if isinstance(error, WorkerError) else None
            self._leave_uncommitted()
            self._end(limit_s if isinstance(error, Exception) else _AFTER_INTERRUPT_S)
            raise
        self._collect(wait=True)
        failures = self._failures
        if self._uploads is not None:
            failures = failures + self._last_copies(self._uploads)
        if failures:
            raise CheckpointWriteError(f"{failures[-1]}{self._stays()}")

    def _leave_uncommitted(self) -> None:
        """Commits the save that the loop has not committed, or drops it."""
        if self._commits_on_error:
            with suppress(CheckpointWriteError, OSError):
                self.commit()
        elif self._running is not None and not self._running.may_commit.is_set():
            self._running.give_up()
        # What was written while the run waited goes with the next rotation.
        self._written = None

    def _last_copies(self, uploads: Uploads) -> list[CheckpointWriteError]:
        """Waits for the copies that are still made, and returns what failed."""
        uploads.wait(self._copies_limit_s(uploads))
        late = sorted(uploads.steps)
        return uploads.news()[1] + [
            CheckpointWriteError(
                f"the checkpoint of step {step} was not copied in trainer.save_timeout_s={self._save_timeout_s:g} s"
            )
            for step in late
        ]

    def _copies_limit_s(self, uploads: Uploads) -> float:
        """The time that as many saves have as copies are left."""
        return self._save_timeout_s * max(1, len(uploads.steps))

    def _publish(self, tmp: Path, *, step: int, check: Callable[[], None] = lambda: None) -> Path:
        """Makes the written files a checkpoint; a copy for the mirror is made later.  check: as `publish`."""
        uploads = self._uploads
        spare = set() if uploads is None else uploads.steps
        directory = publish(tmp, self._root, step, self._kept, spare=spare, check=check)
        if uploads is not None:
            uploads.add(directory)
        return directory

    def _stays(self) -> str:
        return "" if self.latest is None else f"; the newest checkpoint is {self.latest}"

    def _end(self, limit_s: float | None) -> None:
        if self._running is not None:
            self._running.wait(limit_s)
            self._collect(wait=False)
            if self._running is not None:
                self._running.give_up()
        if self._uploads is not None:
            self._uploads.wait(self._copies_limit_s(self._uploads) if limit_s is None else limit_s)

    def _collect(self, *, wait: bool) -> None:
        """Takes the result of a save in the background, if it has ended; with `wait`, waits for its end."""
        if wait:
            self.commit()
        running = self._running
        if running is None or not (wait or running.is_done):
            return
        running.wait()
        self._running = None
        self._news["checkpoint/background_s"] = running.seconds
        if running.directory is None:
            self._failed(running.step, running.error)
        else:
            self.latest = running.directory

    def _failed(self, step: int, error: Exception | None) -> None:
        self.saved_at.pop(step, None)
        self._news["checkpoint/failed_saves"] = self._news.get("checkpoint/failed_saves", 0.0) + 1
        whole = isinstance(error, NotNewestError)
        said = str(error) if whole else f"the checkpoint of step {step} was not written: {error}"
        self._failures.append(CheckpointWriteError(said))


class _Running:
    """A save whose files are being written; a thread commits it as soon as they are complete."""

    def __init__(
        self,
        tmp: Path,
        step: int,
        models: Mapping[str, SavedModel],
        state: dict[str, Any],
        write: Callable[..., None],
        publish: Callable[..., Path],
    ) -> None:
        """Starts the save; what every rank changes when this has returned is not in it."""
        self.step, self.given_up, self.may_commit = step, threading.Event(), threading.Event()
        self.directory: Path | None = None
        self.error: Exception | None = None
        self.seconds = 0.0
        self._start = time.monotonic()
        # Waits for the role's files; each is taken out when it is waited for.
        self._writing: dict[str, Writing] = {}
        written = {role: self._begun(role, model, tmp / role) for role, model in models.items()}
        # Copied, because the run changes its state while the thread writes.
        self._write = functools.partial(write, tmp, step=step, models=written, state=copy.deepcopy(state))
        self._publish = functools.partial(publish, tmp, step=step, check=self._check)
        # A daemon thread: a process that an interrupt ends does not wait for it.
        self._thread = threading.Thread(target=self._run, name=f"save-{step}", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, limit_s: float | None = None) -> None:
        self._thread.join(limit_s)

    def give_up(self) -> None:
        """Ends the wait for the ranks; their files become no checkpoint."""
        self.given_up.set()
        self.may_commit.set()
        # A rank that is well answers at once; the thread may wait for one that is not, and asks nobody else.
        self._thread.join(_GIVE_UP_S)

    def _begun(self, role: str, model: SavedModel, directory: Path) -> SavedModel:
        assert model.begin is not None, "a model that cannot be saved in the background"
        self._writing[role] = model.begin(str(directory))
        return replace(model, write=lambda _: self._wait_for(role))

    def _wait_for(self, role: str) -> None:
        try:
            self._writing.pop(role)(self.given_up)
        except Exception:
            # Ranks that still write would make the removed files again.
            for writing in self._writing.values():
                with suppress(Exception):
                    writing(self.given_up)
            raise

    def _check(self) -> None:
        """Raises CheckpointWriteError if the save was given up: the directory may be another attempt's by now."""
        if self.given_up.is_set():
            raise CheckpointWriteError("it was given up")

    def _run(self) -> None:
        try:
            self._write()
            self.may_commit.wait()
            self.directory = self._publish()
        except Exception as error:
            self.error = error
        self.seconds = time.monotonic() - self._start


# --- the two halves of a save ---


def write(
    tmp: Path,
    root: str,
    step: int,
    models: Mapping[str, SavedModel],
    *,
    state: dict[str, Any],
    config: PPOConfig | SFTConfig | None = None,
    roles: Collection[str] = (),
    chat_template: str | None = None,
) -> None:
    """Writes all of a checkpoint into `tmp`, which begin_save created; it counts for nothing until `publish`.

    config: of the run, saved with the models.  roles: the models that the run trains.
    chat_template: the run's own (data.chat_template_path), saved with every model; None: each keeps its own.
    Raises CheckpointWriteError, also if one of `roles` was not written.
    """
    with _removed_on_failure(tmp, root, step):
        for role, model in models.items():
            directory = tmp / role
            directory.mkdir(exist_ok=True)
            model.write(str(directory))
            _describe(model, directory / "huggingface", chat_template)
        if missing := sorted(role for role in roles if not _has_weights(tmp / role)):
            raise CheckpointWriteError(
                f"{root}: the checkpoint of step {step} was not written: the run trains {', '.join(sorted(roles))}, "
                f"and nothing was saved of {', '.join(missing)}"
            )
        if config is not None:
            save_resolved(config, tmp / RESOLVED_CONFIG)
        write_trainer_state(tmp, state | {"step": step, CODE: code_version()})


def _has_weights(directory: Path) -> bool:
    files = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return any(file.parts[0] != "huggingface" for file in files)


def publish(
    tmp: Path,
    root: str,
    step: int,
    kept: Kept,
    *,
    spare: Collection[int] = (),
    check: Callable[[], None] = lambda: None,
) -> Path:
    """Makes what `write` wrote the newest checkpoint, then removes those that are not `kept`; returns its directory.

    spare: steps that stay this time.
    check: raises if neither may happen any more; called before, between and after the parts that may take long.
    """
    with _removed_on_failure(tmp, root, step):
        check()
        directory = commit(tmp, root, step, check=check)
    check()
    try:
        rotate(root, kept, spare=spare)
    except OSError as error:
        # The checkpoint is there. What is left takes room, and is tried again after the next.
        warnings.warn(f"old checkpoints in {root} were not removed: {error}", stacklevel=2)
    return directory


@contextmanager
def _removed_on_failure(tmp: Path, root: str, step: int) -> Iterator[None]:
    """Removes an incomplete checkpoint, which would only take the disk space of the next one."""
    try:
        yield
    except Exception as error:
        shutil.rmtree(tmp, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointWriteError(f"{root}: the checkpoint of step {step} was not written: {error}") from error
        raise


def _describe(model: SavedModel, huggingface: Path, chat_template: str | None) -> None:
    """Writes a Hugging Face model directory without the weights, which merge copies into the merged model."""
    huggingface.mkdir()
    copy_beside_weights(model.model_path, huggingface)
    if chat_template is not None:
        set_chat_template(huggingface, chat_template)
    if model.head == "value":
        config = huggingface / "config.json"
        config.write_text(json.dumps(value_model_config(json.loads(config.read_text())), indent=2) + "\n")
