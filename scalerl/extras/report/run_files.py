"""What a run has left in its directory: configuration, metrics, timeline and tables of answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scalerl.config.save import RESOLVED_CONFIG, read_resolved
from scalerl.errors import UserError
from scalerl.tracking.backend import flat_config
from scalerl.tracking.jsonl import METRICS, TIMELINE, read_lines, read_metrics
from scalerl.tracking.timeline import Span

# Columns of a dump that show a sample.
_SHOWN = ("prompt", "response", "score", "prompt_uid")


@dataclass(frozen=True)
class Answer:
    """A sample as text. Nobody has looked at it: it may hold anything."""

    prompt: str
    response: str
    score: float
    ground_truth: str = ""


@dataclass(frozen=True)
class RunFiles:
    """A run as its files have it.

    config: nested values; {} where it has none.  steps: step -> metrics.  timeline: step -> spans.
    resumes: (step, seconds since 1970 of what came next, where that is known) of each time that it was continued.
    answers: step -> what was asked then and what was answered, the same prompts in each step.
    """

    directory: Path
    config: Mapping[str, Any]
    steps: Mapping[int, Mapping[str, float]]
    timeline: Mapping[int, Sequence[Span]] = field(default_factory=dict)
    resumes: Sequence[tuple[int, float | None]] = ()
    answers: Mapping[int, Sequence[Answer]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.value("trainer.experiment_name", self.directory.name))

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key of the configuration; the default where it is not there."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value

    @property
    def flat(self) -> dict[str, Any]:
        """The configuration by dotted keys, without secrets."""
        return flat_config(self.config)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """The steps that have a metric, and its values."""
        steps = [step for step in sorted(self.steps) if key in self.steps[step]]
        return steps, [float(self.steps[step][key]) for step in steps]

    def keys(self, pattern: str) -> list[str]:
        """The metrics of that name; of one that ends with *, all that begin so, sorted."""
        known = {key: None for data in self.steps.values() for key in data}
        if pattern.endswith("*"):
            return sorted(key for key in known if key.startswith(pattern[:-1]))
        return [pattern] if pattern in known else []

    @property
    def trained(self) -> list[int]:
        """The steps that were trained, in order."""
        return [step for step in sorted(self.steps) if "timing_s/step" in self.steps[step]]


def read_run(directory: Path) -> RunFiles:
    """Reads a run's directory. Raises UserError where it has no metrics, or a file that cannot be read."""
    if not (directory / METRICS).is_file():
        raise UserError(
            f"{directory} has no {METRICS}: give the directory of a run (trainer.default_local_dir) that had file in "
            "trainer.logger"
        )
    config = read_resolved(directory / RESOLVED_CONFIG) or {}
    try:
        steps = read_metrics(directory)
        timeline = {line["step"]: [Span(*span) for span in line["spans"]] for line in read_lines(directory / TIMELINE)}
        numbers = {step: {key: float(value) for key, value in data.items()} for step, data in steps.items()}
        return RunFiles(directory, config, numbers, timeline, _resumes(directory), _answers(directory, config))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{directory}: a file of the run cannot be read: {error!r}") from error


def _resumes(directory: Path) -> list[tuple[int, float | None]]:
    """When the run was continued: from its timeline, or without times from its metrics."""
    resumes: list[tuple[int, float | None]] = []
    file = directory / TIMELINE
    file = file if file.is_file() else directory / METRICS
    waiting: list[int] = []
    for text in file.read_text(encoding="utf-8").rpartition("\n")[0].splitlines():
        line = json.loads(text)
        if "resumed_from" in line:
            waiting.append(line["resumed_from"])
        elif waiting:
            begin_s = min((span[2] for span in line.get("spans", ())), default=None)
            resumes += [(step, begin_s) for step in waiting]
            waiting = []
    return [*resumes, *((step, None) for step in waiting)]


def _answers(directory: Path, config: Mapping[str, Any]) -> dict[int, list[Answer]]:
    """Of the first and the last step that have them: the table of a validation, else the dump of the step's samples."""
    files = {_step_of(file): file for file in (directory / "tables" / "val" / "generations").glob("step_*.json")}
    if files:
        return {step: _of_table(files[step]) for step in sorted({min(files), max(files)})}
    dumps = config.get("trainer", {}).get("rollout_data_dir")
    files = {_step_of(file): file for file in Path(dumps).glob("step_*.parquet")} if dumps else {}
    return {step: _of_dump(files[step]) for step in sorted({min(files), max(files)})} if files else {}


def _step_of(file: Path) -> int:
    return int(file.stem.rpartition("_")[2])


def _of_table(file: Path) -> list[Answer]:
    table = json.loads(file.read_text(encoding="utf-8"))
    at = {name: place for place, name in enumerate(table["columns"])}
    return [
        Answer(row[at["prompt"]], row[at["response"]], float(row[at["score"]]), row[at["ground_truth"]])
        for row in table["data"]
    ]


def _of_dump(file: Path) -> list[Answer]:
    import pyarrow.parquet as pq

    rows = pq.read_table(file, columns=list(_SHOWN)).to_pylist()
    first = {row["prompt_uid"]: row for row in reversed(rows)}
    return [Answer(row["prompt"], row["response"], float(row["score"])) for row in first.values()]
