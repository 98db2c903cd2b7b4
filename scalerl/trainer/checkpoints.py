"""When a run saves, what goes into a checkpoint, and how a run finds its way back."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalerl.checkpoint.store import (
    begin_save,
    check_checkpoint,
    commit,
    find_latest_ckpt_path,
    read_trainer_state,
    rotate,
    write_trainer_state,
)
from scalerl.config import ConfigError

# What a Hugging Face model directory holds beside its weights: merge copies these into the merged model.
_NOT_WEIGHTS = (".json", ".jinja", ".txt", ".model", ".py")


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on. directory: None for a fresh start."""

    directory: Path | None
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state.get("step", 0))


def find_resume_point(root: str, resume_mode: str, resume_from_path: str | None) -> Resumed:
    """Raises ConfigError when resume_from_path is not a whole checkpoint."""
    if resume_mode == "disable":
        return Resumed(None, {})
    if resume_mode == "resume_path":
        try:
            check_checkpoint(resume_from_path)
        except ValueError as error:
            raise ConfigError([f"trainer.resume_from_path = {resume_from_path}: {error}"]) from None
        directory = Path(resume_from_path)
    else:
        latest = find_latest_ckpt_path(root)
        if latest is None:
            return Resumed(None, {})
        directory = Path(latest)
    return Resumed(directory, read_trainer_state(directory))


def save(
    root: str,
    step: int,
    *,
    write_actor: Callable[[str], None],
    model_path: str,
    state: dict[str, Any],
    keep: int | None,
) -> Path:
    """One whole checkpoint, then rotation. write_actor: writes the distributed checkpoint into a directory it is given."""
    tmp = begin_save(root, step)
    actor = tmp / "actor"
    actor.mkdir()
    write_actor(str(actor))
    huggingface = actor / "huggingface"
    huggingface.mkdir()
    for file in sorted(Path(model_path).iterdir()):
        if file.suffix in _NOT_WEIGHTS and not file.name.endswith(".index.json"):
            shutil.copy2(file, huggingface / file.name)
    write_trainer_state(tmp, state | {"step": step})
    directory = commit(tmp, root, step)
    rotate(root, keep)
    return directory


def is_due(step: int, every: int, total: int) -> bool:
    """Every `every` steps and at the end; never when `every` is -1."""
    return every > 0 and (step % every == 0 or step == total)
