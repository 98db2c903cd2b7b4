"""Ranks that are killed or stopped at a known place of a run, each as often as it is told; the run is not told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from scalerl.cluster.worker_logs import session_logs
from tests.e2e.jobs import PROMPTS, SAMPLES

# A file of the user's that all processes import. Ranks leave their number; the loss, which is that of any run, strikes.
USER_FILE = """
import os
from pathlib import Path

import torch

from scalerl.algorithms import get_policy_loss, register_policy_loss

DIRECTORY = Path({directory!r})
if "RANK" in os.environ:
    (DIRECTORY / f"rank-{{os.environ['RANK']}}").write_text(str(os.getpid()))


@register_policy_loss("struck")
def struck(logprobs_T, old_logprobs_T, advantages_T, config):
    if os.environ["RANK"] == "1" and strikes_left() and last_logged() == {step} - 1:
        (DIRECTORY / f"struck-{{os.getpid()}}").touch()
        os.kill(os.getpid(), {signum})
    return get_policy_loss("vanilla")(logprobs_T, old_logprobs_T, advantages_T, config)


def strikes_left():
    return len(list(DIRECTORY.glob("struck-*"))) < {times}


def last_logged():
    lines = Path({run_dir!r}, "metrics.jsonl").read_text().splitlines()
    steps = [line.partition(",")[0].partition(": ")[2] for line in lines if line.startswith('{{"step"')]
    return int(steps[-1]) if steps else 0
"""


@dataclass(frozen=True)
class RankStrikes:
    """directory: has what was struck, and the processes of the ranks."""

    directory: Path
    run_dir: Path

    def in_update(self, step: int, *, signum: int = signal.SIGKILL, times: int = 1) -> list[str]:
        """Overrides of a run whose rank 1 is struck in the update of that step.  times: 0: not at all."""
        self.directory.mkdir(parents=True, exist_ok=True)
        file = self.directory / "strikes.py"
        values = {"directory": str(self.directory), "run_dir": str(self.run_dir), "step": step, "times": times}
        file.write_text(USER_FILE.format(**values, signum=int(signum)))
        return [f"trainer.import_files=[{file}]", "actor_rollout_ref.actor.policy_loss.loss_mode=struck"]

    def in_generation(self, step: int) -> list[str]:
        """The same while samples of the step are scored, and the rank waits for them."""
        arguments, file = self.in_update(step, times=0), self.directory / "strikes.json"
        strike = {
            "at": (step - 1) * PROMPTS * SAMPLES + 6,
            "pid_file": str(self.directory / "rank-1"),
            "done": str(self.directory / "struck"),
            "signum": int(signal.SIGKILL),
        }
        file.write_text(json.dumps([strike]))
        return [*arguments, f"+custom_reward_function.reward_kwargs.strikes_file={file}"]

    def pid(self, rank: int) -> int:
        return int((self.directory / f"rank-{rank}").read_text())


@contextlib.contextmanager
def killed_when(condition: Callable[[], object], pid: Callable[[], int]) -> Iterator[None]:
    """Kills that process once, as soon as the condition holds inside the block. Raises what the condition raised."""
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            if condition():
                os.kill(pid(), signal.SIGKILL)
                return
            time.sleep(0.001)

    with ThreadPoolExecutor(1) as pool:
        watched = pool.submit(watch)
        try:
            yield
        finally:
            over.set()
        watched.result()


def rank_in(phase: str) -> int | None:
    """The process of a rank that is in the phase now, by the heartbeats of this cluster."""
    for beat in session_logs().glob("rank-*.beat"):
        pid = int(beat.stem.partition("-")[2])
        with contextlib.suppress(OSError, ValueError):
            # Files of processes that have ended stay.
            if json.loads(beat.read_text(encoding="utf-8"))["phase"] == phase and Path(f"/proc/{pid}").exists():
                return pid
    return None
