"""`scalerl launch slurm KEY=VALUE ...`: submits a run as a Slurm job, which the other subcommands look after."""

from __future__ import annotations

import argparse
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from scalerl.errors import CommandParser, UserError

USAGE = """\
usage: scalerl launch slurm [train | sft] key=value ... slurm.key=value ... [--dry-run]
       scalerl launch status RUN
       scalerl launch logs RUN [--lines N] [--follow] [--all]
       scalerl launch attach RUN [--node NODE] [COMMAND ...]
       scalerl launch cancel RUN

  slurm     check everything, write RUN/launch/job.sbatch, submit it; --dry-run stops before submitting
  status    state, attempt and nodes of the run's job, last line of the launcher, newest checkpoint
  logs      the end of the job's output; --follow shows new lines, too; --all: the end of every log of the last attempt
            (driver, nodes, servers), each line after the name of its log
  attach    a shell, or a command, on a node of the job
  cancel    end the job for good; with trainer.save_deadline_s the run saves first

RUN is trainer.default_local_dir. docs/slurm.md says what a job does.
"""
LAUNCHERS_OWN = "[scalerl "
TRACKER = "latest_checkpointed_iteration.txt"


def main(argv: Sequence[str]) -> int:
    """Runs a subcommand. Returns 0 when it is done; for `attach`, the exit code of the attached command."""
    command, *rest = argv or ["--help"]
    if command not in COMMANDS:
        if command in ("-h", "--help"):
            print(USAGE)
            return 0
        raise UserError(f"launch {command}: there is no such command; there are {', '.join(COMMANDS)}\n\n{USAGE}")
    return COMMANDS[command](rest)


def _slurm(arguments: list[str]) -> int:
    from scalerl.config import help_text
    from scalerl.launch import slurm
    from scalerl.launch.plan import make_plan
    from scalerl.launch.record import Record

    if not {"-h", "--help"}.isdisjoint(arguments):
        print(f"{USAGE}\n{help_text('launch')}\n\nKeys of the run: scalerl train --help")
        return 0
    plan = make_plan([text for text in arguments if text != "--dry-run"])
    _refuse_second_job(plan.run_dir)
    script = plan.write()
    print(f"script  {script}")
    print(f"checked {slurm.test_only(script)}")
    if "--dry-run" in arguments:
        print(f"Everything checked; --dry-run submits nothing. By hand: sbatch {script}")
        return 0
    job_id = slurm.submit(script)
    output = str(plan.script.options["output"]).replace("%j", job_id)
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    Record(job_id, now, str(script), output, str(plan.run_dir / "logs" / job_id)).write(plan.run_dir)
    devices = f" x {plan.gpus_per_node} GPUs" if plan.gpus_per_node else ""
    print(
        f"job     {job_id}: {plan.num_nodes} node{'s' * (plan.num_nodes != 1)}{devices}\n"
        f"output  {output}\n"
        f"logs    {plan.run_dir / 'logs' / job_id / 'latest'}\n"
        f"status  scalerl launch status {plan.run_dir}\n"
        f"attach  scalerl launch attach {plan.run_dir}    (srun --overlap --jobid={job_id} --pty bash)\n"
        f"cancel  scalerl launch cancel {plan.run_dir}    (scancel {job_id})"
    )
    return 0


def _refuse_second_job(run_dir: Path) -> None:
    from scalerl.launch import slurm
    from scalerl.launch.record import read_record

    record = read_record(run_dir)
    job = None if record is None else slurm.job(record.job_id)
    if record is not None and job is not None and not job.is_over:
        raise UserError(
            f"{run_dir}: its job {record.job_id} is {job.state}; wait for it, end it with scalerl launch cancel "
            f"{run_dir}, or give another trainer.default_local_dir"
        )


