"""Seconds of a step: hand-computed rounds and passes, what more devices change, and the published steps."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import yaml

from scalerl.config import LayoutSizes, PPOConfig
from scalerl.config.save import save_resolved
from scalerl.config.value_checks import DEVICES_GIB
from scalerl.errors import UserError
from scalerl.extras.plan.calibrate import MeasuredRun, comparison, fitted
from scalerl.extras.plan.command import main
from scalerl.extras.plan.generation import Rounds, generation_parts
from scalerl.extras.plan.hardware import HARDWARE, Hardware, hardware_of, read_hardware, write_hardware
from scalerl.extras.plan.lengths import Lengths
from scalerl.extras.plan.passes import MicroBatches, Passes
from scalerl.extras.plan.report import seconds_table
from scalerl.extras.plan.seconds import lengths_of, step_seconds
from scalerl.extras.plan.servers import ServerBytes
from tests.model_configs import model_directory
from tests.unit.extras.plan.test_plan import ROLLOUT, config, shapes

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "benchmarks"))
import plan_backtest  # noqa: E402

H100 = HARDWARE["h100"]
SERVER = ServerBytes(weights=16 * 10**9, kv_token_bytes=147_456, kv_tokens=400_000)
# Prompts of 1,000 tokens, responses of 3,000 at most.
LENGTHS = Lengths(1000, 1500, 3000)


def step(cfg: PPOConfig, hardware=H100, server: ServerBytes = SERVER, name: str = "qwen3-8b"):
    return step_seconds(cfg, shapes(name), server, hardware, lengths_of(cfg))


@pytest.mark.parametrize("mean", [10, 300, 1500, 2900, 3000])
def test_lengths_have_their_mean_and_limit(mean: int) -> None:
    lengths = Lengths(1000, mean, 3000)
    assert lengths.samples.mean() - 1000 == pytest.approx(mean, rel=0.03)
    assert lengths.samples.max() <= 4000 and lengths.running(np.array([0.0, 3000.0])).tolist() == [1.0, 0.0]
    assert mean <= lengths.longest_of(10**9) <= 3000 and 0 < lengths.age <= 1500
    # What runs at a time has every length below the limit alike where all responses have the limit.
    assert mean < 3000 or lengths.age == pytest.approx(1500, rel=0.01)


def test_a_round_reads_weights_and_cache() -> None:
    """Qwen3-8B on one H100: 16e9 B, and 147,456 B for each of 64 x 2,000 tokens, at a share of 3.35e12 B/s."""
    rounds = Rounds(shapes()["actor"], SERVER, H100, tp_size=1, itemsize=2)
    (reading_s,) = rounds.parts(np.array([64.0]), np.array([2000.0]))["weights and KV cache"]
    assert reading_s == pytest.approx((16e9 + 64 * 2000 * 147_456) / (H100.memory_frac * 3.35e12))
    parts = rounds.parts(np.array([4096.0]), np.array([0.0]))
    assert parts["products"][0] > 0 and parts["weights and KV cache"][0] == 0, "products decide about many samples"


def test_a_round_reads_the_experts_that_are_chosen() -> None:
    """One sample has 8 of 128 experts; many have all. A server of several devices sums over them in each layer."""
    shape = shapes("qwen3-30b-a3b")["actor"]
    rounds = Rounds(shape, ServerBytes(61 * 10**9, 98_304, None), replace(H100, round_layer_s=1e-9), 1, 2)
    few, many = rounds.parts(np.array([1.0, 500.0]), np.array([0.0, 0.0]))["weights and KV cache"]
    # 28.99e9 of 30.53e9 parameters are experts'.
    assert few / many == pytest.approx((1.54 + 28.99 * 8 / 128) / 30.53, rel=0.01)
    assert not rounds.parts(np.array([1.0]), np.array([0.0]))["sums over devices"].any()
    over_8 = replace(rounds, tp_size=8).parts(np.array([1.0]), np.array([0.0]))["sums over devices"]
    over_nodes = replace(rounds, tp_size=16).parts(np.array([1.0]), np.array([0.0]))["sums over devices"]
    assert over_8[0] >= 2 * 48 * H100.message_s and over_nodes[0] >= 2 * 48 * H100.network_message_s


def test_a_step_waits_for_its_longest_sample() -> None:
    """However many servers share the samples: the rounds of the longest are left."""
    cfg = config(f"{ROLLOUT}.n=8", "data.max_response_length=3000")
    seconds = []
    for nodes in (1, 4, 64):
        cfg.trainer.nnodes = nodes
        seconds.append(sum(generation_parts(cfg, shapes()["actor"], SERVER, H100, LENGTHS).values()))
    assert seconds == sorted(seconds, reverse=True)
    least = 3000 * 36 * H100.round_layer_s
    assert seconds[0] > 2 * least and least < seconds[-1] < 1.5 * least


def test_a_small_cache_makes_samples_wait() -> None:
    cfg = config(f"{ROLLOUT}.n=64")
    small, large = (
        sum(generation_parts(cfg, shapes()["actor"], replace(SERVER, kv_tokens=tokens), H100, LENGTHS).values())
        for tokens in (20_000, 400_000)
    )
    assert small > 1.5 * large


def test_micro_batches_hold_whole_samples() -> None:
    lengths = np.array([100.0, 700.0])
    assert MicroBatches.of(10, lengths, 1000, 1) == MicroBatches(5, 800.0), "five samples fill more than half of one"
    assert MicroBatches.of(10, lengths, 4000, 1).number == 1
    assert MicroBatches.of(10, lengths, 1000, 4).number == 8, "an interleaved pipeline's rounds"


def passes(world: int = 8, tokens: int = 16384, name: str = "qwen3-8b", **sizes: Any) -> Passes:
    """Passes over samples of 4,096 tokens."""
    megatron = config().actor_rollout_ref.actor.megatron
    layout = LayoutSizes(world, **sizes)
    return Passes(shapes(name)["actor"], megatron, layout, H100, tokens, np.full(32, 4096.0))


def test_a_forward_pass_is_its_products() -> None:
    """64 samples of 4,096 tokens on 8 ranks: 2 x 7.57e9 FLOPs a token, and attention, at a share of 989e12."""
    parts = passes().forward(64)
    assert parts["messages"] == parts["experts' exchange"] == parts["idle stages"] == 0
    tokens = 64 * 4096
    matrices = 2 * (8_190_735_360 - 151_936 * 4096) * tokens
    attention = 4 * 36 * 32 * 128 * tokens * 4097 / 2
    assert parts["products"] == pytest.approx((matrices + attention) / (8 * H100.dense_frac * 989e12), rel=1e-3)


def test_an_update_is_three_forward_passes_and_an_exchange() -> None:
    model = passes()
    forward, update = model.forward(64), model.update(64)
    assert update["products"] == pytest.approx(3 * forward["products"])
    # 6 B of each parameter, 7 / 8 of them, at 70 % of NVLink's rate.
    assert update["gradients"] == pytest.approx(6 * 8.19e9 * 7 / 8 / (0.7 * 450e9), rel=0.01)
    again = replace(model, megatron=replace(model.megatron, recompute_granularity="full"))
    assert again.update(64)["products"] == pytest.approx(4 * forward["products"])


def test_a_pipeline_is_idle_at_both_ends() -> None:
    """4 stages, 4 micro-batches of one sample: 3 of 7 rounds; interleaved in 3 chunks, 1 of 5."""
    model = passes(4, 4096, pp_size=4)
    parts = model.forward(4)
    busy = sum(parts.values()) - parts["idle stages"]
    assert parts["idle stages"] / busy == pytest.approx(3 / 4)
    parts = passes(4, 4096, pp_size=4, vpp_size=3).forward(4)
    assert parts["idle stages"] / (sum(parts.values()) - parts["idle stages"]) == pytest.approx(1 / 4)


@pytest.mark.parametrize("sizes", [{"tp_size": 4}, {"cp_size": 4}, {"pp_size": 4}])
def test_a_split_sends_messages(sizes: dict[str, Any]) -> None:
    split, whole = passes(**sizes).forward(64), passes().forward(64)
    assert split["products"] == pytest.approx(whole["products"]) and split["messages"] > 0 == whole["messages"]


def test_experts_over_nodes_exchange_over_the_network() -> None:
    one, inside, beyond = (passes(32, name="qwen3-30b-a3b", ep_size=size).forward(64) for size in (1, 8, 32))
    assert one["experts' exchange"] == 0 < inside["experts' exchange"] < beyond["experts' exchange"] / 3
    assert beyond.keys() == inside.keys(), "products or least of layers of both"


def test_servers_with_devices_of_their_own_hide_the_shorter_side() -> None:
    own = (f"{ROLLOUT}.resource_pool.nnodes=1", "trainer.max_staleness=1", "actor_rollout_ref.hybrid_engine=false")
    correction = "algorithm.rollout_correction.rollout_is=token"
    beside, shared = step(config(*own, correction)), step(config(correction))
    sync = beside.seconds("update_weights")
    training = sum(map(beside.seconds, beside.phases)) - beside.seconds("gen") - sync
    assert beside.is_beside and beside.total == pytest.approx(max(beside.seconds("gen"), training) + sync)
    assert not shared.is_beside and shared.total == pytest.approx(sum(map(shared.seconds, shared.phases)))
    assert beside.num_devices == 2 * shared.num_devices
    limiting = beside.seconds("gen") > training
    assert beside.limit.startswith("gen: ") == limiting
    assert f"{shared.total:.3g}" in seconds_table(shared, H100) and "gen  " in seconds_table(shared, H100)


def test_a_role_has_a_phase_of_its_own() -> None:
    phases = step(config("+recipe=ppo", "trainer.save_freq=10")).phases
    assert {"gen", "values", "update_critic", "update_actor", "update_weights", "save_checkpoint"} <= phases.keys()


def test_the_device_follows_from_its_memory() -> None:
    assert hardware_of("H200").name == "H200" and hardware_of("80GB").name == hardware_of(None).name == "H100"
    assert HARDWARE.keys() == DEVICES_GIB.keys(), "each device of a known memory has rates"
    assert HARDWARE["gb200"].node_size == 72 and HARDWARE["mi300x"].flops == 1307e12


def test_a_file_of_rates(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    write_hardware(replace(H100, dense_frac=0.3), file)
    assert read_hardware(file) == replace(H100, dense_frac=0.3)
    file.write_text("name: mine\nflops: 1e12\nspeed: 3\nmemory_bandwidth: fast\n")
    with pytest.raises(UserError) as caught:
        read_hardware(file)
    said = str(caught.value)
    assert "memory_bandwidth = 'fast' is no rate" in said and "speed is unknown" in said and "flops = " in said
    with pytest.raises(UserError, match="--calibrate"):
        read_hardware(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mean-response"], "--mean-response: needs a number of tokens"),
        (["--mean-response", "many"], "--mean-response many: needs a number of tokens"),
        (["--tune"], "--tune and --devices N belong together"),
        (["--devices", "8"], "--tune and --devices N belong together"),
        (["sft", "--tune", "--devices", "8"], "give no sft"),
    ],
)
def test_options_that_are_wrong(arguments: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        main(arguments)


def measured(cfg: PPOConfig, truth: Hardware, name: str = "qwen3-8b") -> MeasuredRun:
    """A run whose phases took what these rates predict."""
    run = MeasuredRun(cfg, shapes(name), SERVER, lengths_of(cfg), {})
    phases = run.predicted(truth)
    return replace(run, seconds={phase: phases.seconds(phase) for phase in phases.phases})


def test_rates_follow_from_a_run() -> None:
    """What its phases wait for most is found, and the prediction is the run's."""
    truth = replace(H100, dense_frac=0.21, memory_frac=0.33, sync_frac=0.07)
    run = measured(config(f"{ROLLOUT}.n=64"), truth)
    found = fitted([run], H100)
    assert found.dense_frac == pytest.approx(0.21, rel=0.02) and found.sync_frac == pytest.approx(0.07, rel=0.02)
    assert run.predicted(found).total == pytest.approx(run.predicted(truth).total, rel=0.01)
    assert "+0%" in comparison(run, found)


