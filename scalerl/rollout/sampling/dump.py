"""A step's samples as text, and as parquet with the trainer's columns and the updates that used them. S samples."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from scalerl.batch import StepPlan
from scalerl.batch.columns import PIXEL_VALUES
from scalerl.batch.data_proto import DataProto, Jagged
from scalerl.data.conversation_text import ConversationText

if TYPE_CHECKING:
    from scalerl.data import PromptRow


def update_columns(plan: StepPlan) -> dict[str, np.ndarray]:
    """Columns mini_batch, dp_rank and micro_batch [S]: where the actor's plan puts each sample."""
    place_of = {
        row: (mini_batch, dp_rank, micro_batch)
        for dp_rank, mini_batches in enumerate(plan.micro_batches)
        for mini_batch, micro_batches in enumerate(mini_batches)
        for micro_batch, rows in enumerate(micro_batches)
        for row in rows
    }
    columns = np.array([place_of[row] for row in sorted(place_of)]).T
    return dict(zip(("mini_batch", "dp_rank", "micro_batch"), columns, strict=True))


def joined_columns(rows: Sequence[np.ndarray], columns: Sequence[DataProto]) -> dict[str, Jagged]:
    """Joins the token columns of some of a step's samples, in the batch's order. rows[i]: those of columns[i]."""
    by_name: dict[str, list[tuple[np.ndarray, DataProto]]] = {}
    for rows_of_columns, tokens in zip(rows, columns, strict=True):
        for name, column in tokens.tokens.items():
            by_name.setdefault(name, []).append((rows_of_columns, DataProto({name: column})))
    return {
        name: DataProto.concat([column for _, column in held])
        .select(np.argsort(np.concatenate([rows_of_column for rows_of_column, _ in held])).tolist())
        .tokens[name]
        for name, held in by_name.items()
    }


def even_ranges(num_rows: int, most: int) -> list[range]:
    """Divides rows, in order, into at most so many ranges of about equal size, none of them empty."""
    bounds = [number * num_rows // most for number in range(most + 1)]
    return [range(start, end) for start, end in itertools.pairwise(bounds) if end > start]


@contextmanager
def files_at(path: Path, num_files: int) -> Iterator[list[Path]]:
    """Yields where to write the files of a dump, whose rows follow each other in the order of the names. When the block
    ends `path` has them all: one as a file, several as a directory, which readers of parquet also take."""
    if num_files == 1:
        yield [path]
        return
    partial = path.with_name(f"{path.name}.tmp")
    _remove(partial)
    partial.mkdir(parents=True)
    yield [partial / f"part-{number:05d}.parquet" for number in range(num_files)]
    # A killed run may have written a dump of this step.
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
    """Writes a row for each sample: its columns, a list for each token column, and its texts. Whole, or not at all.

    An advantage of the sample becomes one of each token that the policy sampled, as the update has it. Values that are
    dicts are JSON. texts: (prompt, response).
    """
    if "advantages" in samples:
        tokens = {**tokens, "advantages": _on_sampled_tokens(samples["advantages"], tokens["response_mask"])}
    columns: dict[str, Any] = {"prompt": [prompt for prompt, _ in texts], "response": [text for _, text in texts]}
    columns |= {name: _plain(column) for name, column in samples.items() if name != "advantages"}
    # Pixels are many times as large as all else, and are in the data.
    columns |= {name: _lists(column) for name, column in tokens.items() if name != PIXEL_VALUES.name}
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        # A dump by several rollout workers is a directory.
        shutil.rmtree(path)
    partial = path.with_name(f"{path.name}.tmp")
    pq.write_table(pa.table(columns), partial)
    partial.replace(path)


def _on_sampled_tokens(values_S: np.ndarray, mask: Jagged) -> Jagged:
    values_T = torch.as_tensor(np.asarray(values_S, dtype=np.float32)).repeat_interleave(mask.lengths)
    return Jagged(torch.where(mask.values, values_T, 0.0), mask.cu_seqlens)


def _lists(column: Jagged) -> pa.ListArray:
    """A list of each row's values, which are lists themselves where the column has trailing dimensions."""
    values = pa.array(column.values.flatten().numpy())
    for size in reversed(column.values.shape[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return pa.ListArray.from_arrays(pa.array(column.cu_seqlens.int().numpy()), values)


def _plain(column: np.ndarray) -> Any:
    if column.dtype != object:
        return column
    return [json.dumps(value, default=str) if isinstance(value, dict) else value for value in column]


def texts_of(
    tokenizer: Any,
    batch: DataProto,
    prompts: Mapping[int, PromptRow],
    with_special_tokens: bool,
    options: Mapping[str, Any] | None = None,
) -> list[tuple[str, str, str]]:
    """Decodes each row to (prompt, response, ground truth), as `decoded`.  prompts: row of the data set -> prompt."""
    texts = decoded(tokenizer, batch.tokens, batch.samples["prompt_length"], with_special_tokens, options)
    truths = [prompts[uid].ground_truth for uid in batch.samples["prompt_uid"].tolist()]
    return [(*text, _as_text(truth)) for text, truth in zip(texts, truths, strict=True)]


def decoded(
    tokenizer: Any,
    tokens: Mapping[str, Jagged],
    prompt_lengths: np.ndarray,
    with_special_tokens: bool = True,
    options: Mapping[str, Any] | None = None,
) -> list[tuple[str, str]]:
    """Decodes each row to (prompt, response); a response that the policy has not sampled alone is a `ConversationText`.

    tokens: columns input_ids and response_mask.  prompt_lengths: [S], tokens of each row before its response.
    options: data.chat_template_kwargs.
    """
    decode = partial(tokenizer.decode, skip_special_tokens=not with_special_tokens)
    conversations = ConversationText(tokenizer, options, with_special_tokens=with_special_tokens)
    texts = []
    for row, prompt_length in enumerate(prompt_lengths.tolist()):
        ids, mask = (tokens[name][row].tolist() for name in ("input_ids", "response_mask"))
        response, is_sampled = ids[prompt_length:], mask[prompt_length:]
        text = decode(response) if all(is_sampled) else conversations.of(response, is_sampled)
        texts.append((decode(ids[:prompt_length]), text))
    return texts


def _as_text(ground_truth: Any) -> str:
    """A ground truth as text, JSON if it is no string; None is empty."""
    if ground_truth is None or isinstance(ground_truth, str):
        return ground_truth or ""
    return json.dumps(ground_truth, ensure_ascii=False, default=str)
