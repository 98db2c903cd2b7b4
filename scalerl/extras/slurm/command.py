"""`scalerl launch slurm KEY=VALUE ...`: submits a run as a Slurm job, which the other subcommands look after."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl.errors import CommandParser, UserError
from scalerl.extras.slurm import slurm
from scalerl.extras.slurm.record import RECORD, SubmittedJob, read_record, seed_dir
from scalerl.extras.slurm.slurm import Job, SlurmError

if TYPE_CHECKING:
    from scalerl.extras.slurm.plan import Plan

USAGE = """\
usage: scalerl launch slurm [train | sft] key=value ... slurm.key=value ... [--dry-run] [--multirun]
       scalerl launch status RUN
       scalerl launch logs RUN [--lines N] [--follow] [--all] [--attempt N]
       scalerl launch attach RUN [--node NODE] [COMMAND ...]
       scalerl launch cancel RUN

  slurm     check everything, write RUN/launch/job.sbatch, submit it; --dry-run stops before submitting; --multirun
            submits a job for each value of key=a,b
  status    state, attempt and nodes of the run's job, its expected start, last line of the launcher, last step, newest
            checkpoint
  logs      the end of the job's output; --follow shows new lines, too; --all: the end of every log of the last attempt
            (driver, nodes, servers), each after its name; --attempt N: of an earlier attempt
  attach    a shell, or a command, on a node of the job
  cancel    end the job for good; with trainer.save_deadline_s the run saves first

RUN is trainer.default_local_dir. With slurm.seeds each run has RUN/seed_K; status and cancel take RUN for all of them.
docs/slurm.md says what a job does.
"""
LAUNCHERS_OWN = "[scalerl "
# Folders of an attempt that are read when the logs have led there.
_OTHER_LOGS = ("ray", "preflight")
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
    from scalerl.config import help_text, jobs_of, refuse_same_output
    from scalerl.extras.slurm.plan import make_plan

    if not {"-h", "--help"}.isdisjoint(arguments):
        print(f"{USAGE}\n{help_text('launch')}\n\nKeys of the run: scalerl train --help")
        return 0
    jobs = jobs_of(arguments) or [arguments]
    plans = [make_plan([text for text in job if text != "--dry-run"]) for job in jobs]
    refuse_same_output([str(plan.run_dir) for plan in plans], "trainer.default_local_dir")
    for plan in plans:
        _submit(plan, is_dry_run="--dry-run" in arguments)
    return 0


def _submit(plan: Plan, *, is_dry_run: bool) -> None:
    from scalerl.extras.slurm import slurm

    live = {run_dir: _live_jobs(run_dir) for run_dir in plan.run_dirs}
    if "dependency" not in plan.script.options:
        _refuse_second_job(live)
    script = plan.write()
    print(f"script  {script}")
    for note in plan.notes:
        print(f"note    {note}")
    print(f"checked {slurm.test_only(script)}")
    if is_dry_run:
        print(f"Everything checked; --dry-run submits nothing. By hand: sbatch {script}")
        return
    job_id = slurm.submit(script)
    _write_records(plan, job_id, script, live)
    _say_submitted(plan, job_id)


def _live_jobs(run_dir: Path) -> list[tuple[SubmittedJob, Job]]:
    """The jobs of a run that are not over, in the order of their submission."""
    record = read_record(run_dir)
    jobs = [] if record is None else _jobs(record)
    return [(each, job) for each, job in jobs if job is not None and not job.is_over]


def _jobs(record: SubmittedJob) -> list[tuple[SubmittedJob, Job | None]]:
    """The record's jobs and what Slurm says of each, in the order of their submission."""
    return [(each, slurm.job(each.job_id)) for each in (*record.earlier, record)]


def _refuse_second_job(live: dict[Path, list[tuple[SubmittedJob, Job]]]) -> None:
    """Raises UserError for a run with a live job: a second one would find the run's directory locked."""
    for run_dir, jobs in live.items():
        for record, job in jobs:
            raise UserError(
                f"{run_dir}: its job {record.job_id} is {job.state}; wait for it, end it with scalerl launch cancel "
                f"{run_dir}, give another trainer.default_local_dir, or let the new job wait for it: "
                "slurm.options={dependency:singleton}"
            )


