"""The sbatch file of a run: it sets options and variables, and calls scripts/ray.sbatch, which does the work."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent / "scripts"
LAUNCHER = "ray.sbatch"
# In variables and command: stands for the seed of a task of an array.
SEED = "\0"
HEAD = """\
#!/bin/bash
# Written by `scalerl launch slurm`. It may be edited, and submitted by hand: sbatch THIS_FILE
# What it starts, its variables, log files and exit codes: docs/slurm.md
"""
# ray.sbatch does so for whatever else is missing.
WITHOUT_LAUNCHER = rf"""
if [[ ! -r $SCALERL_LAUNCHER/{LAUNCHER} ]]; then
  echo "error: no $SCALERL_LAUNCHER/{LAUNCHER} on $SLURMD_NODENAME"
  # A node that has lost it since the first attempt: the job starts again without that node.
  if ((${{SLURM_RESTART_COUNT:-0}} > 0)) && scontrol requeue "$SLURM_JOB_ID"; then
    trap '' TERM
    excluded=$(scontrol -o show job "$SLURM_JOB_ID" | sed -n 's/.* ExcNodeList=\([^ ]*\).*/,\1/p')
    until scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$SLURMD_NODENAME${{excluded#,(null)}}"; do sleep 1; done
  fi
  exit 70
fi
"""


@dataclass(frozen=True)
class SbatchFile:
    """An sbatch file.

    options: options of sbatch by name, without dashes; None for an option without a value.
    seeds: one for each task of the array; () for a job that is none.
    """

    options: Mapping[str, str | None]
    variables: Mapping[str, str]
    command: Sequence[str]
    seeds: Sequence[int] = ()

    def text(self) -> str:
        """The content of the file."""
        options = {**launcher_options(), **self.options}
        lines = [HEAD.rstrip(), *(_directive(name, value) for name, value in options.items()), ""]
        if self.seeds:
            lines += [f"seeds=({' '.join(map(str, self.seeds))})", "seed=${seeds[SLURM_ARRAY_TASK_ID]}"]
        variables = {"SCALERL_LAUNCHER": str(SCRIPTS), **self.variables}
        lines += [f"export {name}={_quoted(value)}" for name, value in variables.items()]
        program = f'exec bash "$SCALERL_LAUNCHER/{LAUNCHER}" {shlex.join(self.command[:2])}'
        start = " \\\n  ".join([program, *map(_quoted, self.command[2:])])
        return "\n".join([*lines, WITHOUT_LAUNCHER, start, ""])


def launcher_options() -> dict[str, str | None]:
    """The options of sbatch that ray.sbatch itself has, by name; None for an option without a value."""
    text = (SCRIPTS / LAUNCHER).read_text(encoding="utf-8")
    directives = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text, re.MULTILINE)
    return {name: value or None for name, value in directives}


def _quoted(text: str) -> str:
    return '"$seed"'.join(shlex.quote(part) if part else "" for part in text.split(SEED)) or "''"


def _directive(name: str, value: str | None) -> str:
    return f"#SBATCH --{name}" + ("" if value is None else f"={shlex.quote(value)}")
