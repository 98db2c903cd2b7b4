"""cp_comm_type, its sizes and moe_experts_impl: what keys, model, device and installed version allow."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest

from scalerl.config import ModelSizes, compose, layout_violations, violations_of
from scalerl.config.schema import FLASH_ATTENTION_IMPLS, MegatronConfig
from scalerl.config.transformer_engine import (
    FIRST_VERSIONS,
    expert_violations,
    transformer_engine_version,
    transformer_engine_violations,
)

ACTOR = "actor_rollout_ref.actor.megatron"
NEEDED = ["data.train_files=a.parquet", "data.val_files=b.parquet", "actor_rollout_ref.model.path=m"]
PPO = compose("ppo", [*NEEDED, "trainer.n_gpus_per_node=8", "actor_rollout_ref.rollout.n=4"])
SFT = compose("sft", ["data.train_files=a.parquet", "model.path=m", "trainer.n_gpus_per_node=8"])
KINDS = list(FIRST_VERSIONS)
KV8 = {"num_attention_heads": 16, "num_kv_heads": 8, "num_layers": 4, "ffn_hidden_size": 256}


def with_megatron(kind: str, values: dict[str, Any], section: str | None = None) -> Any:
    cfg = copy.deepcopy({"ppo": PPO, "sft": SFT}[kind])
    section = section or {"ppo": ACTOR, "sft": "megatron"}[kind]
    megatron = functools.reduce(getattr, section.split("."), cfg)
    for name, value in values.items():
        setattr(megatron, name, value)
    return cfg


def violations(kind: str, values: dict[str, Any], device: str | None = None) -> list[str]:
    return violations_of(with_megatron(kind, values), device=device)


@pytest.mark.parametrize(
    "values",
    [
        {"cp_comm_type": "p2p"},
        {"cp_comm_type": "a2a", "context_parallel_size": 8, "dtype": "float16"},
        {"cp_comm_type": "all_gather", "context_parallel_size": 3 * 8, "tensor_model_parallel_size": 1},
        {"cp_comm_type": "a2a+p2p", "context_parallel_size": 8, "hierarchical_context_parallel_sizes": [4, 2]},
        {"dtype": "float32", "context_parallel_size": 8},
    ],
)
def test_what_goes_together_passes(values: dict[str, Any]) -> None:
    world = values.get("context_parallel_size", 1)
    cfg = with_megatron("sft", values)
    cfg.trainer.n_gpus_per_node = world
    assert violations_of(cfg) == []


@pytest.mark.parametrize("kind", ["ppo", "sft"])
@pytest.mark.parametrize("comm_type", KINDS)
def test_the_cpu_is_refused_whether_asked_for_or_found(kind: str, comm_type: str) -> None:
    values = {"cp_comm_type": comm_type}
    if comm_type == "a2a+p2p":
        values |= {"context_parallel_size": 8, "hierarchical_context_parallel_sizes": [2, 4]}
    assert violations(kind, values) == []
    (violation,) = violations(kind, values, device="cpu")
    assert f"cp_comm_type = {comm_type}: Transformer Engine runs on GPUs only" in violation
    assert "set trainer.device=cuda, or" in violation and "cp_comm_type=null" in violation
    cfg = with_megatron(kind, values)
    cfg.trainer.device = "cpu"
    assert violations_of(cfg) == [violation]


def test_a_role_that_differs_is_judged_by_itself_where_the_run_has_it() -> None:
    cfg = with_megatron("ppo", {"cp_comm_type": "p2p"}, section="critic.megatron")
    assert violations_of(cfg, device="cpu") == []
    cfg.algorithm.adv_estimator = "gae"
    (violation,) = violations_of(cfg, device="cpu")
    assert violation.startswith("critic.megatron.cp_comm_type = p2p: Transformer Engine runs on GPUs only")


@pytest.mark.parametrize("setting", ["cp_comm_type=a2a", "moe_experts_impl=transformer_engine"])
def test_one_violation_for_all_roles_that_inherit_it(setting: str) -> None:
    used = ["algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true"]
    cfg = compose("ppo", [*NEEDED, *used, f"{ACTOR}.{setting}"])
    (violation,) = violations_of(cfg, device="cpu")
    assert violation.startswith(f"{ACTOR}.{setting.replace('=', ' = ')}: ")


# trainer.flash_attention_impl


@pytest.mark.parametrize("kind", ["ppo", "sft"])
@pytest.mark.parametrize("impl", FLASH_ATTENTION_IMPLS)
def test_an_own_flash_attention_is_of_gpus_and_of_torchs_attention_in_16_bits(kind: str, impl: str) -> None:
    def found(values: dict[str, Any], device: str) -> list[str]:
        cfg = with_megatron(kind, values)
        cfg.trainer.flash_attention_impl = impl
        return violations_of(cfg, device=device)

    assert found({}, "cuda") == []
    (on_cpu,) = found({}, "cpu")
    assert on_cpu.startswith(f"trainer.flash_attention_impl = {impl}: runs on GPUs only")
    (exact,) = found({"dtype": "float32"}, "cuda")
    assert exact.startswith(f"trainer.flash_attention_impl = {impl}: has no effect when") and "dtype=bfloat16" in exact
    assert any("which takes Transformer Engine's attention" in each for each in found({"cp_comm_type": "p2p"}, "cuda"))


@pytest.mark.parametrize("kind", ["ppo", "sft"])
@pytest.mark.parametrize("values", [{}, {"dtype": "float32"}, {"cp_comm_type": "p2p"}])
def test_what_is_taken_by_itself_is_no_ones_mistake(kind: str, values: dict[str, Any]) -> None:
    cfg = with_megatron(kind, values)
    assert cfg.trainer.flash_attention_impl == "auto"
    for device in ("cuda", "cpu"):
        assert not [each for each in violations(kind, values, device) if "flash_attention_impl" in each]


# The installed version


def judged(comm_type: str | None, cp_size: int, version: str | None) -> list[str]:
    return list(transformer_engine_violations(comm_type, cp_size, prefix="megatron", device="cuda", version=version))


@pytest.mark.parametrize(
    ("comm_type", "cp_size", "refused", "taken"),
    [
        ("p2p", 2, "2.8.0", "2.9.0"),
        ("a2a", 2, "2.14.1", "2.15.0+abcdef"),
        ("all_gather", 2, "2.17.1", "2.18.0"),
        ("a2a+p2p", 4, "2.18.0", "2.19.0"),
        # Nothing is exchanged.
        ("all_gather", 1, "1.13.0", "2.9.0.dev0"),
        ("a2a", 1, "2.8.0", "10.0"),
    ],
)
def test_versions_that_take_packed_sequences(comm_type: str, cp_size: int, refused: str, taken: str) -> None:
    (violation,) = judged(comm_type, cp_size, refused)
    assert f"and {refused} is installed; install a newer one" in violation
    assert judged(comm_type, cp_size, taken) == []


def test_an_absent_transformer_engine_is_refused_with_what_to_install() -> None:
    (violation,) = judged("a2a", 2, None)
    assert "transformer-engine is not installed; install 2.15 or newer, or set megatron.cp_comm_type=null" in violation
    assert judged(None, 2, None) == []


def test_the_machine_is_asked_once_the_device_is_known() -> None:
    messages = violations("sft", {"cp_comm_type": "p2p"}, device="cuda")
    assert messages == judged("p2p", 1, transformer_engine_version())
    cfg = with_megatron("sft", {"cp_comm_type": "p2p"})
    cfg.trainer.device = "cuda"
    # A run may be composed where it does not run.
    assert violations_of(cfg) == []


# Experts


@pytest.mark.parametrize(
    ("impl", "device", "version", "text"),
    [
        ("torch", "cpu", None, None),
        (
            "transformer_engine",
            "cpu",
            "2.20.2",
            "runs on GPUs only, and the device is cpu; set trainer.device=cuda",
        ),
        ("transformer_engine", "cuda", None, "is not installed; install 2.9 or newer, or set m.moe_experts_impl="),
        ("transformer_engine", "cuda", "2.8.1", "engine 2.9 or newer, and 2.8.1 is installed; install a newer one, or"),
        ("transformer_engine", "cuda", "2.9.0.dev0+abc", None),
    ],
)
def test_experts_of_transformer_engine(impl: str, device: str, version: str | None, text: str | None) -> None:
    found = list(expert_violations(impl, prefix="m", device=device, version=version))
    assert [text in violation for violation in found] == ([] if text is None else [True])


# The model


def model_violations(model: dict[str, int], world: int, **megatron: Any) -> list[str]:
    config = MegatronConfig(context_parallel_size=world // megatron.get("tensor_model_parallel_size", 1), **megatron)
    return layout_violations(ModelSizes(**{**KV8, **model}), megatron=config, world_size=world)


@pytest.mark.parametrize(
    ("model", "world", "megatron"),
    [
        # Shared out by nobody.
        ({"num_attention_heads": 3, "num_kv_heads": 1}, 4, {"cp_comm_type": "p2p"}),
        ({"num_attention_heads": 3, "num_kv_heads": 1}, 4, {"cp_comm_type": "all_gather"}),
        ({}, 8, {"cp_comm_type": "a2a"}),
        ({}, 8, {"cp_comm_type": "a2a", "tensor_model_parallel_size": 2}),
        # Ulysses repeats key/value heads.
        ({}, 16, {}),
        ({}, 64, {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [8, 8]}),
    ],
)
def test_context_parallel_sizes_that_the_heads_allow(model: dict[str, int], world: int, megatron: Any) -> None:
    assert model_violations(model, world, **megatron) == []


@pytest.mark.parametrize(
    ("model", "world", "megatron", "texts"),
    [
        (
            {},
            16,
            {"cp_comm_type": "a2a"},
            ["context_parallel_size = 16: must divide the 16 attention heads and the 8 key", "1, 2, 4, 8, or", "p2p"],
        ),
        (
            {},
            16,
            {"cp_comm_type": "a2a", "tensor_model_parallel_size": 2},
            ["context_parallel_size = 8: must divide the 8 attention heads and the 4 key/value heads", "1, 2, 4, or"],
        ),
        (
            {},
            32,
            {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [16, 2]},
            ["sizes = [16,2]: the first number must divide", "one of 1, 2, 4, 8 in its place"],
        ),
        ({}, 3, {}, ["context_parallel_size = 3: must divide the 16 attention heads"]),
    ],
)
def test_context_parallel_sizes_that_the_heads_do_not_allow(
    model: dict[str, int], world: int, megatron: Any, texts: list[str]
) -> None:
    (violation,) = model_violations(model, world, **megatron)
    for text in texts:
        assert text in violation, violation


# --- gated delta nets ---

# Heads of attention alone would allow more.
DELTA = ModelSizes(num_attention_heads=16, num_kv_heads=16, num_layers=4, ffn_hidden_size=256, linear_num_key_heads=4)


@pytest.mark.parametrize(
    ("values", "messages"),
    [
        ({"tensor_model_parallel_size": 2, "context_parallel_size": 2}, []),
        (
            {"tensor_model_parallel_size": 8},
            [f"{ACTOR}.tensor_model_parallel_size = 8: must divide the model's 4 key heads of the gated delta nets"],
        ),
        (
            {"tensor_model_parallel_size": 2, "context_parallel_size": 4},
            [f"{ACTOR}.context_parallel_size = 4: must divide the 2 key heads of the gated delta nets"],
        ),
        (
            {"context_parallel_size": 2, "cp_comm_type": "p2p"},
            [f"{ACTOR}.cp_comm_type = p2p: is of attention alone, and this model has gated delta nets"],
        ),
    ],
)
def test_ranks_share_out_the_key_heads_of_gated_delta_nets(values: dict[str, Any], messages: list[str]) -> None:
    found = layout_violations(DELTA, megatron=MegatronConfig(**values), world_size=8)
    assert len(found) == len(messages)
    assert all(line.startswith(message) for line, message in zip(found, messages, strict=True))
