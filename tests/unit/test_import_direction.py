"""Imports inside scalerl go from a higher layer to a lower one, and a heavy package stays with its owner."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "scalerl"
# A module is a file or a package directly below scalerl/.
LAYERS = [
    {"errors"},
    {"base"},
    {"config", "configs", "tracking"},
    # checkpoint is files: an engine of parallel writes them, merge reads them.
    {"algorithms", "batch", "checkpoint", "models", "rewards"},
    # What a model sees of a row's pictures is in its files, and goes into a batch.
    {"data"},
    {"parallel", "merge"},
    # The cluster's groups of workers have the layouts of parallel.
    {"cluster"},
    # Servers are processes of the cluster; rollout.sync joins them and parallel.
    {"rollout"},
    {"trainer"},
    {"commands"},
    # The edges. Nothing of the core imports them: it opens a door by name (base.extras), the command line by its table.
    {"extras"},
    {"cli"},
]
LAYER = {module: number for number, modules in enumerate(LAYERS) for module in modules}
# The command line imports a command by its name.
NEVER_IMPORTED = {"extras", "cli"}
ONLY_IN = {
    "megatron": {"parallel"},
    "sglang": {"rollout", "cluster", "extras"},
    "mlflow": {"tracking"},
    "tensorboard": {"tracking"},
    "wandb": {"tracking"},
    "swanlab": {"tracking"},
    "reasoning_gym": {"commands", "rewards"},
    "ray": {"cluster", "rollout", "trainer", "commands", "extras"},
    "hydra": {"config"},
    "omegaconf": {"config"},
}
# Of a rollout worker, what is held, dealt and dumped: it knows nothing of how the samples are made.
SAMPLING = ROOT / "rollout" / "sampling"
HELD = [SAMPLING / f"{name}.py" for name in ("held_batches", "dump")]
MAKES_SAMPLES = ("scalerl.rollout", "scalerl.rewards")
# Modules that must work where a package is not installed, whatever they import on the way.
WITHOUT = {
    "config": {"torch", "megatron", "sglang", "ray", "mlflow"},
    "models": {"megatron", "sglang", "ray", "mlflow"},
    "checkpoint": {"megatron", "sglang", "ray", "mlflow"},
    "merge": {"megatron", "sglang", "ray", "mlflow"},
}


Import = tuple[int, str, bool]


def imports(path: Path) -> Iterator[Import]:
    """(line, dotted name, whether it is for types alone) of every import, those inside functions and by name too."""
    waiting: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text(encoding="utf-8")), False)]
    while waiting:
        node, for_types = waiting.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            stem = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{stem}.{alias.name}", for_types) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__", "importorskip"):
                yield node.lineno, str(node.args[0].value), for_types
        is_block = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        body = node.body if isinstance(node, ast.If) and is_block else []
        waiting += [(child, for_types or child in body) for child in ast.iter_child_nodes(node)]


def modules_of(root: Path) -> dict[str, Path]:
    """Dotted name -> file of every module below a package."""
    paths = {".".join(("scalerl", *p.relative_to(root).with_suffix("").parts)): p for p in root.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in paths.items()}


def nearest(name: str, modules: Mapping[str, object]) -> str:
    """The module that an imported name is, or is in; "" for another package's."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def violations(root: Path) -> list[str]:
    modules = {name: (path, list(imports(path))) for name, path in modules_of(root).items()}
    found = []
    for name, (path, imported) in sorted(modules.items()):
        package = name.split(".")[1] if "." in name else ""
        if package and package not in LAYER:
            found.append(f"{path.relative_to(root)}: {package} has no place in the map")
            continue
        for line, target, _ in imported:
            texts = breaches(package, LAYER.get(package, -1), target)
            found += [f"{path.relative_to(root)}:{line}: {text}" for text in texts]
    targets = {name: [target for _, target, _ in imported] for name, (_, imported) in modules.items()}
    return [*found, *needs_what_it_must_not(targets)]


