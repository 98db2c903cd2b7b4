"""Parameters, gradients and optimizer state in host memory between the phases: same numbers, memory really freed."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.launch import run_ranks
from tests.dist.test_lora import make_adapter
from tests.dist.trainee import Trainee
from tests.lanes import full
from tests.tiny_models import make_tiny_model

# (tp_size, pp_size, world_size)
LAYOUTS = {"dp2": (1, 1, 2), "tp2": (2, 1, 2)}
PARTS = ("params", "grads", "optimizer")
NUM_UPDATES = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", initializer_range=0.1))


def train(model: str, layout: tuple[int, ...], options: dict[str, Any], away: bool) -> Any:
    """Log-probs, an update and an export per round; away: everything is in host memory between each two."""
    trainee = Trainee(model, layout, **options)
    sizes = []

    def leave(*parts: str) -> None:
        if away:
            trainee.engine.to_host(*parts)
            sizes.append(trainee.engine.device_bytes())

    leave()
    numbers: list[Any] = []
    for _ in range(NUM_UPDATES):
        trainee.engine.to_device("params")
        numbers.append(trainee.logprobs())
        leave("params")
        trainee.engine.to_device()
        numbers.append(trainee.update())
        leave()
        trainee.engine.to_device("params")
        numbers.append(trainee.weights())
        leave()
    trainee.engine.to_device()
    return numbers, trainee.state(), sizes, trainee.engine.device_bytes()


def same(mine: Any, theirs: Any) -> bool:
    """Bitwise, through lists and dicts."""
    if isinstance(mine, torch.Tensor):
        return mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(same(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, list | tuple):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    return mine == theirs


@pytest.mark.parametrize("dtype", [full("float32"), "bfloat16"])
@pytest.mark.parametrize(
    ("layout", "distributed"), [("dp2", True), ("tp2", True), full("dp2", False)], ids=["dp2", "tp2", "dp2-replicated"]
)
def test_training_is_bitwise_the_same(model: str, layout: str, distributed: bool, dtype: str) -> None:
    assert_same_training(model, layout, {"dtype": dtype, "use_distributed_optimizer": distributed})


@pytest.mark.parametrize(("family", "layout"), [("qwen3_moe", "tp2"), full("qwen3_moe", "dp2"), full("qwen3", "tp2")])
def test_training_with_an_adapter_is_bitwise_the_same(tmp_path: Path, family: str, layout: str) -> None:
    """Its matrices lie in DDP's buffers; the weights beside them in none."""
    model = make_tiny_model(tmp_path / "model", family, initializer_range=0.1)
    assert_same_training(str(model), layout, {"dtype": "bfloat16", **make_adapter(tmp_path / "adapter", model)})


def assert_same_training(model: str, layout: str, options: dict[str, Any]) -> None:
    here, away = (run_ranks(2, train, model, LAYOUTS[layout], options, is_away) for is_away in (False, True))
    for (numbers, state, _, whole), (others, other_state, sizes, whole_again) in zip(here, away, strict=True):
        assert same(numbers, others)
        assert same(state, other_state)
        assert numbers[1]["grad_norm"] > 0 and not same(numbers[2], numbers[-1])
        assert len(sizes) == 1 + 3 * NUM_UPDATES
        assert all(size == dict.fromkeys(PARTS, 0) for size in sizes)
        # Flat copies may end in a few bytes of padding.
        assert all(0 <= whole_again[part] - whole[part] < 256 * 200 for part in PARTS)
        assert all(whole[part] > 0 for part in PARTS)


