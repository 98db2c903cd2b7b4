"""Rows with the five columns that are generated from a task of reasoning-gym."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from scalerl.commands.data.splits import TRAIN, VAL, Rows, five_columns, question_with
from scalerl.data.problems import DataError

NAME = "reasoning_gym"
ABOUT = "tasks of the package reasoning-gym, generated on this machine by --seed: no files needed"
INSTRUCTION = "Think step by step, then write the final answer alone between <answer> and </answer>."
# While rows are missing, up to this many data sets are generated, each from another seed.
MAX_ROUNDS = 4
# Run by its file name, so that scalerl is not imported (it takes seconds); -P keeps the file's folder off the path.
_PROGRAM = ("-P", str(Path(__file__).with_name("reasoning_gym_process.py")))


@dataclass(frozen=True)
class GeneratedRows:
    """Generated rows by split.  dropped: number of dropped rows by reason."""

    rows: dict[str, Rows]
    dropped: dict[str, int] = field(default_factory=dict)


def parse_options(texts: list[str]) -> dict[str, Any]:
    """Parses options such as "min_terms=2", whose values are YAML, into a dict.  Raises DataError."""
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or name in options:
            what = "is given twice" if name in options else "is not NAME=VALUE"
            raise DataError([f"--option {text}: {what}; write --option min_terms=2"])
        try:
            options[name] = yaml.safe_load(value)
            json.dumps(options[name])
        except (yaml.YAMLError, TypeError) as error:
            raise DataError([f"--option {text}: the value cannot be read: {error}"]) from error
    return options


def generate(
    task: str, sizes: dict[str, int], seed: int, options: dict[str, Any], instruction: str = INSTRUCTION
) -> GeneratedRows:
    """Generates the rows of a task, without repeating a problem within a split or across splits.

    sizes: rows by split; a task that has fewer different problems gives fewer rows.
    The rows depend only on the arguments and the version of the package. Raises DataError.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise DataError(["reasoning_gym needs the package reasoning-gym: pip install 'scalerl[reasoning-gym]'"])
    for name, size in sizes.items():
        if size < 1:
            raise DataError([f"{size} rows of {name}: give at least 1"])
    # Validation first, so that training leaves out its problems.
    splits = [
        {"name": name, "size": sizes[name], "seeds": [_derive(task, seed, name, i) for i in range(MAX_ROUNDS)]}
        for name in (VAL, TRAIN)
    ]
    reply = _run({"task": task, "options": options, "splits": splits})
    options_text = json.dumps(options, sort_keys=True)
    rows: dict[str, Rows] = {TRAIN: [], VAL: []}
    for row in reply["rows"]:
        rows[row["split"]].append(_row(task, reply["category"], row, options_text, instruction))
    for name, rows_of_split in rows.items():
        if not rows_of_split:
            raise DataError(
                [f"task {task} has no rows left for {name}; ask for fewer (--val-size), or for more variety (--option)"]
            )
    return GeneratedRows(rows, reply["dropped"])


def _derive(task: str, seed: int, split: str, number: int) -> int:
    """A seed of 31 bits for one data set.

    Row i of a task is drawn from its seed + i, so data sets of neighbouring seeds would share all rows but one.
    """
    return int.from_bytes(hashlib.sha256(f"{task} {seed} {split} {number}".encode()).digest()[:4], "big") >> 1


def _run(request: dict[str, Any]) -> dict[str, Any]:
    """Runs the program in a process: some tasks depend on the order of sets, which Python can fix only at its start."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, *_PROGRAM], input=json.dumps(request).encode(), stdout=subprocess.PIPE, env=env
    )
    if done.returncode != 0:
        raise DataError(
            [f"reasoning_gym: task {request['task']} ended with exit code {done.returncode}; see the lines above"]
        )
    reply = json.loads(done.stdout)
    if "error" in reply:
        raise DataError([reply["error"]])
    return reply


def _row(task: str, category: str, generated: dict[str, str], options: str, instruction: str) -> dict[str, Any]:
    messages = question_with(instruction, generated["question"])
    extra_info = {"task": task, "options": options, "entry": generated["entry"]}
    return five_columns(f"{NAME}/{task}", messages, category, generated["answer"], extra_info)
