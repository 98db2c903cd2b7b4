"""The parquet of a step: its samples, what the trainer made of them, and in which updates they were. S samples."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from scalerl.balance import StepPlan
from scalerl.cluster.batch import PlacedBatch
from scalerl.protocol import DataProto, Jagged


def placed_fragments(batch: PlacedBatch, leave_out: str) -> tuple[list[tuple[int, ...]], list[Any]]:
    """(rows of each fragment, the fragments) of all token columns of the batch but that one."""
    found = [
        (rows, fragment)
        for name, column in batch.columns.items()
        if name != leave_out
        for rows, fragment in zip(column.rows_of_fragments, column.fragments, strict=True)
    ]
    return [rows for rows, _ in found], [fragment for _, fragment in found]


def update_columns(plan: StepPlan) -> dict[str, np.ndarray]:
    """mini_batch, dp_rank, micro_batch [S]: where the actor's plan has each sample."""
    places = {
        row: (mini_batch, dp_rank, micro_batch)
        for dp_rank, mini_batches in enumerate(plan.micro_batches)
        for mini_batch, micro_batches in enumerate(mini_batches)
        for micro_batch, rows in enumerate(micro_batches)
        for row in rows
    }
    columns = np.array([places[row] for row in sorted(places)]).T
    return dict(zip(("mini_batch", "dp_rank", "micro_batch"), columns, strict=True))


def joined(rows: Sequence[Sequence[int]], fragments: Sequence[DataProto], wanted: range) -> dict[str, Jagged]:
    """Token columns of the wanted samples in the batch's order. rows[i]: those of fragments[i]."""
    pieces: dict[str, dict[int, torch.Tensor]] = {}
    for of_fragment, fragment in zip(rows, fragments, strict=True):
        for name, column in fragment.tokens.items():
            found = {row: column[at] for at, row in enumerate(of_fragment) if row in wanted}
            pieces.setdefault(name, {}).update(found)
    return {
        name: Jagged.from_list([found[row] for row in sorted(found)], next(iter(found.values())).dtype)
        for name, found in pieces.items()
    }


def parts_of(num_rows: int, num_parts: int) -> list[range]:
    """Rows of each part, in order, about as many in each; without those that would have none."""
    bounds = [part * num_rows // num_parts for part in range(num_parts + 1)]
    return [range(start, end) for start, end in itertools.pairwise(bounds) if end > start]


@contextmanager
def parts_at(path: Path, num_parts: int) -> Iterator[list[Path]]:
    """Where to write the parts of a dump, whose rows follow each other as the names do. When the block ends `path` has
    them all: one part as a file, several as a directory, which readers of parquet take in its place."""
    if num_parts == 1:
        yield [path]
        return
    partial = path.with_name(f"{path.name}.tmp")
    _remove(partial)
    partial.mkdir(parents=True)
    yield [partial / f"part-{part:05d}.parquet" for part in range(num_parts)]
    # Of a step that a run did before it was killed.
    _remove(path)
    partial.replace(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_dump(
    path: Path,
    tokens: Mapping[str, Jagged],
    samples: Mapping[str, np.ndarray],
    texts: Sequence[tuple[str, str]],
) -> None:
    """A row for each sample: its columns, a list for each token column, and its texts. Whole, or not at all.

    An advantage of the sample becomes one of each token that the policy sampled, as the update has it. Values that are
    dicts are JSON. texts: (prompt, response).
    """
    if "advantages" in samples:
        tokens = {**tokens, "advantages": _on_sampled_tokens(samples["advantages"], tokens["response_mask"])}
    columns: dict[str, Any] = {"prompt": [prompt for prompt, _ in texts], "response": [text for _, text in texts]}
    columns |= {name: _plain(column) for name, column in samples.items() if name != "advantages"}
    columns |= {name: _lists(column) for name, column in tokens.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        # Of another number of rollout workers.
        shutil.rmtree(path)
    partial = path.with_name(f"{path.name}.tmp")
    pq.write_table(pa.table(columns), partial)
    partial.replace(path)


def _on_sampled_tokens(values_S: np.ndarray, mask: Jagged) -> Jagged:
    values_T = torch.as_tensor(np.asarray(values_S, dtype=np.float32)).repeat_interleave(mask.lengths)
    return Jagged(torch.where(mask.values, values_T, 0.0), mask.cu_seqlens)


def _lists(column: Jagged) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(column.cu_seqlens.int().numpy()), pa.array(column.values.numpy()))


def _plain(column: np.ndarray) -> Any:
    if column.dtype != object:
        return column
    return [json.dumps(value, default=str) if isinstance(value, dict) else value for value in column]
