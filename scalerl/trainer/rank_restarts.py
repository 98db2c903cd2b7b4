"""When a run that lost a rank is built again in its own process, from where, and what was lost by it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from scalerl.base.stop import StopRequest
from scalerl.cluster.failures import WorkerError
from scalerl.cluster.pools import ResourcePool
from scalerl.config.schema import RunConfig
from scalerl.tracking import Tracking
from scalerl.trainer.saving.checkpoints import Resumed, find_resume_point
from scalerl.trainer.saving.saves import Saves

logger = logging.getLogger(__name__)

# Set by a launcher: when the job ends, in seconds since the epoch.
JOB_END_ENV = "SCALERL_JOB_END_TIME"
# How long Ray may take to notice that a node is lost, and to find another in its place.
REPLACE_NODE_S = 120.0


class AnyRun(Protocol):
    """A run of any kind (`ppo.Run`, `sft.SFTRun`)."""

    step: int
    saves: Saves
    tracker: Tracking


@dataclass
class Loss:
    """The work that failures cost, from the first of them until the run can train again.

    since: time of the first failure.  steps: finished steps that are done again.
    work_s: seconds of work since the state that the run continues from.
    """

    since: float
    steps: int = 0
    work_s: float = 0.0


def seconds_left(now: float | None = None) -> float | None:
    """Seconds until the end of the job, as a launcher said it; None: nothing is known of an end."""
    end = os.environ.get(JOB_END_ENV)
    return None if not end else float(end) - (time.time() if now is None else now)


class RankRestarts:
    """The restarts of a run in its process: whether there is one after an error, and from which checkpoint.

    A restart and a new job lose the same work, as both resume from the newest checkpoint; a new job also waits for its
    nodes and starts everything anew. So a restart is the cheaper one wherever the job has the time for it.
    """

    def __init__(
        self, trainer: RunConfig, stop: StopRequest, resumed: Resumed, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begins with no restart.  resumed: the state from which the first start continues."""
        self._trainer, self._stop, self._clock = trainer, stop, clock
        self.num_restarts = 0
        # The state from which the start in progress, or the next one, continues.
        self.resumed = resumed
        # Of the run that was ready last; None without mlflow.
        self.mlflow_run_id: str | None = None
        self._run: AnyRun | None = None
        self._began = self._ready = clock()
        self._start_s = 0.0
        self._loss: Loss | None = None
        # The error after which the run is built again; why another was the last.
        self._survived: WorkerError | None = None
        self._refusal = ""

    def begin(self) -> None:
        """Notes that the run starts."""
        self._began, self._run, self._refusal = self._clock(), None, ""

    def ready(self, run: AnyRun) -> None:
        """Notes that the run can train, and logs what was lost since it last could."""
        now = self._clock()
        self._start_s, self._ready, self._run = now - self._began, now, run
        self.mlflow_run_id = run.tracker.run_id
        if self._loss is None:
            return
        lost_s = self._loss.work_s + now - self._loss.since
        run.tracker.log(
            {
                "training/num_rank_restarts": float(self.num_restarts),
                "training/redone_steps": float(self._loss.steps),
                "training/restart_lost_s": lost_s,
            },
            step=run.step,
        )
        run.tracker.message(
            f"restarted after step {run.step}: {self._loss.steps} finished steps are done again, {lost_s:.0f} s were "
            f"lost, {now - self._loss.since:.0f} s of them for the restart"
        )
        self._loss = None

    def survives(self, error: BaseException, pools: Sequence[ResourcePool]) -> bool:
        """Decides whether the run is built again after this error, and from which checkpoint.

        Called before the processes that are left are ended.  pools: of the run.
        """
        if not isinstance(error, WorkerError) or not error.restart_helps or self._trainer.max_rank_restarts == 0:
            return False
        now = self._clock()
        self._refusal = self._why_not(now, pools)
        if self._refusal:
            return False
        newest = self._newest()
        self._note_loss(now, newest)
        self.resumed = newest
        self.num_restarts += 1
        logger.warning(
            "%s\nThe ranks are started again, %s (restart %d of at most %d, trainer.max_rank_restarts).",
            error,
            "from the beginning" if self.resumed.directory is None else f"from {self.resumed.directory}",
            self.num_restarts,
            self._trainer.max_rank_restarts,
        )
        self._survived = error
        return True

    def pop_decision(self, error: WorkerError) -> bool:
        """Returns, and clears, the decision of `survives` that the run is built again after this error."""
        survived, self._survived = self._survived, None
        return survived is error

    def explained(self, error: WorkerError) -> WorkerError:
        """The error with the reason why it ends the run although restarts are allowed."""
        return WorkerError(f"{error}\nNot restarted: {self._refusal}") if self._refusal else error

    def _why_not(self, now: float, pools: Sequence[ResourcePool]) -> str:
        limit = self._trainer.max_rank_restarts
        if self._run is None and not self.num_restarts:
            return "the run had not started"
        if self.num_restarts >= limit:
            return f"the ranks were restarted {self.num_restarts} times, trainer.max_rank_restarts={limit}"
        if self._stop.requested:
            return "the run was asked to stop"
        left_s, needed_s = seconds_left(), self._start_s + self._step_s(now)
        if left_s is not None and left_s < needed_s:
            return f"the job ends in {left_s:.0f} s; a start and a step take about {needed_s:.0f} s"
        try:
            self._newest()
        except ValueError as problem:
            return str(problem)
        if not all(pool.is_whole(REPLACE_NODE_S) for pool in pools):
            return "a node is gone, and the Ray cluster has no other in its place"
        return ""

    def _step_s(self, now: float) -> float:
        """Seconds of a step of the run that was lost, its saves and validations included."""
        if self._run is None:
            return 0.0
        return (now - self._ready) / max(1, self._run.step - self.resumed.step)

    def _newest(self) -> Resumed:
        """The newest checkpoint of the run.  Raises ValueError if it is not whole any more."""
        latest = None if self._run is None else self._run.saves.latest
        if latest is None or latest == self.resumed.directory:
            return self.resumed
        # This process wrote it: that its files are there is enough, and takes no time.
        return find_resume_point(self._trainer.default_local_dir, "resume_path", str(latest), digests=False)

    def _note_loss(self, now: float, newest: Resumed) -> None:
        loss = self._loss = self._loss or Loss(since=now)
        # In a start nothing was done.
        if self._run is not None:
            loss.steps += self._run.step - newest.step
            loss.work_s += now - self._run.saves.saved_at.get(newest.step, self._ready)
