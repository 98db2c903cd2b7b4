"""Modules of rules export rules, made in one way, about keys that exist."""

from __future__ import annotations

import importlib
import pkgutil
import typing
from types import FunctionType, ModuleType

import pytest

from scalerl.config import rules
from scalerl.config.keys import KeyTable
from scalerl.config.rules.base import Rule, rule
from scalerl.config.rules.commands import PPO_RULES, SFT_RULES
from scalerl.config.rules.generation import GENERATION_RULES
from scalerl.config.rules.rollout import ROLLOUT_RULES_ON_CUDA
from scalerl.config.schema import GenerationConfig, PPOConfig, SFTConfig

# base has what rules are made of.
MODULES = [
    importlib.import_module(f"{rules.__name__}.{module.name}")
    for module in pkgutil.iter_modules(rules.__path__)
    if module.name != "base"
]
PROGRAMS = {
    "ppo": (PPOConfig, [*PPO_RULES, *ROLLOUT_RULES_ON_CUDA]),
    "sft": (SFTConfig, SFT_RULES),
    "generation": (GenerationConfig, GENERATION_RULES),
}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_module_of_rules_exports_nothing_else(module: ModuleType) -> None:
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    functions = {
        name: value
        for name, value in public.items()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__
    }
    returned = {name: typing.get_type_hints(function)["return"] for name, function in functions.items()}
    assert {name for name, kind in returned.items() if kind not in (Rule, list[Rule])} == set()
    lists = {name: value for name, value in public.items() if name.endswith("_RULES") or "_RULES_" in name}
    assert functions or lists
    for name, value in lists.items():
        assert value and all(isinstance(one, Rule) for one in value), name
    # A rule that stands alone is in a list.
    assert [name for name, value in public.items() if isinstance(value, Rule)] == []
    alone = [value for value in vars(module).values() if isinstance(value, Rule)]
    listed = [one for value in vars(module).values() if isinstance(value, list) for one in value]
    assert all(any(one is other for other in listed) for one in alone)


@pytest.mark.parametrize("program", PROGRAMS)
def test_rules_are_about_keys_that_exist(program: str) -> None:
    schema, its_rules = PROGRAMS[program]
    leaves = KeyTable(schema).leaves
    assert len(its_rules) >= 3
    for one in its_rules:
        assert one.keys and set(one.keys) <= set(leaves), one


def test_a_decorated_function_is_a_rule() -> None:
    @rule("a.b", "c")
    def check(cfg):
        yield f"c = {cfg}: wrong"

    assert isinstance(check, Rule) and check.keys == ("a.b", "c")
    assert list(check.check(3)) == ["c = 3: wrong"]
