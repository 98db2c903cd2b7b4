"""Makes the pages of the site that are no files of docs/. mkdocs runs it (gen-files in mkdocs.yml)."""

from __future__ import annotations

from pathlib import Path

import mkdocs_gen_files

ROOT = Path(__file__).parents[1]
COPIES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "benchmarks/README.md": "benchmarks.md"}
# What a user's own code imports comes first.
FIRST = ("algorithms", "rewards", "data", "tracking", "rollout", "trainer")


def write(path: str, text: str) -> None:
    with mkdocs_gen_files.open(path, "w") as page:
        page.write(text)


def packages() -> list[str]:
    found = sorted(path.parent.name for path in (ROOT / "scalerl").glob("*/__init__.py"))
    return [*FIRST, *(name for name in found if name not in FIRST)]


for source, target in COPIES.items():
    write(target, (ROOT / source).read_text(encoding="utf-8"))
entries = [f"- [scalerl.{name}]({name}.md)\n" for name in packages()]
write("api/index.md", "# API\n\nMade from the docstrings of each package.\n\n" + "".join(entries))
for name in packages():
    write(f"api/{name}.md", f"# scalerl.{name}\n\n::: scalerl.{name}\n")
