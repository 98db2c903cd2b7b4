"""The page of a report: its sections, and the HTML that holds them, its styles and plotly, and loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from scalerl import __version__
from scalerl.errors import UserError
from scalerl.extras.report import against_plan, charts, who_waited
from scalerl.extras.report.alarms import alarms
from scalerl.extras.report.charts import Chart, Figure
from scalerl.extras.report.conversations import Compared, compared
from scalerl.extras.report.faults import fault_figure, faults
from scalerl.extras.report.run_files import RunFiles
from scalerl.tracking.console import duration

# What draws, and what fills the page: the extra `report`.
PACKAGES = ("plotly", "jinja2")
# Keys whose values say nothing about what two runs do otherwise.
_OF_PLACE = ("trainer.default_local_dir", "trainer.experiment_name", "trainer.rollout_data_dir")


@dataclass(frozen=True)
class Section:
    """A section of the page.  says: sentences above its figures.  figures: those that are there.

    tall: they need the whole width.
    """

    title: str
    says: Sequence[str]
    figures: Sequence[Figure] = ()
    tall: bool = False


def check_installed() -> None:
    """Raises UserError, with what to install, where a package of the extra is not there."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise UserError(f"scalerl report needs {' and '.join(missing)}: pip install 'scalerl[report]'")


def page(run: RunFiles, other: RunFiles | None = None) -> str:
    """The HTML of a run's report.  other: a run that it is compared with."""
    import jinja2
    from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingImports]  # an optional package

    here = files(__package__ or "")
    scripts = [get_plotlyjs(), (here / "page.js").read_text(encoding="utf-8")]
    # Undefined names are mistakes of ours; all values are escaped.
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string((here / "page.html").read_text(encoding="utf-8")).render(
        run=run,
        other=other,
        facts=facts(run),
        other_facts=None if other is None else facts(other),
        changed=[] if other is None else changed_keys(run, other),
        alarms=alarms(run),
        sections=sections(run, other),
        samples=samples(run),
        style=(here / "page.css").read_text(encoding="utf-8"),
        scripts=scripts,
        # Nothing but these scripts runs, whatever a sample holds.
        hashes=[base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts],
        version=__version__,
    )


def facts(run: RunFiles) -> dict[str, str]:
    """What the run is and what came of it, in a few words each."""
    steps = run.trained
    model = run.value("actor_rollout_ref.model.path") or run.value("model.path")
    made = {"model": model, "data": run.value("data.train_files"), "estimator": run.value("algorithm.adv_estimator")}
    if steps:
        seconds = sum(run.steps[step]["timing_s/step"] for step in steps)
        made["steps"] = f"{steps[-1]}, in {duration(seconds)}"
    for name, pattern in (("reward", "critic/score/mean"), ("loss", "train/loss"), ("validation", "val-core/*/mean@*")):
        prefix, _, rest = pattern.partition("*/")
        for key in run.keys(f"{prefix}*") if rest else run.keys(pattern):
            if rest and "/mean@" not in key:
                continue
            values = run.series(key)[1]
            made[f"{name} {key.removeprefix(prefix)}" if rest else name] = f"{values[0]:.4g} → {values[-1]:.4g}"
    return {name: str(value) for name, value in made.items() if value}


def changed_keys(run: RunFiles, other: RunFiles) -> list[tuple[str, str, str]]:
    """The keys in whose values two runs differ, with both."""
    one, two = run.flat, other.flat
    return [
        (key, str(one.get(key, "–")), str(two.get(key, "–")))
        for key in sorted(one.keys() | two.keys())
        if one.get(key) != two.get(key) and key not in _OF_PLACE
    ]


def sections(run: RunFiles, other: RunFiles | None) -> list[Section]:
    """The sections with figures; one without figures and sentences is left out."""
    runs = [run] if other is None else [run, other]

    def drawn(of: Sequence[Chart]) -> list[Figure]:
        return _there([charts.curves(chart, runs) for chart in of])

    plan = against_plan.planned(run)
    found = faults(run)
    phases = [charts.phases(each, with_name=other is not None) for each in runs]
    made = [
        Section("Does it learn?", [], drawn(charts.LEARNING)),
        Section("Is it stable?", [], drawn(charts.STABILITY)),
        Section("Where does the time of a step go?", [], _there(phases), tall=True),
        Section("How fast is it?", [], drawn(charts.TIME) + _there([against_plan.seconds_figure(run, plan)])),
        *timelines(run),
        Section("Packing and padding", [], drawn(charts.PACKING)),
        Section(
            "Memory against the plan",
            against_plan.said_of_memory(run, plan),
            _there([against_plan.memory_figure(run, plan)]) + drawn(charts.MEMORY),
        ),
        Section(
            "Faults and restarts",
            [] if found else ["No fault was counted, and the run was never continued."],
            _there([fault_figure(run, found)]),
            tall=True,
        ),
    ]
    return [section for section in made if section.figures or section.says]


def _there(figures: Sequence[Figure | None]) -> list[Figure]:
    return [figure for figure in figures if figure is not None]


def timelines(run: RunFiles) -> list[Section]:
    """A section for each chosen step."""
    chosen = who_waited.chosen_steps(run)
    if not chosen:
        return [Section("Who waited for whom?", ["The run has no timeline.jsonl: trainer.logger had no file."])]
    return [
        Section(
            f"Who waited for whom? Step {step}, {name}",
            who_waited.said(run.timeline[step]),
            [who_waited.timeline_figure(run.timeline[step], f"Step {step}")],
            tall=True,
        )
        for name, step in chosen.items()
    ]


def samples(run: RunFiles) -> Mapping[str, Any]:
    """What the page says of samples: `before` and `after`, the steps, and `compared`."""
    shown: list[Compared] = compared(run)
    steps = sorted(run.answers)
    return {"compared": shown, "before": steps[0] if steps else None, "after": steps[-1] if steps else None}
