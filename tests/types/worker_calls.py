# pyright: reportUnnecessaryTypeIgnoreComment=true
"""Mistakes in calls of workers that pyright finds. Nothing runs this: `make types` reads it, and a mistake that pyright
did not find any more would leave its comment without a use, which is an error."""

from __future__ import annotations

from scalerl.cluster.batch import ShardedBatch
from scalerl.cluster.worker_group import WorkerGroup
from scalerl.config.schema import CriticConfig
from scalerl.tracking.metrics import Metric
from scalerl.trainer.ranks.rl_worker import RLWorker
from scalerl.trainer.ranks.sft_worker import SFTWorker
from scalerl.trainer.ranks.worker import MegatronWorker


def right(workers: WorkerGroup, batch: ShardedBatch) -> tuple[float | None, dict[str, Metric], list[None]]:
    peak = workers.call(MegatronWorker.peak_flops, "bfloat16")
    metrics = workers.call(RLWorker.update_critic, batch, config=CriticConfig(), totals=[]).metrics
    return peak, metrics, workers.call(MegatronWorker.save_checkpoint, "actor", directory="/checkpoint")


def wrong(workers: WorkerGroup, batch: ShardedBatch) -> None:
    workers.call(MegatronWorker.peak_flops)  # pyright: ignore[reportCallIssue]
    workers.call(MegatronWorker.peak_flops, 16)  # pyright: ignore[reportArgumentType]
    workers.call(MegatronWorker.save_checkpoint, "actor", path="/checkpoint")  # pyright: ignore[reportCallIssue]
    # The ranks get shards of it, the caller gives the whole.
    workers.call(RLWorker.compute_values, batch.plan)  # pyright: ignore[reportArgumentType]
    workers.call(RLWorker.compute_value, batch)  # pyright: ignore[reportAttributeAccessIssue]
    # Of supervised fine-tuning, which has no such call.
    workers.call(SFTWorker.compute_values, batch)  # pyright: ignore[reportAttributeAccessIssue]
    # A future, which knows no metrics before `get`.
    _ = workers.call(RLWorker.compute_values, batch).metrics  # pyright: ignore[reportAttributeAccessIssue]
    # Not registered: the ranks' own.
    workers.call(MegatronWorker.join, ("localhost", 29500))  # pyright: ignore[reportArgumentType, reportCallIssue]
    peaks: list[float] = workers.call(MegatronWorker.peak_flops, "bfloat16")  # pyright: ignore[reportAssignmentType]
    del peaks
