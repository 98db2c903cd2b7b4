"""The lines of a step's worst samples."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from scalerl.trainer.dumps import IDENTITY, worst_rows, write_outliers


def samples() -> dict[str, np.ndarray]:
    columns = {name: np.arange(4) * 10 + at for at, name in enumerate(IDENTITY)}
    columns["finish_reason"] = np.array(["stop", "length", "stop", "abort"], dtype=object)
    return columns | {"score": np.ones(4)}


def worst() -> dict[str, np.ndarray]:
    return {
        "difference": np.array([0.25, np.nan, 0.0, 0.5]),
        "position": np.array([7, 3, -1, 5]),
        "token_id": np.array([100, 101, 102, 103]),
        "rollout_logprob": np.array([-0.5, -1.0, 0.0, -np.inf], dtype=np.float32),
        "old_logprob": np.array([-0.75, np.nan, 0.0, -0.5], dtype=np.float32),
    }


def test_worst_first_and_rows_that_agree_left_out(tmp_path: Path) -> None:
    path = tmp_path / "new" / "outliers_3.jsonl"
    write_outliers(worst_rows(samples(), worst(), k=8), path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["row"] for row in rows] == [1, 3, 0]
    assert rows[2] == {
        "row": 0,
        "prompt_uid": 0,
        "sample_index": 1,
        "policy_version": 2,
        "prompt_length": 3,
        "response_length": 4,
        "finish_reason": "stop",
        "difference": 0.25,
        "position": 7,
        "token_id": 100,
        "rollout_logprob": -0.5,
        "old_logprob": -0.75,
    }
    # JSON has no such numbers.
    assert rows[0]["difference"] == rows[0]["old_logprob"] == "nan" and rows[1]["rollout_logprob"] == "-inf"
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["outliers_3.jsonl"]


def test_no_more_than_asked_for_and_none_without_a_comparison(tmp_path: Path) -> None:
    assert [row["row"] for row in worst_rows(samples(), worst(), k=1)] == [1]
    assert worst_rows(samples(), {}, k=8) == []
    path = tmp_path / "outliers_1.jsonl"
    path.write_text("of a run before\n")
    write_outliers([], path)
    assert path.read_text() == ""
