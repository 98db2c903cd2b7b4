"""Comparison of two runs: checkpoints tensor by tensor, metrics number by number, samples column by column."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scalerl.checkpoint.store import TRAINER_STATE_NAME
from scalerl.checkpoint.torch_dist import DistCheckpoint

# Metrics of clocks, memory and what a restart cost, which no two runs share.
MEASURED = re.compile(
    r"timing_s/|timing_per_token_ms/|train/mfu|perf/(throughput|time_per_step|mfu/|max_memory|memory_|cpu_memory|handover/)"
    r"|perf/update_weights_gb_per_s|checkpoint/background_s|training/(num_rank_restarts|redone_steps|restart_lost_s)"
)
# First part of a tensor's key -> what it is.
_OPTIMIZER = "optimizer."


@dataclass(frozen=True)
class ComparedPart:
    """The result of one comparison.

    what: name of the part.  compared: how much of it was compared.  difference: the first one; None if all is the same.
    is_compared: False if there was nothing to compare; `compared` then says why.
    """

    what: str
    compared: str
    difference: str | None = None
    is_compared: bool = True

    @property
    def result(self) -> str:
        if not self.is_compared:
            return "-"
        return "same" if self.difference is None else "DIFFERENT"


def compared_part(what: str, compared: str, differences: Iterator[str]) -> ComparedPart:
    return ComparedPart(what, compared, next(differences, None))


def table(parts: Collection[ComparedPart]) -> str:
    """The results as text: a line for each part, and below them the first difference of each part that differs."""
    rows = [(f.what, f.compared, f.result) for f in parts]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"  {what:<{widths[0]}}  {compared:<{widths[1]}}  {result}" for what, compared, result in rows]
    lines += [f"first difference, in {f.what}: {f.difference}" for f in parts if f.difference is not None]
    return "\n".join(lines)


# --- checkpoints ---


def compare_models(one: Path, other: Path, *, tolerance: float = 0.0) -> list[ComparedPart]:
    """Compares weights and optimizers of all models of two checkpoints, and their states that are no tensors.

    tolerance: largest difference allowed, as a share of the largest number of the tensor; 0: bit for bit.
    """
    roles = [{path.parent.name for path in at.glob("*/dist_ckpt")} for at in (one, other)]
    if roles[0] != roles[1]:
        return [ComparedPart("models", ", ".join(sorted(roles[0])), f"{sorted(roles[0])}, {sorted(roles[1])}")]
    parts = []
    for role in sorted(roles[0]):
        with DistCheckpoint(one / role / "dist_ckpt") as ours, DistCheckpoint(other / role / "dist_ckpt") as theirs:
            for what, wanted in (
                ("weights", lambda key: not key.startswith(_OPTIMIZER)),
                ("optimizer", lambda key: key.startswith(_OPTIMIZER)),
            ):
                keys = [sorted(filter(wanted, stored.tensors)) for stored in (ours, theirs)]
                differences = _tensors(ours, theirs, keys, tolerance)
                parts.append(compared_part(f"{role}: {what}", f"{len(keys[0])} tensors", differences))
        updates = [torch.load(at / role / "dist_ckpt" / "common.pt", weights_only=True) for at in (one, other)]
        names = ("num_updates", "grad_scaler")
        states = [{name: common[name] for name in names if name in common} for common in updates]
        parts.append(
            compared_part(f"{role}: number of updates", str(states[0]["num_updates"]), _values(states[0], states[1]))
        )
    return parts


def compare_random_states(one: Path, other: Path) -> ComparedPart:
    """Compares the random number generators of every rank."""
    from safetensors.torch import load_file

    names = [{str(path.relative_to(at)): path for path in sorted(at.glob("*/rng/*"))} for at in (one, other)]

    def differences() -> Iterator[str]:
        yield from (f"{name}: only in one" for name in sorted(names[0].keys() ^ names[1].keys()))
        for name, path in names[0].items():
            ours, theirs = load_file(path), load_file(names[1][name])
            for key in sorted(ours.keys() | theirs.keys()):
                if key not in ours or key not in theirs or not torch.equal(ours[key], theirs[key]):
                    yield f"{name}: {key}"

    return compared_part("random states", f"{len(names[0])} ranks", differences())


def compare_states(one: Path, other: Path, leave_out: Collection[str] = ("mlflow_run_id", "code")) -> ComparedPart:
    """Compares trainer_state.json of two checkpoint directories: every key, such as cursor and ledger.

    leave_out: top-level keys that are not compared. The first difference is reported.
    """
    states = [json.loads((at / TRAINER_STATE_NAME).read_text(encoding="utf-8")) for at in (one, other)]
    states = [{key: value for key, value in state.items() if key not in leave_out} for state in states]
    return compared_part("state of the run", ", ".join(sorted(states[0])), _values(states[0], states[1]))


def _tensors(ours: DistCheckpoint, theirs: DistCheckpoint, keys: list[list[str]], tolerance: float) -> Iterator[str]:
    yield from (f"{key}: only in one" for key in sorted(set(keys[0]) ^ set(keys[1])))
    for key in keys[0]:
        one, other = ours.read(key), theirs.read(key)
        if tolerance and one.dim() and one.shape[1:] == other.shape[1:]:
            # Another layout pads the vocabulary to another number of rows.
            rows = min(len(one), len(other))
            one, other = one[:rows], other[:rows]
        if one.shape != other.shape or one.dtype != other.dtype:
            yield f"{key}: {tuple(one.shape)} {one.dtype}, {tuple(other.shape)} {other.dtype}"
        elif not torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)):
            most, largest = float((one.double() - other.double()).abs().max()), float(other.double().abs().max())
            if not most <= tolerance * largest:
                yield f"{key}: by up to {most:.3g}, its largest number is {largest:.3g}"


def _values(one: Any, other: Any, path: str = "") -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            yield from _values(one.get(key), other.get(key), f"{path}.{key}" if path else str(key))
    elif one != other:
        yield f"{path}: {_short(one)}, {_short(other)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- metrics ---


def reproducible(data: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step that two equal runs share: those that measure no time and no memory."""
    return {key: value for key, value in data.items() if not MEASURED.match(key)}


