"""A model with latent attention in SGLang on a CPU: its checksums, and the tokens that it samples before and after."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scalerl.models import ModelShape, family_of
from scalerl.parallel.export import plan_buckets
from scalerl.rollout.servers.checksums import checksum_differences
from scalerl.rollout.servers.client import SamplingParams
from scalerl.rollout.servers.sglang.placement_arguments import MIXTURES
from tests.served_weights import expected_checksums, serialize_bucket
from tests.sglang.conftest import PROMPTS, Engine, Model, make_model
from tests.sglang.test_contract import assert_logprobs_match, requests_for
from tests.sglang.test_sync_mixture import TWO_CORES
from tests.tiny_models import load_tiny_model

# As transformers writes it: without keys that SGLang needs, and without yarn.
PLAIN = {"max_position_embeddings": 512}
# As DeepSeek-V3's own config.json has them.
YARN = {
    "max_position_embeddings": 512,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


FAMILIES = ("deepseek_v3", "glm4_moe_lite")


def test_every_family_that_is_said_to_be_known_is_here() -> None:
    assert {name for name in MIXTURES if family_of({"model_type": name}).latent} == set(FAMILIES)


def assert_samples_are_of(model: Model, engine: Engine, policy_version: int) -> None:
    """Twice: the second time the prompts are in the cache.

    One after another: what is computed together depends on when it comes, and rounding on that. Where two experts are
    as good as equal the router would take the one or the other.
    """
    for _ in range(2):
        for request in requests_for(PROMPTS, SamplingParams(max_new_tokens=12, temperature=1.0)):
            (output,) = engine.generate([request])
            assert_logprobs_match(model, request.input_ids, output, temperature=1.0)
            assert output.policy_version == policy_version


@pytest.mark.shows("sync", "serve", server="sglang")
@pytest.mark.parametrize(
    ("family", "config_keys", "tp_size", "ep_size"),
    [
        pytest.param("deepseek_v3", YARN, 1, 1, marks=pytest.mark.full),
        ("deepseek_v3", PLAIN, 1, 1),
        pytest.param("deepseek_v3", YARN, 2, 1, marks=[TWO_CORES, pytest.mark.full]),
        pytest.param("deepseek_v3", PLAIN, 2, 2, marks=[TWO_CORES, pytest.mark.full]),
        pytest.param("kimi_k2", PLAIN, 1, 1, marks=pytest.mark.full),
        pytest.param("glm4_moe_lite", PLAIN, 1, 1, marks=pytest.mark.full),
        pytest.param("glm4_moe_lite", PLAIN, 2, 2, marks=[TWO_CORES, pytest.mark.full]),
    ],
    ids=["yarn", "plain", "yarn-tp2", "plain-ep2", "kimi_k2", "glm4_moe_lite", "glm4_moe_lite-ep2"],
)
def test_samples_checksums_and_what_sglang_drops(
    start_engine: Callable[..., Engine],
    tmp_path: Path,
    family: str,
    config_keys: dict[str, Any],
    tp_size: int,
    ep_size: int,
) -> None:
    """A down projection that comes in a bucket without the other is dropped without a word; the checksum names it."""
    own = {"ep_size": ep_size} if ep_size > 1 else {}
    paths = [make_model(tmp_path / str(seed), family, seed, **config_keys) for seed in (0, 1)]
    old, new = (Model(path, load_tiny_model(path, family).eval()) for path in paths)
    config, weights, kwargs = new.hf.config.to_dict(), dict(new.weights()), {"sglang": own}
    engine = start_engine("sglang", old.path, tp_size=tp_size, **own)
    try:
        assert_samples_are_of(old, engine, 0)
        checksums = engine.client.checksums()
        expected = expected_checksums(old.weights(), config, tp_size, "sglang", engine_kwargs=kwargs)
        assert checksum_differences(expected, checksums) == []
        assert any("shared_experts.gate_up_proj" in name for name in checksums[0])
        expected = expected_checksums(new.weights(), config, tp_size, "sglang", engine_kwargs=kwargs)

        def differences_after(buckets: list[list[str]], version: int) -> list[str]:
            engine.client.begin_weight_update()
            for names in buckets:
                blobs = [serialize_bucket([(name, weights[name]) for name in names], "sglang") for _ in range(tp_size)]
                engine.client.update_weights(blobs)
            engine.client.end_weight_update(version)
            return checksum_differences(expected, engine.client.checksums())

        alone = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
        lines = differences_after([[name for name in weights if name != alone], [alone]], 3)
        assert [line.partition(": ")[0] for line in lines] == [
            f"rank {rank} model.layers.1.self_attn.fused_qkv_a_proj_with_mqa.weight" for rank in range(tp_size)
        ]
        shape = ModelShape.from_hf(new.path)
        planned = plan_buckets(family_of(shape).params(shape), shape, 4, bucket_bytes=40_000)
        buckets = [[name for param in bucket for name in param.hf] for bucket in planned]
        assert len(buckets) > 5 and differences_after(buckets, 4) == []
        assert_samples_are_of(new, engine, 4)
    finally:
        engine.server.stop()
