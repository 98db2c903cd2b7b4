"""Fields of Megatron's configs that the user sets: known names, values of their types, as Megatron wants them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig

from scalerl.config.schema import MegatronConfig, OptimConfig
from scalerl.config.verl.overrides import OWNED, SAME_NAME
from scalerl.errors import UserError
from scalerl.families import ModelShape
from scalerl.parallel.layout import Layout
from scalerl.parallel.model import transformer_config
from scalerl.parallel.overrides import fits, megatron_values, override_violations


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
    (found,) = override_violations("actor.megatron", MegatronConfig(override_transformer_config={field: value}))
    assert found.startswith(f"actor.megatron.override_transformer_config.{field} = ") and text in found


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
    names = set(OWNED[kind]) - {"use_flash_attn"}  # of Megatron's command line, not of its config
    assert names <= set(get_type_hints(owner))
    if kind == "transformer":
        assert set(SAME_NAME) - {"use_distributed_optimizer"} <= set(get_type_hints(owner))


def config_of(**override: Any) -> Any:
    config = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    shape = ModelShape.from_config(config | {"intermediate_size": 64, "vocab_size": 128, "num_key_value_heads": 2})
    groups: Any = SimpleNamespace(layout=Layout(world_size=1))
    return transformer_config(shape, MegatronConfig(override_transformer_config=override), groups, on_cpu=True)


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
