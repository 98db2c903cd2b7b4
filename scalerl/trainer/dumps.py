"""Dumps of a step's samples: a parquet file of all, a file of the outliers, and a table for trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.cluster.batch import HeldRows, PlacedBatch
from scalerl.config.schema import TrainerConfig
from scalerl.trainer.contracts import Actor, Rollout
from scalerl.trainer.mismatched_samples import worst_rows, write_outliers
from scalerl.trainer.saving.checkpoints import is_due


def dump_step(
    config: TrainerConfig,
    rollout: Rollout,
    actor: Actor,
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
    samples: Mapping[str, np.ndarray], texts: Sequence[tuple[str, str, str]]
) -> tuple[list[str], list[list[Any]]]:
    """Makes the column names and rows of a table of the first samples.  texts: their prompt, response, ground truth.

    Each value that the reward function returned beside the score has a column, "" for samples without it.
    """
    extras = samples["reward_extra"][: len(texts)].tolist()
    names = list(dict.fromkeys(name for extra in extras for name in extra))
    table = [
        [*text, float(samples["score"][row]), samples["data_source"][row], *(extra.get(name, "") for name in names)]
        for row, (text, extra) in enumerate(zip(texts, extras, strict=True))
    ]
    columns = ["prompt", "response", "ground_truth", "score", "data_source"]
    return [*columns, *(f"extra/{name}" if name in columns else name for name in names)], table
