"""The checkpoint that a run resumes from, the changes since that checkpoint, and a run's messages about checkpoints."""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from scalerl.base.code_version import code_version
from scalerl.checkpoint.mirror import Mirror
from scalerl.checkpoint.store import (
    RNG,
    check_checkpoint,
    checkpoint_to_resume,
    read_trainer_state,
    step_of,
)
from scalerl.config import PPOConfig, SFTConfig, trained_layout
from scalerl.config.save import RESOLVED_CONFIG, read_resolved
from scalerl.config.schema import RunConfig
from scalerl.config.value_checks import show
from scalerl.models import ModelShape
from scalerl.rollout.tools import class_files
from scalerl.tracking.backend import flat_config

# Fields of ModelShape that may differ between a checkpoint's model and the model of the run that resumes from it.
_NOT_ARCHITECTURE = ("dtype", "eos_token_ids", "max_position_embeddings", "adapter", "frozen_tower")

# Key of the trainer state with the version of the code that saved it.
CODE = "code"
# Key of the trainer state with the FlashAttention of the ranks that saved it; null: torch's own.
FLASH_ATTENTION = "flash_attention"
# Key of the trainer state with the digests: configuration key -> path -> SHA-256 of the text.
OWN_FILES = "own_files"
_COMMAND = "actor_rollout_ref.rollout.program.command"
_CLASS_LISTS = (
    "actor_rollout_ref.rollout.program.tool_config_path",
    "actor_rollout_ref.rollout.program.interaction_config_path",
)
# Configuration keys that name files of the user that a run reads. Data has other checks; a model is compared tensor
# by tensor.
OWN_FILE_KEYS = (
    "trainer.import_files",
    "trainer.custom_fit.path",
    "custom_reward_function.path",
    "reward_model.judge.prompt_path",
    "actor_rollout_ref.rollout.program.path",
    _COMMAND,
    *_CLASS_LISTS,
    "data.custom_cls.path",
    "data.chat_template_path",
)
# A message names at most so many changed keys.
_MAX_CHANGES = 30


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run resumes from. directory: None for a fresh start.  state: the saved trainer state."""

    directory: Path | None
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """The last step that the checkpoint has; 0 for a fresh start."""
        return int(self.state.get("step", 0))

    def mlflow_run_in(self, run_dir: Path) -> str | None:
        """The MLflow run to continue in a run directory; None for a checkpoint of another directory."""
        if self.directory is None or self.directory.resolve().parent != run_dir.resolve():
            return None
        return self.state.get("mlflow_run_id")


def find_resume_point(
    root: str,
    resume_mode: str,
    resume_from_path: str | None,
    *,
    digests: bool = True,
    mirror: str | None = None,
    passed_over: Mapping[Path, str] | None = None,
) -> Resumed:
    """Finds and checks the checkpoint that a run resumes from.

    Nothing is read of the tensors, whose digests the ranks compare while they load them.
    digests: False checks only that the files exist and their sizes, without reading their contents.
    passed_over: checkpoints of `root` that the ranks could not load, and why.
    mirror: URL with copies of the run's checkpoints; with `digests` and mode auto a newer one there is fetched.
    Raises ValueError when resume_from_path is not a whole checkpoint, and when checkpoints exist but all are damaged;
    RunError where one at the mirror is not damaged, but was not fetched.
    """
    if resume_mode == "disable" or (resume_mode == "resume_path" and resume_from_path is None):
        return Resumed(None, {})
    if resume_mode == "resume_path" and resume_from_path is not None:
        check_checkpoint(resume_from_path, digests=digests, data=False)
        directory = Path(resume_from_path)
    else:
        latest = (
            _newest(root, mirror, passed_over)
            if mirror is not None and digests
            else checkpoint_to_resume(root, digests=digests, passed_over=passed_over)
        )
        if latest is None:
            return Resumed(None, {})
        directory = Path(latest)
    return Resumed(directory, read_trainer_state(directory))


def _newest(root: str, mirror: str, passed_over: Mapping[Path, str] | None) -> str | Path | None:
    """The checkpoint to resume from in `root`, or a newer one that was fetched from the mirror."""
    try:
        latest, problem = checkpoint_to_resume(root, digests=True, passed_over=passed_over), None
    except ValueError as error:
        latest, problem = None, error
    try:
        fetched = Mirror(mirror).fetch_newer(root, 0 if latest is None else step_of(Path(latest).name) or 0)
    except ValueError as error:
        raise error if problem is None else ValueError(f"{error}. {problem}") from None
    if fetched is None and problem is not None:
        raise problem
    return fetched or latest


def check_same_model(resumed: Resumed, shape: ModelShape, model_path: str, role: str = "actor") -> None:
    """Raises ValueError when the checkpoint's model is of another architecture than the run's."""
    if resumed.directory is None:
        return
    if not (resumed.directory / role).is_dir():
        raise ValueError(
            f"checkpoint {resumed.directory} has no {role}: the run that saved it had none. Give another "
            "trainer.default_local_dir, or trainer.resume_mode=disable"
        )
    stored = ModelShape.from_hf(resumed.directory / role / "huggingface")
    if shape.vision is None:
        # The run may leave the vision tower out.
        stored = stored.without_tower()
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


def resumed_lines(resumed: Resumed, cfg: PPOConfig | SFTConfig, flash_attention: str | None = None) -> list[str]:
    """Messages of a run that resumes: its checkpoint, and what changed since in configuration, the user's files,
    attention and code.

    flash_attention: of its ranks; None: torch's own.
    """
    assert resumed.directory is not None
    lines = [f"resumed from {resumed.directory}"]
    if changed := _changed_keys(resumed.directory / RESOLVED_CONFIG, cfg):
        more = f", and {len(changed) - _MAX_CHANGES} more" if len(changed) > _MAX_CHANGES else ""
        lines.append(f"changed since that checkpoint: {', '.join(changed[:_MAX_CHANGES])}{more}")
    if files := changed_files(resumed.state, cfg):
        lines.append(f"files with another text than the run of that checkpoint began with: {', '.join(files)}")
    # A checkpoint of another number of ranks has no random state for each.
    saved_ranks, ranks = len(list((resumed.directory / "actor" / RNG).glob("rank_*"))), trained_layout(cfg).world_size
    if saved_ranks not in (0, ranks):
        lines.append(f"random states of that checkpoint's {saved_ranks} ranks are not used: this run trains on {ranks}")
    lines += other_attention(resumed.state, flash_attention)
    before, now = resumed.state.get(CODE), code_version()
    if before is not None and before != now:
        lines.append(f"that checkpoint was saved by scalerl {_described(before)}; this is {_described(now)}")
    return lines


def other_attention(state: Mapping[str, Any], flash_attention: str | None) -> list[str]:
    """A line where the ranks that saved a checkpoint had another FlashAttention than those of now; None: torch's own.

    state: of the trainer, which older checkpoints say nothing of it in.
    """
    if FLASH_ATTENTION not in state or state[FLASH_ATTENTION] == flash_attention:
        return []
    then, here = (impl or "torch's own" for impl in (state[FLASH_ATTENTION], flash_attention))
    return [f"attention was {then} until that checkpoint and is {here} now, which rounds otherwise"]


def _changed_keys(saved: Path, cfg: PPOConfig | SFTConfig) -> list[str]:
    """`key before -> now` of every key with another value; [] for a checkpoint without a configuration."""
    before = read_resolved(saved)
    if before is None:
        return []
    # Without secrets.
    there, here = flat_config(before), flat_config(asdict(cfg))
    return [
        f"{key} {show(there[key]) if key in there else '(no such key)'} -> "
        f"{show(here[key]) if key in here else '(no such key)'}"
        for key in sorted(there.keys() | here.keys())
        if key not in there or key not in here or there[key] != here[key]
    ]


def _described(code: Mapping[str, str]) -> str:
    return code.get("version", "?") + (f" (commit {code['commit']})" if "commit" in code else "")


def is_save_due(step: int, save_freq: int, total: int) -> bool:
    """Whether a step saves: the last step, and each save_freq-th step if save_freq > 0; no step if save_freq is 0."""
    return save_freq != 0 and (step == total or (save_freq > 0 and step % save_freq == 0))


def dry_run_text(resumed: Resumed) -> str:
    """The last message of --dry-run. resumed: a checkpoint whose digests were not compared, or a fresh start."""
    if resumed.directory is None:
        return "Everything checked; --dry-run starts nothing."
    return (
        f"Everything checked. The files of {resumed.directory} exist and have the saved sizes; their contents are "
        "checked when the run starts, or by `scalerl inspect --check`. --dry-run starts nothing."
    )


def matching(metric: str, names: Iterable[str]) -> list[str]:
    """The names that trainer.best_ckpt_metric stands for: * in it is any text."""
    pattern = re.compile(".*".join(map(re.escape, metric.split("*"))))
    return [name for name in names if pattern.fullmatch(name)]


def announcement(trainer: RunConfig, total_steps: int) -> str:
    """The message at a run's start that says which checkpoints it will save and keep."""
    every, keep = trainer.save_freq, trainer.max_actor_ckpt_to_keep
    if every == 0:
        return (
            "checkpoints: none (trainer.save_freq=0), the trained weights will be lost; trainer.save_freq=-1 saves the "
            "last step"
        )
    first = f"every {every} steps and " if 0 < every < total_steps else ""
    kept = f"; the newest {keep} stay (trainer.max_actor_ckpt_to_keep)" if first and keep is not None else ""
    if kept and trainer.best_ckpt_to_keep:
        which = "largest" if trainer.best_ckpt_mode == "max" else "smallest"
        kept += f", the {trainer.best_ckpt_to_keep} with the {which} {trainer.best_ckpt_metric}"
    if kept and trainer.ckpt_every_to_keep is not None:
        kept += f", those of every {trainer.ckpt_every_to_keep} steps"
    more = "" if first else "; trainer.save_freq=N for one every N steps"
    return f"checkpoints: {first}of the last step ({total_steps}), in {trainer.default_local_dir}{kept}{more}"


