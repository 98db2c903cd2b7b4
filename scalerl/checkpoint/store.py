"""Checkpoint directories: which are whole, which is the newest, how they are committed and removed. No Megatron.

A save is written to `global_step_N.tmp-<host>-<pid>-<random>`, gets its COMPLETE file (manifest of files, sizes and
digests), is renamed to `global_step_N`, and only then named by the tracker. A removal renames to `.deleting-` first.
One run at a time writes to a root.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import socket
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from types import MappingProxyType
from typing import Any

from scalerl.base.files import flush, fsync, whole_file
from scalerl.checkpoint import PIECES_INDEX_NAME
from scalerl.errors import RunError

TRACKER_NAME = "latest_checkpointed_iteration.txt"
COMPLETE_NAME = "COMPLETE"
TRAINER_STATE_NAME = "trainer_state.json"
# Key of the trainer state with the metrics by which `rotate` chooses the best.
METRICS = "metrics"
DIRECTORY_FORMAT = "global_step_{}"
# Subdirectory of a model's directory with a file of random states for each rank, rank_*.
RNG = "rng"
_TMP_NAME = re.compile(r"global_step_(?P<step>\d+)\.tmp-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]+")
# Of a rank's tensors.
_DATA_NAME = re.compile(r"__(\d+)_0\.distcp")
_DELETING_NAME = re.compile(r"global_step_\d+\.deleting-[0-9a-f]+")

# Keys of the manifest. Another one is damage: it may be one of these, with a flipped bit.
_MANIFEST_KEYS = ("step", "files", "algorithm", "digests", "sha256")
_MAX_THREADS = 8


class CheckpointWriteError(RunError):
    """A checkpoint could not be written: the disk is full, or the directory cannot be written."""

    restart_helps = False


class NotNewestError(CheckpointWriteError):
    """A checkpoint is whole, but the file that says which one is the newest could not be written."""


def find_latest_ckpt_path(
    path: str | os.PathLike[str] | None, directory_format: str = DIRECTORY_FORMAT, *, digests: bool = False
) -> str | None:
    """Directory of the checkpoint to resume from under `path`; None when there is none, or no `path`.

    That is the step the tracker names, or where its directory is not whole the newest whole one before it: later ones
    are of a run that went back. When there are only later ones, or the tracker is missing or unreadable, it is the
    whole directory with the highest step. A UserWarning names each directory passed over, and why.
    digests: read all files, and pass over a directory with other bytes than were saved.
    """
    if path is None:
        return None
    latest, problems = _latest_whole(Path(path), directory_format, digests)
    for directory, problem in problems.items():
        warnings.warn(f"skipping checkpoint {directory}: {problem}", stacklevel=2)
    return latest


def checkpoint_to_resume(
    root: str | os.PathLike[str], *, digests: bool = False, passed_over: Mapping[Path, str] | None = None
) -> str | None:
    """The checkpoint to resume from, as `find_latest_ckpt_path`; None if `root` has none.

    digests: compares those of all files but the tensors', which the ranks compare while they load them.
    passed_over: directories that could not be loaded, and why.
    Raises ValueError if there are checkpoints and none is whole: a run that began anew would replace them one by one.
    """
    latest, problems = _latest_whole(Path(root), DIRECTORY_FORMAT, digests, data=False, passed_over=passed_over or {})
    if latest is None and problems:
        each = "; ".join(f"{directory}: {problem}" for directory, problem in problems.items())
        raise ValueError(
            f"no checkpoint in {root} can be loaded: {each}. To begin anew move these directories away or give "
            "another trainer.default_local_dir; trainer.resume_mode=disable begins anew here and replaces them"
        )
    for directory, problem in problems.items():
        warnings.warn(f"skipping checkpoint {directory}: {problem}", stacklevel=2)
    return latest


def _latest_whole(
    root: Path,
    directory_format: str,
    digests: bool,
    *,
    data: bool = True,
    passed_over: Mapping[Path, str] = MappingProxyType({}),
) -> tuple[str | None, dict[Path, str]]:
    """The directory to resume from, and for each directory that was passed over the reason."""
    tracked = _tracked_step(root)
    steps = sorted(checkpoint_steps(root, directory_format), reverse=True)
    if tracked is not None and tracked not in steps:
        warnings.warn(f"{root / TRACKER_NAME} names step {tracked}, whose directory is not there", stacklevel=3)
    problems = {}
    # sorted is stable: from newest to oldest, but those that a run abandoned when it went back come last.
    for step in sorted(steps, key=lambda s: tracked is not None and s > tracked):
        directory = root / directory_format.format(step)
        problem = passed_over.get(directory) or integrity_problem(directory, digests=digests, data=data)
        if problem is None:
            return str(directory), problems
        problems[directory] = problem
    return None, problems


def checkpoint_steps(root: str | os.PathLike[str], directory_format: str = DIRECTORY_FORMAT) -> list[int]:
    """Steps that have a directory under `root`, whole or not, ascending."""
    root = Path(root)
    prefix, suffix = directory_format.split("{}")
    name = re.compile(re.escape(prefix) + r"(\d+)" + re.escape(suffix))
    if not root.is_dir():
        return []
    return sorted(int(m[1]) for p in root.iterdir() if (m := name.fullmatch(p.name)) and p.is_dir())


def abandoned_steps(root: str | os.PathLike[str]) -> list[int]:
    """Steps that have a directory under `root` and come after the tracked one: of a run that went back."""
    tracked = _tracked_step(Path(root))
    return [] if tracked is None else [step for step in checkpoint_steps(root) if step > tracked]


def step_of(name: str) -> int | None:
    """The step of a checkpoint directory's name; None for another name."""
    prefix, suffix = DIRECTORY_FORMAT.split("{}")
    step = name.removeprefix(prefix).removesuffix(suffix)
    return int(step) if step.isdecimal() and name == DIRECTORY_FORMAT.format(step) else None


