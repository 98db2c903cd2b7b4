"""Division of rows into training and validation, so that no problem occurs twice or on both sides."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from scalerl.data.problems import DataError

TRAIN, VAL = "train", "val"
_VALIDATION_NAMES = ("test", "val", "valid", "validation", "eval")

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Split:
    """Rows of training and of validation.  dropped: number of dropped rows by reason."""

    train: Rows
    val: Rows
    dropped: dict[str, int]


def split_of(name: str) -> str:
    """The split of a file: by a word of its name, else by the whole name of a folder, the nearest first.

    test, val, valid, validation and eval mean validation, everything else training.
    """
    path = PurePath(name)
    for word in (*re.split(r"[-_.]", path.name.lower()), *(parent.name.lower() for parent in path.parents)):
        if word == TRAIN:
            return TRAIN
        if word in _VALIDATION_NAMES:
            return VAL
    return TRAIN


def split_rows(train: Rows, val: Rows, val_size: int | None, seed: int) -> Split:
    """Splits rows so that each prompt occurs once and on one side only.

    val_size: number of validation rows to take out of `train`; which ones depends only on their text and the seed.
    Raises DataError when either side would be empty.
    """
    dropped: dict[str, int] = {}
    val = _first_of_each(val, set(), dropped)
    train = _first_of_each(train, set(map(_key, val)), dropped)
    if not train:
        raise DataError(["no training rows; give a training file with --local"])
    if val_size is not None:
        if val:
            raise DataError(["--val-size is for data without validation files, and there are some; leave one out"])
        if not 0 < val_size < len(train):
            raise DataError([f"--val-size {val_size}: give 1 to {len(train) - 1}, of {len(train)} different rows"])
        taken = {i for _, i in sorted((_rank(row, seed), i) for i, row in enumerate(train))[:val_size]}
        val = [row for i, row in enumerate(train) if i in taken]
        train = [row for i, row in enumerate(train) if i not in taken]
    if not val:
        raise DataError(["no validation rows; give a file with --val, or take rows out with --val-size N"])
    for name, rows in ((TRAIN, train), (VAL, val)):
        for i, row in enumerate(rows):
            row["extra_info"] = {"split": name, "index": i} | row["extra_info"]
    return Split(train, val, dropped)


def _first_of_each(rows: Rows, validating: set[str], dropped: dict[str, int]) -> Rows:
    truths: dict[str, str] = {}
    kept = []
    for row in rows:
        key, truth = _key(row), row["reward_model"]["ground_truth"]
        if key in validating:
            _count(dropped, "are validation rows too")
        elif key not in truths:
            truths[key] = truth
            kept.append(row)
        else:
            same = truths[key] == truth
            _count(dropped, "repeat an earlier row" if same else "repeat an earlier row with another answer")
    return kept


def _count(dropped: dict[str, int], reason: str) -> None:
    dropped[reason] = dropped.get(reason, 0) + 1


def _key(row: dict[str, Any]) -> str:
    return json.dumps(row["prompt"], sort_keys=True)


def _rank(row: dict[str, Any], seed: int) -> str:
    return hashlib.sha256(f"{seed} {_key(row)}".encode()).hexdigest()
