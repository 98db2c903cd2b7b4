"""Joining the weights takes a few collectives for each bucket, however many layers and experts the model has."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from scalerl.parallel.export import GATHER_FRAC
from tests.dist.launch import run_ranks
from tests.dist.layouts import MIXTURE_LAYOUTS, Sizes
from tests.lanes import mostly_full
from tests.tiny_models import make_tiny_model

# (layers, experts)
MODELS = ((2, 4), (2, 8), (4, 4), (4, 8))
ONE_BUCKET = 1 << 40
SMALL_BUCKETS = 150_000
# Of a whole model in one bucket: a gather of shards for those of tp and one for those of etp; a broadcast from each
# expert rank of a stage, and from each stage.
PREDICTED = {
    "ep2": {"broadcast": 2},
    "tp2_etp2": {"all_gather": 2},
    "tp2_ep2": {"all_gather": 2, "broadcast": 2},
    "tp2_ep2_etp1": {"all_gather": 1, "broadcast": 2},
    "ep2_cp2": {"broadcast": 2},
    "ep2_pp2": {"broadcast": 2 + 2},
}
COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all_single", "barrier",
    "broadcast", "broadcast_object_list", "gather", "gather_object", "recv", "reduce_scatter_tensor", "scatter", "send",
)  # fmt: skip


@contextlib.contextmanager
def counted() -> Iterator[tuple[Counter[str], list[int]]]:
    """Calls of torch.distributed by this rank, by name; bytes that each has in hand."""
    counts: Counter[str] = Counter()
    num_bytes: list[int] = []
    real = {name: getattr(dist, name) for name in COLLECTIVES}

    def counting(name: str) -> Any:
        def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            num_bytes.append(sum(x.nbytes for x in (tensors if isinstance(tensors, list) else [tensors])))
            return real[name](tensors, *args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counting(name))
    try:
        yield counts, num_bytes
    finally:
        for name in COLLECTIVES:
            setattr(dist, name, real[name])


Counted = tuple[dict[str, int], int, int, int, int]


def export(models: list[str], sizes: Sizes) -> list[dict[int, Counted]]:
    """Of each model, bytes of a bucket -> calls by name, buckets, most bytes of a call, of a tensor, of all tensors."""
    from scalerl.config.schema import MegatronConfig
    from scalerl.parallel import platform
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize

    platform.install("cpu")
    layout = Layout(**sizes)
    groups = initialize(layout, backend="gloo", timeout_s=60, seed=1)
    config = MegatronConfig(
        dtype="float32",
        tensor_model_parallel_size=layout.tp_size,
        pipeline_model_parallel_size=layout.pp_size,
        context_parallel_size=layout.cp_size,
        expert_model_parallel_size=layout.ep_size,
        expert_tensor_parallel_size=layout.etp_size,
        sequence_parallel=layout.tp_size > 1,
    )
    measured = []
    for model in models:
        engine = MegatronEngine(model, config, groups, optim=None)
        of_model = {}
        for bucket_bytes in (ONE_BUCKET, SMALL_BUCKETS):
            with counted() as (counts, num_bytes):
                buckets = [[x.nbytes for _, x in bucket] for bucket in engine.export_buckets(bucket_bytes)]
            total = sum(map(sum, buckets))
            of_model[bucket_bytes] = dict(counts), len(buckets), max(num_bytes), max(map(max, buckets)), total
        measured.append(of_model)
    return measured


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("models")
    return [
        make_tiny_model(directory / f"{layers}x{experts}", "qwen3_moe", num_layers=layers, num_experts=experts)
        for layers, experts in MODELS
    ]


@pytest.mark.parametrize("layout", mostly_full(MIXTURE_LAYOUTS, lambda name: name in ("tp2_ep2_etp1", "ep2_pp2")))
def test_collectives_do_not_grow_with_layers_and_experts(models: list[Path], layout: str) -> None:
    sizes = MIXTURE_LAYOUTS[layout]
    for rank in run_ranks(sizes["world_size"], export, [str(model) for model in models], sizes):
        for model in rank:
            assert model[ONE_BUCKET][:2] == (PREDICTED[layout], 1)
            counts, num_buckets, most_bytes, largest, total = model[SMALL_BUCKETS]
            assert num_buckets > 2
            # Of a bucket as above, and more where a gather holds but a part of one.
            gathers = 2 * math.ceil(total / (GATHER_FRAC * SMALL_BUCKETS))
            assert sum(counts.values()) <= num_buckets * sum(PREDICTED[layout].values()) + gathers
            # Nothing is in hand that does not fit in a bucket, but the padded vocabulary.
            assert most_bytes <= max(SMALL_BUCKETS, largest * 1.1)
            assert num_buckets <= 2 * math.ceil(total / SMALL_BUCKETS)