def sizes(model: str, layout: tuple[int, int, int], dtype: str) -> Any:
    trainee = Trainee(model, layout, dtype=dtype)
    trainee.update()
    num_params = sum(p.numel() for p in trainee.engine.chunks[0].parameters())
    views = [*trainee.engine.chunks[0].parameters()]
    views += [p.main_grad for p in trainee.engine.chunks[0].parameters()]
    addresses = {}
    device_bytes = {"all": trainee.engine.device_bytes()}
    for part in PARTS:
        trainee.engine.to_host(part)
        trainee.engine.to_host(part)
        device_bytes[part] = trainee.engine.device_bytes()
        addresses[part] = [view.untyped_storage().nbytes() for view in views]
        trainee.engine.to_device(part)
        trainee.engine.to_device(part)
    device_bytes["back"] = trainee.engine.device_bytes()
    grads_are_zero = all(not p.main_grad.any() for p in trainee.engine.chunks[0].parameters())
    return num_params, device_bytes, addresses, grads_are_zero


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_part_frees_its_own_bytes(model: str, dtype: str) -> None:
    """Counted from the storages: with the distributed optimizer on 2 ranks each holds half of the optimizer state."""
    for num_params, device_bytes, addresses, grads_are_zero in run_ranks(2, sizes, model, LAYOUTS["dp2"], dtype):
        whole = device_bytes["all"]
        param_bytes = {"float32": 4, "bfloat16": 2}[dtype]
        # Moments, and main parameters where the parameters are not float32 themselves.
        state_bytes = {"float32": 8, "bfloat16": 12}[dtype]
        assert whole["params"] == pytest.approx(num_params * param_bytes, rel=0.01)
        assert whole["grads"] == pytest.approx(num_params * 4, rel=0.01)
        assert whole["optimizer"] == pytest.approx(num_params * state_bytes / 2, rel=0.02)
        for part in PARTS:
            assert device_bytes[part] == whole | {part: 0}
        half = len(addresses["params"]) // 2
        assert not any(addresses["params"][:half]) and all(addresses["params"][half:])
        assert all(addresses["grads"][:half]) and not any(addresses["grads"][half:])
        assert all(addresses["optimizer"])
        assert device_bytes["back"] == pytest.approx(whole, rel=0.05)
        assert grads_are_zero


def copies(model: str, layout: tuple[int, int, int], distributed: bool) -> Any:
    """How many storages each part has, before it left the first time and after it came back."""
    from scalerl.parallel.offload import _storages

    trainee = Trainee(model, layout, dtype="bfloat16", use_distributed_optimizer=distributed)

    def count() -> dict[str, int]:
        offload = trainee.engine._offload
        return {part: sum(len(_storages(group)) for group in offload._tensors(part)) for part in (PARTS[0], PARTS[2])}

    before = count()
    trainee.engine.to_host()
    trainee.engine.to_device()
    return before, count()


@pytest.mark.parametrize("distributed", [True, False])
def test_a_part_comes_back_as_one_flat_storage(model: str, distributed: bool) -> None:
    """So that from the second time on each direction is one copy per part and dtype, not one per parameter."""
    (before, after), _ = run_ranks(2, copies, model, LAYOUTS["dp2"], distributed)
    assert before["optimizer"] > 10 and (before["params"] == 1 if distributed else before["params"] > 10)
    assert after == {"params": 1, "optimizer": 1}


def refusals(model: str, layout: tuple[int, int, int], directory: str) -> Any:
    from scalerl.parallel.checkpoint import save_engine
    from scalerl.parallel.offload import OffloadedError
    from scalerl.parallel.restore import load_engine

    trainee = Trainee(model, layout)
    trainee.update()

    def refused(work: Any, *parts: str) -> str:
        trainee.engine.to_host(*parts)
        with pytest.raises(OffloadedError) as error:
            work()
        trainee.engine.to_device()
        return str(error.value)

    messages = {
        "logprobs": refused(trainee.logprobs, "params"),
        "grads": refused(trainee.update, "grads"),
        "update": refused(trainee.update, "params", "optimizer"),
        "export": refused(trainee.weights, "params"),
        "save": refused(lambda: save_engine(trainee.engine, directory), "optimizer"),
        "load": refused(lambda: load_engine(trainee.engine, directory), "params"),
    }
    # Log-probs and export need neither gradients nor optimizer state.
    trainee.engine.to_host("grads", "optimizer")
    trainee.logprobs(), trainee.weights()
    trainee.engine.to_device()
    return messages, trainee.update()["grad_norm"]


