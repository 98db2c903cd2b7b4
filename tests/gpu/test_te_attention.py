"""Transformer Engine's attention (cp_comm_type) against scalerl's own, forward and backward, at cp 1 and above.

NOT RUN YET on a GPU: written from the sources of megatron-core 0.19.2 and of transformer-engine 2.9 to 2.20.2 on a
machine without one. Where the installed version is too old for an exchange, the test expects it to be refused.

    python -m pytest tests/gpu/test_te_attention.py -q
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scalerl.config.transformer_engine import transformer_engine_version, transformer_engine_violations
from tests.gpu.isolated import run_isolated, run_isolated_ranks
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.skipif(
    transformer_engine_version() is None,
    reason="transformer-engine is not installed; requirements/gpu.txt says how",
)

# Of a sequence of one token, of lengths around the kernels' tile sizes, and of one long sequence.
LENGTHS = (1, 7, 64, 129, 1, 300, 1024)
NUM_HEADS, HEAD_DIM = 8, 64
VALUE_DIM_OF_LATENT = 32
# About three times the distance of scalerl's own attention in bfloat16 from float32, on a CPU: at most 0.0026 of the
# output and 0.0061 of a gradient. Relative Frobenius norms.
FORWARD_BOUND, GRADIENT_BOUND = 0.008, 0.018
# Mean absolute difference of log-probs, nats: the bound of test_engine_update.py for bfloat16 against float32.
LOGPROB_BOUND = 0.05


@functools.cache
def whole_inputs(num_tokens: int, num_kv_heads: int, value_dim: int) -> tuple[Tensor, ...]:
    """query, key, value and the weights of the output in the loss, of all P tokens; rounded to bfloat16."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(NUM_HEADS, HEAD_DIM), (num_kv_heads, HEAD_DIM), (num_kv_heads, value_dim), (NUM_HEADS, value_dim)]
    return tuple(torch.randn(num_tokens, *size, generator=generator).bfloat16() for size in sizes)


def attend(
    model: str, comm_type: str | None, hierarchy: list[int] | None, value_dim: int, dtype: str
) -> dict[str, Any]:
    """On each cp rank: output and gradients of its tokens, and their places among the P of the micro-batch."""
    import torch.distributed as dist
    from megatron.core.transformer.enums import AttnMaskType

    from scalerl.batch import Alignment
    from scalerl.batch.data_proto import DataProto, Jagged
    from scalerl.config.schema import MegatronConfig
    from scalerl.models import ModelShape
    from scalerl.parallel import platform
    from scalerl.parallel.attention import Rotary
    from scalerl.parallel.layout import Layout, initialize
    from scalerl.parallel.micro_batch import pack_rows
    from scalerl.parallel.model import core_attention, transformer_config
    from tests.gpu.isolated import TIMEOUT_S

    dist.init_process_group(platform.backend())
    cp_size, device = dist.get_world_size(), platform.device_type()
    megatron = MegatronConfig(
        context_parallel_size=cp_size,
        cp_comm_type=comm_type,
        hierarchical_context_parallel_sizes=hierarchy,
        dtype=dtype,
    )
    groups = initialize(Layout.of(megatron, cp_size), backend=platform.backend(), timeout_s=TIMEOUT_S, seed=1)
    shape = ModelShape.from_hf(model)
    config = transformer_config(shape, megatron, groups, on_cpu=device == "cpu")
    channels = {} if value_dim == HEAD_DIM else {"k_channels": HEAD_DIM, "v_channels": value_dim}
    attention = core_attention(config, groups)(
        config=config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        cp_comm_type=comm_type,
        softmax_scale=None,
        pg_collection=None,
        **channels,
    )
    ids = Jagged.from_list([torch.ones(length) for length in LENGTHS], torch.int64)
    alignment = Alignment.of_layout(tp_size=1, cp_size=cp_size, sequence_parallel=False)
    batch = pack_rows(
        DataProto({"input_ids": ids}),
        range(len(LENGTHS)),
        device=device,
        alignment=alignment,
        cp_size=cp_size,
        cp_rank=groups.coordinates.cp_rank,
    )
    batch.packing.cos_sin = Rotary(shape, device).tables(batch.position_ids[0])
    num_tokens = sum(batch.packing.lengths)
    order = torch.arange(num_tokens) if cp_size == 1 else batch.packing.order.cpu()
    places = order.view(cp_size, -1)[groups.coordinates.cp_rank]
    mine = [x[places].to(device, config.params_dtype) for x in whole_inputs(num_tokens, shape.num_kv_heads, value_dim)]
    tensors = [x.requires_grad_() for x in mine[:3]]
    out = attention(*tensors, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=batch.packing)
    out.backward(mine[3].flatten(1))
    return {
        "places": places,
        "lengths": batch.packing.lengths,
        "results": [x.float().cpu() for x in (out.detach(), *(tensor.grad for tensor in tensors))],
        "state": sorted(attention.sharded_state_dict()) if comm_type else [],
    }


