"""Turns links between files of the repository into links between pages of the site (a hook of mkdocs.yml)."""

from __future__ import annotations

import re
from typing import Any

# From the file that a link stands in to the page that it becomes.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "benchmarks/README.md": "benchmarks.md"}
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrites the links of a page; a link to a file that has no page becomes its text in code."""
    source = next((name for name, target in PAGES.items() if target == page.file.src_uri), f"docs/{page.file.src_uri}")
    if source.startswith("docs/api/"):
        return markdown
    folder = source.rpartition("/")[0]
    return LINK.sub(lambda link: f"]({_target(folder, link[1])}{link[2] or ''})", markdown)


def _target(folder: str, link: str) -> str:
    parts = folder.split("/") if folder else []
    for part in link.split("/"):
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    path = "/".join(parts)
    return PAGES.get(path, path.removeprefix("docs/"))