def _status(arguments: list[str]) -> int:
    from scalerl.launch import slurm

    run_dir = _run_dir("status", arguments)
    record = _record(run_dir)
    job = slurm.job(record.job_id)
    if job is None:
        print(f"job {record.job_id}, submitted {record.submitted_at}: Slurm no longer knows it")
    else:
        reason = f" ({job.reason})" if job.reason != "None" else ""
        code = f", exit code {job.exit_code}" if job.is_over else ""
        nodes = f", on {job.nodes}" if job.nodes else ""
        print(f"job {record.job_id}: {job.state}{reason}{code}, attempt {job.restarts}{nodes}")
        print(f"time    {job.run_time} of {job.time_limit}, submitted {record.submitted_at}")
    print(f"output  {record.output}")
    launcher_lines = [line for line in _last_lines(Path(record.output), 200) if line.startswith(LAUNCHERS_OWN)]
    if launcher_lines:
        print(f"last    {launcher_lines[-1].rstrip()}")
    tracker = run_dir / TRACKER
    if tracker.exists():
        print(f"newest  {run_dir / f'global_step_{tracker.read_text().strip()}'}")
    return 0


def _logs(arguments: list[str]) -> int:
    parser = _parser("logs")
    parser.add_argument("--lines", type=int, default=50)
    parser.add_argument("--follow", "-f", action="store_true")
    parser.add_argument("--all", "-a", action="store_true")
    options = parser.parse_args(arguments)
    record = _record(Path(options.run))
    if options.all:
        return _all_logs(Path(record.logs) / "latest", options.lines, options.follow)
    output = Path(record.output)
    if options.follow:
        return subprocess.call(["tail", "-n", str(options.lines), "-F", str(output)])
    if not output.exists():
        raise UserError(f"{output}: not there yet; the job has not begun (scalerl launch status {options.run})")
    print("".join(_last_lines(output, options.lines)), end="")
    return 0


def _all_logs(attempt: Path, lines: int, follow: bool) -> int:
    from scalerl.launch.logs import ends_of, followed

    if not attempt.exists():
        raise UserError(f"{attempt}: not there yet; the job has not begun")
    for text in ends_of(attempt, lines):
        print(text)
    if follow:
        for text in followed(attempt):
            print(text, flush=True)
    return 0


def _attach(arguments: list[str]) -> int:
    from scalerl.launch import slurm

    # Arguments after RUN and --node are the command's, options included.
    parser = _parser("attach")
    parser.add_argument("--node", help="default: the one that the run's driver is on")
    num_own = 3 if arguments[1:2] == ["--node"] else 1
    options, command = parser.parse_args(arguments[:num_own]), arguments[num_own:]
    record = _record(Path(options.run))
    job = slurm.job(record.job_id)
    if job is None or job.state != "RUNNING":
        state = "over" if job is None else job.state
        raise UserError(f"job {record.job_id} is {state}: there is no node to attach to")
    return slurm.attach(record.job_id, options.node or job.head, command)


def _cancel(arguments: list[str]) -> int:
    from scalerl.launch import slurm

    record = _record(_run_dir("cancel", arguments))
    slurm.cancel(record.job_id)
    print(f"job {record.job_id}: cancelled")
    return 0


def _parser(command: str) -> argparse.ArgumentParser:
    parser = CommandParser(prog=f"scalerl launch {command}", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="trainer.default_local_dir of the run")
    return parser


def _run_dir(command: str, arguments: list[str]) -> Path:
    return Path(_parser(command).parse_args(arguments).run)


def _record(run_dir: Path):
    from scalerl.launch.record import RECORD, read_record

    record = read_record(run_dir)
    if record is None:
        raise UserError(
            f"{run_dir / RECORD}: not found; RUN is the trainer.default_local_dir of a run that scalerl launch started"
        )
    return record


def _last_lines(path: Path, number: int) -> list[str]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", errors="replace") as file:
        return list(deque(file, maxlen=number))


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "slurm": _slurm,
    "status": _status,
    "logs": _logs,
    "attach": _attach,
    "cancel": _cancel,
}
