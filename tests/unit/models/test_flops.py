from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from scalerl.models import ModelShape
from scalerl.models.adapters import Adapter, resolve_targets
from scalerl.models.flops import FlopsShape, device_peak_flops, flops_shape, measured_matmul_peak, mfu

SHAPE = FlopsShape(
    num_layers=3, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16, ffn_hidden_size=48, vocab_size=71
)
COMMON = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 71,
}
GQA = COMMON | {"num_key_value_heads": 2, "head_dim": 16}
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
LATENT = COMMON | {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 10,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 18,
}
# name: (transformers' prefix, config)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", GQA | {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {**GQA, "head_dim": 8}),
    "llama": ("Llama", GQA),
    "qwen3_moe": ("Qwen3Moe", GQA | MIXTURE),
    "qwen3_moe_sparse": ("Qwen3Moe", GQA | MIXTURE | {"decoder_sparse_step": 2}),
    "mixtral": ("Mixtral", GQA | {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "deepseek_v3": ("DeepseekV3", LATENT),
    "gpt_oss": ("GptOss", GQA | {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 5}),
    "deepseek_v3_full_queries": ("DeepseekV3", LATENT | {"q_lora_rank": None}),
}


def hf_model(name: str, head: str) -> torch.nn.Module:
    prefix, fields = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**fields, num_labels=1, attn_implementation="eager")
    model = getattr(transformers, f"{prefix}For{head}")(config)
    if hasattr(config, "_experts_implementation"):
        # The counter does not know grouped products.
        model.set_experts_implementation("eager")
    for parameter in model.parameters():
        # Some experts are created empty.
        torch.nn.init.normal_(parameter, std=0.02)
    return model


def counted(model: torch.nn.Module, seq_len: int) -> tuple[int, int]:
    """FLOPs of forward and of backward that torch's counter sees."""
    with FlopCounterMode(display=False) as counter:
        logits = model(torch.arange(seq_len)[None] % SHAPE.vocab_size).logits
        forward = counter.get_total_flops()
        logits.sum().backward()
    return forward, counter.get_total_flops() - forward


def shape_of(name: str) -> FlopsShape:
    prefix, fields = MODELS[name]
    return flops_shape(ModelShape.from_config(getattr(transformers, f"{prefix}Config")(**fields).to_dict()))


