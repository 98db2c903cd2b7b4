"""What the tests of this folder submit, and how they look after it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.jobs import Inputs
from tests.slurm.minislurm import POLL_S, MiniSlurm

REPO = Path(__file__).resolve().parents[2]
LAUNCHER = REPO / "launchers/slurm/ray.sbatch"
Launch = Callable[..., subprocess.CompletedProcess[str]]
# Of a training.
STEPS = 2


def wait_until(what: str, condition: Callable[[], object], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not after {timeout_s} s"
        time.sleep(POLL_S)


def assert_nothing_left(slurm: MiniSlurm) -> None:
    left: dict[str, list[tuple[int, str]]] = {}

    def clean() -> bool:
        left.update({host: slurm.processes(host) for host in slurm.hosts})
        return not any(left.values())

    try:
        wait_until("no process left", clean, timeout_s=15)
    except AssertionError:
        pytest.fail(f"left on the nodes: {left}")
    sessions = [path for host in slurm.hosts for path in (slurm.root / f"nodes/{host}/ray").glob("session_2*")]
    assert not sessions


def assert_came_back(
    slurm: MiniSlurm, job_id: str, out: Path, *, because: str, logs: Path | None = None, timeout_s: float = 120
) -> None:
    """The second attempt is the last, and did what was left. logs: of all jobs; beside `out` by default."""
    wait_until("second attempt", lambda: slurm.job(job_id)["Restarts"] == "1", timeout_s)
    job = slurm.wait(job_id, timeout_s)
    text = out.read_text()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1"), text
    assert f"exit code {because}: requeue" in text
    assert {path.name for path in ((logs or out.parent / "logs") / job_id).glob("attempt_*")} == {
        "attempt_0",
        "attempt_1",
    }
    assert_nothing_left(slurm)


def overrides(small: Inputs, run_dir: Path, nnodes: int, n_gpus_per_node: int, *more: str) -> list[str]:
    return small.overrides(
        run_dir,
        "data.max_prompt_length=64",
        "actor_rollout_ref.actor.max_tokens_per_micro_batch=160",
        # One on each device.
        "actor_rollout_ref.rollout.num_replicas=null",
        f"trainer.nnodes={nnodes}",
        f"trainer.n_gpus_per_node={n_gpus_per_node}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=false",
        "trainer.save_freq=-1",
        *more,
    )


def launched_job(done: subprocess.CompletedProcess[str]) -> str:
    """Its number."""
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split("job     ")[1].split(":")[0]