def integrity_problem(
    directory: str | os.PathLike[str], *, digests: bool = False, below: str = "", data: bool = True
) -> str | None:
    """Why the directory is not a whole checkpoint (names the file, and the tensor in it), or None.

    Compares sizes and reads no data; with `digests` it reads every file. What was saved before there were digests has
    none to compare. below: a directory in it, to look at this one alone. data False: no digests of files of tensors
    that have an index, whose digests are compared by who reads the tensors.
    """
    directory = Path(directory)
    if not directory.is_dir():
        return "no such directory"
    try:
        text = (directory / COMPLETE_NAME).read_text(encoding="utf-8")
        manifest = json.loads(text)
        sizes, saved = dict(manifest["files"]), dict(manifest.get("digests", {}))
    except FileNotFoundError:
        return f"no {COMPLETE_NAME} file, so its save did not finish"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{COMPLETE_NAME} is not a manifest"
    if _is_damaged(manifest, text, sizes.keys() == saved.keys()):
        return f"{COMPLETE_NAME} is not what was saved"
    for name, size in sizes.items():
        if below and not name.startswith(f"{below}/"):
            continue
        try:
            size_on_disk = (directory / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return f"file {name} is missing"
        if size_on_disk != size:
            return f"file {name} has {size_on_disk} bytes, was saved with {size}"
    if digests and manifest.get("algorithm", _algorithm()) != _algorithm():
        return f"its digests are {manifest['algorithm']!r}, this version makes {_algorithm()}"
    wanted = [name for name in saved if name.startswith(f"{below}/" if below else "")]
    if not data:
        wanted = [
            name for name in wanted if not (_is_data(name) and str(Path(name).with_name(PIECES_INDEX_NAME)) in saved)
        ]
    for name, digest in _digests(directory, wanted).items() if digests else ():
        if digest != saved[name]:
            return f"file {name} is not what was saved{_damaged_tensor(directory / name)}"
    return None


def _manifest_text(manifest: Mapping[str, Any]) -> str:
    """The text of the manifest's file: the manifest, and the digest of the manifest."""
    digest = hashlib.sha256(json.dumps(manifest, indent=1).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": digest}, indent=1)


def _is_damaged(manifest: Mapping[str, Any], text: str, has_all_digests: bool) -> bool:
    """Whether a manifest is not as it was written. Older ones have no digest of themselves, or no digests at all."""
    if "sha256" in manifest:
        return text != _manifest_text({key: value for key, value in manifest.items() if key != "sha256"})
    if not manifest.keys() <= set(_MANIFEST_KEYS):
        return True
    return ("algorithm" in manifest or "digests" in manifest) and not has_all_digests


def manifest_sizes(directory: str | os.PathLike[str]) -> dict[str, int]:
    """Bytes of each file of a whole checkpoint, by its path in it. Raises ValueError for any other directory."""
    check_checkpoint(directory)
    return dict(json.loads((Path(directory) / COMPLETE_NAME).read_text(encoding="utf-8"))["files"])


def has_digests(directory: str | os.PathLike[str]) -> bool:
    """Whether a whole checkpoint has digests of its files; those from before there were any have none."""
    return "digests" in json.loads((Path(directory) / COMPLETE_NAME).read_text(encoding="utf-8"))


def check_checkpoint(directory: str | os.PathLike[str], *, digests: bool = False, data: bool = True) -> None:
    """Raises ValueError naming the file when `directory` is not a whole checkpoint; as `integrity_problem`."""
    problem = integrity_problem(directory, digests=digests, data=data)
    if problem is not None:
        raise ValueError(f"checkpoint {directory} cannot be loaded: {problem}; choose another with resume_from_path")


def _algorithm() -> str:
    # Imported here and below: digests need torch, and who only looks which checkpoints there are need not wait for it.
    from scalerl.checkpoint.pieces import ALGORITHM

    return ALGORITHM


def _digests(root: Path, names: Iterable[str]) -> dict[str, str]:
    """The digests of files below root, which several threads read now."""
    from scalerl.checkpoint.pieces import digest_of_file

    names = list(names)
    with ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
        return dict(zip(names, pool.map(lambda name: digest_of_file(root / name), names), strict=True))


def _is_data(name: str) -> bool:
    return name.endswith(".distcp")


def _damaged_tensor(file: Path) -> str:
    """The end of a message: which tensor of a file of tensors is damaged."""
    if not _is_data(file.name):
        return ""
    from scalerl.checkpoint.errors import DamagedCheckpointError
    from scalerl.checkpoint.torch_dist import DistCheckpoint, PieceReader

    try:
        with DistCheckpoint(file.parent) as stored:
            for key in stored.tensors:
                for piece in stored.pieces(key):
                    if piece.file == file.name:
                        PieceReader(stored, piece).finish()
    except DamagedCheckpointError as error:
        return f": {str(error).removeprefix(f'{file}: ')}"
    return ", between its tensors"


def begin_save(root: str | os.PathLike[str], step: int) -> Path:
    """Makes and returns the directory to write step `step` to; it becomes a checkpoint with commit()."""
    root = Path(root)
    name = f"{DIRECTORY_FORMAT.format(step)}.tmp-{socket.gethostname()}-{os.getpid()}-{token_hex(4)}"
    tmp = root / name
    try:
        tmp.mkdir(parents=True)
    except OSError as error:
        raise CheckpointWriteError(f"{root}: no checkpoint can be written here: {error.strerror}") from error
    return tmp


def commit(
    tmp: str | os.PathLike[str],
    root: str | os.PathLike[str],
    step: int,
    *,
    check: Callable[[], None] = lambda: None,
) -> Path:
    """Turns a fully written `tmp` into global_step_{step} and points the tracker at it; returns the directory.

    Call once, after every rank has written. A killed process leaves either the old state or the new one.
    An existing directory of the same step is replaced. Raises NotNewestError if it is whole, but not tracked.
    check: called when all files are on the disk; an error of `check` leaves no checkpoint.
    """
    tmp, root = Path(tmp), Path(root)
    final = root / DIRECTORY_FORMAT.format(step)
    files = sorted(p for p in tmp.rglob("*") if p.is_file() and p.name != COMPLETE_NAME)
    flush([*files, *(p for p in tmp.rglob("*") if p.is_dir())])
    digests = _written_digests(tmp)
    # A network file system may not list yet what another machine wrote. What is not there at all fails below.
    names = sorted({*(str(f.relative_to(tmp)) for f in files), *digests, *_random_states(tmp, digests)})
    digests |= _digests(tmp, (name for name in names if name not in digests))
    manifest = {
        "step": step,
        "files": {name: (tmp / name).stat().st_size for name in names},
        "algorithm": _algorithm(),
        "digests": {name: digests[name] for name in names},
    }
    (tmp / COMPLETE_NAME).write_text(_manifest_text(manifest), encoding="utf-8")
    flush([tmp / COMPLETE_NAME, tmp])
    check()
    return _become(tmp, final, step)


def adopt(tmp: str | os.PathLike[str], root: str | os.PathLike[str], step: int) -> Path:
    """Makes a checkpoint that was saved elsewhere, and copied whole to `tmp`, the newest one of `root`.

    Raises ValueError, naming the file, if it is not as it was saved.
    """
    tmp, root = Path(tmp), Path(root)
    problem = integrity_problem(tmp, digests=True)
    if problem is not None:
        raise ValueError(problem)
    flush([*tmp.rglob("*"), tmp])
    return _become(tmp, root / DIRECTORY_FORMAT.format(step), step)


def finish_commit(root: str | os.PathLike[str]) -> None:
    """Finishes a save that replaced the tracked step, if a kill between its two renames left it under its other name.

    For the one run that writes to `root`: the save of a live run looks the same for a moment.
    """
    root = Path(root)
    step = _tracked_step(root)
    if step is None or (final := root / DIRECTORY_FORMAT.format(step)).exists():
        return
    for path in root.iterdir():
        match = _TMP_NAME.fullmatch(path.name)
        if match and int(match["step"]) == step and integrity_problem(path) is None:
            path.rename(final)
            fsync(root)
            return


def _become(tmp: Path, final: Path, step: int) -> Path:
    """Renames a whole directory, points the tracker at it, and removes one of the same step."""
    replaced = _set_aside(final) if final.exists() else None
    tmp.rename(final)
    tracker = final.parent / TRACKER_NAME
    try:
        fsync(final.parent)
        _write_atomic(tracker, str(step))
    except OSError as error:
        raise NotNewestError(
            f"{final} is whole, but a run with trainer.resume_mode=auto goes on from an older one, because {tracker} "
            f"could not be written: {error}. trainer.resume_mode=resume_path goes on from it"
        ) from error
    if replaced is not None:
        _remove(replaced)
    return final


def _written_digests(root: Path) -> dict[str, str]:
    """The digests that the writers of files have left, so that these files need not be read again."""
    digests = {}
    for index in root.rglob(PIECES_INDEX_NAME):
        for name, digest in json.loads(index.read_text(encoding="utf-8"))["digests"].items():
            digests[str((index.parent / name).relative_to(root))] = digest
    return digests


def _random_states(root: Path, names: Iterable[str]) -> list[str]:
    """The files of random states of the ranks that wrote these files of tensors, of models that have such files."""
    ranks = [(root / name, match[1]) for name in names if (match := _DATA_NAME.fullmatch(Path(name).name))]
    directories = [(file.parents[1] / RNG, rank) for file, rank in ranks]
    return [
        str((directory / f"rank_{rank}.safetensors").relative_to(root))
        for directory, rank in directories
        if directory.is_dir()
    ]


@dataclass(frozen=True)
class Best:
    """The rule that `count` checkpoints stay: those with the largest (mode min: smallest) `metric` in their state."""

    count: int
    metric: str
    mode: str = "max"

    def of(self, values: Mapping[int, float]) -> set[int]:
        """The steps that stay.  values: the metric by step; of equal values the newer step is the better."""
        sign = -1.0 if self.mode == "min" else 1.0
        return set(sorted(values, key=lambda step: (sign * values[step], step), reverse=True)[: self.count])


@dataclass(frozen=True)
class Kept:
    """The rule by which checkpoints stay: the `newest` newest ones, also the best ones and every n-th.

    newest: at least 1; None: all.  every: steps that it divides stay.
    """

    newest: int | None
    best: Best | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        if self.newest is not None and self.newest < 1:
            raise ValueError(f"keep is {self.newest}, must be at least 1 (null keeps all)")

    def surplus(self, whole: Sequence[int], tracked: int | None, states: Mapping[int, Mapping[str, Any]]) -> list[int]:
        """The steps whose checkpoints go. whole: those that are there, ascending; the tracked one always stays.

        states: the trainer state by step, if there is a rule for the best.
        """
        if self.newest is None:
            return []
        # The tracked one is counted among the newest. Later ones are of a run that went back: they go first.
        others = sorted((step for step in whole if step != tracked), key=lambda s: tracked is None or s < tracked)
        surplus = others[: max(0, len(whole) - self.newest)]
        stay = {step for step in surplus if self.every is not None and step % self.every == 0}
        if self.best is not None:
            stay |= self.best.of(_metric_values(states, self.best.metric))
        return [step for step in surplus if step not in stay]


def rotate(root: str | os.PathLike[str], kept: Kept, *, spare: Collection[int] = ()) -> list[str]:
    """Removes the checkpoints that the rule does not keep; returns the names removed. Call after commit().

    What is not whole, or cannot be read, is neither counted nor removed. Also removes what killed saves and removals
    left behind. What cannot be read or removed is named by a UserWarning, since nothing of a run depends on it, and
    tried again the next time.
    spare: steps whose checkpoints are being read, and go the next time.
    """
    root = Path(root)
    tracked = _tracked_step(root)
    remove_leftovers(root)
    if kept.newest is None:
        return []
    states = {}
    for step in checkpoint_steps(root):
        directory = root / DIRECTORY_FORMAT.format(step)
        try:
            if integrity_problem(directory) is None:
                states[step] = {} if kept.best is None else read_trainer_state(directory)
        except (OSError, ValueError) as error:
            warnings.warn(f"{directory} stays, as it cannot be read: {error}", stacklevel=2)
    surplus = [DIRECTORY_FORMAT.format(s) for s in kept.surplus(list(states), tracked, states) if s not in spare]
    return [name for name in surplus if _remove(root / name, aside=True)]


def _metric_values(states: Mapping[int, Mapping[str, Any]], metric: str) -> dict[int, float]:
    """The metric by step, of the steps whose checkpoint has it as a finite number."""
    values = {}
    for step, state in states.items():
        metrics = state.get(METRICS)
        value = metrics.get(metric) if isinstance(metrics, Mapping) else None
        if isinstance(value, int | float) and math.isfinite(value):
            values[step] = float(value)
    return values


def write_trainer_state(directory: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Writes trainer_state.json, whole or not at all. Raises TypeError for a value that JSON has no form for."""
    _write_atomic(Path(directory) / TRAINER_STATE_NAME, json.dumps(dict(state), indent=1))


def read_trainer_state(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads trainer_state.json.  Raises ValueError if it is missing or not a JSON object."""
    path = Path(directory) / TRAINER_STATE_NAME
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; {directory} is not a checkpoint of a training run") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__}, not a JSON object")
    return state


def _tracked_step(root: Path) -> int | None:
    path = root / TRACKER_NAME
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    if not text.isdecimal():
        warnings.warn(f"{path} holds {text[:40]!r}, not a step; looking for the newest checkpoint", stacklevel=4)
        return None
    return int(text)


def _remove(directory: Path, *, aside: bool = False) -> bool:
    """Removes a directory that counts for nothing; False where that fails.  aside: it counts until it is renamed."""
    try:
        shutil.rmtree(_set_aside(directory) if aside else directory)
    except OSError as error:
        warnings.warn(f"{directory} could not be removed, and takes room: {error}", stacklevel=3)
        return False
    return True


def _set_aside(directory: Path) -> Path:
    aside = directory.with_name(f"{directory.name}.deleting-{token_hex(4)}")
    directory.rename(aside)
    return aside


def remove_leftovers(root: str | os.PathLike[str]) -> None:
    """Removes what killed or failed saves and removals left behind; a UserWarning names what cannot be removed.

    For the one run that writes to `root`, while it saves nothing.
    """
    root = Path(root)
    if not root.is_dir():
        return
    tracked = _tracked_step(root)
    for path in list(root.iterdir()):
        match = _TMP_NAME.fullmatch(path.name)
        if _DELETING_NAME.fullmatch(path.name) or (match and _is_dead(match, tracked)):
            _remove(path)
        elif path.name.startswith(f".{TRACKER_NAME}."):
            path.unlink()


def _is_dead(tmp: re.Match[str], tracked: int | None) -> bool:
    # Saves come in step order, so one for a step that is already committed has ended. Elsewhere nobody can tell.
    if tracked is not None and int(tmp["step"]) <= tracked:
        return True
    if tmp["host"] != socket.gethostname():
        return False
    try:
        os.kill(int(tmp["pid"]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return int(tmp["pid"]) == os.getpid()


def _write_atomic(path: Path, text: str) -> None:
    with whole_file(path) as file:
        file.write(text.encode())
