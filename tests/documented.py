"""Finds the commands that pages and files show: blocks of shell, code in the text, comments and docstrings."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    *("README.md", "CONTRIBUTING.md", "benchmarks/README.md"),
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]
# Files whose comments or first docstring show commands.
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in (
        *("configs/**/*.yaml", "examples/**/*.yaml", "examples/**/*.py", "benchmarks/*.py", "docs/*.py"),
        *("docker/Dockerfile", "docker/*.def", "launchers/slurm/*.sbatch", "tests/gpu/*.py"),
    )
    for path in ROOT.glob(pattern)
)
# Programs that a block of a page may call.
PROGRAMS = (
    *("scalerl", "python", "python3", "pip", "make", "mlflow", "nsys"),
    *("docker", "apptainer", "sbatch", "srun", "tail"),
)
# Programs that are named in the text alone.
NAMED_PROGRAMS = ("kill", "ray", "scancel", "scontrol", "sinfo", "quickstart.py")
# Output, pictures and other languages are labelled (```text).
BLOCK = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = ("", "bash", "sh", "console")
# Stands in a page for what a reader has.
REST = "..."
# Between commands of a line.
OPERATORS = ("|", "||", "&&", ";")


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def blocks(page: str) -> list[str]:
    """The blocks of a page that a shell reads."""
    return [block for label, block in BLOCK.findall(read(page)) if label in COMMANDS]


def spans(text: str) -> list[str]:
    """The code in the text of a page or comment, outside its blocks; each once, on one line."""
    # A table's cell has \| for |.
    quoted = re.findall(r"`([^`]+)`", BLOCK.sub("", text).replace("\\|", "|"))
    return list(dict.fromkeys(" ".join(span.split()) for span in quoted))


def commands(block: str) -> list[list[str]]:
    """The words of each command of a block, each line of which has one."""
    found = []
    for line in block.replace("\\\n", " ").splitlines():
        words = words_of(line)
        assert words or not line.strip(), (
            f"{line!r} begins with no program: label its block ```text, or add the program"
        )
        found += words
    return found


def commands_in_text(page: str) -> list[list[str]]:
    """The words of each command in the text of a page, outside its blocks."""
    return [words for span in spans(read(page)) for words in words_of(span)]


def commands_in_comments(source: str) -> list[list[str]]:
    """The words of each command in the comments of a file, or in the docstring at the beginning of a Python file."""
    text = read(source)
    if source.endswith(".py"):
        lines = (ast.get_docstring(ast.parse(text)) or "").splitlines()
    else:
        lines = [line.strip().removeprefix("#").strip() for line in text.splitlines() if line.lstrip().startswith("#")]
    shown = [line.strip() for line in lines if line.split(maxsplit=1)[:1] and "`" not in line]
    return [words for line in [*shown, *spans("\n".join(lines))] for words in words_of(line)]


def words_of(line: str) -> list[list[str]]:
    """The words of each command of a line, as usages are written too: [--optional N], one|another.

    Empty for prose, for a line that begins with no program, and for one that has nothing but that. Variables before a
    program are left out.
    """
    if re.search(r"[^. ]\.$", line) or line.startswith("["):
        return []
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # It has an apostrophe.
        return []
    split_words: list[list[str]] = [[]]
    for word in words:
        if word in OPERATORS:
            split_words.append([])
        elif word := _unbracketed(word):
            split_words[-1].append(word)
    found = []
    for command in split_words:
        while command and re.match("[A-Z_]+=", command[0]):
            command = command[1:]
        if len(command) > 1 and _program(command[0]):
            found.append([_program(command[0]), *command[1:]])
    return found


def _unbracketed(word: str) -> str:
    """Without the brackets around what may be left out, and the first of alternatives."""
    if word.startswith("["):
        word = word[1:]
    if word.endswith("]") and word.count("[") < word.count("]"):
        word = word[:-1]
    return word.partition("|")[0]


def _program(word: str) -> str:
    """The program that a word names, also by its path; "" where it names none."""
    name = word.rsplit("/", 1)[-1]
    return name if name in (*PROGRAMS, *NAMED_PROGRAMS) and word.rsplit("/", 1)[0].find("=") < 0 else ""
