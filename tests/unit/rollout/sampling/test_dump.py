"""The parquet of a step: rows in the batch's order whatever ranks they were on, and nothing half written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from scalerl.batch import StepPlan
from scalerl.batch.data_proto import Jagged
from scalerl.rollout.sampling.dump import even_ranges, files_at, update_columns, write_dump

LENGTHS = [3, 2, 4, 1]
# [dp_rank][mini_batch][micro_batch]: two ranks and mini-batches; one rank with all of it.
ACTOR = StepPlan(((((2,),), ((0,),)), (((3,),), ((1,),))), lower_bounds=(1, 1))


def jagged(scale: float, rows: range | tuple[int, ...] = range(4)) -> Jagged:
    """Token t of row r: scale * (10 r + t)."""
    return Jagged.from_list([[scale * (10 * row + at) for at in range(LENGTHS[row])] for row in rows], torch.float32)


def test_every_sample_has_its_place_in_the_updates() -> None:
    columns = {name: column.tolist() for name, column in update_columns(ACTOR).items()}
    assert columns == {"mini_batch": [1, 1, 0, 0], "dp_rank": [0, 1, 0, 1], "micro_batch": [0, 0, 0, 0]}


def written(path: Path, **samples: np.ndarray) -> pa.Table:
    mask = Jagged.from_list([[0, 1, 1], [0, 1], [0, 0, 1, 1], [0]], torch.bool)
    tokens = {"input_ids": jagged(1.0), "response_mask": mask}
    write_dump(path, tokens, samples, [("p", f"r{row}") for row in range(4)])
    return pq.read_table(path)


def test_a_row_for_each_sample(tmp_path: Path) -> None:
    extras, sources = np.empty(4, dtype=object), np.empty(4, dtype=object)
    extras[:] = [{}, {"acc": True, "n": np.float64(0.5)}, {"note": "ä"}, {"acc": float("nan")}]
    sources[:] = list("abcd")
    table = written(
        tmp_path / "deep" / "step_1.parquet",
        score=np.array([1.0, 0.5, float("nan"), 0.0]),
        advantages=np.array([0.25, -0.5, 1.0, 2.0]),
        reward_extra=extras,
        data_source=sources,
    )
    rows = table.to_pylist()
    assert [row["response"] for row in rows] == ["r0", "r1", "r2", "r3"]
    assert [row["input_ids"] for row in rows] == [[0.0, 1.0, 2.0], [10.0, 11.0], [20.0, 21.0, 22.0, 23.0], [30.0]]
    assert [row["response_mask"] for row in rows][:2] == [[False, True, True], [False, True]]
    # On the sampled tokens alone, as the update has it.
    assert [row["advantages"] for row in rows] == [[0, 0.25, 0.25], [0, -0.5], [0, 0, 1.0, 1.0], [0]]
    assert [json.loads(row["reward_extra"]).get("acc") for row in rows][:3] == [None, True, None]
    assert json.loads(rows[1]["reward_extra"])["n"] in (0.5, "0.5") and [row["data_source"] for row in rows] == [
        *"abcd"
    ]
    assert np.isnan(rows[2]["score"])


def test_parts_are_read_as_one_dump_with_its_rows_in_order(tmp_path: Path) -> None:
    """The dump of a run before is replaced, whatever it was made of; parts that were left half written are not read."""
    path = tmp_path / "step_1.parquet"
    scores = np.arange(40.0)
    for num_parts in (12, 1, 3, 3):
        parts = even_ranges(40, num_parts)
        assert [row for part in parts for row in part] == list(range(40))
        with files_at(path, len(parts)) as files:
            for part, file in zip(parts, files, strict=True):
                texts = [("p", f"r{row}") for row in part]
                write_dump(file, {}, {"score": scores[part.start : part.stop]}, texts)
        assert path.is_dir() == (num_parts > 1)
        assert pq.read_table(path)["score"].to_pylist() == scores.tolist()
    with pytest.raises(KeyError), files_at(path, 2) as files:
        write_dump(files[0], {}, {"score": -scores}, [("p", "r")] * 40)
        raise KeyError
    assert pq.read_table(path)["score"].to_pylist() == scores.tolist()
    assert even_ranges(2, 3) == [range(0, 1), range(1, 2)]


def test_a_dump_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "step_1.parquet"
    before = written(path, score=np.zeros(4))
    with pytest.raises(ValueError, match=r"4|length"):
        written(path, score=np.zeros(3))
    assert pq.read_table(path).equals(before)
