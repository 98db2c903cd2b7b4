"""Scoring of a file's responses: scores, metrics, the printed table and the written file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from scalerl.data.response_rows import ResponseRow
from scalerl.data.tables import with_columns, write_table
from scalerl.rewards import RewardManager, ScoreRequest, ScoreResult
from scalerl.tracking.metrics.failed_samples import as_wrong
from scalerl.tracking.metrics.validation import Values, source_metrics, validation_metrics

# More than the calls that any manager runs at a time.
MAX_PENDING = 512
SCORE_COLUMNS = ("scores", "reward_extra", "reward_failed")


@dataclass(frozen=True)
class Scored:
    """The scores of all responses, row by row.  rows, data_sources, results: an entry per response; rows: its row.

    results: a response that could not be scored counts as wrong (`failed_samples.as_wrong`).
    """

    rows: list[int]
    data_sources: list[str]
    results: list[ScoreResult]

    @property
    def failed(self) -> list[ScoreResult]:
        """The results of responses that could not be scored."""
        return [result for result in self.results if result.error is not None]

    def by_source(self) -> dict[str, dict[str, Values]]:
        """Metrics by data source, variable and name."""
        return source_metrics(*self._arguments())

    def metrics(self) -> dict[str, float]:
        """The metrics under their names in trackers (`validation_metrics`)."""
        return validation_metrics(*self._arguments())

    def num_responses(self, source: str) -> dict[int, int]:
        """The number of responses of each row of a data source."""
        counts: dict[int, int] = {}
        for row, name in zip(self.rows, self.data_sources, strict=True):
            if name == source:
                counts[row] = counts.get(row, 0) + 1
        return counts

    def _arguments(self) -> tuple[list[str], list[int], list[float], list[dict[str, Any]], list[bool] | None]:
        scores, extras = [result.score for result in self.results], [result.extra for result in self.results]
        failed = [result.error is not None for result in self.results] if self.failed else None
        return self.data_sources, self.rows, scores, extras, failed


def score_rows(
    manager: RewardManager, rows: Iterable[ResponseRow], on_score: Callable[[int], None] | None = None
) -> Scored:
    """Scores every response by the manager, many at a time.  on_score: called with the number scored so far.

    Raises RewardError as the manager does; calls that still run are then abandoned.
    """
    rows_and_sources: list[tuple[int, str]] = []

    def requests() -> Iterator[ScoreRequest]:
        for row in rows:
            for number, response in enumerate(row.responses):
                rows_and_sources.append((row.row, row.data_source))
                yield ScoreRequest(
                    sample_name=f"{row.name} response {number}",
                    data_source=row.data_source,
                    prompt_str=row.prompt,
                    solution_str=response,
                    ground_truth=row.ground_truth,
                    extra_info=row.extra_info,
                )

    results = asyncio.run(_score_all(manager, requests(), on_score))
    sources = [source for _, source in rows_and_sources]
    scores = as_wrong([result.score for result in results], sources, [result.error is not None for result in results])
    counted = [replace(result, score=float(score)) for result, score in zip(results, scores, strict=True)]
    return Scored([row for row, _ in rows_and_sources], sources, counted)


async def _score_all(
    manager: RewardManager, requests: Iterator[ScoreRequest], on_score: Callable[[int], None] | None
) -> list[ScoreResult]:
    results: dict[int, ScoreResult] = {}
    numbered = enumerate(requests)

    async def take_turns() -> None:
        for number, request in numbered:
            results[number] = await manager.scored(request)
            if on_score is not None:
                on_score(len(results))

    takers = [asyncio.create_task(take_turns()) for _ in range(MAX_PENDING)]
    try:
        await asyncio.gather(*takers)
    finally:
        for taker in takers:
            taker.cancel()
        await asyncio.gather(*takers, return_exceptions=True)
    return [results[number] for number in range(len(results))]


def with_scores(table: pa.Table, scored: Scored) -> pa.Table:
    """The table with SCORE_COLUMNS, lists per row: scores, other values as JSON text, True where scoring failed."""
    responses_of_row: list[list[int]] = [[] for _ in range(len(table))]
    for response, row in enumerate(scored.rows):
        responses_of_row[row].append(response)

    def column(value: Callable[[ScoreResult], Any], kind: pa.DataType) -> pa.Array:
        values = [[value(scored.results[response]) for response in responses] for responses in responses_of_row]
        return pa.array(values, pa.list_(kind))

    return with_columns(
        table,
        {
            "scores": column(lambda result: result.score, pa.float64()),
            "reward_extra": column(lambda result: json.dumps(result.extra, default=str), pa.string()),
            "reward_failed": column(lambda result: result.error is not None, pa.bool_()),
        },
    )


def write_scores(table: pa.Table, scored: Scored, path: str) -> None:
    """Writes the table with its scores to a file.  Raises OSError."""
    write_table(with_scores(table, scored), Path(path).expanduser())


def report(scored: Scored) -> str:
    """The printed report: a block per data source, a line per variable and metric, a column per number of responses."""
    blocks = []
    for source, variables in scored.by_source().items():
        counts = scored.num_responses(source)
        fewest, most = min(counts.values()), max(counts.values())
        each = str(most) if fewest == most else f"{fewest} to {most}"
        lines = [f"{source}: {len(counts)} prompts, responses of each: {each}", *_lines(variables)]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


# Names of metrics without @n, each with its name in the report.
_SHOWN = {
    "mean": "mean",
    "std": "std",
    "best/mean": "best of n",
    "worst/mean": "worst of n",
    "maj/mean": "majority of n",
    "pass": "pass@n",
}


def _lines(variables: dict[str, Values]) -> list[str]:
    tables = {variable: _by_metric(values) for variable, values in variables.items()}
    sizes = sorted({n for table in tables.values() for line in table.values() for n in line})
    width = max(map(len, ["variable", *tables]))
    rows: list[Sequence[str]] = [("variable", "metric", *(f"n={n}" for n in sizes))]
    for variable, table in tables.items():
        for metric, values in table.items():
            cells = (f"{values[n]:.4f}" if n in values else "" for n in sizes)
            rows.append((variable if metric == "mean" else "", _SHOWN[metric], *cells))
    return [f"  {a:<{width}}  {b:<13}" + "".join(f"{cell:>10}" for cell in cells) for a, b, *cells in rows]


def _by_metric(values: Values) -> dict[str, dict[int, float]]:
    """The values of the metrics in _SHOWN, by metric and n."""
    by_metric: dict[str, dict[int, float]] = {}
    for name, value in values.items():
        metric, _, rest = name.partition("@")
        n, slash, part = rest.partition("/")
        if metric + slash + part in _SHOWN:
            by_metric.setdefault(metric + slash + part, {})[int(n)] = value
    return {metric: by_metric[metric] for metric in _SHOWN if metric in by_metric}
