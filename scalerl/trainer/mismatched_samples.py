"""Writes the samples on whose tokens sampler and trainer disagree most to a file. S: number of samples."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.tracking.metrics import worst_samples

# Columns that identify a sample; `row` is its row in the step's dump.
IDENTITY = ("prompt_uid", "sample_index", "policy_version", "prompt_length", "response_length", "finish_reason")


def worst_rows(
    samples: Mapping[str, np.ndarray], worst_tokens: Mapping[str, np.ndarray], k: int
) -> list[dict[str, Any]]:
    """The k samples with the largest difference, worst first; those without a difference are left out.

    worst_tokens: `logprob_mismatch.worst_tokens` of all samples, [S] each; {}: nothing was compared.
    """
    if not worst_tokens:
        return []
    columns = {name: samples[name] for name in IDENTITY} | dict(worst_tokens)
    return [
        {"row": int(row)} | {name: _plain(column[row]) for name, column in columns.items()}
        for row in worst_samples(worst_tokens["difference"], k)
    ]


def write_outliers(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes one JSON object per line, atomically; an empty file means that no sample has a difference."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    partial.replace(path)


def _plain(value: Any) -> Any:
    """A value as JSON can hold it: numpy scalars as Python ones, NaN and infinities as text."""
    value = value.item() if isinstance(value, np.generic) else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
