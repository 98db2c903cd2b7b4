"""The runs of configs/: without a mistake, within 80 GB a device, and complete against transformers' models."""

from __future__ import annotations

import copy
from collections import Counter
from functools import cache
from math import prod
from pathlib import Path

import pytest

from scalerl.config import PPOConfig, compose, validate_ppo, world_size
from scalerl.families import ModelShape, family_of
from scalerl.memory_plan.check import checked_plan
from scalerl.memory_plan.plan import MemoryPlan
from scalerl.parallel.export import plan_buckets
from scalerl.trainer.model_checks import actor_violations
from tests.configs_table import docs_table
from tests.lanes import mostly_full
from tests.model_configs import CONFIGS, FILES, meta_model, model_of, read_config

GB80 = 80 * 10**9
MODELS_PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@cache
def config(name: str) -> PPOConfig:
    return compose("ppo", ["--config-dir", str(FILES[name].parent), "--config-name", name], rules=False)


@cache
def planned(name: str, memory_bytes: int = GB80) -> tuple[MemoryPlan, list[str]]:
    return checked_plan(config(name), shapes_of(name), memory_bytes)


def shapes_of(name: str) -> dict[str, ModelShape]:
    actor = ModelShape.from_config(read_config(model_of(name)))
    return {"actor": actor, "ref": actor, "critic": actor.with_head("value")}


@pytest.mark.parametrize("name", sorted(FILES))
def test_it_has_no_mistake(name: str) -> None:
    cfg = config(name)
    assert validate_ppo(cfg, device="cuda") == []
    shape = ModelShape.from_config(read_config(model_of(name)))
    assert list(actor_violations(cfg, shape, device="cuda")) == []
    assert world_size(cfg) == int(name.rpartition("-")[2]), "the name says the devices"


@pytest.mark.parametrize("name", sorted(FILES))
def test_it_fits_80_gb(name: str) -> None:
    plan, violations = planned(name)
    assert violations == []
    assert plan.concurrency is not None and plan.concurrency > 0


def test_servers_that_need_several_nodes_are_refused_on_one_with_their_size() -> None:
    """DeepSeek-V3's: its trainer fits 80 GB."""
    name = "deepseek-v3-grpo-512"
    cfg = copy.deepcopy(config(name))
    rollout = cfg.actor_rollout_ref.rollout
    needed, rollout.tensor_model_parallel_size = rollout.tensor_model_parallel_size, cfg.trainer.n_gpus_per_node
    plan, (violation,) = checked_plan(cfg, shapes_of(name), GB80)
    assert "rollout servers: 157.9 GiB of weights" in violation
    assert f"set actor_rollout_ref.rollout.tensor_model_parallel_size={needed}\n" in violation
    for device in plan.devices:
        for phase in device.phases:
            own = sum(size for part, size in phase.parts.items() if part not in ("server weights", "KV cache"))
            assert own < GB80, (device.name, phase.name)


def test_the_table_of_the_page_is_the_plans() -> None:
    """After a change: `python -m tests.configs_table` makes it."""
    page = MODELS_PAGE.read_text(encoding="utf-8")
    for line in docs_table(GB80).splitlines():
        assert line in page, line


# Models whose names take no second to compare.
QUICK = ("qwen3-8b", "qwen3-0.6b", "qwen3-30b-a3b")


def names_of_transformers(name: str) -> dict[str, tuple[int, ...]]:
    """Tensors as the files on the hub have them: transformers holds experts in one tensor, files one by one."""
    shapes = {}
    model = meta_model(name)
    for key, tensor in model.state_dict().items():
        if key.endswith(".experts.gate_up_proj"):
            for expert, joined in enumerate(tensor):
                for part in ("gate_proj", "up_proj"):
                    own = f"{key.removesuffix('gate_up_proj')}{expert}.{part}.weight"
                    shapes[own] = (joined.shape[0] // 2, joined.shape[1])
        elif key.endswith(".experts.down_proj"):
            for expert, down in enumerate(tensor):
                shapes[f"{key.removesuffix('down_proj')}{expert}.down_proj.weight"] = tuple(down.shape)
        elif key != "lm_head.weight" or not model.config.tie_word_embeddings:
            shapes[key] = tuple(tensor.shape)
    return shapes


@pytest.mark.parametrize("name", mostly_full(sorted(CONFIGS), lambda name: name in QUICK))
def test_load_sync_and_merge_have_every_tensor_of_transformers(name: str) -> None:
    """Loading reads, and a sync sends, each tensor of the table once; merging writes each of its rows once."""
    shape = ModelShape.from_config(read_config(name))
    family, theirs = family_of(shape), names_of_transformers(name)
    assert family.hf_shapes(shape) == theirs
    bucket_bytes = 512 << 20
    sent = Counter(hf for bucket in plan_buckets(family, shape, 2, bucket_bytes) for param in bucket for hf in param.hf)
    assert sent == dict.fromkeys(theirs, 1)
    written: Counter[str] = Counter()
    for param in family.params(shape):
        for rows in param.rows_of(shape):
            written[rows.name] += rows.count
    assert written == {hf: size[0] for hf, size in theirs.items()}
    assert all(prod(size) > 0 for size in theirs.values())
