"""When a run saves, what a checkpoint holds, and where a run resumes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.base.code_version import code_version
from scalerl.base.files import set_chat_template
from scalerl.checkpoint.mirror import Mirror
from scalerl.checkpoint.store import (
    RNG,
    Best,
    CheckpointWriteError,
    check_checkpoint,
    checkpoint_to_resume,
    commit,
    read_trainer_state,
    rotate,
    step_of,
    write_trainer_state,
)
from scalerl.config import PPOConfig, SFTConfig, trained_layout
from scalerl.config.save import RESOLVED_CONFIG, read_resolved, save_resolved
from scalerl.config.schema import RunConfig
from scalerl.config.value_checks import show
from scalerl.models import Head, ModelShape, copy_beside_weights, value_model_config
from scalerl.tracking.backend import flat_config
from scalerl.trainer.saving.user_file_digests import changed_files

if TYPE_CHECKING:
    # Imports torch's checkpoints, with SymPy: a second that what only checks a run does without.
    from scalerl.trainer.ranks.save_calls import Writing

# Fields of ModelShape that may differ between a checkpoint's model and the model of the run that resumes from it.
_NOT_ARCHITECTURE = ("dtype", "eos_token_ids", "max_position_embeddings")

# Key of the trainer state with the version of the code that saved it.
CODE = "code"
# Key of the trainer state with the FlashAttention of the ranks that saved it; null: torch's own.
FLASH_ATTENTION = "flash_attention"
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

    config: of the run, saved beside the models.  roles: the models that the run trains.
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
    *,
    keep: int | None,
    best: Best | None = None,
    every: int | None = None,
    spare: Collection[int] = (),
    check: Callable[[], None] = lambda: None,
) -> Path:
    """Makes what `write` wrote the newest checkpoint, then removes old ones but `spare`; returns its directory.

    check: raises if neither may happen any more; called before, between and after the parts that may take long.
    """
    with _removed_on_failure(tmp, root, step):
        check()
        directory = commit(tmp, root, step, check=check)
    check()
    try:
        rotate(root, keep, best=best, every=every, spare=spare)
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
    """The rest of a sentence that says what was not saved: why, what is lost by it, and how to save."""
    if trainer.save_freq == 0:
        return f" (trainer.save_freq=0): {weights} are gone. trainer.save_freq=-1 saves the last step."
    # scalerl's loops save the last step; one of the user may not.
    return f": {weights} are gone. Save in the training loop: `scalerl.trainer.ppo.save(run)`."


def is_due(step: int, every: int, total: int) -> bool:
    """Whether a step is due: each `every`-th step and the last step; no step when `every` is -1."""
    return every > 0 and (step % every == 0 or step == total)