def test_work_that_needs_what_is_away_is_refused(model: str, tmp_path: Path) -> None:
    for messages, grad_norm in run_ranks(2, refusals, model, LAYOUTS["tp2"], str(tmp_path / "none")):
        assert messages["logprobs"].startswith("logprobs needs") and ": params; call to_device" in messages["logprobs"]
        assert "an update" in messages["grads"] and ": grads; " in messages["grads"]
        assert ": params, optimizer; " in messages["update"]
        assert messages["export"].startswith("export_buckets needs")
        assert messages["save"].startswith("saving a checkpoint needs") and "optimizer" in messages["save"]
        assert messages["load"].startswith("loading a checkpoint needs") and "params" in messages["load"]
        assert math.isfinite(grad_norm)
    assert not (tmp_path / "none").exists()


def resumed(model: str, layout: tuple[int, int, int], directory: str, away: bool) -> Any:
    """Saves after an update, changes everything, loads, and goes on; away: with moves to the host around each."""
    from scalerl.parallel.checkpoint import save_engine
    from scalerl.parallel.restore import load_engine

    trainee = Trainee(model, layout, dtype="bfloat16", param_offload=away, grad_offload=away, optimizer_offload=away)
    trainee.engine.leave_device()
    results: list[Any] = []
    for step in ("train", "save", "spoil", "load", "train", "train"):
        with trainee.engine.on_device():
            if step == "save":
                save_engine(trainee.engine, directory)
            elif step == "load":
                load_engine(trainee.engine, directory)
            else:
                results.append(trainee.update())
        results.append(trainee.engine.device_bytes() if away else None)
    trainee.engine.to_device()
    return results, trainee.state()


def test_a_checkpoint_of_a_model_that_comes_and_goes(model: str, tmp_path: Path) -> None:
    """Loading gives Adam new tensors: they too leave, come back and train on as if they had stayed."""
    here = run_ranks(2, resumed, model, LAYOUTS["dp2"], str(tmp_path / "here"), False)
    away = run_ranks(2, resumed, model, LAYOUTS["dp2"], str(tmp_path / "away"), True)
    for (results, state), (others, other_state) in zip(here, away, strict=True):
        updates = [result for result in others if result and "grad_norm" in result]
        assert same([result for result in results if result], updates)
        assert all(result == dict.fromkeys(PARTS, 0) for result in others if result and "grad_norm" not in result)
        assert same(state, other_state)


def frozen(model: str, layout: tuple[int, int, int]) -> Any:
    trainee = Trainee(model, layout, frozen=True, dtype="bfloat16", param_offload=True)
    before = trainee.logprobs()
    whole = trainee.engine.device_bytes()
    trainee.engine.leave_device()
    sizes = [trainee.engine.device_bytes()]
    after = []
    for _ in range(2):
        with trainee.engine.on_device("params"):
            after.append(trainee.logprobs())
        sizes.append(trainee.engine.device_bytes())
    return before, after, whole, sizes


def test_a_frozen_model_comes_and_goes(model: str) -> None:
    """A reference has no DDP buffers: its parameters leave all the same."""
    for before, after, whole, sizes in run_ranks(2, frozen, model, LAYOUTS["tp2"]):
        assert all(same(before, again) for again in after)
        assert whole["params"] > 0 and whole["grads"] == whole["optimizer"] == 0
        assert all(size["params"] == 0 for size in sizes)


def reading(model: str, layout: tuple[int, int, int], distributed: bool, leaves: bool) -> Any:
    """Rounds of log-probs, update, export, save: numbers, state, and how many bytes went to the host after each."""
    from scalerl.parallel import offload
    from scalerl.parallel.checkpoint import save_engine
    from scalerl.parallel.restore import load_engine

    keys = ("param_offload", "grad_offload", "optimizer_offload")
    megatron = {"dtype": "bfloat16", "use_distributed_optimizer": distributed} | dict.fromkeys(keys, leaves)
    trainee = Trainee(model, layout, **megatron)
    # As on a GPU.
    trainee.engine._offload.keeps_copies = True
    written = []
    write = offload._HostBuffer.write
    numbers: list[Any] = []

    def counted(self: Any, offset: int, source: torch.Tensor) -> None:
        written[-1][1] += source.numel()
        write(self, offset, source)

    def round_of(name: str, work: Any, *parts: str, reads: bool) -> None:
        written.append([name, 0])
        with trainee.engine.on_device(*parts, reads=reads):
            numbers.append(work())

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(offload._HostBuffer, "write", counted)
        written.append(["start", 0])
        trainee.engine.leave_device()
        for _ in range(2):
            round_of("logprobs", trainee.logprobs, "params", reads=True)
            round_of("update", trainee.update, reads=False)
            round_of("export", trainee.weights, "params", reads=True)
            directory = tempfile.mkdtemp()
            round_of("save", lambda to=directory: save_engine(trainee.engine, to), "params", "optimizer", reads=True)
        # Work that changes weights is written whatever the block says.
        round_of("update in a block that reads", trainee.update, reads=True)
        round_of("logprobs", trainee.logprobs, "params", reads=True)
        round_of("load", lambda: load_engine(trainee.engine, directory), "params", "optimizer", reads=False)
        round_of("logprobs", trainee.logprobs, "params", reads=True)
        trainee.engine.to_device()
    return numbers, trainee.state(), written