def breaches(package: str, layer: int, target: str) -> Iterator[str]:
    top, *rest = target.split(".")
    if not top:
        yield f"relative import of {target}"
    elif top == "scalerl" and rest and rest[0] in LAYER:
        if rest[0] != package and (LAYER[rest[0]] >= layer or rest[0] in NEVER_IMPORTED):
            yield f"{package} (layer {layer}) imports {rest[0]} (layer {LAYER[rest[0]]})"
    elif top in ONLY_IN and package not in ONLY_IN[top]:
        yield f"{top} is imported in {', '.join(sorted(ONLY_IN[top]))} alone"


def needs_what_it_must_not(targets: Mapping[str, list[str]]) -> Iterator[str]:
    """Follow the imports between modules, inside functions too: what a package needs in the end, at most."""

    def with_packages(target: str) -> set[str]:
        parts = nearest(target, targets).split(".")
        return {".".join(parts[:end]) for end in range(1, len(parts) + 1)} & targets.keys()

    # A module is imported with the packages that it is in.
    graph = {name: set().union(*map(with_packages, names)) for name, names in targets.items()}
    for package, refused in WITHOUT.items():
        own = [name for name in targets if name.split(".")[1:2] == [package]]
        needed = {target.split(".")[0] for start in own for name in reached(start, graph) for target in targets[name]}
        yield from (f"{package} needs {name}, through what it imports" for name in sorted(needed & refused))


