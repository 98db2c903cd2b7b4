"""The runs of configs/: without a mistake, within 80 GB a device, and complete against transformers' models."""

from __future__ import annotations

import copy
import math
from collections import Counter
from functools import cache
from math import prod
from pathlib import Path

import pytest

from scalerl.config import model_roles, uses_critic, violations_of, world_size
from scalerl.extras.plan.check import checked_plan
from scalerl.extras.plan.plan import MemoryPlan
from scalerl.models import Family, HFWeights, ModelShape, family_of, value_model_config
from scalerl.models.block_scales import BlockScaledTensor
from scalerl.parallel.export import plan_buckets
from scalerl.trainer.checks.models import actor_violations, role_violations
from tests.configs_table import docs_table
from tests.hub_files import SCALE, file_shapes, headers, write_headers
from tests.lanes import full, mostly_full
from tests.model_configs import (
    CONFIGS,
    FILES,
    WITH_CRITIC,
    meta_model,
    meta_value_model,
    model_directory,
    model_of,
    read_config,
    run_config,
    run_shapes,
)

GB80 = 80 * 10**9
MODELS_PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@cache
def planned(name: str, memory_bytes: int = GB80) -> tuple[MemoryPlan, list[str]]:
    return checked_plan(run_config(name), run_shapes(name), memory_bytes)


@pytest.mark.parametrize("name", sorted(FILES))
def test_it_has_no_mistake(name: str, tmp_path: Path) -> None:
    cfg = copy.deepcopy(run_config(name))
    cfg.actor_rollout_ref.model.path = str(model_directory(model_of(name), tmp_path))
    assert violations_of(cfg, device="cuda") == []
    assert list(actor_violations(cfg, run_shapes(name)["actor"], device="cuda")) == []
    for role in model_roles(cfg):
        assert list(role_violations(cfg, role, run_shapes(name)[role.name], None)) == []
    assert uses_critic(cfg) == (name in WITH_CRITIC)
    assert world_size(cfg) == int(name.rpartition("-")[2]), "the name says the devices"
    overlap = {"overlap_grad_reduce": True} if cfg.trainer.nnodes > 1 else {}
    assert cfg.actor_rollout_ref.actor.megatron.override_ddp_config == overlap


@pytest.mark.parametrize("name", sorted(FILES))
def test_it_fits_80_gb(name: str) -> None:
    plan, violations = planned(name)
    assert violations == []
    assert plan.concurrency is not None and plan.concurrency > 0


def test_servers_that_need_several_nodes_are_refused_on_one_with_their_size() -> None:
    """DeepSeek-V3's: its trainer fits 80 GB."""
    name = "deepseek-v3-grpo-512"
    cfg = copy.deepcopy(run_config(name))
    rollout = cfg.actor_rollout_ref.rollout
    needed, rollout.tensor_model_parallel_size = rollout.tensor_model_parallel_size, cfg.trainer.n_gpus_per_node
    plan, (violation,) = checked_plan(cfg, run_shapes(name), GB80)
    assert "rollout servers: 157.9 GiB of weights" in violation
    assert f"set actor_rollout_ref.rollout.tensor_model_parallel_size={needed}\n" in violation
    for device in plan.devices:
        for phase in device.phases:
            own = sum(size for part, size in phase.parts.items() if part not in ("server weights", "KV cache"))
            assert own < GB80, (device.name, phase.name)


def test_a_run_that_follows_the_samplers_experts_plans_their_memory() -> None:
    """Qwen3-30B-A3B: 48 layers of 8 experts, a byte for each; SGLang has four for each token of its cache."""
    name = "qwen3-30b-a3b-grpo-32"
    plan, _ = planned(name)
    longest, num_samples = 2048 + 14336, 512 * 16
    assert run_config(name).algorithm.routing_replay == "rollout"
    assert plan.routed is not None and plan.server is not None and plan.server.kv_tokens is not None
    assert (plan.routed.token, plan.routed.step) == (384, num_samples * longest * 384)
    assert plan.routed.server == plan.server.kv_tokens * 4 * 384


def test_the_table_of_the_page_is_the_plans() -> None:
    """After a change: `python -m tests.configs_table` makes it."""
    page = MODELS_PAGE.read_text(encoding="utf-8")
    for line in docs_table(GB80).splitlines():
        assert line in page, line


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
KV_A = f"model.layers.0.self_attn.kv_a_proj_with_mqa.weight{SCALE}"
GATE = f"model.layers.3.mlp.experts.255.gate_proj.weight{SCALE}"