def not_ours(shape: FlopsShape, seq_len: int) -> tuple[int, int]:
    """(masked, rotary) FLOPs of eager attention in transformers' forward that are not the model's.

    The counter sees the whole score matrix, s * s pairs, where a causal kernel needs s * (s + 1) / 2. And transformers
    computes the rotary angles, [rotary_dim / 2, 1] x [1, s], as a matrix product; it has no gradient.
    """
    latent = shape.kv_lora_rank is not None
    dims = shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim if latent else 2 * shape.head_dim
    seen = [sum(range(seq_len + 1))] * (shape.num_layers - shape.num_sliding_layers)
    seen += [sum(min(token + 1, shape.sliding_window) for token in range(seq_len))] * shape.num_sliding_layers
    rotary_dim = shape.qk_rope_head_dim if latent else shape.head_dim
    pairs = sum(seq_len**2 - of_layer for of_layer in seen)
    return 2 * shape.num_heads * dims * pairs, 2 * (rotary_dim // 2) * seq_len


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seq_len", [1, 7, 24])
def test_flops_are_those_that_torch_counts(name, seq_len):
    shape = shape_of(name)
    forward, backward = counted(hf_model(name, "CausalLM"), seq_len)
    masked, rotary = not_ours(shape, seq_len)
    assert forward - masked - rotary == shape.forward([seq_len])
    assert backward - 2 * masked == shape.backward([seq_len])
    assert shape.train([seq_len]) == shape.forward([seq_len]) + shape.backward([seq_len])


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_a_critic_has_a_value_head_in_place_of_the_vocabulary(name):
    shape = shape_of(name).as_critic()
    forward, backward = counted(hf_model(name, "TokenClassification"), 7)
    masked, rotary = not_ours(shape, 7)
    assert forward - masked - rotary == shape.forward([7])
    assert backward - 2 * masked == shape.backward([7])


@pytest.mark.parametrize("target_modules", ["all-linear", ["q_proj", "down_proj"]])
def test_a_frozen_weight_has_one_product_in_the_backward_pass(peft, target_modules):
    """torch counts those of peft, whose embedding gives gradients, as ours does."""
    prefix, fields = MODELS["qwen3"]
    shape = ModelShape.from_config(getattr(transformers, f"{prefix}Config")(**fields).to_dict())
    adapter = Adapter(5, 10, resolve_targets(shape, target_modules))
    model = peft.get_peft_model(hf_model("qwen3", "CausalLM"), peft.LoraConfig(r=5, target_modules=target_modules))
    model.enable_input_require_grads()
    forward, backward = counted(model, 7)
    sizes = flops_shape(replace(shape, adapter=adapter))
    masked, rotary = not_ours(sizes, 7)
    assert forward - masked - rotary == sizes.forward([7])
    assert backward - 2 * masked == sizes.backward([7])
    assert sizes.train([7]) == sizes.forward([7]) + sizes.backward([7])


def test_adapters_of_experts_by_hand():
    """A token meets those of two of six experts; a critic's head is trained, and everything else is not."""
    prefix, fields = MODELS["qwen3_moe"]
    shape = ModelShape.from_config(getattr(transformers, f"{prefix}Config")(**fields).to_dict())
    adapter = Adapter(5, 10, resolve_targets(shape, "all-linear", ["q_proj", "k_proj", "v_proj"]))
    # Of 3 layers: the output projection of 4 heads of 16, then gate, up and down of an expert.
    pairs = 3 * 5 * ((64 + 32) + 2 * 3 * (32 + 20))
    for head, trained in (("lm", 0), ("value", 32)):
        whole = flops_shape(shape.with_head(head))
        sizes = flops_shape(replace(shape.with_head(head), adapter=adapter))
        assert sizes.forward([7]) - whole.forward([7]) == 2 * 7 * pairs
        frozen = whole.matmul_params - trained
        assert whole.train([7]) - sizes.train([7]) == 2 * 7 * (frozen - 3 * pairs)


def test_gated_delta_nets_pay_for_their_matrices_and_states():
    """transformers' linear layers, the pairs of the layers that attend, and three products with each state."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8}
    fields = GQA | MIXTURE | sizes | {"linear_value_head_dim": 10, "shared_expert_intermediate_size": 12}
    fields |= {"num_hidden_layers": 4, "mlp_only_layers": [1]}
    config = transformers.Qwen3NextConfig(**fields)
    model = transformers.Qwen3NextForCausalLM(config)
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    routed = sum(2 * 3 * 32 * 20 + m.gate.weight.numel() for m in model.modules() if hasattr(m, "shared_expert_gate"))
    pairs, states = 7 * 8 // 2, 3 * 6 * 8 * 10
    by_hand = 2 * 7 * (weights + routed) + pairs * 2 * 4 * 2 * 16 + 7 * 3 * 2 * states
    assert flops_shape(ModelShape.from_config(config.to_dict())).forward([7]) == by_hand


def test_a_token_pays_for_its_own_experts_only():
    """By hand: all experts would cost 6 / 2 times the two that a token goes to; the router always sees all six."""
    shape = shape_of("qwen3_moe")
    dense = FlopsShape(**{**shape.__dict__, "num_moe_layers": 0, "ffn_hidden_size": 2 * 20})
    assert shape.forward([5]) - dense.forward([5]) == 2 * 5 * 3 * 32 * 6


def test_each_sequence_alone_and_their_sum():
    lengths = np.array([5, 9, 131072])
    assert SHAPE.forward_each(lengths).tolist() == [SHAPE.forward([length]) for length in lengths]
    assert SHAPE.forward(lengths) == SHAPE.forward_each(lengths).sum()
    assert SHAPE.forward([]) == 0.0
    # 1 TB of weights and a million tokens: no overflow.
    giant = FlopsShape(
        num_layers=100, hidden_size=20480, num_heads=160, num_kv_heads=16, head_dim=128, ffn_hidden_size=81920,
        vocab_size=256000,
    )  # fmt: skip
    assert giant.forward([2**20]) == pytest.approx(
        2.0 * giant.matmul_params * 2**20 + 4.0 * 100 * 160 * 128 * (2.0**20 * (2**20 + 1) / 2)
    )


def test_sequences_do_not_attend_to_each_other():
    assert SHAPE.forward([5, 9]) == SHAPE.forward([5]) + SHAPE.forward([9]) < SHAPE.forward([14])


def test_an_mlp_without_gate_has_two_matrices():
    plain = FlopsShape(**{**SHAPE.__dict__, "gated": False})
    assert SHAPE.forward([4]) - plain.forward([4]) == 2 * 4 * 3 * 32 * 48


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H200", torch.bfloat16, 989e12),
        ("NVIDIA H20", "bfloat16", 148e12),
        ("NVIDIA H800", "float16", 989e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5e12),
        ("NVIDIA B200", "bfloat16", 2.25e15),
        ("NVIDIA GB200", "bfloat16", 2.5e15),
        ("NVIDIA L40S", "bfloat16", 362.05e12),
        ("NVIDIA L40", "bfloat16", 181.05e12),
    ],
)
def test_peak_of_known_devices(name, dtype, peak):
    assert device_peak_flops(name, dtype) == peak


def test_an_unknown_device_has_no_peak_and_one_warning(caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert device_peak_flops("Abacus 3000", "bfloat16") is None
        assert device_peak_flops("NVIDIA H100", "int3") is None
        # A name that only contains a known one is another device.
        assert device_peak_flops("Model XA100", "bfloat16") is None
        assert device_peak_flops("Model A1000", "bfloat16") is None
    assert [record.getMessage().count("Abacus 3000") for record in caplog.records] == [1, 0, 0, 0]


def test_mfu():
    assert mfu(6e12, 2.0, 3, 4e12) == 0.25
    assert mfu(6e12, 2.0, 3, None) is None
    with pytest.raises(ValueError, match="seconds=0"):
        mfu(1.0, 0.0, 1, 1.0)


def test_measured_peak_is_a_rate_of_multiply_adds():
    peak = measured_matmul_peak("cpu", "float32", size=128, seconds=0.01)
    # From a pocket calculator to a cluster: a unit that is wrong by 1e9 or inverted falls out.
    assert 1e6 < peak < 1e18
