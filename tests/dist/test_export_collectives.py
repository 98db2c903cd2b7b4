"""Joining the weights takes a few collectives for each bucket, however many layers and experts the model has, and no
rank that could do without it."""

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


def engines(models: list[str], sizes: Sizes) -> Iterator[Any]:
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
    for model in models:
        yield MegatronEngine(model, config, groups, optim=None)


def export(models: list[str], sizes: Sizes) -> list[dict[int, Counted]]:
    """Of each model, bytes of a bucket -> calls by name, buckets, most bytes of a call, of a tensor, of all tensors."""
    measured = []
    for engine in engines(models, sizes):
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


# Of four ranks, by the one that needs everything: what each rank is asked for by a bucket of the whole model.
BY_NEED: dict[str, tuple[Sizes, int, list[dict[str, int]]]] = {
    # Two copies of the model, the needing rank in the second; dense and expert shards of its neighbour go to it alone.
    "tp2_dp2": (dict(world_size=4, tp_size=2, etp_size=2), 3, [{}, {}, {"gather": 2}, {"gather": 2}]),
    "pp2_dp2": (dict(world_size=4, pp_size=2), 1, [{}, {"broadcast": 2}, {}, {"broadcast": 2}]),
    # One copy of the experts over both copies of the rest: what expert ranks send to each other is for all of them.
    "tp2_ep2": (
        dict(world_size=4, tp_size=2, ep_size=2, etp_size=2),
        0,
        [{"gather": 2, "broadcast": 2}, {"gather": 2}, {"gather": 1, "broadcast": 2}, {"gather": 1}],
    ),
    "ep2_pp2": (
        dict(world_size=4, pp_size=2, ep_size=2),
        2,
        [{"broadcast": 4}, {"broadcast": 2}, {"broadcast": 4}, {"broadcast": 2}],
    ),
}


def export_by_need(model: str, sizes: Sizes, needing: int) -> tuple[dict[str, int], bool, list[int], list[int]]:
    """-> calls by name for one bucket; whether all that was handed out is what every rank gets without a need; tensors
    in each bucket where one rank needs all, and where the ranks need buckets in turn."""
    import torch

    (engine,) = engines([model], sizes)
    whole = [[(name, x.clone()) for name, x in bucket] for bucket in engine.export_buckets(SMALL_BUCKETS)]
    with counted() as (counts, _):
        for _ in engine.export_buckets(ONE_BUCKET, lambda number: {needing}):
            pass
    are_equal, sizes_of = True, []
    for needed in (lambda number: {needing}, lambda number: {number % sizes["world_size"]}):
        handed_out = [
            [(name, x.clone()) for name, x in bucket] for bucket in engine.export_buckets(SMALL_BUCKETS, needed)
        ]
        assert len(handed_out) == len(whole)
        for mine, bucket in zip(handed_out, whole, strict=True):
            of_bucket = dict(bucket)
            are_equal &= all(torch.equal(x, of_bucket[name]) for name, x in mine) and len(mine) in (0, len(bucket))
        sizes_of.append([len(bucket) for bucket in handed_out])
    return dict(counts), are_equal, *sizes_of


@pytest.mark.parametrize("layout", mostly_full(BY_NEED, lambda name: name in ("tp2_dp2", "ep2_pp2")))
def test_a_rank_receives_what_its_servers_need(models: list[Path], layout: str) -> None:
    sizes, needing, predicted = BY_NEED[layout]
    ranks = run_ranks(4, export_by_need, str(models[-1]), sizes, needing)
    assert [counts for counts, *_ in ranks] == predicted
    whole = ranks[needing][2]
    assert len(whole) > 4 and min(whole) > 0
    for rank, (_, are_equal, of_one, in_turn) in enumerate(ranks):
        assert are_equal
        assert of_one == (whole if rank == needing else [0] * len(whole))
        assert in_turn == [size if number % 4 == rank else 0 for number, size in enumerate(whole)]
