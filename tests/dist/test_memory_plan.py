"""The memory plan against real ranks: weights, gradients, optimizer, the peak of an update, the copy of a save."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.dist.launch import run_ranks
from tests.lanes import mostly_full
from tests.tiny_models import make_tiny_model

NUM_SEQUENCES, LENGTH, NUM_MICRO_BATCHES = 8, 256, 4
TOKENS = NUM_SEQUENCES * LENGTH // NUM_MICRO_BATCHES
SIZES: dict[str, Any] = dict(
    num_layers=4, hidden_size=128, ffn_size=384, num_heads=8, num_kv_heads=4, vocab_size=512, tied=False
)
# (tp_size, pp_size, world_size) and, where it is not 1, cp_size
ONE, TP2, PP2, DP2, CP2, CP4 = (1, 1, 1), (2, 1, 2), (1, 2, 2), (1, 1, 2), (1, 1, 2, 2), (1, 1, 4, 4)
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "core_attn": {"recompute_granularity": "selective"},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]},
    "full": {"recompute_granularity": "full"},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
}
# (family, layout, dtype, mode)
CASES = [
    *(("qwen3", ONE, "bfloat16", mode) for mode in MODES),
    ("qwen2", ONE, "float32", "none"),
    ("qwen3_moe", ONE, "bfloat16", "none"),
    ("qwen3_moe", ONE, "bfloat16", "full"),
    ("qwen3", TP2, "bfloat16", "none"),
    ("qwen3", TP2, "bfloat16", "core_attn"),
    ("qwen3", TP2, "bfloat16", "full"),
    ("qwen3_moe", TP2, "bfloat16", "none"),
    ("deepseek_v3", ONE, "bfloat16", "none"),
    ("deepseek_v3", ONE, "bfloat16", "core_attn"),
    ("qwen3", PP2, "bfloat16", "none"),
    ("qwen3", PP2, "bfloat16", "full"),
    ("qwen3", CP2, "bfloat16", "none"),
    ("qwen3", CP2, "bfloat16", "core_attn"),
    ("qwen2", CP4, "float32", "none"),
    ("qwen3", ONE, "float32", "none"),
    ("qwen3", ONE, "float32", "full"),
    ("qwen3", TP2, "float32", "none"),
    ("deepseek_v3", ONE, "float32", "none"),
]
RANK = 8
WITH_ADAPTERS = [
    ("qwen3_moe", DP2, "bfloat16", "full"),
    *(("qwen3", ONE, "bfloat16", mode) for mode in ("none", "core_attn", "full")),
    ("qwen3", ONE, "float32", "none"),
    ("qwen3", TP2, "bfloat16", "none"),
    ("qwen3", PP2, "bfloat16", "none"),
    ("qwen3_moe", ONE, "bfloat16", "none"),
    ("deepseek_v3", ONE, "bfloat16", "none"),
]
# So few tokens that what does not shrink with them is the most.
SHORT = 24
SHORT_CASES = [(layout, dtype) for dtype in ("bfloat16", "float32") for layout in (CP2, DP2, ONE)]
LONG = 32768
LONG_SIZES: dict[str, Any] = dict(
    num_layers=2, hidden_size=64, ffn_size=192, num_heads=4, num_kv_heads=2, vocab_size=512, tied=False
)
USUAL = [
    *(("qwen3", ONE, "bfloat16", mode) for mode in ("none", "core_attn", "full")),
    ("deepseek_v3", ONE, "bfloat16", "none"),
    # In which norms and SwiGLU are one operation each on a CPU too.
    ("qwen3", ONE, "float32", "none"),
]
# Updates of ranks that exchange by gloo (`measured_and_planned`).
NUM_MEASURED = 3
RELATIVE = 0.1
# The plan of a pass without gradients is a bound (`_Model.forward`), and not so wide that it would refuse what fits: an
# update takes more.
FORWARD_AT_MOST = 3
# Of a layout's loss and gradient norm, as in test_layout_invariance.
RELATIVE_LOSS = 1e-5


def peak_bytes(work: Any) -> int:
    """Most that torch's allocator handed out while `work` ran and had not yet got back.

    What gloo's threads free, the profiler does not see: a block is gone, too, once another one takes its place.
    """
    from torch._C._profiler import _EventType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    profiler: Any = recorded.profiler
    events, waiting = [], list(profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            events.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return peak_of((address, size) for _, address, size in sorted(events, key=lambda event: event[0]))


def peak_of(events: Iterable[tuple[int, int]]) -> int:
    """Of (address, bytes) in their order, where bytes below 0 give a block back."""
    starts: list[int] = []
    sizes: dict[int, int] = {}
    held = most = 0

    def drop(start: int) -> int:
        starts.remove(start)
        return sizes.pop(start)

    for address, num_bytes in events:
        if num_bytes < 0:
            # Blocks that were there before give nothing back.
            held -= drop(address) if address in sizes else 0
            continue
        first = bisect.bisect_right(starts, address)
        if first and starts[first - 1] + sizes[starts[first - 1]] > address:
            first -= 1
        for start in starts[first : bisect.bisect_left(starts, address + num_bytes)]:
            held -= drop(start)
        bisect.insort(starts, address)
        sizes[address] = num_bytes
        held += num_bytes
        most = max(most, held)
    return most


def test_a_block_in_the_place_of_another_counts_once() -> None:
    assert peak_of([(0, 10), (10, 5), (0, -10), (100, 4)]) == 15
    assert peak_of([(0, 10), (10, 5), (4, 8), (50, 1)]) == 15, "both were gone"
    assert peak_of([(0, 10), (70, -3), (10, 5), (0, 10), (10, 5)]) == 15


def measured_and_planned(
    model: str,
    layout: tuple[int, ...],
    megatron: dict[str, Any],
    num_sequences: int = NUM_SEQUENCES,
    length: int = LENGTH,
    num_measured: int = 1,
    rank: int = 0,
) -> dict[str, Any]:
    """On every rank: bytes of its parts, and the peak of an update beside them; both as measured and as planned.

    layout: as Trainee's.  num_measured: updates, of which the least peak counts: now and then no block comes into the
    place of one that gloo has freed.  rank: of adapters of all projections; 0: without.  Under "updates" is what they
    returned, with one before that was not measured.
    """
    from scalerl.batch.data_proto import DataProto, Jagged
    from scalerl.config.schema import MegatronConfig, SFTConfig, SFTDataConfig, SFTTrainerConfig
    from scalerl.config.schema.model import TrainedModelConfig
    from scalerl.extras.plan.plan import memory_plan
    from scalerl.models import ModelShape
    from scalerl.models.adapters import ALL_LINEAR, Adapter, resolve_targets
    from scalerl.parallel.checkpoint import HostCopy, own_share
    from tests.dist.trainee import Trainee

    shape = ModelShape.from_hf(model)
    adapter = Adapter(rank, 2 * rank, resolve_targets(shape, ALL_LINEAR)) if rank else None
    trainee = Trainee(model, layout, adapter=adapter, **megatron)
    dp_size = trainee.groups.layout.dp_size
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 500, (length,), generator=generator) for _ in range(num_sequences // dp_size)]
    trainee.shard = DataProto({"input_ids": Jagged.from_list(rows, torch.int64)})
    each = len(rows) // NUM_MICRO_BATCHES or 1
    trainee.micro_batches = [range(start, start + each) for start in range(0, len(rows), each)]
    updates = [trainee.update()]
    peak = min(peak_bytes(lambda: updates.append(trainee.update())) for _ in range(num_measured))
    forward = peak_bytes(lambda: trainee.engine.logprobs(trainee.shard, trainee.micro_batches, temperature=1.0))
    cfg = SFTConfig(
        data=SFTDataConfig(
            train_files="none",
            max_tokens_per_micro_batch=each * length,
            max_length=length,
            train_batch_size=len(trainee.micro_batches) * dp_size,
        ),
        model=TrainedModelConfig(path=model),
        megatron=MegatronConfig(
            **megatron,
            tensor_model_parallel_size=layout[0],
            pipeline_model_parallel_size=layout[1],
            context_parallel_size=layout[3] if len(layout) > 3 else 1,
            expert_tensor_parallel_size=1,
        ),
        trainer=SFTTrainerConfig(n_gpus_per_node=layout[2]),
    )
    cfg.trainer.async_save = True
    plan = memory_plan(cfg, {"actor": replace(shape, adapter=adapter)}, memory_bytes=None, on_cpu=True)
    device = plan.devices[trainee.groups.coordinates.pp_rank]
    memory = HostCopy()
    memory.copy_pieces(own_share(trainee.engine).pieces)
    parts, forward_parts = (
        next(phase for phase in device.phases if phase.name == f"actor {name}").parts for name in ("update", "forward")
    )
    state = {"params": "actor weights", "grads": "actor gradients", "optimizer": "actor optimizer"}
    return {
        "state": (trainee.engine.device_bytes(), {part: parts[name] for part, name in state.items()}),
        "peak": (peak, sum(size for name, size in parts.items() if name not in (*state.values(), "save copy"))),
        "forward": (
            forward,
            sum(size for name, size in forward_parts.items() if name not in (*state.values(), "save copy")),
        ),
        "save copy": (len(memory._memory), device.save_copy_bytes),
        "updates": updates,
    }


def made(tmp_path_factory: pytest.TempPathFactory, family: str, sizes: dict[str, Any] = SIZES) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp(family), family, **sizes))


@pytest.mark.parametrize(("family", "layout", "dtype", "mode"), mostly_full(CASES, lambda case: case in USUAL))
def test_an_update_takes_what_is_planned(
    tmp_path_factory: pytest.TempPathFactory, family: str, layout: tuple[int, ...], dtype: str, mode: str
) -> None:
    model = made(tmp_path_factory, family)
    times = 1 if layout == ONE else NUM_MEASURED
    megatron = {"dtype": dtype} | MODES[mode]
    for rank in run_ranks(layout[2], measured_and_planned, model, layout, megatron, NUM_SEQUENCES, LENGTH, times):
        measured, planned = rank["peak"]
        assert planned == pytest.approx(measured, rel=RELATIVE), (rank, measured / planned)
        held, most = rank["forward"]
        assert held <= most <= FORWARD_AT_MOST * held, rank


@pytest.mark.full
@pytest.mark.parametrize(("family", "layout", "dtype", "mode"), WITH_ADAPTERS)
def test_an_update_of_an_adapter_takes_what_is_planned(
    tmp_path_factory: pytest.TempPathFactory, family: str, layout: tuple[int, ...], dtype: str, mode: str
) -> None:
    """And less than one of all weights, by more than half of their gradients and optimizer."""
    model, times = made(tmp_path_factory, family), 1 if layout == ONE else NUM_MEASURED
    arguments = (model, layout, {"dtype": dtype} | MODES[mode], NUM_SEQUENCES, LENGTH, times)
    for rank in run_ranks(layout[2], measured_and_planned, *arguments, RANK):
        measured, planned = rank["peak"]
        assert planned == pytest.approx(measured, rel=RELATIVE), (rank, measured / planned)
        # Frozen matrices of latent attention take memory of torch's on a CPU, in a reference too, that no plan counts.
        held, most = rank["forward"]
        assert family == "deepseek_v3" or held <= most <= FORWARD_AT_MOST * held, rank
        own, of_plan = rank["state"]
        assert own == pytest.approx(of_plan, rel=0.02) and own["grads"] < own["params"] / 4, rank
        copied, of_plan = rank["save copy"]
        assert copied <= 1.02 * of_plan, rank


@pytest.mark.parametrize(("layout", "dtype"), mostly_full(SHORT_CASES, lambda case: case == (CP2, "bfloat16")))
def test_an_update_of_short_sequences_takes_what_is_planned(
    tmp_path_factory: pytest.TempPathFactory, layout: tuple[int, ...], dtype: str
) -> None:
    """What it takes is gloo's copy of the gradients."""
    model = made(tmp_path_factory, "qwen3")
    ranks = run_ranks(
        layout[2], measured_and_planned, model, layout, {"dtype": dtype}, NUM_SEQUENCES, SHORT, NUM_MEASURED
    )
    for rank in ranks:
        measured, planned = rank["peak"]
        assert planned == pytest.approx(measured, rel=RELATIVE), (rank, measured / planned)