def _write_records(plan: Plan, job_id: str, script: Path, live: dict[Path, list[tuple[SubmittedJob, Job]]]) -> None:
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    pattern = str(plan.script.options["output"])
    for place, run_dir in enumerate(plan.run_dirs):
        own_id = f"{job_id}_{place}" if plan.script.seeds else job_id
        earlier = [replace(record, earlier=[]) for record, _ in live[run_dir]]
        logs = str(run_dir / "logs" / own_id)
        output = output_file(pattern, job_id, place)
        SubmittedJob(own_id, now, str(script), output, logs, earlier, name=plan.name).write(run_dir)
    if plan.script.seeds:
        seeds, output = list(plan.script.seeds), output_file(pattern, job_id)
        SubmittedJob(job_id, now, str(script), output, str(plan.run_dir), seeds=seeds, name=plan.name).write(
            plan.run_dir
        )


def output_file(pattern: str, job_id: str, place: int | None = None) -> str:
    """The file of a job's output.  pattern: as sbatch takes it.  place: of a task in its array; None: `%a` stays."""
    values = {"%%": "%", "%j": job_id, "%A": job_id} | ({} if place is None else {"%a": str(place)})
    return re.sub("%.", lambda match: values.get(match[0], match[0]), pattern)


def _say_submitted(plan: Plan, job_id: str) -> None:
    devices = f" x {plan.gpus_per_node} GPUs" if plan.gpus_per_node else ""
    tasks = f"{len(plan.script.seeds)} runs of " if plan.script.seeds else ""
    print(f"job     {job_id}: {tasks}{plan.num_nodes} node{'s' * (plan.num_nodes != 1)}{devices}")
    for run_dir in plan.run_dirs:
        record = read_record(run_dir)
        assert record is not None, "just written"
        if plan.script.seeds:
            print(f"run     {run_dir}: job {record.job_id}")
        print(f"output  {record.output}\nlogs    {Path(record.logs) / 'latest'}")
    one = plan.run_dirs[0]
    attach_by_hand = "" if plan.script.seeds else f"    (srun --overlap --jobid={job_id} --pty bash)"
    print(
        f"status  scalerl launch status {plan.run_dir}\n"
        f"attach  scalerl launch attach {one}{attach_by_hand}\n"
        f"cancel  scalerl launch cancel {plan.run_dir}    (scancel {job_id})"
    )


def _status(arguments: list[str]) -> int:
    run_dir = _run_dir("status", arguments)
    record = _record(run_dir)
    for place, seed in enumerate(record.seeds):
        own_dir = Path(seed_dir(run_dir, seed))
        print(f"{chr(10) if place else ''}run     {own_dir}")
        _print_status(own_dir, _record(own_dir))
    if not record.seeds:
        _print_status(run_dir, record)
    return 0


def _print_status(run_dir: Path, record: SubmittedJob) -> None:
    try:
        jobs = _jobs(record)
    except (SlurmError, UserError) as error:
        # The files of the run are of interest just then.
        print(f"job {record.job_id}: unknown; {error}")
        jobs = []
    for each, job in jobs:
        if job is None:
            print(f"job {each.job_id}, submitted {each.submitted_at}: Slurm no longer knows it")
            continue
        # Of earlier jobs only what is still to come.
        if job.is_over and each is not record:
            continue
        reason = f" ({job.reason})" if job.reason != "None" else ""
        code = f", exit code {job.exit_code}" if job.is_over else ""
        nodes = f", on {job.nodes}" if job.nodes else ""
        print(f"job {each.job_id}: {job.state}{reason}{code}, attempt {job.restarts}{nodes}")
        starts = f", expected to start at {job.start_time}" if job.state == "PENDING" and job.start_time else ""
        print(f"time    {job.run_time} of {job.time_limit}, submitted {each.submitted_at}{starts}")
    if jobs:
        record, _ = _current(jobs)
    print(f"output  {record.output}")
    if (line := last_line(Path(record.output), lambda line: line.startswith(LAUNCHERS_OWN))) is not None:
        print(f"last    {line}")
    if (step := last_step(run_dir, Path(record.logs) / "latest")) is not None:
        print(f"step    {step}")
    tracker = run_dir / TRACKER
    if tracker.exists():
        print(f"newest  {run_dir / f'global_step_{tracker.read_text().strip()}'}")


def last_step(run_dir: Path, attempt: Path) -> str | None:
    """The last step that a run has logged, in words; None where it has logged none.

    From metrics.jsonl (trainer.logger has file), else the last line of progress in the driver's log of an attempt.
    """
    metrics = run_dir / "metrics.jsonl"
    if (line := last_line(metrics, lambda line: line.startswith('{"step"') and line.endswith("}"))) is not None:
        age_s = max(0, time.time() - metrics.stat().st_mtime)
        return f"{json.loads(line)['step']}, logged {timedelta(seconds=round(age_s))} ago"
    return last_line(attempt / "driver.log", lambda line: re.match(r"step \d+", line) is not None)


