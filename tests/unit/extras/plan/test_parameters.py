"""Counts of a model's numbers against transformers' own, built on the meta device."""

from __future__ import annotations

from typing import Any

import pytest

from scalerl.config.schema import RolloutConfig
from scalerl.extras.plan.parameters import stage_parameters
from scalerl.extras.plan.servers import kv_token_bytes, server_bytes, weight_bytes
from scalerl.models import ModelShape
from scalerl.models.sizes import model_bytes, num_parameters
from scalerl.parallel.layout import Layout
from tests.model_configs import CONFIGS, meta_model, read_config

LARGE = sorted(CONFIGS)
# As their model cards give them, billions.
KNOWN = {"qwen3-8b": 8.19, "qwen3-30b-a3b": 30.5, "llama-3.1-70b": 70.6, "deepseek-v3": 671.0, "kimi-k2": 1026.4}


def shape_of(name: str, **changes: Any) -> ModelShape:
    return ModelShape.from_config(read_config(name) | changes)


@pytest.mark.parametrize("name", LARGE)
def test_as_many_as_transformers_has(name: str) -> None:
    model = meta_model(name)
    numbers = {parameter.data_ptr() or id(parameter): parameter.numel() for parameter in model.parameters()}
    biases = sum(b.numel() for key, b in model.named_buffers() if key.endswith("e_score_correction_bias"))
    assert num_parameters(shape_of(name)) == sum(numbers.values()) + biases


@pytest.mark.parametrize(("name", "billions"), KNOWN.items())
def test_models_have_their_size(name: str, billions: float) -> None:
    assert num_parameters(shape_of(name)) / 1e9 == pytest.approx(billions, rel=0.002)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3-8b", Layout(16, tp_size=2, pp_size=4)),
        ("qwen3-0.6b", Layout(4, pp_size=2)),
        ("qwen3-30b-a3b", Layout(32, tp_size=2, pp_size=2, ep_size=8)),
        ("deepseek-v3", Layout(512, tp_size=8, pp_size=16, ep_size=32, first_stage_layers=3, last_stage_layers=2)),
    ],
)
def test_ranks_hold_the_model_together(name: str, layout: Layout) -> None:
    """Each number once: what a rank has, times the ranks of a stage, over the copies. Twice only what is copied:
    tensors that tp ranks have whole, and the tied embedding of the last stage."""
    shape = shape_of(name)
    stages = stage_parameters(shape, layout)
    whole = sum(
        stage.shared * layout.stage_size // stage.shared_copies
        + stage.experts * layout.stage_size // stage.expert_copies
        + stage.buffers
        for stage in stages
    )
    tied = shape.tie_word_embeddings * shape.vocab_size * shape.hidden_size
    assert sorted(layer for stage in stages for layer in stage.layers) == list(range(shape.num_layers))
    assert whole == pytest.approx(num_parameters(shape) + tied, rel=0.02)
    assert whole >= num_parameters(shape) + tied


def test_bytes_of_a_stage_by_hand() -> None:
    """Adam: two moments and a main parameter, over the ranks that have a copy; float32 weights are their own."""
    (stage,) = stage_parameters(shape_of("qwen3-8b"), Layout(8, tp_size=2))
    padding = 0  # 151936 is a multiple of 128
    assert stage.trained * 2 == pytest.approx(8_190_735_360 + padding, rel=1e-3)
    assert stage.gradient_bytes == 4 * stage.trained and stage.weight_bytes(2) == 2 * stage.trained
    assert stage.optimizer_bytes(2, distributed=True) == pytest.approx(12 * stage.trained / 4, rel=1e-6)
    assert stage.optimizer_bytes(4, distributed=True) == pytest.approx(8 * stage.trained / 4, rel=1e-6)
    assert stage.optimizer_bytes(2, distributed=False) == 12 * stage.trained


def test_a_server_by_hand() -> None:
    """Qwen3-8B: 36 layers x 8 key/value heads x 128 x 2 (keys, values) x 2 B; DeepSeek-V3: 61 x (512 + 64) x 2 B."""
    dense, latent = shape_of("qwen3-8b"), shape_of("deepseek-v3")
    assert kv_token_bytes(dense, 1, 2) == 147_456 and kv_token_bytes(dense, 4, 2) == 36_864
    assert kv_token_bytes(dense, 16, 2) == kv_token_bytes(dense, 8, 2), "a rank has one head at least"
    assert kv_token_bytes(latent, 8, 2) == 61 * 576 * 2
    assert weight_bytes(dense, 1, 2) == model_bytes(dense, 2)
    assert weight_bytes(dense, 8, 2) == pytest.approx(model_bytes(dense, 2) / 8, rel=0.001)
    assert weight_bytes(dense, 16, 2) > model_bytes(dense, 2) / 16


def test_a_server_with_deepep_has_shared_experts_whole_on_every_rank() -> None:
    """DeepSeek-V3: 58 layers x 3 matrices x 7168 x 2048 x 2 B, and an eighth of them without."""
    shape = shape_of("deepseek-v3")

    def weights(**own: Any) -> int:
        config = RolloutConfig(tensor_model_parallel_size=8, kv_cache_tokens=1, engine_kwargs={"sglang": own})
        return server_bytes(shape, config, None).weights

    assert weights(ep_size=8) == weights() == weight_bytes(shape, 8, 2)
    assert weights(moe_a2a_backend="deepep") - weights() == 58 * 3 * 7168 * 2048 * 2 * 7 // 8


def test_a_server_in_fp8_by_hand() -> None:
    """Qwen3-30B-A3B: embedding, head, routers, norms stay 2 B; each other number is 1 B and 4 B / 128^2 of a scale."""
    shape = shape_of("qwen3-30b-a3b")
    whole = 2 * 151_936 * 2048 + 48 * (128 * 2048 + 2 * 2048 + 2 * 128) + 2048
    expected = 2 * whole + (num_parameters(shape) - whole) * (1 + 4 / 128**2)
    assert model_bytes(shape, 2, in_fp8=True) == pytest.approx(expected, abs=1000)
    config = RolloutConfig(tensor_model_parallel_size=2, kv_cache_tokens=1, quantization="fp8")
    replicated = 2 * (whole - 2 * 151_936 * 2048)
    assert server_bytes(shape, config, None).weights == pytest.approx((expected + replicated) / 2, abs=1000)
