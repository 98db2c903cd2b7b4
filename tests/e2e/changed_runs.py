"""Differences that a test puts into what a resumed run of `scalerl verify-resume` left, one at a time."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from scalerl.extras.verify.resume import Pair, compare


@dataclass(frozen=True)
class Change:
    """change: writes another content of `file`.  said: of the first difference that the comparison then finds."""

    file: Path
    change: Callable[[], None]
    said: str


def changes(pair: Pair, prefix: str) -> list[Change]:
    """Changes of every file that runs of both kinds leave.  prefix: of the metrics of an update."""
    last, run_dir, checkpoint = pair.num_steps, pair.resumed, pair.checkpoints[1]
    metrics, mlflow, state = run_dir / "metrics.jsonl", run_dir / "mlflow.db", checkpoint / "trainer_state.json"
    common = checkpoint / "actor" / "dist_ckpt" / "common.pt"
    random = checkpoint / "actor" / "rng" / "rank_0.safetensors"
    *others, line = metrics.read_bytes().splitlines()
    logged = json.loads(line)
    grad_norm, lr = (f"{prefix}/{name}" for name in ("grad_norm", "lr"))

    def with_metric(key: str) -> Callable[[], None]:
        changed = json.dumps(logged | {"data": logged["data"] | {key: 0.5}})
        return lambda: _write(metrics, b"".join(line + b"\n" for line in [*others, changed.encode()]))

    def other_state() -> None:
        changed = json.loads(state.read_bytes())
        changed["prompts"]["position"] = -1
        state.write_text(json.dumps(changed))

    def one_more_update() -> None:
        changed = torch.load(common, weights_only=True)
        torch.save(changed | {"num_updates": changed["num_updates"] + 1}, common)

    def other_random_state() -> None:
        # Not a view of the file, which is written over.
        states = {name: value.clone() for name, value in load_file(random).items()}
        name = min(states)
        save_file(states | {name: states[name].flip(0)}, random)

    def other_history() -> None:
        with contextlib.closing(sqlite3.connect(mlflow)) as store, store:
            update = "UPDATE metrics SET value = value + 1 WHERE key = ? AND step = ?"
            assert store.execute(update, (grad_norm, last)).rowcount == 1

    values = logged["data"]
    return [
        Change(metrics, with_metric(grad_norm), f"metrics: step {last}: {grad_norm} {values[grad_norm]!r}, 0.5"),
        Change(metrics, with_metric(lr), f"learning rates: step {last}: {lr} {values[lr]!r}, 0.5"),
        Change(metrics, lambda: _write(metrics, others[0] + b"\n"), "steps: logged steps are [1]"),
        Change(state, other_state, "state of the run: prompts.position: "),
        Change(common, one_more_update, "actor: number of updates: num_updates: "),
        Change(random, other_random_state, "random states: actor/rng/rank_0.safetensors: "),
        Change(mlflow, other_history, f"MLflow's history: step {last}: {grad_norm} {values[grad_norm]!r}, "),
    ]


def check_each_is_found(pair: Pair, all_changes: Iterable[Change]) -> None:
    """Each change, alone, is the first difference of the two runs; without them there is none."""
    assert first_difference(pair) is None
    for each in all_changes:
        whole = each.file.read_bytes()
        each.change()
        found = first_difference(pair)
        assert found is not None and each.said in found, (each.said, found)
        each.file.write_bytes(whole)
    assert first_difference(pair) is None


def first_difference(pair: Pair) -> str | None:
    parts = compare(pair, is_exact=True)
    return next((f"{part.what}: {part.difference}" for part in parts if part.difference is not None), None)


def _write(file: Path, content: bytes) -> None:
    file.write_bytes(content)
