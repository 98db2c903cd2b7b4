"""The record of a run's jobs: `launch/job.json` in the run's directory, written at each submission."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from scalerl.base.files import whole_file
from scalerl.errors import UserError

RECORD = Path("launch/job.json")


@dataclass(frozen=True)
class SubmittedJob:
    """The last job of a run that was submitted.

    submitted_at: ISO time, with the zone.  earlier: jobs of the run that were not over when this one was submitted.
    seeds: of an array; each of its runs has another record.  name: trainer.experiment_name.
    """

    job_id: str
    submitted_at: str
    script: str
    output: str
    logs: str
    earlier: list[SubmittedJob] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    name: str = ""

    def write(self, run_dir: Path) -> None:
        """Writes the record into a run's directory, whole or not at all."""
        path = run_dir / RECORD
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(json.dumps(asdict(self), indent=2).encode() + b"\n")


def read_record(run_dir: Path) -> SubmittedJob | None:
    """Reads the record of a run; None where nothing was launched. Raises UserError for a file that is no record."""
    path = run_dir / RECORD
    if not path.exists():
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return SubmittedJob(**fields | {"earlier": [SubmittedJob(**each) for each in fields.get("earlier", [])]})
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: not a record of a launched job ({error}); remove it") from None


def seed_dir(run_dir: Path, seed: int | str) -> str:
    """The directory of the run that a job array makes with a seed."""
    return str(run_dir / f"seed_{seed}")
