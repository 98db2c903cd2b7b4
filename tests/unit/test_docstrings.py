"""A docstring's first sentence stands alone: a reader who sees only it knows what the thing is or does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "scalerl"
# A sentence that begins so goes on from the name above it, or says what a thing has not.
NO_SUBJECT = re.compile(
    r"(?:Of|In|On|At|By|From|To|For|With|Without|Within|Per|As|And|Or|But|Also|Then|It|If)\s"
    r"|(?:None|True|False|Empty):"
    r"|Has (?:\w+ )?(?:no|nothing)\b"
    # An argument of a function, in the place of what the function does.
    r"|(?:[a-z_]+, )*[a-z_]+:\s"
    # The shape of a result, without a word of what it is.
    r"|\("
    r"|(?:[A-Z]\w*(?: \w+){0,2}|\[[^\]]*\]) -> "
)


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """(line, first line) of every docstring of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text.splitlines()[0]


def violations(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root.parent)}:{line}: {text}"
        for path in sorted(root.rglob("*.py"))
        for line, text in sentences(path)
        if NO_SUBJECT.match(text)
    ]


def test_first_sentences_stand_alone() -> None:
    assert sum(1 for path in ROOT.rglob("*.py") for _ in sentences(path)) > 2000
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("text", "stands"),
    [
        ("Of every rank.", False),
        ("In the place of the run's stream.", False),
        ("Without what is measured by clocks.", False),
        ("Has skipped no update.", False),
        ("Has counted nothing.  file: a descriptor.", False),
        ("specs: of what was written, by name.", False),
        ("num_bytes, num_files: of the merge", False),
        ("False: the loss has no entropy term.", False),
        ("(row of each label, whether it is there).", False),
        ("Device -> bytes that became free on it.", False),
        ("Run id -> step -> metrics.", False),
        ("[P / cp, h, d] -> [P, h / cp, d].", False),
        ("Reads all runs: run id -> step -> metrics.", True),
        ("Compares the generators of every rank.", True),
        ("One of the ranks.", True),
        ("[S] float32: the scores.", True),
        ("Has the server load one bucket of weights.", True),
        ("metrics.jsonl as step -> numbers.", True),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, stands: bool) -> None:
    (tmp_path / "module.py").write_text(f'def function():\n    """{text}\n\n    More of it."""\n')
    assert (violations(tmp_path) == []) == stands
