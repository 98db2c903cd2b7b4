"""Asks Slurm through its own commands, none of which needs accounting (sacct)."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scalerl.errors import RunError, UserError

COMMANDS = ("sbatch", "scontrol", "scancel", "srun")
TIMEOUT_S = 60.0
UNREACHABLE = ("Unable to contact", "Socket timed out", "Connection refused")
UNLIMITED = ("UNLIMITED", "NONE", "INFINITE")
# All others, such as REQUEUE_HOLD or STOPPED, Slurm may still lead back to RUNNING.
ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT",
)  # fmt: skip


class SlurmError(RunError):
    """A command of Slurm failed; the message has its own words."""


@dataclass(frozen=True)
class Partition:
    """A partition of the cluster.

    max_nodes, max_time_s: None where there is no limit.  grace_s: from SIGTERM to the end of a job that is preempted.
    """

    name: str
    is_default: bool
    total_nodes: int
    max_nodes: int | None
    max_time_s: int | None
    grace_s: int = 0


@dataclass(frozen=True)
class Job:
    """What Slurm says of a job.

    number: each task of an array has another one.  state: RUNNING, PENDING, ...  nodes: empty until it runs.
    head: the node that its batch script is on.  start_time: of a job that waits, when it is expected; "" if unknown.
    """

    number: str
    state: str
    reason: str
    nodes: str
    head: str
    restarts: int
    exit_code: str
    run_time: str
    time_limit: str
    start_time: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the job has ended for good."""
        return self.state in ENDED


def missing_commands() -> list[str]:
    """The commands of Slurm that are not on PATH."""
    return [name for name in COMMANDS if shutil.which(name) is None]


def has_pyxis() -> bool:
    """Whether the site's srun takes container images."""
    return "--container-image" in _run("srun", "--help")


def partitions() -> list[Partition]:
    """All partitions of the cluster."""
    return [_partition(_fields(line)) for line in _run("scontrol", "-o", "show", "partition").splitlines() if line]


def _partition(fields: dict[str, str]) -> Partition:
    max_nodes, max_time = fields["MaxNodes"], fields["MaxTime"]
    return Partition(
        name=fields["PartitionName"],
        is_default=fields["Default"] == "YES",
        total_nodes=int(fields["TotalNodes"]),
        max_nodes=None if max_nodes in UNLIMITED else int(max_nodes),
        max_time_s=None if max_time in UNLIMITED else seconds_of(max_time),
        grace_s=int(fields.get("GraceTime", "0")),
    )


def kill_wait_s() -> int:
    """Seconds that a process of a job which ends has from SIGTERM to SIGKILL, on this site; 0: it does not say."""
    setting = re.search(r"^KillWait\s*=\s*(\d+)", _run("scontrol", "show", "config"), re.MULTILINE)
    return 0 if setting is None else int(setting[1])


def test_only(script: Path) -> str:
    """Asks when and where Slurm would start a script. Raises UserError with the reason where it never would."""
    return _sbatch("--test-only", script).strip().removeprefix("sbatch: ")


def submit(script: Path) -> str:
    """Submits a script and returns the job's number. Raises UserError with the reason where Slurm refuses it."""
    return _sbatch("--parsable", script).split(";")[0].strip()


def _sbatch(option: str, script: Path) -> str:
    done = _call("sbatch", option, str(script))
    # Neither the file nor the options are to blame for a controller that is away.
    if done.returncode and not any(words in done.stderr for words in UNREACHABLE):
        raise UserError(f"{script}: Slurm refuses it: {(done.stderr or done.stdout).strip()}")
    return _checked(done)


def job(job_id: str) -> Job | None:
    """Asks Slurm about a job; None where Slurm no longer knows it, some minutes after its end.

    job_id: 12, or 12_0 for a task of an array.
    """
    done = _call("scontrol", "-o", "show", "job", job_id)
    # The latter of a task of an array that ended before it began.
    if done.returncode and any(words in done.stderr for words in ("Invalid job id", "not found")):
        return None
    fields = _fields(_checked(done))
    return Job(
        number=fields["JobId"],
        state=fields["JobState"],
        reason=fields["Reason"],
        nodes=fields.get("NodeList", "").replace("(null)", ""),
        head=fields.get("BatchHost", ""),
        restarts=int(fields["Restarts"]),
        exit_code=fields["ExitCode"].partition(":")[0],
        run_time=fields["RunTime"],
        time_limit=fields["TimeLimit"],
        start_time=fields.get("StartTime", "").replace("Unknown", ""),
    )


def cancel(job_id: str) -> None:
    """Cancels a job; an array with all its tasks."""
    _run("scancel", job_id)


def attach(job_id: str, node: str, command: Sequence[str]) -> int:
    """Runs a command, or a shell, on a node of a running job, and returns its exit code."""
    options = ["--quiet", "--overlap", "--mem=0", f"--jobid={job_id}", "--nodes=1", "--ntasks=1", f"--nodelist={node}"]
    shell = command or ("--pty", "bash")
    return subprocess.call(["srun", *options, *shell])


def seconds_of(text: str) -> int:
    """Seconds of a time limit as Slurm takes it: minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s. Raises UserError."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise UserError(f"{text}: no time limit; write minutes, hours:minutes:seconds or days-hours:minutes:seconds")
    days, first, second, third = (None if part is None else int(part) for part in match.groups())
    if days is not None:
        return ((days * 24 + (first or 0)) * 60 + (second or 0)) * 60 + (third or 0)
    if third is not None:
        return ((first or 0) * 60 + (second or 0)) * 60 + third
    return (first or 0) * 60 + (second or 0)


def _fields(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def _run(*command: str) -> str:
    return _checked(_call(*command))


def _call(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise UserError(f"{command[0]}: not on PATH; ask on a login node of the Slurm cluster") from None
    except subprocess.TimeoutExpired:
        late = f"{command[0]} did not answer within {TIMEOUT_S:g} s"
        raise SlurmError(f"{late}: is slurmctld up? (scontrol ping)") from None


def _checked(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode:
        raise SlurmError(f"{' '.join(done.args)} ended with {done.returncode}: {(done.stderr or done.stdout).strip()}")
    # --test-only answers on stderr.
    return done.stdout or done.stderr
