"""The dataclasses of the configuration: each default is written once, and a section keeps what it extends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from omegaconf import OmegaConf

from scalerl.config import help_text, schema
from scalerl.config.help import key_docs
from scalerl.config.keys import KeyTable
from scalerl.config.schema import SCHEMAS, domain_violations, domains_of
from scalerl.config.schema.actor import PPOModelConfig
from scalerl.config.schema.fields import Place, broken_checks, check, key
from scalerl.config.value_checks import TEXTS, at_least


@dataclass
class Base:
    # Number of them.
    count: int = key(3, at_least(2))
    parts: list[str] = key(["a"], TEXTS)


@dataclass
class MoreWords(Base):
    # Another comment.
    count: int = Base.count


@dataclass
class OtherDefault(Base):
    count: int = 5


@dataclass
class OtherDomain(Base):
    count: int = key(Base.count, at_least(0))


@pytest.mark.parametrize(("section", "default", "low"), [(MoreWords, 3, 2), (OtherDefault, 5, 2), (OtherDomain, 3, 0)])
def test_a_key_that_is_declared_again_keeps_what_it_does_not_change(section: type, default: int, low: int) -> None:
    assert section().count == default
    assert domains_of(section)["count"].limit == f"at least {low}"
    assert list(domain_violations(section(count=low))) == []
    ((name, text),) = domain_violations(section(count=low - 1), "a.")
    assert name == "a.count"
    assert text == f"a.count = {low - 1}: must be at least {low}; set for example a.count={low}"
    assert OmegaConf.structured(section).count == default


def test_a_list_as_default_is_each_instances_own() -> None:
    Base().parts.append("b")
    assert Base().parts == ["a"]


def test_the_example_of_a_domain_without_one_is_the_default() -> None:
    domain = domains_of(schema.RewardModelConfig)["timeout_s"]
    assert domain.limit == "above 0" and domain.example == "60"


def test_help_shows_what_a_key_may_be() -> None:
    docs = {doc.key: doc for doc in key_docs("ppo")}
    assert docs["trainer.device"].domain == "one of auto, cuda, cpu"
    # The type says that it may be null.
    assert docs["trainer.total_training_steps"].domain == "at least 1"
    assert docs["data.shuffle"].domain == ""
    # Of the section that it extends.
    assert docs["critic.ppo_epochs"].domain == domains_of(PPOModelConfig)["ppo_epochs"].limit == "at least 1"
    lines = help_text("ppo").splitlines()
    assert "  trainer.total_training_steps (int | null: at least 1) = null" in lines
    assert "  data.shuffle (bool) = true" in lines


@dataclass
class Inner:
    low: int = key(1, at_least(0))
    high: int = key(2, at_least(0))
    unused: int = key(0, at_least(0), only_with="low=1|2")

    @check("low", "high")
    def in_order(self, at: Place) -> Iterator[str]:
        if self.low > self.high:
            yield f"{at('low')} = {self.low}: must be at most {at('high')} = {self.high}"


@dataclass
class Outer:
    first: Inner = dataclasses.field(default_factory=Inner)
    second: Inner = dataclasses.field(default_factory=Inner)
    count: int = key(1, at_least(0))

    @check("count", "first")
    def counts(self, at: Place) -> Iterator[str]:
        if at.device == "cuda" and self.count < self.first.low:
            yield f"count = {self.count}: too few"


def test_checks_of_all_sections_run_with_the_place_of_the_section() -> None:
    config = Outer(Inner(low=3), Inner(low=5, unused=7))
    first, unused, second = broken_checks(config, Place())
    assert first == "first.low = 3: must be at most first.high = 2"
    assert unused == "second.unused = 7: has no effect when second.low = 5; set second.low=1 or 2, or leave " + (
        "second.unused out"
    )
    assert second == "second.low = 5: must be at most second.high = 2"
    assert next(broken_checks(config, Place(device="cuda"))) == "count = 1: too few"
    assert list(broken_checks(config, Place(), without={"first", "second"})) == []


@pytest.mark.parametrize(
    ("wrong", "told"),
    [("", []), ("first.high", ["second.low"]), ("first", ["second.low"]), ("count", ["first.low", "second.low"])],
)
def test_a_check_waits_for_its_own_keys(wrong: str, told: list[str]) -> None:
    config = Outer(Inner(low=3), Inner(low=5), count=2)
    place = Place(device="cuda", wrong=frozenset({wrong}))
    assert [text.split(" ")[0] for text in broken_checks(config, place)] == told


@pytest.mark.parametrize("kind", SCHEMAS)
def test_checks_are_about_keys_that_exist(kind: str) -> None:
    """Those of the section, or dotted ones from the root."""
    table = KeyTable(SCHEMAS[kind])
    prefixes = {leaf.owner: leaf.key.removesuffix(leaf.name) for leaf in table.leaves.values()} | {SCHEMAS[kind]: ""}
    num_checks = 0
    for owner, prefix in prefixes.items():
        for name in dir(owner):
            keys = getattr(getattr(owner, name), "_checked_keys", ())
            num_checks += bool(keys)
            fields = {field.name for field in dataclasses.fields(owner)}
            dotted = [prefix + each if each.split(".")[0] in fields else each for each in keys]
            # A run alone has a device.
            unknown = {each for each in dotted if table.kind(each) == "unknown"} - {"trainer.device"}
            assert unknown == set(), (owner, name)
    assert num_checks >= {"ppo": 40, "sft": 20, "generation": 2}.get(kind, 0)