def closing(trainer: RunConfig, last: Path | None, *, step: int, is_done: bool) -> str:
    """The message at a run's end.

    last: the newest checkpoint, of this run or the one that it resumed from.  step: the run's last.
    """
    if last is None:
        return f"No checkpoint was saved{_gone(trainer, 'the trained weights')}"
    last = last.absolute()
    command = [
        *(["scalerl", "merge"] if shutil.which("scalerl") else [sys.executable, "-m", "scalerl.merge", "merge"]),
        *("--backend", "megatron"),
        *("--local_dir", str(last / "actor")),
        *("--target_dir", str(Path(trainer.default_local_dir).absolute() / f"merged_{last.name}")),
    ]
    lines = [f"Checkpoints are in {last.parent}, the last one is {last.name}."]
    if (saved := step_of(last.name) or 0) < step:
        lines.append(f"No later one was saved{_gone(trainer, f'the weights of step {step}')}")
        lines.append(f"Those of step {saved} are in {last.name}.")
    if not is_done:
        lines.append("The same command goes on from it.")
    return "\n".join([*lines, "To make a Hugging Face model of it:", f"  {shlex.join(command)}"])


def _gone(trainer: RunConfig, weights: str) -> str:
    """The rest of a sentence about state that was not saved: the reason, the loss, and how to save."""
    if trainer.save_freq == 0:
        return f" (trainer.save_freq=0): {weights} are gone. trainer.save_freq=-1 saves the last step."
    # scalerl's loops save the last step; one of the user may not.
    return f": {weights} are gone. Save in the training loop: `scalerl.trainer.ppo.save(run)`."


