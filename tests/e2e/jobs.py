"""Whole runs as subprocesses: started, waited for, signalled, and looked after until their last process is gone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from scalerl.errors import EXIT_USER_ERROR
from tests.e2e.step_checks import check_steps

if TYPE_CHECKING:
    from tests.e2e.kept import Finished

MARKER = "SCALERL_E2E_JOB"
RUN_TIMEOUT_S = 400.0
GONE_TIMEOUT_S = 120.0
POLL_S = 0.02
SHARED_MEMORY = Path("/dev/shm")
REWARD = Path(__file__).with_name("graded_reward.py")
# Per step: prompts x samples of each.
PROMPTS, SAMPLES = 4, 4


@dataclass(frozen=True)
class Process:
    """start: clock ticks since boot, which tells a process from a later one with its number."""

    pid: int
    start: int


@dataclass
class Job:
    """A command in a session of its own. All that it starts carries its marker in the environment.

    Ray's agents and SGLang's schedulers write their title over their environment, so processes are also remembered by
    number, from looks at the tree below the command.
    """

    arguments: Sequence[str]
    directory: Path
    marker: str = field(default_factory=lambda: uuid.uuid4().hex)
    # Metrics of the test's own code, which no page documents.
    own_keys: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment[MARKER] = self.marker
        self.out, self.err = self.directory / f"{self.marker}.out", self.directory / f"{self.marker}.err"
        self._shared_before = set(os.listdir(SHARED_MEMORY))
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                self.arguments,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=self.directory,
                env=environment,
                start_new_session=True,
                # As from a terminal: a suite in the background of a shell ignores SIGINT, and its children would too.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        self.seen: set[Process] = set()

    @property
    def stdout(self) -> str:
        return self.out.read_text(encoding="utf-8", errors="replace")

    @property
    def stderr(self) -> str:
        return self.err.read_text(encoding="utf-8", errors="replace")

    def finish(self, timeout_s: float = RUN_TIMEOUT_S) -> int:
        """The exit code, negative after a signal. Of a run that came to its end the steps are checked."""
        self.wait_for(lambda: self.process.poll() is not None, "its end", timeout_s, ended_is_failure=False)
        if self.process.returncode == 0:
            check_steps(Record.read(self._run_dir()).final.values(), self.own_keys)
        return self.process.returncode

    def _run_dir(self) -> Path:
        """trainer.default_local_dir; the job's directory for a command without one."""
        given = [text.partition("=")[2] for text in self.arguments if text.startswith("trainer.default_local_dir=")]
        return self.directory / given[-1] if given else self.directory

    def wait_for(
        self, condition: Callable[[], object], what: str, timeout_s: float = RUN_TIMEOUT_S, *, ended_is_failure=True
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            ended = self.process.poll() is not None
            assert not (ended and ended_is_failure), f"ended with {self.process.returncode} before {what}:{self.tail()}"
            assert time.monotonic() < deadline, f"no {what} within {timeout_s:.0f} s:{self.tail()}"
            time.sleep(POLL_S)

    def look(self) -> set[Process]:
        """The processes of the job that run now; remembers them."""
        table = _process_table()
        # The number of a command that was waited for may be another process's by now.
        command = self.process.pid if self.process.returncode is None else None
        known = [process for process in table if process in self.seen or process.pid == command]
        running = _with_marker(table, self.marker, known)
        self.seen |= running
        return running

    def commands(self) -> list[str]:
        """Number and command line of every process of the job."""
        return [command for process in self.look() if (command := _command(process.pid))]

    def kill_driver(self, signum: int = signal.SIGKILL) -> None:
        """To the driver alone."""
        self.look()
        self.process.send_signal(signum)

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to the whole foreground process group."""
        self.look()
        os.killpg(self.process.pid, signal.SIGINT)

    def assert_gone(self) -> None:
        """No process of the job is left, or is after a moment: the kernel needs one to end a tree."""
        deadline = time.monotonic() + GONE_TIMEOUT_S
        while left := self.commands():
            assert time.monotonic() < deadline, f"still running: {left}"
            time.sleep(0.1)

    def shared_names(self) -> set[str]:
        """Names in /dev/shm of what a process of the job has open or mapped now, or with the number of one in them.

        A number in a name that was there before the job is of an earlier process, and does not count.
        """
        pids = {process.pid for process in self.look()}
        names = {name for pid in pids for name in _shared_by(pid) if (SHARED_MEMORY / name).exists()}
        numbers = {str(process.pid) for process in self.seen}
        new = set(os.listdir(SHARED_MEMORY)) - self._shared_before
        return names | {name for name in new if numbers & set(re.split(r"[-_.]", name))}

    def kill_all(self) -> None:
        """Whatever the test left."""
        while left := self.look():
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=0.2)

    def tail(self) -> str:
        return f"\n--- stdout\n{self.stdout[-2000:]}\n--- stderr\n{self.stderr[-6000:]}"


def kill_marked(marker: str) -> None:
    """Ends what is left of a job whose starter is gone."""
    while left := marked_processes(marker):
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.2)


def marked_processes(marker: str) -> set[Process]:
    """What of a job runs now, but for processes that wrote over their environment and that nothing else is above."""
    return _with_marker(_process_table(), marker)


def _with_marker(table: dict[Process, int], marker: str, known: Sequence[Process] = ()) -> set[Process]:
    """The processes with this marker, those that are known, and all below them."""
    children: dict[int, list[Process]] = {}
    for process, parent in table.items():
        children.setdefault(parent, []).append(process)
    waiting = [*known, *(process for process in table if _has_marker(process.pid, marker))]
    visited: set[Process] = set()
    while waiting:
        process = waiting.pop()
        if process not in visited:
            visited.add(process)
            waiting += children.get(process.pid, [])
    return visited


@dataclass(frozen=True)
class Pause:
    """Stops a run inside the scoring of a sample, so that a test can act in the middle of a known step."""

    directory: Path

    def in_step(self, step: int, *, steps_done: int = 0) -> None:
        """In the scoring of this step's 6th sample; steps_done: those of the process that goes on from a checkpoint.

        A run that is stopped in an earlier step goes on to this one.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        after = (step - steps_done - 1) * PROMPTS * SAMPLES + 5
        (self.directory / f"reached-{after}").unlink(missing_ok=True)
        # In one go: the run may read it now.
        (self.directory / "after.new").write_text(str(after))
        (self.directory / "after.new").replace(self.directory / "after")

    def reached(self) -> bool:
        return (self.directory / f"reached-{(self.directory / 'after').read_text()}").exists()

    def over(self) -> None:
        (self.directory / "after").unlink()

    def in_validation(self, step: int) -> None:
        """In the validation after this step, until `validation_over`."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "validation_after").write_text(str(step * PROMPTS * SAMPLES))

    def reached_validation(self) -> bool:
        return (self.directory / "in_validation").exists()

    def validation_over(self) -> None:
        (self.directory / "validation_after").unlink()

    def raises(self, message: str) -> None:
        """In the place of `over`: this score and the next ones raise, until `mended`."""
        (self.directory / "error").write_text(message)
        self.over()

    def mended(self) -> None:
        (self.directory / "error").unlink()


@dataclass(frozen=True)
class Strike:
    """A signal to all of a rollout server, sent from inside the scoring of a training sample."""

    step: int
    replica: int
    signum: int
    # After the step's last sample came back, else after its second.
    idle: bool = False

    def as_json(self, run_dir: Path) -> dict[str, Any]:
        at = (self.step - 1) * PROMPTS * SAMPLES + (PROMPTS * SAMPLES if self.idle else 2)
        return {"at": at, "log": str(run_dir / "logs" / f"rollout-{self.replica}."), "signum": int(self.signum)}


@dataclass(frozen=True)
class Inputs:
    model: Path
    train: Path
    val: Path

    @property
    def config(self) -> dict[str, Any]:
        """Of the model: the example may be tuned, the tests take its sizes as they are."""
        return json.loads((self.model / "config.json").read_text(encoding="utf-8"))

    @property
    def data_source(self) -> str:
        return pq.read_table(self.val, columns=["data_source"])["data_source"][0].as_py()

    def with_every_other_prompt_for(self, style: str, directory: Path) -> dict[str, Path]:
        """train, val -> copies in which every other prompt has this reward_model.style."""
        files = {}
        for split, source in (("train", self.train), ("val", self.val)):
            table = pq.read_table(source)
            rows = table.to_pylist()
            for row in rows[::2]:
                row["reward_model"] = row["reward_model"] | {"style": style}
            files[split] = directory / f"{split}.parquet"
            pq.write_table(type(table).from_pylist(rows, schema=table.schema), files[split])
        return files

    def own_template(self, directory: Path) -> Path:
        """A file with another chat template than the model's, which makes the same prompts."""
        file = directory / "own.jinja"
        template = (self.model / "chat_template.jinja").read_text(encoding="utf-8")
        file.write_text("{# own #}" + template, encoding="utf-8")
        return file

    def overrides(self, run_dir: Path, *more: str) -> list[str]:
        """Arguments of a short GRPO run on the embedded engine; `more` comes last and wins."""
        policy = "actor_rollout_ref"
        return [
            "+recipe=[grpo,cpu]",
            f"data.train_files={self.train}",
            f"data.val_files={self.val}",
            "data.val_max_samples=16",
            "data.max_prompt_length=16",
            "data.max_response_length=8",
            f"data.train_batch_size={PROMPTS}",
            f"{policy}.model.path={self.model}",
            f"{policy}.actor.optim.lr=1e-3",
            f"{policy}.actor.ppo_mini_batch_size={PROMPTS // 2}",
            f"{policy}.actor.max_tokens_per_micro_batch=64",
            f"{policy}.rollout.name=embedded",
            f"{policy}.rollout.n={SAMPLES}",
            f"custom_reward_function.path={REWARD}",
            "reward_model.timeout_s=300",
            "trainer.logger=[console,file]",
            # A run that looks at checkpoints says when they come.
            "trainer.save_freq=0",
            f"trainer.default_local_dir={run_dir}",
            f"trainer.rollout_data_dir={run_dir / 'rollouts'}",
            *more,
        ]


def main_ppo(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "scalerl.trainer.main_ppo", *arguments]


def scalerl(*arguments: str) -> list[str]:
    """The console script of the environment that runs the tests."""
    return [str(Path(sys.executable).with_name("scalerl")), *arguments]


@dataclass(frozen=True)
class Record:
    """metrics.jsonl. lines: (step, data) as logged; final: step -> data, lines that a resume replaced left out."""

    lines: list[tuple[int, dict[str, float]]]
    final: dict[int, dict[str, float]]

    @classmethod
    def read(cls, run_dir: Path) -> Record:
        lines, final = [], {}
        path = run_dir / "metrics.jsonl"
        # The last line may be half written.
        whole = path.read_text(encoding="utf-8").rpartition("\n")[0] if path.exists() else ""
        for text in whole.splitlines():
            entry = json.loads(text)
            if "resumed_from" in entry:
                final = {step: data for step, data in final.items() if step <= entry["resumed_from"]}
                continue
            lines.append((entry["step"], entry["data"]))
            final.setdefault(entry["step"], {}).update(entry["data"])
        check_first_updates(run_dir, final)
        return cls(lines, final)


def check_first_updates(run_dir: Path, final: dict[int, dict[str, float]]) -> None:
    """Of every step of every run: nothing has changed since old_logprobs, so no token has moved and none is clipped.

    With bypass_mode the old log-probs are the sampler's, which are not the trainer's.
    """
    config = run_dir / "config.yaml"
    if config.exists() and "bypass_mode: true" in config.read_text(encoding="utf-8"):
        return
    for step, data in final.items():
        if data.get("actor/num_updates"):
            assert abs(data["actor/ppo_kl_first_update"]) < 1e-6, f"step {step} of {run_dir}"
            for key in ("actor/pg_clipfrac_first_update", "actor/pg_clipfrac_lower_first_update"):
                assert data.get(key, 0.0) == 0.0, f"{key} of step {step} of {run_dir}"
            assert data["actor/entropy_loss"] > 0, f"step {step} of {run_dir}"
            left_out = ("actor/skipped_updates", "actor/rejected_updates", "rollout_corr/rollout_rs_masked_fraction")
            if data["actor/num_updates"] == 1 and not any(data.get(key) for key in left_out):
                # One update has the tokens and the policy of the pass before it.
                same = pytest.approx(data["actor/entropy_loss"], rel=1e-4)
                assert data["actor/entropy"] == same, f"step {step} of {run_dir}"


def refused(job: Job | Finished, timeout_s: float = 120) -> str:
    """The message of a run that was refused: all of standard error, no stack in it."""
    code = job.finish(timeout_s) if isinstance(job, Job) else job.code
    assert code == EXIT_USER_ERROR, job.tail()
    for text in (job.stdout, job.stderr):
        assert "Traceback" not in text and "ray::" not in text, job.tail()
    assert job.stderr.startswith("error: "), job.tail()
    return job.stderr


def numbered(message: str) -> list[str]:
    """The violations of a message."""
    head, *violations = re.split(r"\n  \d+\. ", message.rstrip())
    count = re.fullmatch(r"error: The configuration has (\d+) problems?:", head)
    assert count and int(count[1]) == len(violations), message
    return violations


def only(violations: list[str], *parts: str) -> str:
    """The one violation that has all the parts."""
    matching = [text for text in violations if all(part in text for part in parts)]
    assert len(matching) == 1, f"{parts} in {violations}"
    return matching[0]


def _shared_by(pid: int) -> set[str]:
    """Names in /dev/shm that a process has open or mapped, those of removed files too."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines += Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                lines.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return {match[1] for line in lines if (match := re.search(rf"{SHARED_MEMORY}/([^/ ]+)", line))}


def _process_table() -> dict[Process, int]:
    """Live processes -> the number of the parent."""
    table = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # "pid (name) state ppid ... starttime": the name may hold spaces and parentheses.
            state, parent, *rest = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if state not in "ZX":
                table[Process(int(entry.name), int(rest[17]))] = int(parent)
    return table


def _has_marker(pid: int, marker: str) -> bool:
    try:
        return f"{MARKER}={marker}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _command(pid: int) -> str:
    """The number and the command line; "" for a process that has ended."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
    return f"{pid} {line[:200]}" if line else ""