def whole(ranks: list[dict[str, Any]]) -> list[Tensor]:
    """Output and gradients in packed order."""
    order = torch.cat([rank["places"] for rank in ranks]).argsort()
    return [torch.cat(parts)[order] for parts in zip(*(rank["results"] for rank in ranks), strict=True)]


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def distances(ranks: list[dict[str, Any]], expected: list[dict[str, Any]]) -> dict[str, float]:
    assert ranks[0]["lengths"] == expected[0]["lengths"]
    names = ("output", "query", "key", "value")
    pairs = zip(names, whole(ranks), whole(expected), strict=True)
    return {name: relative(actual, reference) for name, actual, reference in pairs}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By number of key/value heads."""
    directory = tmp_path_factory.mktemp("models")
    sizes = dict(num_heads=NUM_HEADS, head_dim=HEAD_DIM)
    return {number: make_tiny_model(directory / str(number), num_kv_heads=number, **sizes) for number in (2, NUM_HEADS)}


@functools.cache
def own_attention(model: Path, cp_size: int, value_dim: int) -> list[dict[str, Any]]:
    """scalerl's in float32 on the CPU, on sequences aligned for cp_size."""
    return run_isolated_ranks(cp_size, attend, str(model), None, None, value_dim, "float32", device="cpu")


def check(model: Path, comm_type: str, cp_size: int, value_dim: int, hierarchy: list[int] | None = None) -> None:
    run = functools.partial(
        run_isolated_ranks, cp_size, attend, str(model), comm_type, hierarchy, value_dim, "bfloat16", device="cuda"
    )
    refusal = transformer_engine_violations(
        comm_type, cp_size, prefix="megatron", device="cuda", version=transformer_engine_version()
    )
    if list(refusal):
        with pytest.raises(AssertionError, match="needs transformer-engine"):
            run()
        return
    ranks = run()
    distance = distances(ranks, own_attention(model, cp_size, value_dim))
    assert distance["output"] < FORWARD_BOUND, distance
    assert max(distance[name] for name in ("query", "key", "value")) < GRADIENT_BOUND, distance
    # A checkpoint is the same with every attention.
    assert all(rank["state"] == [] for rank in ranks)


@pytest.mark.parametrize("num_kv_heads", [2, NUM_HEADS])
def test_output_and_gradients_are_those_of_own_attention(models: dict[int, Path], num_kv_heads: int) -> None:
    check(models[num_kv_heads], "p2p", 1, HEAD_DIM)


def test_values_may_be_narrower_than_keys(models: dict[int, Path]) -> None:
    check(models[NUM_HEADS], "p2p", 1, VALUE_DIM_OF_LATENT)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("value_dim", [HEAD_DIM, VALUE_DIM_OF_LATENT])
@pytest.mark.parametrize("comm_type", ["p2p", "a2a", "all_gather"])
def test_two_ranks_exchange(models: dict[int, Path], comm_type: str, value_dim: int) -> None:
    check(models[2 if value_dim == HEAD_DIM else NUM_HEADS], comm_type, 2, value_dim)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 GPUs")
@pytest.mark.parametrize("value_dim", [HEAD_DIM, VALUE_DIM_OF_LATENT])
def test_four_ranks_exchange_in_two_ways(models: dict[int, Path], value_dim: int) -> None:
    check(models[2 if value_dim == HEAD_DIM else NUM_HEADS], "a2a+p2p", 4, value_dim, [2, 2])


def logprobs_of_an_engine(model: str, comm_type: str | None) -> dict[str, Any]:
    from scalerl.batch.data_proto import DataProto, Jagged
    from scalerl.config.schema import MegatronConfig
    from scalerl.parallel import platform
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize

    groups = initialize(Layout(1), backend=platform.backend(), timeout_s=120, seed=1)
    megatron = MegatronConfig(dtype="bfloat16", cp_comm_type=comm_type)
    engine = MegatronEngine(model, megatron, groups, optim=None)
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, 500, (length,), generator=generator) for length in LENGTHS]
    shard = DataProto({"input_ids": Jagged.from_list(ids, torch.int64)})
    columns = engine.logprobs(shard, [range(3), range(3, len(LENGTHS))], temperature=1.0)
    return {"logprobs": columns["logprobs"].values, "state": sorted(engine.chunks[0].sharded_state_dict())}


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_an_engine_gives_the_same_logprobs_and_checkpoint_keys(tmp_path: Path, family: str) -> None:
    sizes = dict(hidden_size=256, initializer_range=0.05)
    if family == "deepseek_v3":
        # Sizes that kernels take; queries and keys have the sum of the first two.
        sizes |= dict(qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64)
    model = make_tiny_model(tmp_path, family, **sizes)
    own, theirs = (run_isolated(logprobs_of_an_engine, str(model), kind, device="cuda") for kind in (None, "p2p"))
    assert own["state"] == theirs["state"]
    assert float((own["logprobs"] - theirs["logprobs"]).abs().mean()) < LOGPROB_BOUND
