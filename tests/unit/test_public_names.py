"""A public class, a public function and a module have a name that no other has, so that a search for it finds one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "scalerl"
# Name -> why two modules may have it.
SHARED = {
    "DataProto": "compat's is verl's class under verl's name, which users' code imports; docs/extending.md has both",
}
SHARED_FUNCTIONS = {
    "build_parser": "the parser of each command's arguments",
    "compare": "what each command of verify compares",
    "compute_score": "verl's name of a rule of rewards, of which each module has one",
    "extract_answer": "the step of a rule before it compares; each rule has its own",
    "fit": "the loop of each kind of training",
    "generate": "makes what each module is about: the rows of a task, or the responses of a file",
    "gpg": "the advantages and the loss of one paper",
    "main": "the entry of each program",
    "register": "the decorator is verl's name, the plugin's function is SGLang's",
    "save": "of each kind of training, beside its `fit`",
    "validate": "of each kind of training, beside its `fit`",
}
# Their modules are named for the thing elsewhere that they have the keys, the rules or verl's interface of.
NAMED_FOR_ANOTHER = ("config/rules", "config/schema", "config/verl/vocabulary", "compat")
SHARED_STEMS = {
    "batch": "the controller's batch; the reward manager `batch`",
    "chat": "chat templates; the command",
    "command": "the command line of each package that has one",
    "correction": "the meaning of the keys of what algorithms/ computes",
    "engine": "the trainer's engine; the embedded one of servers",
    "errors": "the errors of each package",
    "files": "data files; the files of a new project",
    "flash_attention": "its use; the program that probes it",
    "flops": "the sizes of a family's model that the metric is computed from",
    "generation": "the command; the package that it calls",
    "host": "the machine that is probed; the host of a server",
    "judge": "its servers; its question",
    "plan": "of a step, of a job, of memory: `balance`, `launch` or `memory_plan` says which",
    "preflight": "the checks before a job's Ray, and before a run",
    "protocol": "the batch that workers exchange; what servers speak",
    "registry": "of functions; of families",
    "report": "what `scalerl plan` and `scalerl translate` print",
    "script": "the sbatch file that is written; verl's script that is read",
    "weights": "of a model's files; of a sync to servers",
    "worker": "of each side of the controller",
}


def public_names(path: Path, kinds: tuple[type[ast.AST], ...]) -> Iterator[str]:
    """The public classes or functions that a module defines, each once, however many overloads it has."""
    names = {
        getattr(node, "name", "_") for node in ast.parse(path.read_text(encoding="utf-8")).body if type(node) in kinds
    }
    yield from (name for name in names if not name.startswith("_"))


def stem_of(path: Path, root: Path) -> Iterator[str]:
    """The name of a module, unless it is that of a package or of another thing."""
    folder = path.relative_to(root).parent.as_posix()
    if not path.stem.startswith("__") and not folder.startswith(NAMED_FOR_ANOTHER):
        yield path.stem


def shared_names(root: Path, kind: str) -> dict[str, list[str]]:
    """The names of one kind that several modules have, and those modules.  kind: class | function | module."""
    modules: dict[str, list[str]] = {}
    for path in sorted(root.rglob("*.py")):
        if kind == "module":
            names = stem_of(path, root)
        else:
            names = public_names(path, (ast.ClassDef,) if kind == "class" else (ast.FunctionDef, ast.AsyncFunctionDef))
        for name in names:
            modules.setdefault(name, []).append(str(path.relative_to(root)))
    return {name: paths for name, paths in modules.items() if len(paths) > 1}


@pytest.mark.parametrize(
    ("kind", "allowed"), [("class", SHARED), ("function", SHARED_FUNCTIONS), ("module", SHARED_STEMS)]
)
def test_no_two_things_have_one_name(kind: str, allowed: dict[str, str]) -> None:
    paths_of_name = shared_names(ROOT, kind)
    assert {name: paths for name, paths in paths_of_name.items() if name not in allowed} == {}
    assert set(allowed) <= set(paths_of_name), "an exception that is none any more"


@pytest.mark.parametrize(
    ("kind", "second", "is_shared"),
    [
        ("class", "class Record: pass", True),
        ("class", "class Other: pass", False),
        ("class", "class _Record: pass", False),
        ("class", "Record = dict", False),
        ("class", "def make():\n    class Record: pass", False),
        ("function", "async def make(): pass", True),
        ("function", "class Maker:\n    def make(self): pass", False),
        ("function", "def _make(): pass", False),
        ("function", "from first import make", False),
    ],
)
def test_what_is_refused(tmp_path: Path, kind: str, second: str, is_shared: bool) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "first.py").write_text("class Record: pass\n\ndef make(): pass\n\ndef make(): pass\n")
    (tmp_path / "package" / "second.py").write_text(second + "\n")
    name = "Record" if kind == "class" else "make"
    assert shared_names(tmp_path, kind) == ({name: ["first.py", "package/second.py"]} if is_shared else {})


@pytest.mark.parametrize(
    ("second", "is_shared"),
    [("trainer/first.py", True), ("trainer/__init__.py", False), ("config/rules/first.py", False)],
)
def test_which_modules_are_refused(tmp_path: Path, second: str, is_shared: bool) -> None:
    for name in ("first.py", "__init__.py", second):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert shared_names(tmp_path, "module") == ({"first": ["first.py", "trainer/first.py"]} if is_shared else {})
