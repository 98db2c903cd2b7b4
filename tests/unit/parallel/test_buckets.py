"""The static plan of a weight sync."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl.models import Family, ModelShape, family_of
from scalerl.parallel.export import largest_bytes, plan_buckets
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module", params=["qwen3", "qwen2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Family, ModelShape]:
    shape = ModelShape.from_hf(make_tiny_model(tmp_path_factory.mktemp(request.param), request.param))
    return family_of(shape), shape


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Family, ModelShape]:
    shape = ModelShape.from_hf(make_tiny_model(tmp_path_factory.mktemp("latent"), "deepseek_v3"))
    return family_of(shape), shape


def num_bytes(param: object, shape: ModelShape, itemsize: int) -> int:
    return itemsize * sum(math.prod(size) for size in param.hf_shapes(shape).values())


@given(bucket_bytes=st.integers(1, 600_000), itemsize=st.sampled_from([2, 4]), num_layers=st.integers(1, 5))
def test_buckets(model: tuple[Family, ModelShape], bucket_bytes: int, itemsize: int, num_layers: int) -> None:
    family, shape = model[0], replace(model[1], num_layers=num_layers)
    buckets = plan_buckets(family.params(shape), shape, itemsize, bucket_bytes)
    # In the table's order, each parameter once.
    assert [param for bucket in buckets for param in bucket] == family.params(shape)
    sizes = [[num_bytes(param, shape, itemsize) for param in bucket] for bucket in buckets]
    for number, bucket in enumerate(sizes):
        assert bucket, "an empty bucket"
        # Only a parameter that is too large by itself may pass the cap, and then it is alone.
        assert sum(bucket) <= bucket_bytes or len(bucket) == 1
        if number:
            # Not cut before the cap.
            assert sum(sizes[number - 1]) + bucket[0] > bucket_bytes


@given(bucket_bytes=st.integers(1, 600_000))
def test_what_an_engine_joins_comes_in_one_bucket(latent: tuple[Family, ModelShape], bucket_bytes: int) -> None:
    """SGLang drops one of DeepSeek-V3's down projections without a word if the other is not in the same call."""
    family, shape = latent
    parts = {"q_a_proj", "kv_a_proj_with_mqa"}
    for bucket in plan_buckets(family.params(shape), shape, 4, bucket_bytes):
        held = {hf.split(".")[4]: hf.split(".")[2] for param in bucket for hf in param.hf if parts & set(hf.split("."))}
        layers = [hf.split(".")[2] for param in bucket for hf in param.hf if parts & set(hf.split("."))]
        assert held.keys() in (set(), parts) and all(layers.count(layer) == 2 for layer in layers)
    assert all(
        sum(num_bytes(param, shape, 4) for param in bucket) <= largest_bytes(family, shape, 4)
        for bucket in plan_buckets(family.params(shape), shape, 4, 1)
    )


def test_one_bucket_holds_a_model_that_fits(model: tuple[Family, ModelShape]) -> None:
    family, shape = model
    total = sum(num_bytes(param, shape, 4) for param in family.params(shape))
    assert len(plan_buckets(family.params(shape), shape, 4, total)) == 1
    assert len(plan_buckets(family.params(shape), shape, 4, total - 1)) == 2
