"""A rank that does not come to a collective is named, with its phase and the stacks of all, and the run ends by 70."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from scalerl.cluster.failures import WorkerError
from scalerl.cluster.worker_group import WorkerGroup
from scalerl.errors import EXIT_FAILED, run_main
from scalerl.parallel.layout import Layout
from tests.ray.workers import MeetingWorker

# Of one call; those before it may take longer on a loaded machine.
LIMIT_S = 10.0


@pytest.fixture
def group(start_group: Callable[..., WorkerGroup], tmp_path: Path) -> WorkerGroup:
    group = start_group(MeetingWorker, Layout(2), device="cpu", collective_timeout_s=120.0, seed=1, log_dir=tmp_path)
    assert group.call(MeetingWorker.meet, None) == [1.0, 1.0]
    return group


def test_a_rank_that_is_stopped_before_a_collective(
    group: WorkerGroup, start_group: Callable[..., WorkerGroup], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    processes = group.call(MeetingWorker.process)
    group.timeout_s = LIMIT_S
    errors: list[BaseException] = []

    def run() -> None:
        try:
            group.call(MeetingWorker.meet, 1)
        except WorkerError as error:
            errors.append(error)
            raise

    try:
        assert run_main(run) == EXIT_FAILED
    finally:
        os.kill(processes[1], signal.SIGKILL)
        start_group.stop(group, failed=errors[0] if errors else RuntimeError())
    message = capsys.readouterr().err
    assert "meet: ranks [0, 1] did not answer within trainer.timeout_s=10 s; missing in gloo:all_reduce" in message
    verdict = next(line for line in message.splitlines() if "missing in" in line)
    assert "in which ranks [0] wait: [1]; first of them rank 1 (" in verdict
    assert f"process {processes[1]} on " in verdict and ": stopped" in verdict and "; meet for " in verdict
    assert "  rank 0 (" in message and "in gloo:all_reduce of group" in message
    assert "Stack of rank 0:" in message and "in all_reduce" in message and "in meet" in message
    assert message.rstrip().endswith("  | about to stop")
    (report,) = tmp_path.glob("hang-meet-*.txt")
    assert f"Stacks of all ranks: {report}" in message
    assert "in meet" in report.read_text()
    (flight,) = tmp_path.glob("hang-meet-*-rank-0.flight.json")
    assert json.loads(flight.read_text())["gloo"]["entries"]


@pytest.mark.full
def test_a_rank_that_does_something_else(
    group: WorkerGroup, start_group: Callable[..., WorkerGroup], tmp_path: Path
) -> None:
    """Its process runs and beats: its stack shows where it is."""
    group.timeout_s = LIMIT_S
    with pytest.raises(WorkerError) as error:
        group.call(MeetingWorker.meet, None, idle=0)
    start_group.stop(group, failed=error.value)
    message = str(error.value)
    assert "in which ranks [1] wait: [0]; first of them rank 0 (" in message
    assert ": runs; meet for " in message
    # Of the one that is missing first.
    stack = message.split("Stack of rank 0:")[1].split("Stack of rank 1:")[0]
    assert "in meet" in stack and "in all_reduce" not in stack
    assert message.endswith("  | about to dawdle")
