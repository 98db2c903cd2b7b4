"""Fields of Megatron's configs that the user sets: known names, values of their types, as Megatron wants them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import fused_a2a, moe_utils
from megatron.core.transformer.transformer_config import MLATransformerConfig

from scalerl.config.schema import MegatronConfig, OptimConfig
from scalerl.errors import UserError
from scalerl.extras.verl.keys.table import rows_of
from scalerl.models import ModelShape
from scalerl.parallel.layout import Layout
from scalerl.parallel.megatron_overrides import (
    dispatcher_line,
    fits,
    kernel_violations,
    megatron_values,
    override_violations,
    transformer_values,
    unfused,
)
from scalerl.parallel.model import transformer_config


def test_fields_of_megatron_pass():
    megatron = MegatronConfig(
        override_transformer_config={
            "moe_permute_fusion": True,
            "attention_backend": "flash",
            "moe_token_dispatcher_type": "flex",
            "moe_deepep_num_sms": 24,
            "microbatch_group_size_per_vp_stage": None,
        },
        override_ddp_config={"bucket_size": 1000},
    )
    optim = OptimConfig(override_optimizer_config={"adam_eps": 1e-9})
    assert [*override_violations("m", megatron), *override_violations("o", optim)] == []


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("moe_permut_fusion", True, "has no such field; leave it out"),
        ("_cpu_offloading_context", None, "has no such field"),
        ("moe_permute_fusion", "yes", "wants bool"),
        ("moe_permute_fusion", 1, "wants bool"),
        ("moe_deepep_num_sms", 1.5, "wants int"),
        ("moe_token_dispatcher_type", "fast", "wants allgather or alltoall or flex"),
        ("attention_backend", "fa9", "wants flash or fused"),
        ("microbatch_group_size_per_vp_stage", "2", "wants int or null"),
    ],
)
def test_others_are_named_with_what_megatron_wants(field: str, value: Any, text: str):
    (violation,) = override_violations("actor.megatron", MegatronConfig(override_transformer_config={field: value}))
    assert violation.startswith(f"actor.megatron.override_transformer_config.{field} = ") and text in violation


def test_names_become_members_and_types():
    given = {"attention_backend": "fused", "moe_deepep_num_sms": 8}
    assert megatron_values("override_transformer_config", given) == {
        "attention_backend": AttnBackend.fused,
        "moe_deepep_num_sms": 8,
    }
    assert megatron_values("override_optimizer_config", {"exp_avg_dtype": "bfloat16"}) == {
        "exp_avg_dtype": torch.bfloat16
    }


@pytest.mark.parametrize(
    ("kind", "owner"),
    [
        ("transformer", MLATransformerConfig),
        ("ddp", DistributedDataParallelConfig),
        ("optimizer", OptimizerConfig),
    ],
)
def test_what_is_said_to_be_set_elsewhere_is_a_field_of_megatron(kind: str, owner: type):
    # Of Megatron's command line or of MindSpeed, not of its config.
    foreign = {"use_flash_attn", "position_embedding_type", "keep_mtp_spec_in_bf16", "mtp_use_repeated_layer"}
    foreign |= {"use_distributed_optimizer"}
    # Of Megatron's config before 0.17.
    foreign |= {"moe_use_legacy_grouped_gemm"}
    patterns = [row.key for row in rows_of("ppo") if f".override_{kind}_config." in row.key]
    fields = {name for pattern in patterns for name in re.findall(r"\w+", pattern.rpartition("_config.")[2])}
    names = {name for name in fields if not name.startswith("use_fused_")} - foreign
    assert names and names <= set(get_type_hints(owner))


def config_of(*, dtype: str = "bfloat16", **override: Any) -> Any:
    config = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    shape = ModelShape.from_config(config | {"intermediate_size": 64, "vocab_size": 128, "num_key_value_heads": 2})
    groups: Any = SimpleNamespace(layout=Layout(world_size=1))
    megatron = MegatronConfig(dtype=dtype, override_transformer_config=override)
    return transformer_config(shape, megatron, groups, on_cpu=True)


def test_a_field_reaches_megatrons_config():
    assert not config_of().bias_dropout_fusion and config_of(bias_dropout_fusion=True).bias_dropout_fusion
    assert config_of(attention_backend="unfused").attention_backend is AttnBackend.unfused
    # What scalerl sets stays.
    assert config_of(bias_dropout_fusion=True).calculate_per_token_loss


def test_what_megatron_refuses_is_said_with_the_fields():
    with pytest.raises(
        UserError, match=r"override_transformer_config = \{cpu_offloading:true,cpu_offloading_num_layers:-1\}: "
    ):
        config_of(cpu_offloading=True, cpu_offloading_num_layers=-1)


def test_a_number_fits_a_float_and_a_bool_does_not():
    assert fits(1, float) and fits(1.5, float | None) and fits(None, float | None)
    assert not fits(True, float) and not fits(True, int)


def test_gradients_are_added_up_by_a_fused_kernel_only_where_there_is_one(monkeypatch: pytest.MonkeyPatch):
    given = {"gradient_accumulation_fusion": True}
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    assert transformer_values(given, on_cpu=False) == {"gradient_accumulation_fusion": False}
    assert config_of(**given).gradient_accumulation_fusion is False
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    assert transformer_values(given, on_cpu=False) == given
    assert transformer_values(given, on_cpu=True) == {"gradient_accumulation_fusion": False}


def test_tokens_are_sorted_by_a_fused_kernel_only_where_there_is_one(monkeypatch: pytest.MonkeyPatch):
    """Commands of verl ask for it. Without transformer-engine megatron would end each rank with an ImportError."""
    given = {"moe_permute_fusion": True}
    monkeypatch.delattr(moe_utils, "fused_permute", raising=False)
    assert transformer_values(given, on_cpu=False) == {"moe_permute_fusion": False}
    assert config_of(**given).moe_permute_fusion is False
    megatron = MegatronConfig(override_transformer_config=given)
    (line,) = unfused("m", megatron, on_cpu=False)
    assert line.startswith("m.override_transformer_config.moe_permute_fusion = true: its kernel (of transformer-engine")
    monkeypatch.setattr(moe_utils, "fused_permute", lambda: None, raising=False)
    assert transformer_values(given, on_cpu=False) == given and list(unfused("m", megatron, on_cpu=False)) == []
    assert transformer_values(given, on_cpu=True) == {"moe_permute_fusion": False}


@pytest.mark.parametrize(
    ("fields", "device", "text"),
    [
        ({"moe_token_dispatcher_type": "flex"}, "cpu", "runs on GPUs only, and the device is cpu"),
        ({"moe_token_dispatcher_type": "flex"}, "cuda", "needs deep_ep, which cannot be imported here; install it"),
        (
            {"moe_enable_deepep": True, "moe_token_dispatcher_type": "alltoall"},
            "cuda",
            "of the dispatcher flex alone; set m.override_transformer_config.moe_token_dispatcher_type=flex, or",
        ),
        # The dispatcher follows.
        ({"moe_enable_deepep": True}, "cuda", "needs deep_ep, which cannot be imported here; install it"),
        ({"moe_flex_dispatcher_backend": "hybridep"}, "cuda", "needs deep_ep with HybridEPBuffer, which"),
        (
            {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"},
            "cuda",
            "needs deep_ep with HybridEPBuffer, which",
        ),
        ({"moe_enable_deepep": False, "moe_token_dispatcher_type": "alltoall"}, "cpu", None),
    ],
)
def test_kernels_of_deepep(fields: dict[str, Any], device: str, text: str | None, monkeypatch: pytest.MonkeyPatch):
    megatron = MegatronConfig(override_transformer_config=fields)
    monkeypatch.setattr(fused_a2a, "HAVE_DEEP_EP", False)
    monkeypatch.setattr(fused_a2a, "HAVE_HYBRIDEP", False)
    violations = list(kernel_violations("m", megatron, device=device))
    assert [text in violation for violation in violations] == ([] if text is None else [True])
    monkeypatch.setattr(fused_a2a, "HAVE_DEEP_EP", True)
    monkeypatch.setattr(fused_a2a, "HAVE_HYBRIDEP", True)
    here = list(kernel_violations("m", megatron, device="cuda"))
    assert here == ([] if text is None or "flex alone" not in text else violations)


@pytest.mark.parametrize("name", ["moe_enable_deepep", "moe_flex_dispatcher_backend"])
def test_the_dispatcher_of_tokens_follows_from_deepep(name: str):
    given = {name: True if name == "moe_enable_deepep" else "deepep"}
    assert transformer_values(given, on_cpu=False) == given | {"moe_token_dispatcher_type": "flex"}
    key = "m.override_transformer_config"
    assert dispatcher_line("m", MegatronConfig(override_transformer_config=given)) == (
        f"{key}.moe_token_dispatcher_type = flex, which follows from {key}.{name} = {str(given[name]).lower()}"
    )
    for own in ({"moe_token_dispatcher_type": "alltoall"} | given, {"bias_dropout_fusion": True}):
        assert transformer_values(own, on_cpu=False) == own
        assert dispatcher_line("m", MegatronConfig(override_transformer_config=own)) is None
