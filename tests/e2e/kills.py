"""A run that is killed again and again, each time started with the same command, until it is done.

SIGKILL goes to every process of the job at once, at a moment that a seed chooses: somewhere in a phase that it
chooses too, so that short phases are hit as often as long ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scalerl.extras.verify.differences import (
    ComparedPart,
    compared_part,
    metric_differences,
    reproducible,
)
from scalerl.extras.verify.resume import MLFLOW, Pair, compare, is_of_history
from scalerl.tracking.jsonl import read_metrics
from scalerl.tracking.mlflow_store import read_histories
from tests.e2e.jobs import RUN_TIMEOUT_S, Job, Process, Record
from tests.e2e.watched_loop import PIPE

START = "start"
# Phases of the loop in which a kill can fall, beside the start.
PHASES = (
    "gen",
    "old_log_prob",
    "ref",
    "update_actor",
    "update_weights",
    "dump_rollout_generations",
    "testing",
    "save_checkpoint",
    "commit",
    "rotation",
)
# Those of about 1 ms: of few kills they would take the tries of the others.
BRIEF_PHASES = ("balance", "adv", "metrics")
# Those that a run with a critic has beside them.
CRITIC_PHASES = ("values", "update_critic")
# Phases that not every step has.
RARE = ("testing", "save_checkpoint", "commit", "rotation")
# What a step first begins, all of them, and then waits for: the second time of each is the longer one.
PASSES = ("old_log_prob", "ref", "values")
_LOOK_S = 0.3
# Steps between the checkpoints of the runs.
SAVE_FREQ = 2


@dataclass(frozen=True)
class Moment:
    """When to kill: `share` of the usual length of a phase after it began, in a process that has done some steps."""

    phase: str
    share: float
    num_steps: int = 0


def moments(
    seed: int, struck: Sequence[Struck] = (), phases: Sequence[str] = (START, *PHASES), *, most_steps: int = 3
) -> Iterator[Moment]:
    """Endless moments that a seed chooses. The next phase is the one that was tried and hit least.

    struck: the kills so far, to which the caller adds. So one of 2 ms, which is often missed, is tried more often, and
    one that is never hit twice as often as others at most.
    """
    chosen, tried = random.Random(seed), Counter[str]()
    while True:
        hit = phases_hit(struck)
        phase = min(chosen.sample(phases, len(phases)), key=lambda phase: tried[phase] + hit.get(phase, 0))
        tried[phase] += 1
        yield Moment(phase, chosen.random(), chosen.randrange(most_steps))


@dataclass(frozen=True)
class Struck:
    """A kill. wanted: the phase that was chosen. phase: the one that had begun last, or the part of the start.

    num_steps: that the process had begun.  left: what the directory held of unfinished saves and removals.
    """

    wanted: str
    phase: str
    num_steps: int
    seconds: float
    left: tuple[str, ...]


def watch(
    job: Job, run_dir: Path, moment: Moment | None, usual_s: Mapping[str, float]
) -> tuple[Struck | None, Lengths]:
    """Kills a job at a moment (None: never). Returns None where it came to its end, and how long its phases took."""
    began = told_at = time.monotonic()
    lengths, phase, num_steps, is_near = Lengths(began), START, 0, False
    begun = Counter[str]()
    strike_at = None
    if moment is not None and moment.phase == START:
        strike_at = began + moment.share * usual_s[START]
    running = job.look()
    looked_at = began
    with _opened(run_dir / PIPE) as pipe:
        while job.process.poll() is None:
            now = time.monotonic()
            # Of one phase: how long a whole run takes follows from its steps, and from what runs beside it.
            assert now < told_at + RUN_TIMEOUT_S, f"nothing after {phase} for {RUN_TIMEOUT_S:.0f} s{job.tail()}"
            if strike_at is not None and now >= strike_at:
                _kill(job, running)
                left = tuple(
                    sorted(p.name for p in run_dir.glob("global_step_*") if ".tmp-" in p.name or ".del" in p.name)
                )
                wanted = "" if moment is None else moment.phase
                where = _part_of_start(job) if phase == START else phase
                return Struck(wanted, where, num_steps, now - began, left), lengths
            if strike_at is None and now > looked_at + _LOOK_S:
                running, looked_at = job.look(), time.monotonic()
            wait_s = 0.02 if strike_at is None else max(0.0, min(0.02, strike_at - now))
            if not select.select([pipe], [], [], wait_s)[0]:
                continue
            for name in os.read(pipe, 65536).decode().split():
                now = told_at = time.monotonic()
                lengths.began(name, now)
                phase = name
                if name == "gen":
                    num_steps, begun = num_steps + 1, Counter()
                begun[name] += 1
                # A phase that few steps have is taken in whichever step comes.
                is_near = moment is not None and num_steps > moment.num_steps
                is_meant = moment is not None and name == moment.phase and (name not in PASSES or begun[name] == 2)
                if moment is not None and strike_at is None and is_meant and (is_near or name in RARE):
                    strike_at = now + moment.share * usual_s.get(name, 0.0)
    return None, lengths


class Lengths:
    """Seconds of each phase of one process, and of its start."""

    def __init__(self, began: float) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._last = (START, began)

    def began(self, phase: str, now: float) -> None:
        name, since = self._last
        self.seconds.setdefault(name, []).append(now - since)
        self._last = (phase, now)

    def usual(self) -> dict[str, float]:
        """The median of each."""
        return {phase: sorted(seconds)[len(seconds) // 2] for phase, seconds in self.seconds.items()}


def run_to_the_end(start: Callable[[], Job], run_dir: Path) -> dict[str, float]:
    """Runs a job that nobody disturbs. Returns the usual seconds of its phases."""
    _make_pipe(run_dir)
    job = start()
    _, lengths = watch(job, run_dir, None, {})
    assert job.process.returncode == 0, job.tail()
    return lengths.usual()


def run_killed(
    start: Callable[[], Job], run_dir: Path, when: Iterable[Moment], usual_s: Mapping[str, float]
) -> Iterator[Struck]:
    """Starts a job for each moment and kills it there, until one comes to its end; yields the kills."""
    _make_pipe(run_dir)
    for moment in when:
        job = start()
        struck, _ = watch(job, run_dir, moment, usual_s)
        if struck is None:
            assert job.process.returncode == 0, job.tail()
            return
        job.assert_gone()
        yield struck


def _make_pipe(run_dir: Path) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    if not (run_dir / PIPE).exists():
        os.mkfifo(run_dir / PIPE)


def problems(pair: Pair, *, is_exact: bool) -> list[ComparedPart]:
    """What of the killed run is not as in the undisturbed one, and how much was compared."""
    parts = [one for one in compare(pair, is_exact=is_exact) if one.what != MLFLOW]
    parts += [_in_mlflow(pair, is_exact), compared_part("order of the logged steps", "", _order(pair.resumed))]
    wanted = read_metrics(pair.straight)
    if is_exact:
        lines = Record.read(pair.resumed).lines
        parts.append(compared_part("lines of all processes", f"{len(lines)} lines", _other_lines(lines, wanted)))
        validation = metric_differences(wanted, read_metrics(pair.resumed), wanted=lambda key: key.startswith("val-"))
        parts.append(compared_part("validations", "", validation))
    return parts


def _in_mlflow(pair: Pair, is_exact: bool) -> ComparedPart:
    """The run of the last checkpoint has every step, and no step with two values.

    A process that was killed before there was a checkpoint has left a run of its own, which ends before the first one.
    """
    from mlflow import MlflowClient

    run_id = json.loads((pair.checkpoints[1] / "trainer_state.json").read_text(encoding="utf-8"))["mlflow_run_id"]
    histories = [read_histories(f"sqlite:///{at / 'mlflow.db'}") for at in (pair.straight, pair.resumed)]
    ((_, wanted),) = histories[0].items()
    others = {other: steps for other, steps in histories[1].items() if other != run_id}

    def differences() -> Iterator[str]:
        keys = is_of_history if is_exact else "training/global_step".__eq__
        yield from metric_differences(wanted, histories[1][run_id], wanted=keys)
        client = MlflowClient(tracking_uri=f"sqlite:///{pair.resumed / 'mlflow.db'}")
        for key in ("training/global_step", *(("actor/grad_norm", "critic/score/mean") if is_exact else ())):
            values: dict[int, set[float]] = {}
            for entry in client.get_metric_history(run_id, key):
                values.setdefault(entry.step, set()).add(entry.value)
            yield from (
                f"step {step} has {len(some)} values of {key}" for step, some in values.items() if len(some) > 1
            )
        for other, steps in others.items():
            if max(steps, default=0) > SAVE_FREQ:
                yield f"run {other}, which is not the checkpoint's, goes on to step {max(steps)}"

    numbers = sum(len(data) for data in wanted.values())
    return compared_part(MLFLOW, f"{numbers} numbers; runs before the first checkpoint: {len(others)}", differences())


def _other_lines(
    lines: Iterable[tuple[int, dict[str, float]]], wanted: Mapping[int, dict[str, float]]
) -> Iterator[str]:
    """Lines of any attempt, those that a resume replaced too, that have other numbers than the undisturbed run."""
    for step, data in lines:
        numbers = reproducible(data)
        different = [key for key, value in numbers.items() if wanted.get(step, {}).get(key) != value]
        if different:
            yield f"step {step}: {different[0]} {numbers[different[0]]!r}, {wanted.get(step, {}).get(different[0])!r}"


def _order(run_dir: Path) -> Iterator[str]:
    """Every process logs the step after the one that it resumed from, and then each that follows."""
    last = 0
    for text in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if "resumed_from" in line:
            if line["resumed_from"] > last:
                yield f"resumed from step {line['resumed_from']}, which nobody logged (the last one is {last})"
            last = line["resumed_from"]
        elif line["step"] not in (last, last + 1):
            yield f"step {line['step']} after step {last}"
        else:
            last = line["step"]


def phases_hit(struck: Iterable[Struck]) -> dict[str, int]:
    """Phase -> kills that fell into it; a save that was being written, and a removal, by what they left."""
    hit: Counter[str] = Counter()
    for kill in struck:
        hit[kill.phase.partition("/")[0]] += 1
        hit["left a save half written"] += any(".tmp-" in name for name in kill.left)
        hit["left a removal half done"] += any(".deleting-" in name for name in kill.left)
    return dict(hit)


def _part_of_start(job: Job) -> str:
    """start/NAME, of the part that ended last; start alone before the first."""
    ended = [line.split()[1] for line in job.stdout.splitlines() if line.startswith("start: ")]
    return f"{START}/after {ended[-1]}" if ended else START


def _kill(job: Job, running: set[Process]) -> None:
    """SIGKILL to all that ran when it was looked last, in no order; then to what has started since."""
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    job.kill_all()
    job.process.wait(60)


@contextlib.contextmanager
def _opened(pipe: Path) -> Iterator[int]:
    """For reading and writing: it has no end when a writer is killed. What an earlier process wrote is dropped."""
    descriptor = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        with contextlib.suppress(BlockingIOError):
            while os.read(descriptor, 65536):
                pass
        yield descriptor
    finally:
        os.close(descriptor)
