"""When a run saves, what goes into a checkpoint, and how a run finds its way back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
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
from scalerl.families import Head, ModelShape, value_model_config

# What a Hugging Face model directory holds beside its weights: merge copies these into the merged model.
_NOT_WEIGHTS = (".json", ".jinja", ".txt", ".model", ".py")
# What may differ between the models of two runs that continue each other.
_NOT_ARCHITECTURE = ("dtype", "eos_token_ids", "max_position_embeddings")


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on. directory: None for a fresh start."""

    directory: Path | None
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state.get("step", 0))


def find_resume_point(root: str, resume_mode: str, resume_from_path: str | None) -> Resumed:
    """Raises ValueError when resume_from_path is not a whole checkpoint."""
    if resume_mode == "disable" or (resume_mode == "resume_path" and resume_from_path is None):
        return Resumed(None, {})
    if resume_mode == "resume_path":
        check_checkpoint(resume_from_path)
        directory = Path(resume_from_path)
    else:
        latest = find_latest_ckpt_path(root)
        if latest is None:
            return Resumed(None, {})
        directory = Path(latest)
    return Resumed(directory, read_trainer_state(directory))


@dataclass(frozen=True)
class SavedModel:
    """A model of a checkpoint. write: its distributed checkpoint, into the directory given.

    model_path: what it began as, whose configuration and tokenizer go with it.  head: what it has by now.
    """

    write: Callable[[str], None]
    model_path: str
    head: Head = "lm"


def check_same_model(resumed: Resumed, shape: ModelShape, model_path: str, role: str = "actor") -> None:
    """Raises ValueError when the checkpoint's model is of another architecture than the run's."""
    if resumed.directory is None:
        return
    if not (resumed.directory / role).is_dir():
        raise ValueError(
            f"checkpoint {resumed.directory} has no {role}: it is of a run without one. Give another "
            "trainer.default_local_dir, or trainer.resume_mode=disable"
        )
    stored = ModelShape.from_hf(resumed.directory / role / "huggingface")
    different = [
        f"{field.name} {getattr(stored, field.name)} there, {getattr(shape, field.name)} here"
        for field in fields(ModelShape)
        if field.name not in _NOT_ARCHITECTURE and getattr(stored, field.name) != getattr(shape, field.name)
    ]
    if different:
        raise ValueError(
            f"checkpoint {resumed.directory / role} is from another model than {model_path}: {'; '.join(different)}. "
            "Give the model that the run began with, another trainer.default_local_dir, or trainer.resume_mode=disable"
        )


def save(root: str, step: int, models: Mapping[str, SavedModel], *, state: dict[str, Any], keep: int | None) -> Path:
    """One whole checkpoint, then rotation. models: role -> SavedModel; each gets a directory of its name."""
    tmp = begin_save(root, step)
    for role, model in models.items():
        directory = tmp / role
        directory.mkdir()
        model.write(str(directory))
        _describe(model, directory / "huggingface")
    write_trainer_state(tmp, state | {"step": step})
    directory = commit(tmp, root, step)
    rotate(root, keep)
    return directory


def _describe(model: SavedModel, huggingface: Path) -> None:
    """All of a Hugging Face model directory but the weights."""
    huggingface.mkdir()
    for file in sorted(Path(model.model_path).iterdir()):
        if file.suffix in _NOT_WEIGHTS and not file.name.endswith(".index.json"):
            shutil.copy2(file, huggingface / file.name)
    if model.head == "value":
        config = huggingface / "config.json"
        config.write_text(json.dumps(value_model_config(json.loads(config.read_text())), indent=2) + "\n")


def is_due(step: int, every: int, total: int) -> bool:
    """Every `every` steps and at the end; never when `every` is -1."""
    return every > 0 and (step % every == 0 or step == total)
