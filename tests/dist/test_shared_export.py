"""Trainer ranks write their weights into memory that all of them see: whole tensors, each number by one rank alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.launch import run_ranks
from tests.dist.layouts import LAYOUTS, MIXTURE_LAYOUTS, ONE, Sizes
from tests.lanes import mostly_full
from tests.tiny_models import make_tiny_model

# Not a multiple of 64: padded on every layout.
VOCAB_SIZE = 485
# Several buckets, some of one tensor.
BUCKET_BYTES = 20_000
DENSE = {name: LAYOUTS[name] for name in ("tp2", "pp2", "vpp2_pp2", "tp2_pp2", "tp2_dp2", "pp2_dp2", "tp2_cp2")}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    options = {"vocab_size": VOCAB_SIZE, "num_layers": 4}
    return {
        # With biases, its head tied to the embedding.
        "qwen2": make_tiny_model(directory / "qwen2", "qwen2", **options),
        # A dense layer among the mixtures.
        "qwen3_moe": make_tiny_model(directory / "qwen3_moe", "qwen3_moe", mlp_only_layers=[1], **options),
        # Tensors that stay float32.
        "deepseek_v3": make_tiny_model(directory / "deepseek_v3", "deepseek_v3", **options),
        # Tensors that have the experts of several ranks.
        "gpt_oss": make_tiny_model(directory / "gpt_oss", "gpt_oss", **options),
    }


def write_and_compare(model: str, sizes: Sizes, dtype: str) -> tuple[int, dict[str, torch.Tensor]]:
    """-> number of buckets; per tensor, which of its numbers this rank wrote. Raises unless they are the exported."""
    from scalerl.config.schema import MegatronConfig
    from scalerl.parallel import platform
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize
    from scalerl.rollout.sync.transports.memory import SharedTransport

    platform.install("cpu")
    layout = Layout(**sizes)
    groups = initialize(layout, backend="gloo", timeout_s=60, seed=1)
    config = MegatronConfig(
        dtype=dtype,
        tensor_model_parallel_size=layout.tp_size,
        pipeline_model_parallel_size=layout.pp_size,
        virtual_pipeline_model_parallel_size=layout.vpp_size if layout.vpp_size > 1 else None,
        context_parallel_size=layout.cp_size,
        expert_model_parallel_size=layout.ep_size,
        expert_tensor_parallel_size=layout.etp_size,
        sequence_parallel=layout.tp_size > 1,
    )
    engine = MegatronEngine(model, config, groups, optim=None)
    assert SharedTransport.possible(engine)
    buckets = SharedTransport(engine, BUCKET_BYTES)
    exported = [[(name, x.clone()) for name, x in bucket] for bucket in engine.export_buckets(BUCKET_BYTES)]
    assert buckets.num_buckets == len(exported)
    before = set(os.listdir("/dev/shm"))
    memories = []
    # Twice: the second time over what the first has left, in the same memory.
    for _ in range(2):
        buckets.make_room(BUCKET_BYTES)
        written = compare(buckets, exported)
        memories.append(buckets.memory)
        # What a killed run would leave there stays until the machine is restarted.
        assert not [name for name in set(os.listdir("/dev/shm")) - before if f"_{os.getpid()}_" in name]
    assert memories[0] is memories[1]
    num_buckets = buckets.num_buckets
    write_otherwise(buckets, engine)
    return num_buckets, written


def write_otherwise(buckets: Any, engine: Any) -> None:
    """One rank has less free memory than the others: all of them cut the buckets that fit it, and write the same."""
    from scalerl.parallel.export import largest_bytes
    from scalerl.rollout.sync.handover import BUCKET_COPIES, BUCKET_FREE_FRAC, agreed_bucket_bytes

    itemsize = next(engine.chunks[0].parameters()).element_size()
    largest = largest_bytes(engine.family, engine.shape, itemsize)
    limit = 8 * largest
    last = dist.get_rank() == dist.get_world_size() - 1
    fits = int(BUCKET_COPIES * (largest * 2 if last else limit) / BUCKET_FREE_FRAC)
    agreed = agreed_bucket_bytes(fits, "here", limit_bytes=limit, largest_bytes=largest)
    assert agreed == 2 * largest
    before, count = buckets.memory, buckets.num_buckets
    exported = [[(name, x.clone()) for name, x in bucket] for bucket in engine.export_buckets(agreed)]
    buckets.make_room(agreed)
    assert buckets.num_buckets == len(exported) != count and buckets.memory is not before
    compare(buckets, exported)


def compare(buckets: Any, exported: list[list[tuple[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    written = {}
    for number, expected in enumerate(exported):
        bucket = buckets.write(number)
        dist.barrier()
        assert [name for name, _ in bucket.named] == [name for name, _ in expected]
        for (name, shared), (_, tensor) in zip(bucket.named, expected, strict=True):
            assert shared.dtype == tensor.dtype and torch.equal(shared, tensor), name
        dist.barrier()
        own = {name: torch.full_like(tensor, torch.nan) for name, tensor in bucket.named}
        buckets.writer.write(number, own)
        written |= {name: ~tensor.isnan() for name, tensor in own.items()}
    return written


def check(model: Path, sizes: Sizes, dtype: str = "float32") -> None:
    ranks = run_ranks(sizes["world_size"], write_and_compare, str(model), sizes, dtype)
    assert ranks[0][0] > 5
    writers = {name: sum(written[name].int() for _, written in ranks) for name in ranks[0][1]}
    assert {name for name, count in writers.items() if not bool((count == 1).all())} == set()
    # No rank is idle: those that hold the same share the work.
    assert all(any(bool(part.any()) for part in written.values()) for _, written in ranks)


@pytest.mark.parametrize("layout", mostly_full(DENSE, lambda name: name in ("vpp2_pp2", "tp2_dp2")))
def test_dense(models: dict[str, Path], layout: str) -> None:
    check(models["qwen2"], DENSE[layout])


@pytest.mark.parametrize("layout", mostly_full(MIXTURE_LAYOUTS, lambda name: name in ("ep2_cp2", "tp2_ep2_etp1")))
def test_mixture(models: dict[str, Path], layout: str) -> None:
    check(models["qwen3_moe"], MIXTURE_LAYOUTS[layout])


@pytest.mark.parametrize("layout", mostly_full(MIXTURE_LAYOUTS, lambda name: name == "tp2_ep2"))
def test_stacked_experts(models: dict[str, Path], layout: str) -> None:
    check(models["gpt_oss"], MIXTURE_LAYOUTS[layout])


def test_latent_attention_in_bfloat16(models: dict[str, Path]) -> None:
    check(models["deepseek_v3"], MIXTURE_LAYOUTS["ep2"], "bfloat16")


def test_one_rank(models: dict[str, Path]) -> None:
    check(models["qwen3_moe"], ONE)
