"""Dumps of a step's samples: a parquet file of all, a file of the outliers, and a table for trackers.

Outliers are the samples on whose tokens sampler and trainer disagree most.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.cluster.batch import HeldRows, PlacedBatch
from scalerl.config.schema import TrainerConfig
from scalerl.rollout.sampling.rollout import HybridRollout
from scalerl.tracking.metrics import worst_samples
from scalerl.trainer.ranks.roles import MegatronActor
from scalerl.trainer.saving.checkpoints import is_due

# Columns that identify a sample; `row` is its row in the step's dump.
IDENTITY = ("prompt_uid", "sample_index", "policy_version", "prompt_length", "response_length", "finish_reason")


def dump_step(
    config: TrainerConfig,
    rollout: HybridRollout,
    actor: MegatronActor,
    samples: HeldRows,
    batch: PlacedBatch,
    *,
    step: int,
    total_steps: int,
) -> None:
    """Writes step_N.parquet and outliers_N.jsonl in rollout_data_dir, in the steps given by rollout_data_freq.

    batch: the samples with the columns that the trainer added.
    """
    if not config.rollout_data_dir or not is_due(step, config.rollout_data_freq, total_steps):
        return
    directory = Path(config.rollout_data_dir)
    rollout.dump(samples, batch, directory / f"step_{step}.parquet")
    if config.rollout_data_outliers:
        outliers = worst_rows(batch.samples, actor.worst_tokens(batch), config.rollout_data_outliers)
        write_outliers(outliers, directory / f"outliers_{step}.jsonl")


def generations_table(
    samples: Mapping[str, np.ndarray],
    texts: Sequence[tuple[str, str, str]],
    images: Sequence[Sequence[bytes]] = (),
) -> tuple[list[str], list[list[Any]]]:
    """Makes the column names and rows of a table of the first samples.  texts: their prompt, response, ground truth.

    images: of their prompts, which have columns if there are any.

    Each value that the reward function returned beside the score has a column, "" for samples without it.
    The name of an agent follows its data source, as in the metrics of a validation.
    """
    extras = samples["reward_extra"][: len(texts)].tolist()
    names = list(dict.fromkeys(name for extra in extras for name in extra))
    agents = samples.get("agent", np.full(len(samples["score"]), ""))
    sources = ["/".join(filter(None, both)) for both in zip(samples["data_source"], agents, strict=True)]
    table = [
        [*text, float(samples["score"][row]), sources[row], *(extra.get(name, "") for name in names)]
        for row, (text, extra) in enumerate(zip(texts, extras, strict=True))
    ]
    columns = ["prompt", "response", "ground_truth", "score", "data_source"]
    columns += [f"extra/{name}" if name in columns else name for name in names]
    for number in range(max(map(len, images), default=0)):
        columns.append(f"image/{number}")
        table = [
            [*cells, shown[number] if number < len(shown) else ""] for cells, shown in zip(table, images, strict=True)
        ]
    return columns, table


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
