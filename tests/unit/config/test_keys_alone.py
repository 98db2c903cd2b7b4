"""A key that needs others: one message names them all, each with a value to paste."""

from __future__ import annotations

import ast
import copy
import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import OmegaConf

from scalerl.config import compose
from scalerl.config.compose import composed, value_at, violations_of
from scalerl.config.keys import Leaf, inherited_keys, leaves
from scalerl.config.names import ESTIMATORS, POLICY_LOSSES, REWARD_MANAGERS
from scalerl.config.partial_config import PartialConfig
from scalerl.config.schema import LOGGERS, SCHEMAS, Kind, domains_of, model

ROLLOUT = "actor_rollout_ref.rollout"
REQUIRED: dict[Kind, dict[str, Any]] = {
    "ppo": {"data.train_files": "a.parquet", "data.val_files": "b.parquet", "actor_rollout_ref.model.path": "m"},
    "sft": {"data.train_files": "a.parquet", "model.path": "m"},
    "generation": {"data.path": "a.parquet", "model.path": "m", "data.output_path": "o.parquet"},
    "eval": {"data.path": "a.parquet"},
}
DEVICES = {"ppo": "cuda", "sft": "cuda", "generation": None, "eval": None}
NAMES = {names.key: names.own for names in (ESTIMATORS, POLICY_LOSSES, REWARD_MANAGERS)} | {
    "trainer.logger": [[name] for name in LOGGERS]
}


def overrides(kind: Kind, *more: str) -> list[str]:
    return [*(f"{key}={value}" for key, value in REQUIRED[kind].items()), *more]


@pytest.mark.parametrize(
    ("more", "n", "mini_batch"),
    [
        (["data.train_batch_size=64"], 8, 64),
        (["algorithm.adv_estimator=gae", "data.train_batch_size=512"], 1, 256),
        (["actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.ppo_mini_batch_size=512"], 2, 512),
    ],
)
def test_defaults_that_follow_from_another_key(more: list[str], n: int, mini_batch: int) -> None:
    cfg = compose("ppo", overrides("ppo", *more))
    assert cfg.actor_rollout_ref.rollout.n == n
    assert cfg.actor_rollout_ref.actor.ppo_mini_batch_size == cfg.critic.ppo_mini_batch_size == mini_batch
    assert cfg.data.gen_batch_size == cfg.data.train_batch_size


def test_critics_are_kept_as_long_as_actors() -> None:
    assert compose("ppo", overrides("ppo", "trainer.max_actor_ckpt_to_keep=3")).trainer.max_critic_ckpt_to_keep == 3


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["actor_rollout_ref.actor.checkpoint.async_save=True", "critic.checkpoint.async_save=False"], True),
        (["critic.checkpoint.async_save=True"], True),
        (["actor_rollout_ref.actor.checkpoint.async_save=False"], False),
    ],
)
def test_async_save_of_any_model_is_that_of_the_checkpoint(given: list[str], expected: bool) -> None:
    assert compose("ppo", overrides("ppo", *given)).trainer.async_save is expected


def test_how_a_greedy_validation_would_sample_has_no_effect_and_is_said() -> None:
    val = f"{ROLLOUT}.val_kwargs"
    set_by_user = [f"{ROLLOUT}.n=4", f"{val}.temperature=0.7", f"{val}.top_p=0.9"]
    (line,) = composed("ppo", overrides("ppo", *set_by_user)).lines
    assert line.startswith(f"{val}.temperature, {val}.top_p: no effect") and f"{val}.do_sample=true" in line
    for meant in ("false", "true"):
        assert composed("ppo", overrides("ppo", *set_by_user, f"{val}.do_sample={meant}")).lines == ()


# Every key alone


def candidates(leaf: Leaf) -> Iterator[Any]:
    """Values of a key that it may have by itself: each of a list of names, and one or two of other types."""
    domain = domains_of(leaf.owner).get(leaf.name)
    if leaf.annotation is bool:
        yield from (True, False)
    elif leaf.key in NAMES:
        yield from NAMES[leaf.key]
    elif domain is not None and (
        names := re.search(r"(list of|one of|some of) ([\w+-]+(, [\w+-]+)+)(, each at most once)?$", domain.limit)
    ):
        yield from ([name] if names[1] == "list of" else name for name in names[2].split(", "))
    elif domain is not None:
        is_int = leaf.annotation is int or str(leaf.annotation).startswith("int |")
        samples = (
            (2,)
            if is_int
            else (2, 0.5, "x", "x.parquet", "s3://b/x", "http://h:1", "80GB", ["x"], [2], [2, 2], [0.5, 0.9], "(x)")
        )
        yield from [value for value in samples if domain.allows(value)][:1]


def filled(kind: Kind, values: dict[str, Any]) -> Any:
    partial = PartialConfig(SCHEMAS[kind], kind)
    for key, value in (REQUIRED[kind] | values).items():
        partial.put(key, value)
    missing, cfg = partial.finish()
    assert not missing and not partial.violations
    return cfg


@functools.cache
def sources(kind: Kind) -> set[str]:
    """The keys that the default of another key follows from."""
    raw: Any = OmegaConf.to_container(OmegaConf.structured(SCHEMAS[kind]), resolve=False)
    return set(re.findall(r"\$\{([\w.]+)\}", str(raw)))


@functools.cache
def unchanged(kind: Kind) -> Any:
    return filled(kind, {})


def violations(kind: Kind, values: dict[str, Any]) -> list[str]:
    if values.keys().isdisjoint(sources(kind)):
        # The same, in a tenth of the time.
        cfg = copy.deepcopy(unchanged(kind))
        for key, value in values.items():
            section, _, name = key.rpartition(".")
            setattr(value_at(cfg, section), name, value)
        return violations_of(cfg, device=DEVICES[kind])
    return violations_of(filled(kind, values), device=DEVICES[kind])


def proposed(text: str) -> dict[str, Any]:
    """The settings that a violation says to set, up to its first alternative."""
    clause = re.split(r",? or |, (?=[a-z])", text.rpartition("; set ")[2])[0]
    return {key: parsed(value) for key, value in re.findall(r"([\w.]+)=(\[.*\]|\S+)", clause)}


def parsed(value: str) -> Any:
    if value in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[value]
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def keys_alone(kind: Kind) -> list[Leaf]:
    """The keys of a command, without those that only repeat another section's."""
    repeated = {
        key
        for key, source in inherited_keys(SCHEMAS[kind]).items()
        if key.rpartition(".")[2] == source.rpartition(".")[2]
    }
    return [leaf for leaf in leaves(SCHEMAS[kind]) if leaf.key not in repeated and not leaf.is_free_dict]


@pytest.mark.parametrize("kind", REQUIRED)
def test_a_key_alone_passes_or_one_message_says_all_that_it_needs(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the message says to set is enough: there is no second round."""
    monkeypatch.setattr(model, "transformer_engine_version", lambda: "99.0")
    failures, tried, refused = [], 0, 0
    assert violations(kind, {}) == []
    for leaf in keys_alone(kind):
        for value in candidates(leaf):
            tried += 1
            messages = violations(kind, {leaf.key: value})
            if not messages:
                continue
            refused += 1
            settings = proposed(messages[0])
            if len(messages) > 1 or not settings or (left := violations(kind, {leaf.key: value} | settings)):
                failures.append(
                    (leaf.key, value, messages, settings, [] if len(messages) > 1 or not settings else left)
                )
    assert failures == []
    fewest = {"ppo": (250, 30), "sft": (90, 8), "generation": (40, 0), "eval": (10, 0)}[kind]
    assert tried >= fewest[0] and refused >= fewest[1]
