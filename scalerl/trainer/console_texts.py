"""Texts that a command prints around its run: a run that is already finished, times of the start, how to continue."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.base.stop import EXIT_REQUEUE, EXIT_TERMINATED
from scalerl.checkpoint.store import find_latest_ckpt_path, read_trainer_state
from scalerl.config import translation_table
from scalerl.config.compose import Composed
from scalerl.config.save import RESOLVED_CONFIG, saved_value
from scalerl.config.schema import PPOConfig, RunConfig, SFTConfig, SFTTrainerConfig, TrainerConfig
from scalerl.errors import UserError

if TYPE_CHECKING:
    from scalerl.trainer.rank_restarts import AnyRun


class StartPhases:
    """Reports how long each phase of a start took, when the next phase begins.

    say: called with each line.  show: called with the name of each phase as it begins, for a progress display.
    """

    def __init__(self, say: Callable[[str], None] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.say = say or (lambda text: print(text, flush=True))
        self.show: Callable[[str], None] = lambda name: None
        self._clock = clock
        self._current: tuple[str, float] | None = None

    @property
    def current(self) -> str | None:
        """The name of the phase that has begun; None where all have ended."""
        return None if self._current is None else self._current[0]

    def begin(self, name: str) -> None:
        """Ends the current phase and starts the phase `name`."""
        self.end()
        self._current = (name, self._clock())
        self.show(f"start: {name}")

    def end(self) -> None:
        """Ends the current phase and reports its time; without a current phase nothing happens."""
        if self._current is not None:
            name, began = self._current
            self._current = None
            self.say(f"start: {name} {self._clock() - began:.1f} s")


def say_composed(composition: Composed) -> None:
    """Prints the keys of other systems that were translated, and the lines on the values that follow from others."""
    if composition.translations:
        print(translation_table(composition.translations), flush=True)
    for line in composition.lines:
        print(line, flush=True)


def is_directory_or_free(path: str) -> bool:
    """Whether a run may have its directory there: it is one, or could be made, since nothing on the way is a file."""
    nearest = next(at for at in (Path(path).absolute(), *Path(path).absolute().parents) if os.path.lexists(at))
    return nearest.is_dir()


def run_directory_violation(path: str) -> str | None:
    """What is wrong with trainer.default_local_dir; None if a run may have its directory there."""
    if path.startswith("~"):
        return f"trainer.default_local_dir = {path}: ~ is no directory here; write {os.path.expanduser(path)}"
    if is_directory_or_free(path):
        return None
    return (
        f"trainer.default_local_dir = {path}: it or a part of its path is a file; give a directory, which need not "
        "exist yet"
    )


# Key of the trainer state with the steps that trainer.total_epochs of the data give.
LENGTH = "length"


def length_of_epochs(cfg: PPOConfig | SFTConfig, total_steps: int) -> dict[str, Any]:
    """The trainer state's entry for the steps of trainer.total_epochs, with what they follow from.

    Empty with trainer.total_training_steps, which says itself how many steps there are.
    """
    if cfg.trainer.total_training_steps is not None:
        return {}
    return {LENGTH: {"total_steps": total_steps, "follows_from": _what_gives_epochs(cfg)}}


def _what_gives_epochs(cfg: PPOConfig | SFTConfig) -> dict[str, Any]:
    """Collects, as JSON values, what the number of steps of trainer.total_epochs depends on, and some more.

    A file is its path, size and time of change, so that rows that were added count.
    """
    data = asdict(cfg.data)
    model = cfg.model if isinstance(cfg, SFTConfig) else cfg.actor_rollout_ref.model
    files = [data["train_files"]] if isinstance(data["train_files"], str) else list(data["train_files"])
    files += [data["chat_template_path"], data.get("custom_cls", {}).get("path")]
    causes = {
        "trainer.total_epochs": cfg.trainer.total_epochs,
        "model": model.path,
        "data": data,
        "files": [_identity(file) for file in files if file is not None],
    }
    return json.loads(json.dumps(causes, default=str))


def _identity(file: str) -> list[Any]:
    try:
        stat = Path(file).expanduser().stat()
    except OSError:  # It is a URL, or will be refused.
        return [file]
    return [str(Path(file).expanduser().absolute()), stat.st_size, stat.st_mtime_ns]


def finished_at(cfg: PPOConfig | SFTConfig) -> Path | None:
    """The newest checkpoint if it is of the run's last step, else None; reads only files.

    The last step is trainer.total_training_steps. Without that it is the one that the checkpoint says for
    trainer.total_epochs of the same data. None too with a trainer.resume_mode other than auto.
    """
    trainer = cfg.trainer
    if trainer.resume_mode != "auto" or not is_directory_or_free(trainer.default_local_dir):
        return None
    latest = find_latest_ckpt_path(trainer.default_local_dir)
    if latest is None:
        return None
    state, last = read_trainer_state(latest), trainer.total_training_steps
    if last is None and (length := state.get(LENGTH)) and length["follows_from"] == _what_gives_epochs(cfg):
        last = int(length["total_steps"])
    return None if last is None or int(state.get("step", 0)) < last else Path(latest)


def finished_text(checkpoint: Path, trainer: TrainerConfig | SFTTrainerConfig, model_key: str, model_path: str) -> str:
    """The message for a run that is already finished. model_key, model_path: the key of the model to train, its value.

    Raises UserError when that model has another architecture than the trained model.
    """
    _check_architecture(checkpoint, model_key, model_path)
    last, more = trainer.total_training_steps, "A greater trainer.total_training_steps continues"
    if last is None:
        last, more = int(read_trainer_state(checkpoint)["step"]), "More trainer.total_epochs continue"
    before = saved_value(Path(trainer.default_local_dir) / RESOLVED_CONFIG, model_key)
    other = ""
    if before is not None and Path(before).resolve() != Path(model_path).resolve():
        other = f" It was started with {model_key}={before}, not {model_path}, of which nothing was trained here."
    return (
        f"This run is finished: {checkpoint} is of step {last}, the last one.{other} {more} from it; another "
        "trainer.default_local_dir, or trainer.resume_mode=disable, starts a new run."
    )


def _check_architecture(checkpoint: Path, model_key: str, model_path: str) -> None:
    trained, configured = checkpoint / "actor" / "huggingface" / "config.json", Path(model_path) / "config.json"
    if not (trained.is_file() and configured.is_file()) or trained.read_bytes() == configured.read_bytes():
        return
    # Imported here: these modules import torch, and most finished runs need not wait for that.
    from scalerl.models import ModelShape
    from scalerl.trainer.saving.checkpoints import Resumed, check_same_model

    try:
        check_same_model(Resumed(checkpoint, {}), ModelShape.from_hf(model_path), model_path)
    except ValueError as error:
        raise UserError(f"{model_key}: the run in {checkpoint.parent} is finished, and {error}") from error


def say_how_it_ended(command: str, arguments: Sequence[str], trainer: RunConfig, run: AnyRun, is_done: bool) -> int:
    """Prints the last checkpoint of a run and how to continue; returns the exit code: 75 if the run was stopped."""
    # Imported here: it imports torch.
    from scalerl.trainer.saving.checkpoints import closing

    print(closing(trainer, run.saves.latest, step=run.step, is_done=is_done), flush=True)
    if (how := run.tracker.how_to_open) is not None:
        print(how, flush=True)
    if not is_done:
        print(f"To go on:\n  {command_line(command, arguments)}", flush=True)
    return 0 if is_done else EXIT_REQUEUE


# Phases of a start that start and save nothing -> what is done in them.
_PREPARING = {
    "config": "while the configuration was read and the programs of the run were loaded",
    "data": "while data, models, rewards and your own code were checked",
}


@dataclass
class InterruptedRun:
    """Facts about a run for the message after Ctrl-C or SIGTERM.

    root: trainer.default_local_dir; None: it is not known yet.
    """

    root: str | None = None


@contextmanager
def printing_how_to_continue(command: str, arguments: Sequence[str], phases: StartPhases) -> Iterator[InterruptedRun]:
    """Prints how to continue when Ctrl-C or SIGTERM ends the block, then raises it again.

    phases: of the run's start.
    """
    run = InterruptedRun()
    try:
        yield run
    except (KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code != EXIT_TERMINATED:
            raise
        print(interrupted_text(run.root, command, arguments, phases.current), file=sys.stderr, flush=True)
        raise


def interrupted_text(root: str | None, command: str, arguments: Sequence[str], phase: str | None = None) -> str:
    """The message for a run that Ctrl-C or SIGTERM ended: its checkpoint, and how to continue.

    root: None: it was not known yet.  command: train or sft.  phase: of the start, if that had not ended.
    """
    said = []
    if phase in _PREPARING:
        said.append(f"Stopped {_PREPARING[phase]}: nothing was started, and nothing saved.")
    elif phase is not None:
        said.append(f"Stopped in the start ({phase}): what had been started was ended, and nothing was saved.")
    latest = find_latest_ckpt_path(root) if root is not None and is_directory_or_free(root) else None
    if latest:
        said.append(f"The checkpoint {latest} stands.")
    elif root is not None:
        said.append(f"There is no checkpoint in {root} yet.")
    said.append(f"To go on{' (from the start)' if root is not None and not latest else ''}:")
    return f"{' '.join(said)}\n  {command_line(command, arguments)}"


def command_line(command: str, arguments: Sequence[str]) -> str:
    """A scalerl command as a line that this shell can run."""
    program = ["scalerl"] if shutil.which("scalerl") else [sys.executable, "-m", "scalerl.cli"]
    return shlex.join([*program, command, *arguments])