def circles(root: Path) -> list[list[str]]:
    """The modules that import each other, by imports inside functions too; not those for types alone."""
    modules = modules_of(root)
    graph = {
        name: {nearest(target, modules) for _, target, for_types in imports(path) if not for_types} - {name, ""}
        for name, path in modules.items()
    }
    ends = {name: reached(name, graph) for name in graph}
    groups = {frozenset(other for other in ends[name] if name in ends[other]) for name in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def reached(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    """A module and those that it imports, directly or through others."""
    seen, waiting = {start}, [start]
    while waiting:
        fresh = graph[waiting.pop()] - seen
        seen |= fresh
        waiting += fresh
    return seen


def test_imports_keep_to_the_map():
    assert violations(ROOT) == []


def test_no_modules_import_each_other():
    assert circles(ROOT) == []


def test_what_a_rollout_worker_holds_does_not_depend_on_how_it_is_made():
    held = tuple(f"scalerl.rollout.sampling.{path.stem}." for path in HELD)
    for path in HELD:
        names = [name for _, name, _ in imports(path) if name.startswith(MAKES_SAMPLES) and not name.startswith(held)]
        assert not names, path


@pytest.mark.parametrize(
    ("back", "is_circle"),
    [
        ("def f():\n    from scalerl.one import x", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from scalerl.one import x", False),
        ("from scalerl.one import x", True),
    ],
)
def test_a_circle_inside_a_package_is_found(tmp_path: Path, back: str, is_circle: bool):
    (tmp_path / "one.py").write_text("from scalerl.two import y")
    (tmp_path / "two.py").write_text(back)
    assert circles(tmp_path) == ([["scalerl.one", "scalerl.two"]] if is_circle else [])


def test_the_core_works_without_the_extras(tmp_path: Path):
    shutil.copytree(ROOT, tmp_path / "scalerl", ignore=shutil.ignore_patterns("extras", "__pycache__"))

    # An editable installation finds modules of its own folder that the copy has not.
    only_here = "import sys; sys.meta_path = [f for f in sys.meta_path if '__editable__' not in f'{f}{f.__class__}']; "

    def run(code: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-W", "ignore", "-c", only_here + code]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=env)

    # The key is verl's, and nothing is there that knows it; the preflight is imported.
    key = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    done = run(f"import scalerl.trainer.checks.preflight, scalerl.config as c; c.compose('ppo', ['{key}=1'])")
    assert f"{key}: no such key" in done.stderr
    done = run("import scalerl.cli; sys.exit(scalerl.cli.main(['plan']))")
    assert (done.returncode, "scalerl.extras" in done.stderr) == (2, True), done.stderr


def test_the_page_has_the_layers_of_this_test():
    page = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", page.partition("## Layers")[2], re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(len(rows)))
    assert [set(re.findall(r"`(\w+)`", modules)) for _, modules in rows] == LAYERS


@pytest.mark.parametrize(
    ("module", "code", "breach"),
    [
        (
            "parallel",
            "from scalerl.rollout.servers.client import RolloutClient",
            "parallel (layer 5) imports rollout (layer 7)",
        ),
        ("config", "from scalerl import trainer", "config (layer 2) imports trainer (layer 8)"),
        ("data", "def f():\n    import scalerl.parallel.engine", "data (layer 4) imports parallel (layer 5)"),
        ("trainer", "from megatron.core import tensor_parallel", "megatron is imported in"),
        ("trainer", "import importlib\nimportlib.import_module('sglang.srt')", "sglang is imported in"),
        ("rollout", "from .sync import plan", "relative import of .sync.plan"),
        ("trainer", "from scalerl.extras.plan import check", "trainer (layer 8) imports extras (layer 10)"),
        ("cli", "from scalerl.extras.plan import check", "cli (layer 11) imports extras (layer 10)"),
        ("utils", "", "utils has no place in the map"),
        ("models", "from scalerl.config import schema\nimport megatron", "models needs megatron"),
    ],
)
def test_a_breach_is_listed(tmp_path, module, code, breach):
    (tmp_path / module).mkdir()
    (tmp_path / module / "file.py").write_text(code)
    assert any(breach in text for text in violations(tmp_path))


def test_what_a_module_needs_is_followed_through_others_and_what_the_map_allows_is_not_listed(tmp_path):
    for module, code in {"merge": "from scalerl.models import table", "models": "import torch.nn, mlflow"}.items():
        (tmp_path / f"{module}.py").write_text(code)
    assert "merge needs mlflow, through what it imports" in violations(tmp_path)
    (tmp_path / "models.py").write_text("import torch.nn")
    for module, code in {
        "trainer": "import ray\nfrom scalerl.rollout import program\nfrom scalerl.config import compose",
        "parallel": "from megatron.core import mpu\nfrom scalerl.parallel import layout\nimport torch",
        "__init__": "from __future__ import annotations",
    }.items():
        (tmp_path / f"{module}.py").write_text(code)
    assert violations(tmp_path) == []


@pytest.mark.parametrize(
    ("modules", "packages"),
    [
        # Its ranks do. On a driver it would cost seconds of every start, and warnings on standard error.
        pytest.param(
            [f"scalerl.trainer.{name}" for name in ("main_ppo", "main_sft", "build", "checks.preflight")],
            ["megatron"],
            id="driver",
        ),
        # Torch's checkpoints, with SymPy, are most of a second: nothing is saved.
        pytest.param(
            ["scalerl.trainer.checks.preflight"],
            ["megatron", "torch.distributed.checkpoint", "sympy"],
            id="launch and dry run",
        ),
        # It starts and watches a server, one for each replica.
        pytest.param(
            ["scalerl.rollout.servers.host", "scalerl.rollout.servers.client"], ["torch"], id="a server's host"
        ),
        # Which transformers would import: scikit-learn with pandas, SciPy for losses of other models too. Its arguments
        # are a server's configuration.
        pytest.param(
            ["scalerl.rollout.servers.embedded.server"],
            ["sklearn", "scipy", "omegaconf"],
            id="embedded engine",
        ),
    ],
)
def test_what_a_process_needs_is_all_that_it_imports(modules: list[str], packages: list[str]) -> None:
    code = f"import sys, {', '.join(modules)}; sys.exit(' '.join({{*{packages}}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stderr.strip() == ""
