"""docs/testing.md names every test file, nothing that is not there, and the lanes in which each runs."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))
LANES = ("check", "test", "test-all", "gpu")


def rows() -> list[tuple[list[str], str]]:
    """(tests, lane) of each row of the guarantees' tables."""
    text = PAGE.partition("## What is promised")[2].partition("\n## ")[0]
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ") and "`tests/" in line]
    return [(re.findall(r"`(tests/[^`]+)`", tests), lane.strip()) for _, tests, lane in cells]


def files_of(named: str) -> list[str]:
    """Of a file, a folder with a slash at its end, or a test in a file."""
    path = named.partition("::")[0]
    return [file for file in FILES if file == path or (path.endswith("/") and file.startswith(path))]


def lane_of(named: str) -> str | None:
    """The first lane that runs some of it; None where there is no such test."""
    files, test = files_of(named), named.partition("::")[2]
    tests = [name for file in files for name in functions_of(file).items() if not test or name[0] == test]
    if not tests:
        return None
    lanes = {"unit": "check", "gpu": "gpu"}
    return "test-all" if all(full for _, full in tests) else lanes.get(files[0].split("/")[1], "test")


@cache
def functions_of(file: str) -> dict[str, bool]:
    """Of the functions of a file: whether the whole test is marked `full`."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {f.name: "pytest.mark.full" in {ast.unparse(mark) for mark in f.decorator_list} for f in functions}


def test_every_test_file_has_a_row() -> None:
    named = {file for tests, _ in rows() for name in tests for file in files_of(name)}
    assert set(FILES) - named == set(), "a guarantee without a row in docs/testing.md"


@pytest.mark.parametrize(("tests", "lane"), rows(), ids=lambda value: value if isinstance(value, str) else value[0])
def test_a_row_names_tests_that_exist_and_their_lane(tests: list[str], lane: str) -> None:
    assert lane in LANES and {name: lane_of(name) for name in tests} == dict.fromkeys(tests, lane)


def test_readmes_sentences_name_tests_that_exist() -> None:
    text = PAGE.partition("## README's sentences")[2]
    named = re.findall(r"`(tests/[^`]+)`", text)
    assert len(named) > 20 and None not in map(lane_of, named)
    # What README promises, make test shows.
    assert {name for name in named if lane_of(name) in ("test-all", "gpu")} == set()
