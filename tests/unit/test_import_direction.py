"""Imports inside scalerl go from a higher layer to a lower one, and a heavy package stays with its owner."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "scalerl"
# A module is a file or a package directly below scalerl/.
LAYERS = [
    {
        "byte_units",
        "cache_directory",
        "errors",
        "garbage",
        "model_files",
        "nvidia",
        "optional_imports",
        "random_states",
        "scratch",
        "whole_file",
    },
    # Registries know from it what is the user's own.
    {"user_code"},
    {"protocol", "config", "configs", "metrics"},
    # checkpoint is files: an engine of parallel writes them, merge reads them.
    {"algorithms", "balance", "checkpoint", "families", "data", "rewards", "runtime", "tracking"},
    {"parallel", "merge"},
    # The cluster's groups of workers have the layouts of parallel.
    {"cluster"},
    # Servers are processes of the cluster.
    {"servers"},
    # hybrid joins parallel and servers.
    {"hybrid", "rollout"},
    # The workers host engines, weight sync and checkpoints. memory_plan counts what all of these take.
    {"controller", "memory_plan", "probes"},
    {"inference", "trainer", "translate", "doctor", "init"},
    # It checks a run as the trainer does before it starts.
    {"launch", "verify"},
    # Nothing of a run imports compat.
    {"cli", "compat"},
]
LAYER = {module: number for number, modules in enumerate(LAYERS) for module in modules}
ONLY_IN = {
    "megatron": {"parallel"},
    "sglang": {"servers", "probes"},
    "mlflow": {"tracking"},
    "tensorboard": {"tracking"},
    "wandb": {"tracking"},
    "swanlab": {"tracking"},
    "reasoning_gym": {"data", "rewards"},
    "ray": {"compat", "cluster", "servers", "controller", "trainer", "inference", "verify"},
    "hydra": {"config"},
    "omegaconf": {"config"},
}
# Of a rollout worker, what is held, dealt and dumped: it knows nothing of how the samples are made.
HELD = [ROOT / "controller" / "sampling" / f"{name}.py" for name in ("held_batches", "dump", "texts")]
MAKES_SAMPLES = {"servers", "rollout", "rewards"}
# The one module of the sampling side that calls ranks: a call names a method of their workers, which must be imported.
CALLS_RANKS = "policy_servers"
# Modules that must work where a package is not installed, whatever they import on the way.
WITHOUT = {
    "config": {"torch", "megatron", "sglang", "ray", "mlflow"},
    "families": {"megatron", "sglang", "ray", "mlflow"},
    "checkpoint": {"megatron", "sglang", "ray", "mlflow"},
    "merge": {"megatron", "sglang", "ray", "mlflow"},
}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, those inside functions and `import_module("...")` included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            stem = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{stem}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__", "importorskip"):
                yield node.lineno, str(node.args[0].value)


def module_of(path: Path, root: Path) -> str:
    return path.relative_to(root).parts[0].removesuffix(".py")


def violations(root: Path) -> list[str]:
    messages = []
    for path in sorted(root.rglob("*.py")):
        module = module_of(path, root)
        if module == "__init__":
            module_layer = -1
        elif module in LAYER:
            module_layer = LAYER[module]
        else:
            messages.append(f"{path.relative_to(root)}: {module} has no place in the map")
            continue
        for line, name in imports(path):
            messages += (f"{path.relative_to(root)}:{line}: {text}" for text in breaches(module, module_layer, name))
    return messages + needs_what_it_must_not(root)


def breaches(module: str, layer: int, name: str) -> Iterator[str]:
    top, *rest = name.split(".")
    if not top:
        yield f"relative import of {name}"
    elif top == "scalerl" and rest and rest[0] in LAYER:
        if rest[0] != module and LAYER[rest[0]] >= layer:
            yield f"{module} (layer {layer}) imports {rest[0]} (layer {LAYER[rest[0]]})"
    elif top in ONLY_IN and module not in ONLY_IN[top]:
        yield f"{top} is imported in {', '.join(sorted(ONLY_IN[top]))} alone"


def needs_what_it_must_not(root: Path) -> list[str]:
    """Follow the imports between modules: what a module needs in the end, at most."""
    direct: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        names = (name.split(".") for _, name in imports(path))
        tops = {parts[1] if parts[0] == "scalerl" and len(parts) > 1 else parts[0] for parts in names}
        direct.setdefault(module_of(path, root), set()).update(tops)
    messages = []
    for module, refused in WITHOUT.items():
        needed, front = set(), [module]
        while front:
            fresh = direct.get(front.pop(), set()) - needed
            needed |= fresh
            front += [name for name in fresh if name in LAYER]
        messages += [f"{module} needs {package}, through what it imports" for package in sorted(needed & refused)]
    return messages


def test_imports_keep_to_the_map():
    assert violations(ROOT) == []


def test_what_a_rollout_worker_holds_does_not_depend_on_how_it_is_made():
    made_by = {"scalerl.controller.sampling.worker", "scalerl.controller.sampling.scoring"}
    for path in HELD:
        names = [name for _, name in imports(path)]
        assert not [name for name in names if name.split(".")[1:2] and name.split(".")[1] in MAKES_SAMPLES], path
        assert not [name for name in names if name.rpartition(".")[0] in made_by], path


def users_of(package: str, folder: Path) -> set[str]:
    """The modules of a folder that import something of a package."""
    return {
        path.stem
        for path in folder.rglob("*.py")
        if any(name == package or name.startswith(f"{package}.") for _, name in imports(path))
    }


def test_of_the_sampling_side_policy_servers_alone_calls_the_ranks():
    controller = ROOT / "controller"
    assert users_of("scalerl.controller.training", controller / "sampling") == {CALLS_RANKS}
    assert users_of("scalerl.controller.sampling", controller / "training") == set()


@pytest.mark.parametrize(
    ("code", "calls"),
    [
        ("from scalerl.controller.training.rl_worker import RLWorker", True),
        ("def ask():\n    from scalerl.controller import training", True),
        ("from scalerl.cluster.worker_group import WorkerGroup", False),
        ("from scalerl.controller.training_notes import rows", False),
    ],
)
def test_another_module_that_calls_the_ranks_is_found(tmp_path: Path, code: str, calls: bool):
    (tmp_path / "rollout.py").write_text(code)
    assert users_of("scalerl.controller.training", tmp_path) == ({"rollout"} if calls else set())


def layers_of_the_page() -> list[set[str]]:
    page = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", page.partition("## Layers")[2], re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(len(rows)))
    return [set(re.findall(r"`(\w+)`", modules)) for _, modules in rows]


def test_the_page_has_the_layers_of_this_test():
    assert layers_of_the_page() == LAYERS


def test_every_module_of_the_package_is_in_the_map():
    names = {p.name.removesuffix(".py") for p in ROOT.iterdir() if p.name != "__init__.py"}
    assert names - set(LAYER) - {"__pycache__", "py.typed"} == set()


@pytest.mark.parametrize(
    ("module", "code", "breach"),
    [
        (
            "parallel",
            "from scalerl.servers.client import RolloutClient",
            "parallel (layer 4) imports servers (layer 6)",
        ),
        ("config", "from scalerl import trainer", "config (layer 2) imports trainer (layer 9)"),
        ("data", "def f():\n    import scalerl.parallel.engine", "data (layer 3) imports parallel (layer 4)"),
        ("trainer", "from megatron.core import tensor_parallel", "megatron is imported in"),
        ("trainer", "import importlib\nimportlib.import_module('sglang.srt')", "sglang is imported in"),
        ("hybrid", "from .sync import plan", "relative import of .sync.plan"),
        ("trainer", "from scalerl.compat import collate_fn", "trainer (layer 9) imports compat (layer 11)"),
        ("utils", "", "utils has no place in the map"),
        ("families", "from scalerl.config import schema\nimport megatron", "families needs megatron"),
    ],
)
def test_a_breach_is_listed(tmp_path, module, code, breach):
    (tmp_path / module).mkdir()
    (tmp_path / module / "file.py").write_text(code)
    assert any(breach in text for text in violations(tmp_path))


def test_what_a_module_needs_is_followed_through_others(tmp_path):
    for module, code in {"merge": "from scalerl.families import table", "families": "import torch.nn, mlflow"}.items():
        (tmp_path / f"{module}.py").write_text(code)
    assert "merge needs mlflow, through what it imports" in violations(tmp_path)


def test_what_the_map_allows_is_not_listed(tmp_path):
    for module, code in {
        "trainer": "import ray\nfrom scalerl.controller import groups\nfrom scalerl.config import compose",
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
            [f"scalerl.trainer.{name}" for name in ("main_ppo", "main_sft", "build", "preflight")],
            ["megatron"],
            id="driver",
        ),
        # Torch's checkpoints, with SymPy, are most of a second: nothing is saved.
        pytest.param(
            ["scalerl.trainer.preflight"],
            ["megatron", "torch.distributed.checkpoint", "sympy"],
            id="launch and dry run",
        ),
        # It starts and watches a server, one for each replica.
        pytest.param(["scalerl.servers.host", "scalerl.servers.client"], ["torch"], id="host of a server"),
        # Which transformers would import: scikit-learn with pandas, SciPy for losses of other models too. Its arguments
        # are a server's configuration.
        pytest.param(
            ["scalerl.servers.embedded.server"],
            ["sklearn", "scipy", "torch._dynamo.convert_frame", "omegaconf"],
            id="embedded engine",
        ),
    ],
)
def test_what_a_process_needs_is_all_that_it_imports(modules: list[str], packages: list[str]) -> None:
    code = f"import sys, {', '.join(modules)}; sys.exit(' '.join({{*{packages}}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stderr.strip() == ""
