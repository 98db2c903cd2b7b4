"""`profiled`: records a step on the ranks, into the run's directory and the tracker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from scalerl.cluster.worker_group import WorkerGroup
from scalerl.config.schema import RunConfig
from scalerl.tracking import Tracking
from scalerl.tracking.metrics import Timers
from scalerl.trainer.ranks.worker import MegatronWorker

# Larger profiles stay in the run's directory alone.
MAX_ARTIFACT_BYTES = 2**30


@contextlib.contextmanager
def profiled(
    trainer: RunConfig, groups: Sequence[WorkerGroup], tracker: Tracking, timers: Timers, step: int
) -> Iterator[None]:
    """Records the block, one step, if trainer.profile_steps has it; else does nothing.

    groups: their ranks of trainer.profile_ranks write to trainer.default_local_dir/profile_step_N, which the tracker
    gets as an artifact. After an error in the block nothing is written.
    """
    if step not in trainer.profile_steps:
        yield
        return
    directory = Path(trainer.default_local_dir).absolute() / f"profile_step_{step}"
    with timers("profile"):
        directory.mkdir(parents=True, exist_ok=True)
        for group in groups:
            group.call(MegatronWorker.start_profile, trainer.profile_tool, trainer.profile_ranks)
    yield
    with timers("profile"):
        for group in groups:
            group.call(MegatronWorker.stop_profile, str(directory))
        _log(directory, tracker)


def _log(directory: Path, tracker: Tracking) -> None:
    num_bytes = sum(file.stat().st_size for file in directory.iterdir())
    if not num_bytes:
        # Nsight Systems writes where it was told to.
        directory.rmdir()
    elif num_bytes <= MAX_ARTIFACT_BYTES:
        tracker.log_artifact(directory)
    else:
        tracker.message(f"{directory} has {num_bytes / 2**30:.1f} GiB: too large for the tracker, it stays there")
