"""`scalerl generate` and `scalerl eval`: each rule is broken alone and found alone, every key has a domain."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest

from scalerl.config import ConfigError, compose
from scalerl.config.compose import violations_of
from scalerl.config.keys import leaves
from scalerl.config.schema import EvalConfig, GenerationConfig, domains_of

GENERATION = compose(
    "generation", ["data.path=a.parquet", "data.output_path=b.parquet", "model.path=m", "trainer.n_gpus_per_node=8"]
)
EVAL = compose("eval", ["data.path=a.parquet"])
VALID = {GenerationConfig: GENERATION, EvalConfig: EVAL}


def violations(schema: type, values: dict[str, Any]) -> list[str]:
    cfg = copy.deepcopy(VALID[schema])
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        node = functools.reduce(getattr, section.split("."), cfg)
        assert hasattr(node, name), key
        setattr(node, name, value)
    return violations_of(cfg)


@pytest.mark.parametrize("schema", VALID)
def test_the_smallest_configs_are_valid(schema):
    assert violations(schema, {}) == []


@pytest.mark.parametrize("schema", VALID)
def test_every_key_has_a_domain_unless_any_value_of_its_type_will_do(schema):
    for leaf in leaves(schema):
        free = leaf.annotation is bool or leaf.name in ("reward_kwargs", "chat_template_kwargs")
        assert (leaf.name in domains_of(leaf.owner)) != free, leaf.key


@pytest.mark.parametrize(
    ("schema", "key", "refused", "allowed"),
    [
        (GenerationConfig, "data.output_path", ["", "out", "out.json"], ["d/out.parquet"]),
        (GenerationConfig, "rollout.temperature", [-0.1, float("nan")], [0, 0.6]),
        (EvalConfig, "data.output_path", ["out.json"], [None, "out.parquet"]),
    ],
)
def test_values_on_both_sides_of_the_border(schema, key, refused, allowed):
    for value in refused:
        (violation,) = violations(schema, {key: value})
        assert violation.startswith(f"{key} = ") and "must be" in violation
    for value in allowed:
        assert violations(schema, {key: value}) == []


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        (
            {"data.n_samples": 2, "rollout.temperature": 0},
            ["data.n_samples = 2: greedy decoding", "rollout.temperature=1, or data.n_samples=1"],
        ),
        (
            {"data.response_key": "prompt"},
            ["data.response_key = prompt: is data.prompt_key too", "data.response_key=responses"],
        ),
        (
            {"rollout.tensor_model_parallel_size": 9},
            ["tensor_model_parallel_size = 9", "at most trainer.n_gpus_per_node = 8", "tensor_model_parallel_size=8"],
        ),
        (
            {"rollout.tensor_model_parallel_size": 16, "rollout.name": "embedded", "trainer.nnodes": 2},
            ["rollout.name = embedded", "on 2 nodes", "set rollout.name=sglang"],
        ),
        (
            {"rollout.tensor_model_parallel_size": 3, "rollout.num_replicas": 5, "trainer.nnodes": 2},
            ["rollout.num_replicas = 5", "2 x 8 devices have room for 4", "rollout.num_replicas=4 or less"],
        ),
    ],
)
def test_rules_between_keys(values, parts):
    (violation,) = violations(GenerationConfig, values)
    assert all(part in violation for part in parts), violation


def test_what_is_allowed_together():
    fits = {"rollout.tensor_model_parallel_size": 3, "rollout.num_replicas": 4, "trainer.nnodes": 2}
    assert violations(GenerationConfig, fits) == []
    on_whole_nodes = {"rollout.tensor_model_parallel_size": 16, "rollout.num_replicas": 2, "trainer.nnodes": 4}
    assert violations(GenerationConfig, on_whole_nodes) == []
    assert violations(GenerationConfig, {"data.n_samples": 1, "rollout.temperature": 0}) == []


def test_unknown_keys_and_missing_ones_come_together():
    with pytest.raises(ConfigError) as caught:
        compose("generation", ["data.path=a.parquet", "data.n_sample=8"])
    unknown, *missing = caught.value.violations
    assert unknown.startswith("data.n_sample: no such key") and "data.n_samples" in unknown
    assert [text.split(":")[0] for text in missing] == ["data.output_path", "model.path"]
