"""Texts that a command prints around its run: a run that is already finished, times of the start, how to continue."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scalerl.checkpoint.store import find_latest_ckpt_path, read_trainer_state
from scalerl.config.save import RESOLVED_CONFIG, saved_value
from scalerl.config.schema import SFTTrainerConfig, TrainerConfig
from scalerl.errors import UserError


class StartPhases:
    """Reports how long each phase of a start took, when the next phase begins. say: called with each line."""

    def __init__(self, say: Callable[[str], None] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.say = say or (lambda text: print(text, flush=True))
        self._clock = clock
        self._current: tuple[str, float] | None = None

    def begin(self, name: str) -> None:
        """Ends the current phase and starts the phase `name`."""
        self.end()
        self._current = (name, self._clock())

    def end(self) -> None:
        """Ends the current phase and reports its time; without a current phase nothing happens."""
        if self._current is not None:
            name, began = self._current
            self._current = None
            self.say(f"start: {name} {self._clock() - began:.1f} s")


def is_directory_or_free(path: str) -> bool:
    """Whether a run may have its directory there: it is one, or could be made, since nothing on the way is a file."""
    nearest = next(at for at in (Path(path).absolute(), *Path(path).absolute().parents) if os.path.lexists(at))
    return nearest.is_dir()


def finished_at(trainer: TrainerConfig | SFTTrainerConfig) -> Path | None:
    """The newest checkpoint if it has reached trainer.total_training_steps, else None; reads only files.

    None too without trainer.total_training_steps, or with a trainer.resume_mode other than auto.
    """
    if trainer.total_training_steps is None or trainer.resume_mode != "auto":
        return None
    if not is_directory_or_free(trainer.default_local_dir):
        return None
    latest = find_latest_ckpt_path(trainer.default_local_dir)
    if latest is None or int(read_trainer_state(latest).get("step", 0)) < trainer.total_training_steps:
        return None
    return Path(latest)


def finished_text(checkpoint: Path, trainer: TrainerConfig | SFTTrainerConfig, model_key: str, model_path: str) -> str:
    """The message for a run that is already finished. model_key, model_path: the key of the model to train, its value.

    Raises UserError when that model has another architecture than the trained model.
    """
    _check_architecture(checkpoint, model_key, model_path)
    before = saved_value(Path(trainer.default_local_dir) / RESOLVED_CONFIG, model_key)
    other = ""
    if before is not None and Path(before).resolve() != Path(model_path).resolve():
        other = f" It was started with {model_key}={before}, not {model_path}, of which nothing was trained here."
    return (
        f"This run is finished: {checkpoint} is of step {trainer.total_training_steps}, the last one.{other} A greater "
        "trainer.total_training_steps continues from it; another trainer.default_local_dir, or "
        "trainer.resume_mode=disable, starts a new run."
    )


def _check_architecture(checkpoint: Path, model_key: str, model_path: str) -> None:
    trained, configured = checkpoint / "actor" / "huggingface" / "config.json", Path(model_path) / "config.json"
    if not (trained.is_file() and configured.is_file()) or trained.read_bytes() == configured.read_bytes():
        return
    # Imported here: these modules import torch, and most finished runs need not wait for that.
    from scalerl.families import ModelShape
    from scalerl.trainer.checkpoints import Resumed, check_same_model

    try:
        check_same_model(Resumed(checkpoint, {}), ModelShape.from_hf(model_path), model_path)
    except ValueError as error:
        raise UserError(f"{model_key}: the run in {checkpoint.parent} is finished, and {error}") from error


def interrupted_text(root: str, command: str, arguments: Sequence[str]) -> str:
    """The message for a run that Ctrl-C ended: its checkpoint, and how to continue. command: train or sft."""
    latest = find_latest_ckpt_path(root)
    stands = f"The checkpoint {latest} stands." if latest else f"There is no checkpoint in {root} yet."
    return f"{stands} To go on{'' if latest else ' (from the start)'}:\n  {command_line(command, arguments)}"


def command_line(command: str, arguments: Sequence[str]) -> str:
    """A scalerl command as a line that this shell can run."""
    program = ["scalerl"] if shutil.which("scalerl") else [sys.executable, "-m", "scalerl.cli"]
    return shlex.join([*program, command, *arguments])
