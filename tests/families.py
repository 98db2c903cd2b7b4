"""The page of families: what the tests of a run showed of each family, on which layouts and in which data types.

`@pytest.mark.shows("train step", "log-probs")` says what a test shows if it passes. Family, layout and dtype (float32
if nothing says another) are keywords of the mark, or parameters of the case with these names. A keyword has the value,
or the name of the parameter that has it. `server="sglang"` makes the layout that of a server: its name, and the
parameters `tp_size` and `ep_size`. `make test` and `make test-all` run pytest twice, side by side, each with
`--families DIRECTORY/PART.json`. DIRECTORY.md is the page of all parts, written again when one of them ends.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from filelock import FileLock

THINGS = ("train step", "log-probs", "save/load", "merge", "sync", "serve")
# (thing, family, layout, dtype)
Cell = tuple[str, str, str, str]
HEAD = """# What tests showed of each family

`ok`: every test of these runs that shows it passed, in float32; `bfloat16`: in bfloat16 too. FAILED: a test did not
pass; its number is below the table. Empty: no test of these runs shows it. A layout is that of the ranks that train,
load or send; `no ranks` is a checkpoint that one process wrote; `sglang` and `embedded` are servers, with their ranks.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--families", metavar="DIRECTORY/PART.json", help="write what tests show of families: DIRECTORY.md"
    )


def pytest_configure(config: pytest.Config) -> None:
    # A worker of xdist sends its reports to the process that has the page.
    if config.getoption("families") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Part(config), "part of the page of families")


def pytest_itemcollected(item: pytest.Item) -> None:
    callspec = getattr(item, "callspec", None)
    for mark in item.iter_markers("shows"):
        try:
            cells = cells_of(mark.args, mark.kwargs, callspec.params if callspec else {})
        except ValueError as error:
            raise pytest.UsageError(f"{item.nodeid}: {error}") from error
        # Properties travel with the reports, from workers too.
        item.user_properties.append(("shows", cells))


def cells_of(things: Sequence[str], said: Mapping[str, str], params: Mapping[str, Any]) -> list[Cell]:
    """ValueError: a thing that is none, or a case without family or layout."""
    values = {"dtype": "float32"} | {name: params[name] for name in ("family", "layout", "dtype") if name in params}
    values |= {name: params.get(value, value) for name, value in said.items()}
    if "server" in values:
        sizes = [f"{name[:2]}{params[name]}" for name in ("tp_size", "ep_size") if params.get(name, 1) > 1]
        values["layout"] = " ".join([values.pop("server"), *(["_".join(sizes)] if sizes else [])])
    if not things or set(things) - set(THINGS) or values.keys() != {"family", "layout", "dtype"}:
        raise ValueError(f"shows{tuple(things)} of {dict(values)}: needs some of {THINGS}, a family and a layout")
    where = (str(values["family"]), str(values["layout"]), str(values["dtype"]).removeprefix("torch."))
    return [(thing, *where) for thing in things]


class Part:
    """What one run of pytest showed."""

    def __init__(self, config: pytest.Config) -> None:
        self.file = config.rootpath / config.getoption("families")
        self.page = self.file.parent.with_suffix(".md")
        self.root, self.command = config.rootpath, shlex.join(map(str, config.invocation_params.args))
        self.started = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
        self.outcomes: dict[str, str] = {}
        self.cases: dict[str, dict[str, Any]] = {}

    def pytest_sessionstart(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._write("not ended, or killed")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        decides = report.when == "call" or report.outcome != "passed"
        if report.failed or (decides and name not in self.outcomes):
            # What is expected to fail shows nothing, however it ends.
            self.outcomes[name] = "skipped" if hasattr(report, "wasxfail") else report.outcome
        cells = [tuple(cell) for key, cells in report.user_properties if key == "shows" for cell in cells]
        if cells and name in self.outcomes:
            line = f"{report.location[0]}#L{(report.location[1] or 0) + 1}"
            case = self.cases.setdefault(name, {"cells": cells, "at": line, "why": ""})
            case["outcome"] = self.outcomes[name]
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                first, *more = (crash.message if crash else report.longreprtext).strip().splitlines()
                case["why"] = f"{first} {more[-1].strip()}" if more and first.endswith(":") else first

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        stopped = session.shouldfail or session.shouldstop
        if stopped or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self._write(f"NOT WHOLE ({stopped or f'exit code {int(exitstatus)}'})")
        else:
            self._write("ended")
        with FileLock(self.file.parent / "lock"):
            parts = [json.loads(file.read_text()) for file in sorted(self.file.parent.glob("*.json"))]
            self.page.write_text(page_of(parts, os.path.relpath(self.root, self.page.parent)))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"what tests showed of each family: {self.page}")

    def _write(self, state: str) -> None:
        part = {"command": self.command, "started": self.started, "state": state}
        part |= {"counts": Counter(self.outcomes.values()), "cases": self.cases}
        self.file.with_suffix(".new").write_text(json.dumps(part))
        self.file.with_suffix(".new").rename(self.file)


def page_of(parts: Iterable[dict[str, Any]], root: str) -> str:
    """Markdown. root: the project's directory as seen from the page."""
    lines, cases = [HEAD], {}
    for part in parts:
        counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(part["counts"].items()))
        lines.append(
            f"- `pytest {part['command']}`, started {part['started']} UTC, {part['state']}: {counts or 'no test'}"
        )
        cases |= part["cases"]
    by_family: dict[str, dict[tuple[str, str], dict[str, list[str]]]] = defaultdict(lambda: defaultdict(dict))
    for name, case in sorted(cases.items()):
        for thing, family, layout, dtype in case["cells"] if case["outcome"] != "skipped" else []:
            failures = by_family[family][layout, thing].setdefault(dtype, [])
            failures += [name] if case["outcome"] == "failed" else []
    for family, cells in sorted(by_family.items()):
        failures = sorted({name for by_dtype in cells.values() for names in by_dtype.values() for name in names})
        lines += ["", f"## {family}", "", f"| layout | {' | '.join(THINGS)} |", "|---" * (len(THINGS) + 1) + "|"]
        for layout in sorted({layout for layout, _ in cells}, key=_place):
            row = (_text(cells.get((layout, thing), {}), failures) for thing in THINGS)
            lines.append(f"| {layout} | {' | '.join(row)} |")
        for number, name in enumerate(failures, start=1):
            why = f": {cases[name]['why']}" if cases[name]["why"] else ""
            lines += ["", f"{number}. [`{name}`]({root}/{cases[name]['at']}){why}"]
    return "\n".join(lines) + "\n"


def _place(layout: str) -> tuple[bool, int, str]:
    """One process first, and what is not of ranks last."""
    return layout.split()[0] in ("no", "sglang", "embedded"), 0 if layout == "one" else layout.count("_") + 1, layout


def _text(by_dtype: Mapping[str, Sequence[str]], failures: Sequence[str]) -> str:
    """by_dtype: dtype -> the tests that failed."""
    words = []
    for dtype, names in sorted(by_dtype.items(), key=lambda entry: (entry[0] != "float32", entry[0])):
        numbers = ", ".join(str(failures.index(name) + 1) for name in names)
        if names:
            words.append(f"{'' if dtype == 'float32' else f'{dtype} '}FAILED ({numbers})")
        else:
            words.append("ok" if dtype == "float32" else dtype)
    return ", ".join(words)
