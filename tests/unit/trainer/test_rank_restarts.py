"""When ranks are started again, from where, and what that cost; real ranks: tests/e2e/test_rank_restarts.py."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scalerl.base.stop import StopRequest
from scalerl.checkpoint.store import begin_save, commit, write_trainer_state
from scalerl.cluster.failures import WorkerError
from scalerl.config.schema import TrainerConfig
from scalerl.errors import UserError
from scalerl.trainer.rank_restarts import JOB_END_ENV, RankRestarts, seconds_left
from scalerl.trainer.saving.checkpoints import Resumed
from scalerl.trainer.saving.saves import Saves

FRESH = Resumed(None, {})
LOST = WorkerError("update_actor: the process of rank 1 died")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Tracker:
    """What was logged and said."""

    run_id: str | None = "of mlflow"
    logged: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def log(self, data: dict[str, float], step: int) -> None:
        self.logged.append((step, data))

    def message(self, text: str) -> None:
        self.said.append(text)


@dataclass
class Run:
    saves: Saves
    step: int = 0
    tracker: Tracker = field(default_factory=Tracker)


class Pool:
    def __init__(self, whole: bool = True) -> None:
        self.whole = whole

    def is_whole(self, timeout_s: float) -> bool:
        return self.whole


@dataclass
class Case:
    """A run with max_rank_restarts=2 that was ready after 50 s."""

    directory: Path
    clock: Clock = field(default_factory=Clock)
    stop: StopRequest = field(default_factory=StopRequest)

    def __post_init__(self) -> None:
        self.trainer = TrainerConfig(default_local_dir=str(self.directory), max_rank_restarts=2)
        self.restarts = RankRestarts(self.trainer, self.stop, FRESH, clock=self.clock)
        self.start()

    def start(self, takes_s: float = 50.0) -> Run:
        self.restarts.begin()
        self.clock.now += takes_s
        resumed = self.restarts.resumed
        self.run = Run(Saves(self.trainer), resumed.step)
        self.run.saves.latest = resumed.directory
        self.restarts.ready(self.run)  # type: ignore[arg-type]
        return self.run

    def saved(self) -> Path:
        step = self.run.step
        tmp = begin_save(str(self.directory), step)
        write_trainer_state(tmp, {"step": step})
        self.run.saves.latest = commit(tmp, str(self.directory), step)
        self.run.saves.saved_at[step] = self.clock.now
        return self.run.saves.latest

    def survives(self, error: BaseException = LOST, *pools: Pool) -> bool:
        return self.restarts.survives(error, pools)  # type: ignore[arg-type]

    def reason(self) -> str:
        return str(self.restarts.explained(LOST)).partition("Not restarted: ")[2]


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_it_goes_on_from_the_newest_checkpoint_and_says_what_was_lost(case: Case) -> None:
    case.run.step, case.clock.now = 4, case.clock.now + 40
    newest = case.saved()
    case.run.step, case.clock.now = 6, case.clock.now + 25
    assert case.survives() and case.restarts.pop_decision(LOST)
    assert (case.restarts.resumed.directory, case.restarts.resumed.step) == (newest, 4)
    again = case.start(takes_s=30.0)
    expected = {"training/num_rank_restarts": 1.0, "training/redone_steps": 2.0, "training/restart_lost_s": 55.0}
    assert again.tracker.logged == [(4, expected)]
    assert again.tracker.said == [
        "restarted after step 4: 2 finished steps are done again, 55 s were lost, 30 s of them for the restart"
    ]
    assert case.restarts.mlflow_run_id == "of mlflow"
    # The next loss counts anew, from where this start was ready: its checkpoint is older than that.
    case.run.step, case.clock.now = 5, case.clock.now + 7
    assert case.survives()
    assert case.start(takes_s=1.0).tracker.logged == [
        (4, {"training/num_rank_restarts": 2.0, "training/redone_steps": 1.0, "training/restart_lost_s": 8.0})
    ]


def test_without_a_checkpoint_it_begins_again_where_it_began(case: Case) -> None:
    case.run.step, case.clock.now = 3, case.clock.now + 30
    assert case.survives()
    assert case.restarts.resumed == FRESH
    assert case.start().tracker.logged[0][1]["training/redone_steps"] == 3.0


def test_a_start_that_fails_is_a_restart_more_and_its_time_is_lost(case: Case) -> None:
    case.clock.now += 10
    assert case.survives()
    case.restarts.begin()
    case.clock.now += 20
    assert case.survives()
    assert case.start(takes_s=5.0).tracker.logged == [
        (0, {"training/num_rank_restarts": 2.0, "training/redone_steps": 0.0, "training/restart_lost_s": 35.0})
    ]


def test_as_often_as_allowed(case: Case) -> None:
    assert case.survives() and case.survives()
    case.restarts.begin()
    assert not case.survives() and not case.restarts.pop_decision(WorkerError(str(LOST)))
    assert case.reason() == "the ranks were restarted 2 times, trainer.max_rank_restarts=2"


def test_0_is_never_and_adds_nothing_to_the_error(case: Case) -> None:
    case.trainer.max_rank_restarts = 0
    assert not case.survives() and case.restarts.explained(LOST) is LOST


NO_SPACE = WorkerError("save_checkpoint: no space left")
NO_SPACE.restart_helps = False


@pytest.mark.parametrize(
    "error", [UserError("a reward raised"), KeyboardInterrupt(), RuntimeError("a defect"), NO_SPACE]
)
def test_only_after_a_failure_of_a_rank(case: Case, error: BaseException) -> None:
    assert not case.survives(error)


def test_not_before_the_first_start_has_ended(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.restarts = RankRestarts(case.trainer, case.stop, FRESH)
    case.restarts.begin()
    assert not case.survives() and case.reason() == "the run had not started"


def test_not_after_a_request_to_stop(case: Case) -> None:
    case.stop.requested = True
    assert not case.survives() and case.reason() == "the run was asked to stop"


def test_not_where_a_node_is_gone(case: Case) -> None:
    assert not case.survives(LOST, Pool(), Pool(whole=False))
    assert case.reason() == "a node is gone, and the Ray cluster has no other in its place"
    assert case.survives(LOST, Pool(), Pool())


def test_not_from_a_checkpoint_that_is_gone(case: Case) -> None:
    case.run.step = 4
    (case.saved() / "COMPLETE").unlink()
    assert not case.survives() and "global_step_4" in case.reason()


@pytest.mark.parametrize(("left_s", "restarts"), [(130.0, True), (60.0, False)])
def test_only_where_the_job_has_time_for_a_start_and_a_step(
    case: Case, monkeypatch: pytest.MonkeyPatch, left_s: float, restarts: bool
) -> None:
    """A start took 50 s, a step 20."""
    case.run.step, case.clock.now = 2, case.clock.now + 40
    monkeypatch.setenv(JOB_END_ENV, str(time.time() + left_s))
    assert case.survives() is restarts
    assert restarts or case.reason() in (
        f"the job ends in {s} s; a start and a step take about 70 s" for s in range(1, 61)
    )


def test_without_a_launcher_there_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOB_END_ENV, raising=False)
    assert seconds_left() is None
    # As the launcher sets it for a job without a limit.
    monkeypatch.setenv(JOB_END_ENV, "")
    assert seconds_left() is None
    monkeypatch.setenv(JOB_END_ENV, "1100")
    assert seconds_left(now=1000.0) == 100.0