@pytest.mark.parametrize("distributed", [True, full(False)])
def test_what_was_only_read_leaves_without_a_copy(model: str, distributed: bool) -> None:
    (numbers, state, _), (others, other_state, written) = (
        run_ranks(1, reading, model, (1, 1, 1), distributed, leaves)[0] for leaves in (False, True)
    )
    assert same(numbers, others) and same(state, other_state)
    changing = {"start", "update", "update in a block that reads", "load"}
    assert {name for name, num_bytes in written if num_bytes} == changing
    assert all(num_bytes == 0 for name, num_bytes in written if name not in changing)


def flags(model: str, layout: tuple[int, int, int], megatron: dict[str, bool]) -> Any:
    trainee = Trainee(model, layout, **megatron)
    trainee.engine.leave_device()
    return {part: size == 0 for part, size in trainee.engine.device_bytes().items()}


@pytest.mark.parametrize("part", PARTS)
def test_each_key_moves_its_part(model: str, part: str) -> None:
    key = {"params": "param_offload", "grads": "grad_offload", "optimizer": "optimizer_offload"}[part]
    (away,) = run_ranks(1, flags, model, (1, 1, 1), {key: True})
    assert away == {name: name == part for name in PARTS}


def test_pinned_memory_is_not_rounded_up_by_much() -> None:
    """torch rounds each pinned allocation up to a power of two; 33 GiB in one piece would take 64."""
    from scalerl.parallel.offload import pinned_pieces

    for num_bytes in (1, 1000, 33 * 2**30, 2**35 + 1, 2**35 - 1, 7_777_777_777):
        pieces = pinned_pieces(num_bytes)
        assert sum(pieces) == num_bytes and len(pieces) <= 6
        taken = sum(1 << (piece - 1).bit_length() for piece in pieces)
        assert taken <= num_bytes * (1 + 1 / 16) + 1
    assert pinned_pieces(0) == []


