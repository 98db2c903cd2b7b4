from __future__ import annotations

import logging

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from scalerl.metrics import FlopsShape, device_peak_flops, measured_matmul_peak, mfu

SHAPE = FlopsShape(
    num_layers=3, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16, ffn_hidden_size=48, vocab_size=71
)


def hf_model(kind: str) -> torch.nn.Module:
    classes = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}
    config_class, model_class = classes[kind]
    config = config_class(
        num_hidden_layers=SHAPE.num_layers,
        hidden_size=SHAPE.hidden_size,
        num_attention_heads=SHAPE.num_heads,
        num_key_value_heads=SHAPE.num_kv_heads,
        head_dim=SHAPE.head_dim,
        intermediate_size=SHAPE.ffn_hidden_size,
        vocab_size=SHAPE.vocab_size,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    return model_class(config)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("seq_len", [1, 7, 24])
def test_flops_are_those_that_torch_counts(kind, seq_len):
    model = hf_model(kind)
    with FlopCounterMode(display=False) as counter:
        logits = model(torch.arange(seq_len)[None] % SHAPE.vocab_size).logits
        forward = counter.get_total_flops()
        logits.sum().backward()
    backward = counter.get_total_flops() - forward
    # The counter sees the whole score matrix, s * s pairs, where a causal kernel needs s * (s + 1) / 2.
    masked_pairs = seq_len**2 - seq_len * (seq_len + 1) // 2
    masked = 4 * SHAPE.num_layers * SHAPE.num_heads * SHAPE.head_dim * masked_pairs
    # transformers computes the rotary angles, [head_dim / 2, 1] x [1, s], as a matrix product; it has no gradient.
    rotary = 2 * (SHAPE.head_dim // 2) * seq_len
    assert forward - masked - rotary == SHAPE.forward([seq_len])
    assert backward - 2 * masked == SHAPE.backward([seq_len])
    assert SHAPE.train([seq_len]) == SHAPE.forward([seq_len]) + SHAPE.backward([seq_len])


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
