"""What a step leaves on disk of its samples: all of them as one parquet, the ones that stand out beside it."""

from __future__ import annotations

from pathlib import Path

from scalerl.cluster.batch import BatchRef, PlacedBatch
from scalerl.config.schema import TrainerConfig
from scalerl.trainer.checkpoints import is_due
from scalerl.trainer.contracts import Actor, Rollout
from scalerl.trainer.mismatched_samples import worst_rows, write_outliers


def dump_step(
    config: TrainerConfig,
    rollout: Rollout,
    actor: Actor,
    samples: BatchRef,
    batch: PlacedBatch,
    *,
    step: int,
    total_steps: int,
) -> None:
    """step_N.parquet and outliers_N.jsonl in rollout_data_dir, in the steps that rollout_data_freq says.

    batch: the samples, with what the trainer made of them.
    """
    if not config.rollout_data_dir or not is_due(step, config.rollout_data_freq, total_steps):
        return
    directory = Path(config.rollout_data_dir)
    rollout.dump(samples, batch, directory / f"step_{step}.parquet")
    if config.rollout_data_outliers:
        outliers = worst_rows(batch.samples, actor.worst_tokens(batch), config.rollout_data_outliers)
        write_outliers(outliers, directory / f"outliers_{step}.jsonl")
