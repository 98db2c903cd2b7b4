"""A key that needs others: they follow from it, or one message names them all, each with a value to paste."""

from __future__ import annotations

import ast
import copy
import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import OmegaConf

from scalerl.config import ConfigError, compose
from scalerl.config.companions import COMPANIONS
from scalerl.config.compose import composed
from scalerl.config.help import key_docs
from scalerl.config.keys import Leaf, inherited_keys, leaves
from scalerl.config.partial_config import PartialConfig
from scalerl.config.registered_names import ESTIMATORS, POLICY_LOSSES, REWARD_MANAGERS
from scalerl.config.rules import layout
from scalerl.config.rules.base import value_at
from scalerl.config.schema import LOGGERS, SCHEMAS, Kind, domains_of
from scalerl.config.validate import validate_eval, validate_generation, validate_ppo, validate_sft

ROLLOUT, MEGATRON = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.megatron"
CORRECTION, JUDGE = "algorithm.rollout_correction", "reward_model.judge"
REQUIRED: dict[Kind, dict[str, Any]] = {
    "ppo": {"data.train_files": "a.parquet", "data.val_files": "b.parquet", "actor_rollout_ref.model.path": "m"},
    "sft": {"data.train_files": "a.parquet", "model.path": "m"},
    "generation": {"data.path": "a.parquet", "model.path": "m", "data.output_path": "o.parquet"},
    "eval": {"data.path": "a.parquet"},
}
VALIDATORS: dict[str, Any] = {
    "ppo": lambda cfg: validate_ppo(cfg, device="cuda"),
    "sft": lambda cfg: validate_sft(cfg, device="cuda"),
    "generation": validate_generation,
    "eval": validate_eval,
}
NAMES = {names.key: names.own for names in (ESTIMATORS, POLICY_LOSSES, REWARD_MANAGERS)} | {
    "trainer.logger": [[name] for name in LOGGERS]
}


def overrides(kind: Kind, *more: str) -> list[str]:
    return [*(f"{key}={value}" for key, value in REQUIRED[kind].items()), *more]


# What follows: kind, overrides -> values of other keys.
FOLLOWS = {
    "the best stay": (
        "ppo",
        ["trainer.best_ckpt_to_keep=2", "trainer.save_freq=10"],
        {
            "trainer.best_ckpt_metric": "val-core/*/reward/mean@*",
            "trainer.best_ckpt_mode": "max",
            "trainer.test_freq": 10,
            "trainer.max_actor_ckpt_to_keep": 1,
            "trainer.max_critic_ckpt_to_keep": 1,
        },
    ),
    "the best of fine-tuning": (
        "sft",
        ["trainer.best_ckpt_to_keep=2", "trainer.save_freq=10", "data.val_files=b.parquet"],
        {"trainer.best_ckpt_metric": "val/loss", "trainer.best_ckpt_mode": "min", "trainer.test_freq": 10},
    ),
    "what is set stays": (
        "ppo",
        ["trainer.best_ckpt_to_keep=2", "trainer.save_freq=10", "trainer.test_freq=5", "trainer.best_ckpt_metric=m"],
        {"trainer.test_freq": 5, "trainer.best_ckpt_metric": "m"},
    ),
    "steps that stay": ("ppo", ["trainer.ckpt_every_to_keep=5"], {"trainer.max_actor_ckpt_to_keep": 1}),
    "all stay": ("ppo", [], {"trainer.max_actor_ckpt_to_keep": None, "trainer.test_freq": -1}),
    "groups": ("ppo", ["algorithm.adv_estimator=rloo"], {f"{ROLLOUT}.n": 8}),
    "no groups": ("ppo", ["algorithm.adv_estimator=gae"], {f"{ROLLOUT}.n": 1}),
    "a small step": (
        "ppo",
        ["data.train_batch_size=64"],
        {"actor_rollout_ref.actor.ppo_mini_batch_size": 64, "critic.ppo_mini_batch_size": 64},
    ),
    "a large step": ("ppo", ["data.train_batch_size=512"], {"actor_rollout_ref.actor.ppo_mini_batch_size": 256}),
    "several validation samples": ("ppo", [f"{ROLLOUT}.val_kwargs.n=4"], {f"{ROLLOUT}.val_kwargs.do_sample": True}),
    "weights through files": (
        "ppo",
        [f"{ROLLOUT}.weight_transport=disk", "trainer.default_local_dir=/shared/run"],
        {f"{ROLLOUT}.weight_transport_dir": "/shared/run"},
    ),
    "overlong responses": (
        "ppo",
        ["reward_model.overlong_buffer.enable=true", "data.max_response_length=1000"],
        {"reward_model.reward_manager": "dapo", "reward_model.overlong_buffer.len": 200},
    ),
}