# Models whose names take no second to compare.
QUICK = ("qwen3-8b", "qwen3-0.6b", "qwen3-30b-a3b")


@pytest.mark.parametrize("name", mostly_full(sorted(CONFIGS), lambda name: name in QUICK))
def test_load_sync_and_merge_have_every_tensor_of_transformers(name: str) -> None:
    """Loading reads, and a sync sends, each tensor of the table once; merging writes each of its rows once."""
    shape = ModelShape.from_config(read_config(name))
    family, theirs = family_of(shape), file_shapes(meta_model(name))
    assert family.hf_shapes(shape) == theirs
    bucket_bytes = 512 << 20
    # Stacked experts: in one bucket, sent as one tensor.
    buckets = plan_buckets(family.params(shape), shape, 2, bucket_bytes)
    sent = Counter(hf for bucket in buckets for hf in {hf for p in bucket for hf in p.hf})
    assert sent == dict.fromkeys(theirs, 1)
    assert merged_rows(family, shape) == {hf: size[0] for hf, size in theirs.items()}
    assert all(prod(size) > 0 for size in theirs.values())


def merged_rows(family: Family, shape: ModelShape) -> Counter[str]:
    """The rows of each tensor that a merge writes."""
    written: Counter[str] = Counter()
    for param in family.params(shape):
        if param.stacked:
            written[param.hf[0]] += 1
        for rows in () if param.stacked else param.rows_of(shape):
            written[rows.name] += rows.count
    return written


@pytest.mark.parametrize("name", WITH_CRITIC)
def test_a_critic_has_every_tensor_of_transformers_classifier(name: str) -> None:
    """Those of the language model that it starts from but for the head; merging writes each of its rows once."""
    config, base = read_config(model_of(name)), file_shapes(meta_model(model_of(name)))
    shape, merged_config = run_shapes(name)["critic"], value_model_config(config)
    family, classifier = family_of(shape), meta_value_model(merged_config)
    theirs = file_shapes(classifier)
    assert family.hf_shapes(shape) == theirs
    assert theirs == {hf: base[hf] for hf in base.keys() - {HEAD}} | {"score.weight": (1, config["hidden_size"])}
    assert merged_rows(family, shape) == {hf: size[0] for hf, size in theirs.items()}
    assert merged_config["architectures"] == [type(classifier).__name__]
    assert ModelShape.from_config(merged_config) == shape


# DeepSeek-V3's dense layers and a mixture, or all.
@pytest.mark.parametrize("num_layers", [4, full(61)])
def test_files_in_fp8_are_loaded_with_a_scale_for_each_block(num_layers: int, tmp_path: Path) -> None:
    """Which tensors have scales, and of which shape, is what transformers' own fp8 model says."""
    config = read_config("deepseek-v3") | {"num_hidden_layers": num_layers}
    tensors = headers("deepseek-v3", num_layers)
    # The layer that predicts a further token is in the files, too.
    last = f"model.layers.{num_layers - 1}."
    further = {hf.replace(last, f"model.layers.{num_layers}."): x for hf, x in tensors.items() if hf.startswith(last)}
    stored = tensors | further
    shape = ModelShape.from_config(config)
    family = family_of(shape)
    with HFWeights(write_headers(tmp_path / "whole", config, stored)) as weights:
        weights.check(family, shape)
        for hf, size in family.hf_shapes(shape).items():
            plain = hf.endswith(("norm.weight", "mlp.gate.weight", "bias")) or hf in (EMBEDDING, HEAD)
            assert isinstance(weights.read(hf), BlockScaledTensor) == (hf + SCALE in tensors) == (not plain), hf
            if not plain:
                assert tensors[hf + SCALE] == ("F32", tuple(math.ceil(length / 128) for length in size)), hf
    # 576 rows: the last block has 64.
    assert tensors[KV_A] == ("F32", (5, 56)) and tensors[GATE] == ("F32", (16, 56))
    damaged = {hf: x for hf, x in stored.items() if hf != GATE} | {KV_A: ("F32", (4, 56))}
    files = write_headers(tmp_path / "damaged", config, damaged)
    with HFWeights(files) as weights, pytest.raises(ValueError, match="2 problems") as caught:
        weights.check(family, shape)
    assert f"missing {GATE}" in str(caught.value)
    assert f"{KV_A} has shape (4, 56), blocks of (128, 128) make (5, 56)" in str(caught.value)
