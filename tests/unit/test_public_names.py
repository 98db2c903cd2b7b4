"""A public class has a name that no other module's class has, so that a reader who searches for it finds one thing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "scalerl"
# Name -> why two modules may have it.
SHARED = {
    "DataProto": "compat's is verl's class under verl's name, which users' code imports; docs/extending.md has both",
}


def shared_names(root: Path) -> dict[str, list[str]]:
    """The names of public classes that several modules define, and those modules."""
    modules: dict[str, list[str]] = {}
    for path in sorted(root.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules.setdefault(node.name, []).append(str(path.relative_to(root)))
    return {name: paths for name, paths in modules.items() if len(paths) > 1}


def test_no_two_modules_have_a_class_of_one_name() -> None:
    found = shared_names(ROOT)
    assert {name: paths for name, paths in found.items() if name not in SHARED} == {}
    assert set(SHARED) <= set(found), "an exception that is none any more"


@pytest.mark.parametrize(
    ("second", "is_shared"),
    [
        ("class Record: pass", True),
        ("class Other: pass", False),
        ("class _Record: pass", False),
        ("Record = dict", False),
        ("def make():\n    class Record: pass", False),
    ],
)
def test_what_is_refused(tmp_path: Path, second: str, is_shared: bool) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "first.py").write_text("class Record: pass\n")
    (tmp_path / "package" / "second.py").write_text(second + "\n")
    assert shared_names(tmp_path) == ({"Record": ["first.py", "package/second.py"]} if is_shared else {})
