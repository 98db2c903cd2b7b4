"""Makes the pages of the site that are no files of docs/. mkdocs runs it (gen-files in mkdocs.yml).

SCALERL_PYTHON: a Python that has scalerl's dependencies, for the tables that scalerl's code makes.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import mkdocs_gen_files

ROOT = Path(__file__).parents[1]
COPIES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "benchmarks/README.md": "benchmarks.md"}
# What a user's own code imports comes first.
FIRST = ("algorithms", "rewards", "data", "tracking", "rollout", "trainer")


KEYS_PROGRAM = """
from scalerl.config import help_text
for command, kind in (("train", "ppo"), ("sft", "sft"), ("generate", "generation"), ("eval", "eval")):
    print(f"## scalerl {command}\\n\\n```text\\n{help_text(kind).strip()}\\n```\\n")
"""


def write(path: str, text: str) -> None:
    with mkdocs_gen_files.open(path, "w") as page:
        page.write(text)


def packages() -> list[str]:
    found = sorted(path.parent.name for path in (ROOT / "scalerl").glob("*/__init__.py"))
    return [*FIRST, *(name for name in found if name not in FIRST)]


def printed(*arguments: str) -> str:
    """The output of a program of scalerl."""
    command = [os.environ["SCALERL_PYTHON"], "-W", "ignore", *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout


for source, target in COPIES.items():
    write(target, (ROOT / source).read_text(encoding="utf-8"))
entries = [f"- [scalerl.{name}]({name}.md)\n" for name in packages()]
write("api/index.md", "# API\n\nMade from the docstrings of each package.\n\n" + "".join(entries))
for name in packages():
    write(f"api/{name}.md", f"# scalerl.{name}\n\n::: scalerl.{name}\n")
write(
    "keys.md",
    "# All keys\n\nWhich keys has each command? Type, allowed values, default and meaning.\n\n"
    + printed("-c", KEYS_PROGRAM),
)
write(
    "verl-keys.md", "# Keys of verl\n\nWhat becomes of each key of verl?\n" + printed("-m", "scalerl.extras.verl.page")
)