def metric_differences(
    one: Mapping[int, Mapping[str, float]],
    other: Mapping[int, Mapping[str, float]],
    *,
    wanted: Callable[[str], bool] = lambda key: not key.startswith("val-"),
    tolerance: float = 0.0,
) -> Iterator[str]:
    """Yields the steps and numbers that differ, as text. wanted: keys to compare."""
    for step in sorted(one.keys() | other.keys()):
        ours, theirs = (
            {key: value for key, value in reproducible(data.get(step, {})).items() if wanted(key)}
            for data in (one, other)
        )
        for key in sorted(ours.keys() | theirs.keys()):
            if key not in ours or key not in theirs:
                yield f"step {step}: {key} is missing in one"
            # Losses of centered advantages are next to nothing.
            elif ours[key] != theirs[key] and not _near(ours[key], theirs[key], tolerance, key.endswith("_loss")):
                yield f"step {step}: {key} {ours[key]!r}, {theirs[key]!r}"


def _near(one: Any, other: Any, tolerance: float, is_loss: bool) -> bool:
    if not isinstance(one, int | float) or not isinstance(other, int | float):
        return False
    return abs(one - other) <= tolerance * max(abs(one), abs(other), float(is_loss))


# --- samples ---


def compare_samples(
    one: Path, other: Path, steps: Collection[int], columns: Collection[str] | None = None
) -> ComparedPart:
    """Compares the dumps of steps of two runs, row by row.  columns: None: all."""
    import pyarrow.parquet as pq

    num_rows = 0

    def differences() -> Iterator[str]:
        nonlocal num_rows
        for step in steps:
            ours, theirs = (pq.read_table(at / f"step_{step}.parquet") for at in (one, other))
            num_rows += len(ours)
            names = sorted(set(ours.column_names) | set(theirs.column_names)) if columns is None else columns
            for name in names:
                if name not in ours.column_names or name not in theirs.column_names:
                    yield f"step {step}: column {name} is missing in one"
                elif not ours[name].equals(theirs[name]):
                    pairs = zip(ours[name].to_pylist(), theirs[name].to_pylist(), strict=False)
                    row = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
                    yield f"step {step}: {name} of sample {row}"

    difference = next(differences(), None)
    what = "sampled tokens" if columns is None else "prompts"
    return ComparedPart(what, f"{num_rows} samples of {len(steps)} steps", difference)