def test_a_small_and_a_large_model_tell_bytes_from_calls() -> None:
    """Which one run cannot: with its rates alone the other model's sync is far off."""
    assumed = replace(H100, sync_s=1.0)
    truth = replace(assumed, sync_frac=0.07)
    small, large = (measured(config(), truth, name) for name in ("qwen3-0.6b", "qwen3-8b"))
    found = fitted([small, large], assumed)
    assert (found.sync_frac, found.sync_s) == pytest.approx((0.07, 1.0), rel=0.05)
    for source, other in ((small, large), (large, small)):
        seconds = other.predicted(fitted([source], assumed)).seconds("update_weights")
        assert abs(seconds / other.seconds["update_weights"] - 1) > 0.2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rates_of_a_directory(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Six steps, the first two slower; what the command writes plans the run's seconds."""
    model = model_directory("qwen3-0.6b", tmp_path / "model")
    cfg = config(f"actor_rollout_ref.model.path={model}", f"trainer.device={device}", "trainer.device_memory=h100")
    run = tmp_path / "run"
    run.mkdir()
    save_resolved(cfg, run / "config.yaml")
    phases = {"gen": 30.0, "old_log_prob": 4.0, "update_actor": 12.0, "update_weights": 0.5}
    data = {f"timing_s/{phase}": seconds for phase, seconds in phases.items()} | {"timing_s/step": 47.0}
    data |= {"prompt_length/mean": 100.0, "response_length/mean": 200.0, "response_length/max": 400.0}
    data |= {"perf/mfu/actor": 0.3}
    slow = data | {"timing_s/gen": 300.0}
    lines = [json.dumps({"step": step, "data": slow if step < 2 else data}) for step in range(6)]
    with pytest.raises(UserError, match=r"has no metrics\.jsonl; give trainer\.default_local_dir"):
        main(["--calibrate", str(run)])
    (run / "metrics.jsonl").write_text("\n".join(lines[:2]) + "\n")
    with pytest.raises(UserError, match="needs 3 steps or more"):
        main(["--calibrate", str(run)])
    # The last two steps once more, after a resume.
    lines += [json.dumps({"resumed_from": 3}), *lines[4:]]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["--calibrate", str(run)]) == 0
    assert "hardware.yaml" in capsys.readouterr().out
    read, hardware = MeasuredRun.read(run), read_hardware(run / "hardware.yaml")
    assert read.seconds == phases and read.lengths == Lengths(100.0, 200.0, 400)
    step = read.predicted(hardware)
    assert main(["--calibrate", str(run), "--hardware", str(run / "hardware.yaml")]) == 0
    assert capsys.readouterr().out == comparison(read, hardware) + "\n"
    assert step.seconds("gen") == pytest.approx(30.0, rel=0.02)
    assert step.seconds("update_weights") == pytest.approx(0.5, rel=0.02)
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "hardware.yaml").unlink()
    assert main(["--calibrate", str(run), str(copy)]) == 0
    assert read_hardware(run / "hardware.yaml") == read_hardware(copy / "hardware.yaml")
    config_file = copy / "config.yaml"
    other = {"cpu": "cuda", "cuda": "cpu"}[device]
    config_file.write_text(config_file.read_text().replace(f"device: {device}\n", f"device: {other}\n"))
    with pytest.raises(UserError, match=r"CPU.*; give runs on one kind of device"):
        main(["--calibrate", str(run), str(copy)])
    # Of both the relative errors are the same: a rate of all passes may be any.
    assert step.seconds("old_log_prob") * step.seconds("update_actor") == pytest.approx(4.0 * 12.0, rel=0.02)


# --- published steps


def test_published_steps_that_no_constant_was_fitted_to() -> None:
    chosen = plan_backtest.held_out()
    errors = np.abs(plan_backtest.errors(chosen))
    assert len(chosen) > sum(row.is_fitted for row in plan_backtest.rows())
    assert median(errors) <= 0.25 and plan_backtest.rank_correlation(chosen) >= 0.8


def test_releases_of_a_run_are_on_one_side() -> None:
    rows = plan_backtest.rows()
    assert not {row.run for row in rows if row.is_fitted} & {row.run for row in rows if not row.is_fitted}


def test_the_page_has_the_table() -> None:
    """After a change: `python benchmarks/plan_backtest.py --docs` makes it."""
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    assert plan_backtest.table(plan_backtest.rows()) in page and plan_backtest.summary() in page


def test_the_rate_of_broadcasts_is_the_median_of_published_ones() -> None:
    syncs = yaml.safe_load(plan_backtest.ROWS.read_text(encoding="utf-8"))["syncs"]
    rates = [1e9 * size / seconds for _, _, size, seconds in syncs]
    assert median(rates) / H100.network_bandwidth == pytest.approx(H100.broadcast_frac, abs=0.005)
