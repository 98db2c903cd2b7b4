"""The patterns of docs/metrics.md; tests/e2e compares the keys of every run with them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from scalerl.tracking.chart_sections import SECTIONS

DOC = Path(__file__).parents[4] / "docs" / "metrics.md"


def patterns(text: str) -> list[re.Pattern[str]]:
    """Of the first column of the tables: {a,b} expands, {name} is anything, N a number."""
    regexes = []
    for line in text.splitlines():
        cell = line.split("|")[1].strip() if line.startswith("| `") else ""
        key = cell.strip("`")
        if "/" not in key:
            continue
        pieces = re.split(r"\{([^}]*)\}", key)
        options = [piece.split(",") if at % 2 else [piece] for at, piece in enumerate(pieces)]
        for words in itertools.product(*options):
            regex = ""
            for at, word in enumerate(words):
                is_name = at % 2 and "," not in pieces[at]
                regex += ".+?" if is_name else re.sub(r"@N\b", r"@\\d+", re.escape(word))
            regexes.append(re.compile(regex + r"\Z"))
    return regexes


def test_the_charts_that_come_first_are_of_metrics_that_runs_log():
    documented = patterns(DOC.read_text(encoding="utf-8"))
    for section, charts in SECTIONS:
        for key in charts:
            example = key.replace("*", "x/x/mean@4" if key.startswith("val-core") else "x")
            assert any(pattern.match(example) for pattern in documented), f"{section}: {key}"