def is_due(step: int, every: int, total: int) -> bool:
    """Whether a step is due: each `every`-th step and the last step; no step when `every` is -1."""
    return every > 0 and (step % every == 0 or step == total)


# --- the user's own files that a run reads: a run that resumes says which have changed ---


def own_files(cfg: PPOConfig | SFTConfig) -> dict[str, dict[str, str]]:
    """Maps each configuration key that names files to their paths, as configured, and the SHA-256 of their texts."""
    values = flat_config(asdict(cfg))
    digests = {key: _digests(key, values.get(key)) for key in OWN_FILE_KEYS}
    return {key: of_key for key, of_key in digests.items() if of_key}


def _digests(key: str, value: Any) -> dict[str, str]:
    paths = [] if value is None else [value] if isinstance(value, str) else list(value)
    if key == _COMMAND:
        # The executable is the system's, or that of an environment.
        paths = [path for text in paths for path in shlex.split(text)[1:]]
    if key in _CLASS_LISTS:
        paths += [own for path in paths if Path(path).expanduser().is_file() for own in class_files(path)]
    files = {path: Path(path).expanduser() for path in paths}
    # What cannot be read has been refused, or is somebody else's to say.
    return {path: hashlib.sha256(file.read_bytes()).hexdigest() for path, file in files.items() if file.is_file()}


def changed_files(state: Mapping[str, Any], cfg: PPOConfig | SFTConfig) -> list[str]:
    """`key (path)` of each file with another text than the checkpoint's run began with.

    state: of the trainer. One that older versions saved has no files.
    """
    before = state.get(OWN_FILES, {})
    return [
        f"{key} ({path})"
        for key, digests in own_files(cfg).items()
        for path, digest in digests.items()
        if before.get(key, {}).get(path, digest) != digest
    ]
