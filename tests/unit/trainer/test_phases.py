"""Whatever a step does is inside a timed part of it: read from the code of the loops, so no clock is in the way."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import ModuleType

import pytest

from scalerl.trainer import ppo, sft
from tests.e2e.step_checks import check_timing

# No work: comparisons of numbers, and bookkeeping of what is in memory.
TRIFLES = {"is_due", "is_save_due", "pop", "trained", "StepOutcome", "log_step", "is_one_pass_enough"}
TRIFLES |= {"train_step", "train_step_or_save"}
# What it does is in a part of its own.
TRIFLES |= {"profiled"}


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "?")


def is_part(node: ast.AST) -> bool:
    return isinstance(node, ast.With) and any(
        isinstance(item.context_expr, ast.Call) and name_of(item.context_expr) in ("phase", "timers")
        for item in node.items
    )


def untimed_calls(node: ast.AST) -> Iterator[str]:
    """Calls below this node that are in no `with phase(...)`."""
    if is_part(node):
        return
    if isinstance(node, ast.Call):
        yield name_of(node)
    for child in ast.iter_child_nodes(node):
        yield from untimed_calls(child)


def loop_of(code: str) -> list[ast.AST]:
    """What runs once a step: the body of fit's loop, and train_step and log_step where there are any."""
    functions = {node.name: node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}
    (loop,) = (node for node in ast.walk(functions["fit"]) if isinstance(node, ast.While))
    called = [functions[name] for name in ("train_step", "log_step") if name in functions]
    return [*loop.body, *(node for function in called for node in function.body)]


@pytest.mark.parametrize("module", [ppo, sft], ids=["ppo", "sft"])
def test_nothing_but_trifles_is_outside_the_parts(module: ModuleType) -> None:
    body = loop_of(inspect.getsource(module))
    untimed = [name for node in body for name in untimed_calls(node)]
    assert set(untimed) <= TRIFLES
    assert sum(is_part(node) for part in body for node in ast.walk(part)) >= 4


def test_a_call_outside_is_seen() -> None:
    code = """
def fit(run):
    while run:
        with run.timers("a"):
            work(deeper())
        if rest(run):
            with run.timers("b"):
                more()
"""
    assert [name for node in loop_of(code) for name in untimed_calls(node)] == ["rest"]


def test_whole_runs_notice_a_part_without_a_timer() -> None:
    timed = {"timing_s/step": 1.0, "timing_s/gen": 0.6, "timing_s/gen/wait": 0.5, "timing_s/update_actor": 0.385}
    check_timing(timed | {"timing_s/untimed": 0.015})
    with pytest.raises(AssertionError):
        check_timing(timed | {"timing_s/update_actor": 0.3, "timing_s/untimed": 0.1})