@pytest.mark.parametrize("name", FOLLOWS)
def test_defaults_that_follow_from_another_key(name: str) -> None:
    kind, more, expected = FOLLOWS[name]
    cfg = compose(kind, overrides(kind, *more))
    assert {key: value_at(cfg, key) for key in expected} == expected


def test_what_follows_is_said_with_the_reason() -> None:
    composition = composed("ppo", overrides("ppo", f"{ROLLOUT}.n=4", "trainer.ckpt_every_to_keep=5"))
    assert composition.lines == (
        "trainer.max_actor_ckpt_to_keep = 1, which follows from trainer.ckpt_every_to_keep = 5",
    )
    assert composed("ppo", overrides("ppo", f"{ROLLOUT}.n=4")).lines == ()


def test_how_a_greedy_validation_would_sample_has_no_effect_and_is_said() -> None:
    val = f"{ROLLOUT}.val_kwargs"
    set_by_user = [f"{ROLLOUT}.n=4", f"{val}.temperature=0.7", f"{val}.top_p=0.9"]
    (line,) = composed("ppo", overrides("ppo", *set_by_user)).lines
    assert line.startswith(f"{val}.temperature, {val}.top_p: no effect") and f"{val}.do_sample=true" in line
    for meant in ("false", "true"):
        assert composed("ppo", overrides("ppo", *set_by_user, f"{val}.do_sample={meant}")).lines == ()
    (line,) = composed("ppo", overrides("ppo", *set_by_user, f"{val}.n=2")).lines
    assert line.startswith(f"{val}.do_sample = true, which follows from ")


def test_a_value_that_the_user_sets_against_it_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        compose(
            "ppo",
            overrides("ppo", f"{ROLLOUT}.n=1", f"{ROLLOUT}.val_kwargs.n=2", f"{ROLLOUT}.val_kwargs.do_sample=false"),
        )
    group, greedy = error.value.violations
    assert group.startswith(f"{ROLLOUT}.n = 1: ") or greedy.startswith(f"{ROLLOUT}.n = 1: ")
    assert "do_sample=true" in group + greedy


def test_what_follows_from_a_misspelt_key_is_in_doubt() -> None:
    with pytest.raises(ConfigError) as error:
        compose(
            "ppo", overrides("ppo", "data.train_batch_sise=24", "data.train_batch_size=4", "trainer.n_gpus_per_node=64")
        )
    assert [text.split(":")[0] for text in error.value.violations] == ["data.train_batch_sise"]


def test_help_says_what_follows() -> None:
    for kind in ("ppo", "sft"):
        comments = {doc.key: doc.comment for doc in key_docs(kind)}
        known = [companion for companion in COMPANIONS if companion.kind in (None, kind) and companion.key in comments]
        assert len(known) >= 4
        for companion in known:
            assert "Not set" in comments[companion.key], companion.key


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
            (2,) if is_int else (2, 0.5, "x", "x.parquet", "s3://b/x", "80GB", ["x"], [2], [2, 2], [0.5, 0.9], "(x)")
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
    return {key for companion in COMPANIONS for key in companion.of} | set(re.findall(r"\$\{([\w.]+)\}", str(raw)))


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
        return VALIDATORS[kind](cfg)
    return VALIDATORS[kind](filled(kind, values))


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
    monkeypatch.setattr(layout, "transformer_engine_version", lambda: "99.0")
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