@pytest.mark.full
def test_a_long_sequence_over_four_ranks_takes_what_is_planned(tmp_path_factory: pytest.TempPathFactory) -> None:
    """And trains as on one rank."""
    model = made(tmp_path_factory, "qwen3", LONG_SIZES)
    (one,), four = (
        run_ranks(layout[2], measured_and_planned, model, layout, {"dtype": "float32"}, 1, LONG, timeout_s=1200)
        for layout in (ONE, CP4)
    )
    for rank in (one, *four):
        measured, planned = rank["peak"]
        assert planned == pytest.approx(measured, rel=RELATIVE), (rank, measured / planned)
    for rank in four:
        assert rank["peak"][1] == pytest.approx(one["peak"][1] / 4, rel=RELATIVE), "the ranks share the sequence"
        for over_four, alone in zip(rank["updates"], one["updates"], strict=True):
            assert over_four.keys() == alone.keys() >= {"loss", "grad_norm"}
            assert over_four == pytest.approx(alone, rel=RELATIVE_LOSS)


@pytest.mark.parametrize(
    ("family", "layout"),
    mostly_full(
        [("qwen3", PP2), ("qwen3", DP2), ("llama", TP2), ("qwen2", PP2), ("qwen3_moe", DP2), ("deepseek_v3", TP2)],
        lambda case: case in (("qwen3", DP2), ("deepseek_v3", TP2)),
    ),
)
def test_weights_gradients_and_optimizer_are_counted(
    tmp_path_factory: pytest.TempPathFactory, family: str, layout: tuple[int, int, int]
) -> None:
    """Up to what DDP pads its buffers by: each parameter to 64 numbers."""
    model = made(tmp_path_factory, family)
    ranks = run_ranks(layout[2], measured_and_planned, model, layout, {"dtype": "bfloat16"})
    # A rank that is not the first one of its tensor-parallel group copies nothing of what all of them have; pieces
    # begin at multiples of 64 bytes.
    copies, planned_copies = zip(*(rank["save copy"] for rank in ranks), strict=True)
    assert max(planned_copies) == pytest.approx(max(copies), rel=0.02), (copies, planned_copies)
    assert all(held <= 1.02 * planned for held, planned in zip(copies, planned_copies, strict=True))
    for rank in ranks:
        measured, planned = rank["state"]
        for part in measured:
            assert planned[part] == pytest.approx(measured[part], rel=0.02), (part, rank)
