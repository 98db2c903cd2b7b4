"""Responses as models write them, each judged by hand: 1 is right, under the convention of the data set."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scalerl.rewards import RewardError, default_compute_score, sandbox
from tests.lanes import mostly_full

TABLES = Path(__file__).parent / "tables"
SOURCES = {
    "gsm8k": "openai/gsm8k",
    "math": "lighteval/MATH",
    "math_dapo": "math_dapo",
    "multiple_choice": "multiple_choice",
    "code": "code",
    "apps": "apps",
}


def rows_of(table: str) -> list[dict]:
    return [json.loads(line) for line in (TABLES / f"{table}.jsonl").read_text().splitlines()]


def verdict(table: str, row: dict) -> int:
    result = default_compute_score(SOURCES[table], row["response"], row["ground_truth"])
    return int((result["score"] if isinstance(result, dict) else result) == 1.0)


@pytest.mark.parametrize("table", mostly_full(SOURCES, lambda table: table not in ("code", "apps")))
def test_answer_rules_judge_each_response_of_the_table_as_a_person_does(table):
    if table in ("code", "apps"):
        try:
            sandbox.check_sandbox()
        except RewardError as error:
            pytest.skip(str(error))
    rows = rows_of(table)
    with ThreadPoolExecutor(4) as threads:
        verdicts = list(threads.map(lambda row: verdict(table, row), rows))
    judged = [row | {"rule": rule} for row, rule in zip(rows, verdicts, strict=True)]
    # "mistaken" marks what no simple rule reads; docs/rewards.md counts these.
    assert [row for row in judged if (row["rule"] != row["right"]) != row.get("mistaken", False)] == []
    assert len({(repr(row["ground_truth"]), row["response"]) for row in rows}) == len(rows) >= 150


def test_no_verdict_differs_on_the_strings_of_verls_tests():
    rows = [row for table in SOURCES for row in rows_of(table) if row.get("kind") == "verl's tests" and "verl" in row]
    assert rows and all(row["verl"] == row["right"] for row in rows)