def last_line(path: Path, is_wanted: Callable[[str], bool]) -> str | None:
    """The last line of a file for which `is_wanted` is true, without its end; None where there is none."""
    if not path.exists():
        return None
    with path.open(encoding="utf-8", errors="replace") as file:
        wanted = deque((line for line in map(str.rstrip, file) if is_wanted(line)), maxlen=1)
    return wanted[0] if wanted else None


def _current(jobs: list[tuple[SubmittedJob, Job | None]]) -> tuple[SubmittedJob, Job | None]:
    """The job that runs or comes next: the first of a run's jobs that is not over, else the last."""
    return next(((record, job) for record, job in jobs if job is not None and not job.is_over), jobs[-1])


def _one_job(run_dir: Path) -> tuple[SubmittedJob, Job | None]:
    """The current job of a run. Raises UserError for the directory of an array, of which each run has its own."""
    record = _record(run_dir)
    if record.seeds:
        runs = ", ".join(seed_dir(run_dir, seed) for seed in record.seeds)
        raise UserError(f"{run_dir}: has a run for each of its slurm.seeds; give one of {runs}")
    return _current(_jobs(record))


def _logs(arguments: list[str]) -> int:
    parser = _parser("logs")
    parser.add_argument("--lines", type=int, default=50)
    parser.add_argument("--follow", "-f", action="store_true")
    parser.add_argument("--all", "-a", action="store_true")
    parser.add_argument("--attempt", type=int, metavar="N")
    options = parser.parse_args(arguments)
    record, _ = _one_job(Path(options.run))
    files, names = [Path(record.output)], "--quiet"
    if options.all or options.attempt is not None:
        # Of a link the paths are those of the next attempt, too.
        attempt = Path(record.logs) / ("latest" if options.attempt is None else f"attempt_{options.attempt}")
        files, names = _logs_of(attempt), "--verbose"
    if not files[0].exists():
        raise UserError(f"{files[0]}: not there yet; the job has not begun (scalerl launch status {options.run})")
    sys.stdout.flush()
    following = ["--follow=name", "--retry"] if options.follow else []
    return subprocess.call(["tail", names, f"--lines={options.lines}", *following, "--", *map(str, files)])


def _logs_of(attempt: Path) -> list[Path]:
    """The logs of an attempt, the driver's first, without Ray's own and those of the preflight."""
    if not attempt.exists():
        there = ", ".join(sorted(path.name for path in attempt.parent.glob("attempt_*")))
        raise UserError(f"{attempt}: not there; " + (f"there are {there}" if there else "the job has not begun"))
    paths = [path for path in sorted(attempt.rglob("*.log")) if path.relative_to(attempt).parts[0] not in _OTHER_LOGS]
    return sorted(paths, key=lambda path: path.name != "driver.log") or [attempt / "driver.log"]


def _attach(arguments: list[str]) -> int:
    # Arguments after RUN and --node are the command's, options included.
    parser = _parser("attach")
    parser.add_argument("--node", help="default: the one that the run's driver is on")
    num_own = 3 if arguments[1:2] == ["--node"] else 1
    options, command = parser.parse_args(arguments[:num_own]), arguments[num_own:]
    record, job = _one_job(Path(options.run))
    if job is None or job.state != "RUNNING":
        state = "over" if job is None else job.state
        raise UserError(f"job {record.job_id} is {state}: there is no node to attach to")
    return slurm.attach(job.number, options.node or job.head, command)


def _cancel(arguments: list[str]) -> int:
    run_dir = _run_dir("cancel", arguments)
    record = _record(run_dir)
    # The last first: a job that waits for another would begin.
    waiting = [] if record.seeds else [each for each, _ in _live_jobs(run_dir) if each.job_id != record.job_id]
    for each in (record, *reversed(waiting)):
        slurm.cancel(each.job_id)
        print(f"job {each.job_id}: cancelled")
    return 0


def _parser(command: str) -> argparse.ArgumentParser:
    parser = CommandParser(prog=f"scalerl launch {command}", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="trainer.default_local_dir of the run")
    return parser


def _run_dir(command: str, arguments: list[str]) -> Path:
    return Path(_parser(command).parse_args(arguments).run)


def _record(run_dir: Path) -> SubmittedJob:
    record = read_record(run_dir)
    if record is None:
        raise UserError(
            f"{run_dir / RECORD}: not found; RUN is the trainer.default_local_dir of a run that scalerl launch started"
        )
    return record


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "slurm": _slurm,
    "status": _status,
    "logs": _logs,
    "attach": _attach,
    "cancel": _cancel,
}