def worker_phases(model: str, layout: tuple[int, int, int], megatron: dict[str, Any]) -> Any:
    """A trainer rank as the controller drives it: its metrics, and what is on the device after each call."""
    import logging
    import os

    from scalerl.batch.data_proto import DataProto, Jagged
    from scalerl.config.schema import ActorConfig, MegatronConfig, OptimConfig, RolloutCorrectionConfig
    from scalerl.parallel.layout import Layout
    from scalerl.trainer.ranks.rl_worker import RLWorker

    lines: list[str] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("scalerl.trainer.ranks.rl_worker").addHandler(handler)
    os.environ["SCALERL_LOGGING_LEVEL"] = "debug"
    tp_size, pp_size, world_size = layout
    rank = int(os.environ["RANK"])
    worker = RLWorker(rank, Layout(world_size, tp_size, pp_size), device="cpu", collective_timeout_s=60.0, seed=1)
    # The store is there already.
    worker.join((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    config = MegatronConfig(dtype="bfloat16", **megatron)
    worker.build_engine("actor", model, config, OptimConfig(lr=1e-3))
    worker.build_engine("ref", model, config, None)

    def on_device() -> dict[str, dict[str, int]]:
        return {role: engine.device_bytes() for role, engine in worker.engines.items()}

    generator = torch.Generator().manual_seed(rank)
    ids = Jagged.from_list([torch.randint(0, 500, (length,), generator=generator) for length in (9, 12)], torch.int64)
    shard = DataProto(
        {"input_ids": ids, "response_mask": Jagged(torch.ones(21, dtype=torch.bool), ids.cu_seqlens)},
        samples={"advantages": torch.tensor([1.0, -1.0]).numpy()},
    )
    after = [on_device()]
    for method, options in (
        ("compute_log_prob", {"correction": RolloutCorrectionConfig(), "config": ActorConfig()}),
        ("compute_ref_log_prob", {}),
    ):
        _, columns = getattr(worker, method)(shard, [[[0, 1]]], temperature=1.0, **options)
        shard = shard.union(columns)
        after.append(on_device())
    totals = [{"num_loss_tokens": 42, "num_sequences": 4}]
    metrics, _ = worker.update_actor(
        shard, [[[0, 1]]], config=ActorConfig(), temperature=1.0, totals=totals, bypass_mode=False
    )
    after.append(on_device())
    logprobs = [shard.tokens[name].values for name in ("old_logprobs", "ref_logprobs")]
    return after, metrics, worker.memory(), lines, logprobs


def test_a_worker_has_its_models_on_the_device_only_while_they_compute(model: str) -> None:
    flags = dict.fromkeys(("param_offload", "grad_offload", "optimizer_offload"), True)
    stays = run_ranks(2, worker_phases, model, LAYOUTS["dp2"], {}, fresh=True)
    leaves = run_ranks(2, worker_phases, model, LAYOUTS["dp2"], flags, fresh=True)
    for rank, (there, away) in enumerate(zip(stays, leaves, strict=True)):
        assert all(sizes["actor"]["params"] > 0 < sizes["ref"]["params"] for sizes in there[0])
        assert away[0] == [dict.fromkeys(("actor", "ref"), dict.fromkeys(PARTS, 0))] * 4
        assert same(there[4], away[4]) and {k: m.value for k, m in there[1].items()} == {
            k: m.value for k, m in away[1].items()
        }
        _, metrics, memory, lines, _ = away
        if rank == 0:
            assert metrics["actor/num_updates"].value == 1.0 and metrics["actor/skipped_updates"].value == 0.0
            assert metrics["actor/grad_norm"].value > 0 and "actor/loss_scale" not in metrics
        for phase in ("old_log_prob", "ref", "update_actor"):
            peak, current = (memory[f"perf/memory_{kind}_gb/{phase}"].value for kind in ("peak", "current"))
            assert peak >= current * 0.99 > 0
        heads = [line.partition(":")[0] for line in lines]
        calls = ("actor compute_log_prob", "ref compute_ref_log_prob", "actor update_actor")
        assert heads == ([f"{when} {call}" for call in calls for when in ("before", "after")] if rank == 0 else [])
        assert all("GiB" in line for line in lines)


def test_metrics_of_updates_that_were_skipped() -> None:
    """Means over the others alone; a step that skipped all has no means, and no crash."""
    from types import SimpleNamespace

    from scalerl.trainer.ranks.worker import MegatronWorker

    groups = SimpleNamespace(is_last_stage=True, coordinates=SimpleNamespace(tp_rank=0, dp_rank=0))
    worker = SimpleNamespace(groups=groups)
    skipped = {"skipped_updates": 1.0, "lr": 0.1, "loss_scale": 8.0, "actor/ppo_kl": math.nan}
    applied = {"skipped_updates": 0.0, "lr": 0.2, "loss_scale": 4.0, "actor/ppo_kl": 0.5, "grad_norm": 3.0}

    def values(updates: list[dict[str, float]]) -> dict[str, float]:
        return {key: metric.value for key, metric in MegatronWorker.update_metrics(worker, updates, "actor").items()}

    assert values([skipped, applied, skipped, {**applied, "actor/ppo_kl": 1.5}]) == {
        "actor/ppo_kl": 1.0,
        "actor/ppo_kl_first_update": 0.5,
        "actor/grad_norm": 3.0,
        "actor/lr": pytest.approx(0.2),
        "actor/loss_scale": 4.0,
        "actor/skipped_updates": 2.0,
        "actor/num_updates": 2.0,
    }
    assert values([skipped]) == {"actor/loss_scale": 8.0, "actor/skipped_updates": 1.0, "actor/num_updates": 0.0}
