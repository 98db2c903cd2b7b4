"""The smallest form of each benchmark runs and leaves a result file with what it promises. Nothing is about speed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scalerl.parallel.logprobs import linear_logprobs
from tests.e2e.jobs import marked_processes

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import algorithms  # noqa: E402
import packing  # noqa: E402
import padded_update  # noqa: E402
import time_shares  # noqa: E402
import vs_trl  # noqa: E402

COMMON = {"benchmark", "command", "options", "machine", "versions", "commit", "result"}
PHASES = {"gen", "balance", "old_log_prob", "ref", "adv", "update_actor", "update_weights", "untimed"}


def run_benchmark(script: str, out: Path, *arguments: str, timeout_s: float = 600) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", f"benchmarks/{script}", "--now", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    assert str(out) in done.stdout
    written = json.loads(out.read_text())
    assert written.keys() >= COMMON
    assert {"cpu", "cores", "load_average"} <= written["machine"].keys()
    assert {"python", "torch", "megatron-core"} <= written["versions"].keys()
    assert written["command"].startswith(f"python benchmarks/{script} ")
    return written["result"]


def numbers(value: Any, path: str = "") -> dict[str, float]:
    """Every number below `value`, by its path."""
    if isinstance(value, dict):
        return {key: number for name, item in value.items() for key, number in numbers(item, f"{path}/{name}").items()}
    if isinstance(value, list):
        return {key: number for i, item in enumerate(value) for key, number in numbers(item, f"{path}/{i}").items()}
    return {path: float(value)}


def assert_positive(result: dict[str, Any], may_be_zero: tuple[str, ...] = ()) -> None:
    for path, number in numbers(result).items():
        assert math.isfinite(number), path
        assert number >= 0 if path.startswith(may_be_zero) else number > 0, (path, number)


@pytest.fixture(scope="module")
def train_step(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    # Two ranks of tensor parallelism, so that alignment padding and the sum over ranks occur.
    return run_benchmark(
        "train_step.py", tmp_path_factory.mktemp("train_step") / "result.json",
        *("--world", "2", "--tp", "2", "--hidden", "128", "--layers", "1", "--seqs", "5", "--mean-len", "21"),
        *("--max-tokens-per-micro-batch", "64", "--repeats", "2", "--warmup", "1", "--ceiling-s", "0.1"),
    )  # fmt: skip


@pytest.mark.full
def test_train_step(train_step: dict[str, Any]) -> None:
    assert_positive(train_step, may_be_zero=("/padding_frac",))
    assert train_step["num_sequences"] == 5
    assert len(train_step["matmul_ceiling_per_rank_flops_per_s"]) == 2
    ceiling = sum(train_step["matmul_ceiling_per_rank_flops_per_s"])
    seconds = train_step["update_s"]
    assert seconds["min"] <= seconds["median"] <= seconds["max"]
    assert train_step["mfu"] == pytest.approx(train_step["flops_per_update"] / seconds["median"] / ceiling)
    assert train_step["tokens_per_s"] == pytest.approx(train_step["num_tokens"] / seconds["median"])
    assert train_step["optimizer_s"]["median"] < seconds["median"]


@pytest.mark.full
def test_train_step_counts_the_padding(train_step: dict[str, Any]) -> None:
    """tp 2 pads each micro-batch by at most one token."""
    padded = train_step["padding_frac"] / (1 - train_step["padding_frac"]) * train_step["num_tokens"]
    assert padded == pytest.approx(round(padded))
    assert 0 <= round(padded) <= train_step["num_micro_batches_per_rank"]
    assert (train_step["num_tokens"] + round(padded)) % 2 == 0


@pytest.fixture(scope="module")
def actor_update(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_benchmark(
        "actor_update.py", tmp_path_factory.mktemp("actor_update") / "result.json",
        *("--lengths", "long", "--max-tokens-per-micro-batch", "128", "--seqs", "8"),
        *("--hidden", "128", "--layers", "1", "--rounds", "1", "--repeats", "2", "--warmup", "1", "--ceiling-s", "0.1"),
    )["long"]  # fmt: skip


@pytest.mark.full
def test_actor_update(actor_update: dict[str, Any]) -> None:
    zero = ("/padding_frac", "/time_share", "/padded_to_update/first", "/padded_to_micro_batch/first")
    assert_positive(actor_update, may_be_zero=zero)
    assert actor_update["num_sequences"] == 8
    ceiling = sum(actor_update["matmul_ceiling_per_rank_flops_per_s"])
    seconds = actor_update["update_s"]["median"]
    assert actor_update["mfu"] == pytest.approx(actor_update["flops_per_update"] / seconds / ceiling)
    assert actor_update["peak_memory_gib_per_rank"] > 0
    # One rank for all tensors: packing pads nothing.
    assert actor_update["padding_frac"] == 0.0


@pytest.mark.full
def test_actor_update_says_where_all_the_time_went(actor_update: dict[str, Any]) -> None:
    share = actor_update["time_share"]
    assert share.keys() == {*time_shares.CATEGORIES, "other", "waiting", "profiled_s"}
    assert sum(share.values()) - share["profiled_s"] == pytest.approx(1.0, abs=0.02)
    # What no update is without, on a CPU with two ranks.
    assert all(share[name] > 0 for name in ("attention", "gemm", "optimizer", "communication", "other"))


@pytest.mark.full
@pytest.mark.parametrize("padding", ["update", "micro_batch"])
def test_actor_update_compares_the_same_update(actor_update: dict[str, Any], padding: str) -> None:
    padded = actor_update[f"padded_to_{padding}"]
    assert max(padded["first_update_difference"].values()) < 1e-4
    assert padded["speedup"] == pytest.approx(padded["update_s"]["median"] / actor_update["update_s"]["median"])
    assert 0 < padded["padding_frac"] < 1
    assert padded["padding_frac"] <= actor_update["padded_to_update"]["padding_frac"]


def test_padded_micro_batches() -> None:
    lengths = [3, 5, 2, 2, 9, 1]
    by_micro_batch = padded_update.padded_micro_batches(lengths, 10)
    assert by_micro_batch == [([0, 1], 5), ([2, 3], 2), ([4], 9), ([5], 1)]
    assert padded_update.padded_micro_batches(lengths, 20, shortest=9) == [([0, 1], 9), ([2, 3], 9), ([4, 5], 9)]


def test_the_vocabulary_head_is_found_in_a_profile() -> None:
    """Forward and backward, by the name of the trainer's own function in autograd; the body's product is not it."""
    hidden, body, head = (torch.randn(size, requires_grad=True) for size in ((64, 32), (32, 32), (96, 32)))

    recorded = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with recorded as profiler, torch.profiler.record_function("update"):
        logprobs, entropy = linear_logprobs(hidden @ body, head, torch.arange(64), vocab_size=96)
        (logprobs.sum() + entropy.sum()).backward()
    events = profiler.events()
    products = [e for e in events if e.name in ("aten::mm", "aten::addmm", "aten::addmm_", "aten::addmm_out")]
    categories = [time_shares.category_of(time_shares._chain(event, None)) for event in products]
    # Logits, then in the backward pass logits again, gradients of the hidden states and of the weight.
    assert categories.count("vocabulary head") >= 4 and categories.count("gemm") == 3
    assert time_shares.cpu_shares(events)["vocabulary head"] > 0


def test_packing(tmp_path: Path) -> None:
    result = run_benchmark(
        "packing.py", tmp_path / "result.json",
        *("--batches", "3", "--samples", "32", "--dp", "4", "--large", "256", "--repeats", "1"),
    )  # fmt: skip
    assert result["num_real_texts"] > 1000
    assert len(result["compared"]) == 3
    for comparison in result["compared"].values():
        for planner in ("scalerl", "verl", "slime", "nemo"):
            one = comparison[planner]
            assert one["num_micro_batches"] >= comparison["lower_bound_equal_counts"] >= comparison["lower_bound"]
            assert one["imbalance_max"] >= one["imbalance_mean"] >= 1.0
        ours = comparison["scalerl"]
        assert (ours["batches_over_cap"], ours["worst_fill"] <= 1.0) == (0, True)
        assert ours["num_micro_batches"] <= comparison["nemo"]["num_micro_batches"]
    assert {one["num_samples"] for one in result["timed"]} == {256}
    assert all(one["worst_fill"] <= 1.0 and one["optimality_gap"] >= 0 for one in result["timed"])


def test_the_rules_that_packing_is_compared_with() -> None:
    """By hand, from their descriptions."""
    # Differencing 8 7 6 5 4 in two parts: 8-7, 6-5, 4 -> 1 1 4 -> 4-1=3 -> 3-1=2: 16 and 14.
    parts = packing.karmarkar_karp(np.array([8.0, 7, 6, 5, 4]), 2)
    assert sorted(sum([8, 7, 6, 5, 4][item] for item in part) for part in parts) == [14, 16]
    parts = packing.karmarkar_karp(np.array([9.0, 1, 1, 1, 1, 1]), 2, equal_counts=True)
    assert [len(part) for part in parts] == [3, 3]
    # First fit in the order of the batch: 6, then 3 beside it, 5 alone, 4 beside 5.
    assert packing.slime(np.array([6, 3, 5, 4]), None, 1, 10) == [[[0, 1], [2, 3]]]
    # 51 takes the medium 45; 60 takes the smallest small 17 and the largest that fits beside it, 22; then the rest.
    sizes = [60, 51, 45, 30, 22, 17, 3]
    assert packing.modified_first_fit_decreasing(sizes, 100) == [[0, 5, 4], [1, 2, 6], [3]]


@pytest.mark.full
def test_end_to_end(tmp_path: Path) -> None:
    result = run_benchmark(
        "end_to_end.py", tmp_path / "result.json",
        *("--world", "1", "--tp", "1", "--rollout", "embedded", "--steps", "2", "--warmup", "1"),
        *("--prompts", "4", "--mini-batch", "2", "--n", "2"),
        *("--ceiling-s", "0.1", "--", "trainer.val_before_train=false"),
    )  # fmt: skip
    # Rewards may all have come before the last sample; the clock's rest may round to nothing.
    assert_positive(result, may_be_zero=("/seconds/gen/reward_wait", "/seconds/untimed", "/share_of_step/untimed"))
    assert result["num_steps"] == 2
    assert result["num_samples_per_step"] == 8
    assert result["share_of_step"].keys() >= PHASES
    assert result["share_of_step"]["step"] == 1.0
    assert {"update_weights/send", "update_weights/verify"} <= result["seconds"].keys()
    limits = {"matmul_ceiling_flops_per_s", "copy_gb_per_s", "update_actor_s", "update_weights_s"}
    assert result["limits"].keys() >= limits


PATHS = ("shared", "gathered", "in-turn")


@pytest.mark.full
def test_weight_sync(tmp_path: Path) -> None:
    result = run_benchmark(
        "weight_sync.py", tmp_path / "result.json",
        *("--gb", "0.006", "--layouts", "tp2", "--bucket-mb", "2", "64", "--repeats", "1", "--warmup", "0"),
        *("--rollout", "embedded", "--dtype", "float32", "--paths", *PATHS),
    )  # fmt: skip
    assert result["copies_per_byte"] == 2
    measurements = {(one["path"], one["bucket_mb"]): one for one in result["measured"]}
    assert measurements.keys() == {(path, size) for path in PATHS for size in (2, 64)}
    for (path, size), one in measurements.items():
        assert_positive({name: value for name, value in one.items() if name not in ("layout", "path")})
        assert one["num_buckets"] > 2 if size == 2 else one["num_buckets"] == 1
        assert one["whole_gb_per_s"] == pytest.approx(one["gb"] / one["seconds"]["whole"]["median"])
        if path == "shared":
            limit = one["copy_gb_per_s"] / result["copies_per_byte"]
            assert one["send_over_limit"] == pytest.approx(one["send_gb_per_s"] / limit)
    assert len({one["gb"] for one in measurements.values()}) == 1


@pytest.mark.full
@pytest.mark.parametrize("more", [(), ("--cold",)])
def test_checkpoint(tmp_path: Path, more: tuple[str, ...]) -> None:
    result = run_benchmark(
        "checkpoint.py", tmp_path / "result.json",
        *("--hidden", "128", "--layers", "2", "--repeats", "1", *more),
    )  # fmt: skip
    # Their memory is there from the repeat before.
    assert_positive(result, may_be_zero=("/peak_bytes_of_a_rank/",))
    assert result["save_over_dd"] == pytest.approx(
        result["save_gb_per_s"]["median"] / result["dd_write_gb_per_s"]["median"]
    )
    # The driver compares what is beside the tensors, before the ranks load these.
    assert result["resume_gb_per_s"]["median"] < result["load_gb_per_s"]["median"]
    assert result["predicted_gb_per_s"].keys() == {"save", "load", "resume"}
    if more:
        assert result["predicted_gb_per_s"]["load"] <= result["dd_read_gb_per_s"]["median"]


@pytest.mark.full
def test_merge(tmp_path: Path) -> None:
    result = run_benchmark("merge.py", tmp_path / "result.json", "--gb", "0.04", "--repeats", "1")
    assert_positive(result)


@pytest.mark.full
def test_rollout_client(tmp_path: Path) -> None:
    result = run_benchmark(
        "rollout_client.py", tmp_path / "result.json",
        *("--prompts", "5", "--n", "2", "--prompt-len", "4", "--response-len", "3", "--max-num-seqs", "4"),
        *("--hidden", "64", "--layers", "1", "--repeats", "3", "--warmup", "0"),
    )  # fmt: skip
    # Processor time may round to nothing.
    assert_positive(result, may_be_zero=("/client_cpu_s", "/server_cpu_s"))
    assert result["num_tokens"] == 30
    rates = result["tokens_per_s"]
    assert rates["ours"] == pytest.approx(30 / result["seconds"]["ours"]["median"])
    assert result["ratio"] == pytest.approx(rates["ours"] / rates["sglang"])
    assert result["ratio_of_rounds"]["min"] <= result["ratio_of_rounds"]["median"] <= result["ratio_of_rounds"]["max"]


def test_answers(tmp_path: Path) -> None:
    result = run_benchmark("answers.py", tmp_path / "result.json", "--samples", "3", "--tokens", "5", "--repeats", "2")
    assert_positive(result)
    rates = result["tokens_per_s"]
    assert rates.keys() == {"to_batch", "orjson", "json"}
    assert result["of_limit"] == pytest.approx(rates["to_batch"]["median"] / rates["orjson"]["median"])


def test_embedded_engine(tmp_path: Path) -> None:
    result = run_benchmark(
        "embedded_engine.py", tmp_path / "result.json",
        *("--prompts", "7", "--n", "6", "--prompt-len", "2", "5", "--response-len", "4", "--max-num-seqs", "40"),
        *("--hidden", "64", "--layers", "1", "--repeats", "2", "--warmup", "0", "--alone", "3"),
    )  # fmt: skip
    # Processor time may round to nothing.
    assert_positive(result, may_be_zero=("/cpu_s", "/tokens_per_cpu_s", "/ratio_cpu"))
    assert result["num_tokens"] == 7 * 6 * 4
    assert result["compared_alone"] == 6
    rates = result["tokens_per_s"]
    assert rates["engine"] == pytest.approx(result["num_tokens"] / result["seconds"]["engine"]["median"])
    assert result["ratio"] == pytest.approx(rates["engine"] / rates["transformers"])


@pytest.mark.full
def test_first_hour(tmp_path: Path) -> None:
    """A run of one step, found finished, merged and served; the benchmark looks after its processes itself."""
    result = run_benchmark(
        "first_hour.py", tmp_path / "result.json", "--steps", "1", "--repeats", "1", "--warmup", "0"
    )  # fmt: skip
    # Phases of the start have one decimal, and processor time may round to nothing.
    once = result["once_s"]
    assert once["start"].keys() == {"config", "data", "processes", "model", "servers", "first sync"}
    assert_positive(result, may_be_zero=("/once_s/start", "/measured/python/cpu_s"))
    took = {name: each["wall_s"]["median"] for name, each in result["measured"].items()}
    imports = {f"imports of {name}" for name in ("doctor", "finished", "merge", "serve")}
    parts = {"merge", "serve", "first answer"}
    assert took.keys() == {"python", *imports, "doctor", "finished", *parts, "second answer", "answer"}
    # All of the way, and little between its parts.
    assert took["answer"] == pytest.approx(sum(took[part] for part in parts), abs=1)
    assert result["share_of_imports"]["merge"] == pytest.approx(took["imports of merge"] / took["merge"])
    slowest = {name: result["of_aim"][name] * aim for name, aim in result["aims_s"].items()}
    assert slowest == pytest.approx({name: took[name] for name in ("doctor", "finished", "answer")})


@pytest.mark.full
def test_a_failing_trainer_is_reported_in_its_own_words(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "benchmarks/end_to_end.py",
        "--now",
        "--ceiling-s",
        "0.1",
        "--world",
        "1",
        "--tp",
        "1",
    ]
    command += ["--out", str(tmp_path / "result.json"), "--", "data.no_such_key=1"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "data.no_such_key" in done.stderr
    assert not (tmp_path / "result.json").exists()


def test_a_finished_learning_run_is_not_run_again(tmp_path: Path) -> None:
    options = algorithms.parse(["--seeds", "3", "--steps", "7", "--work", str(tmp_path)])
    settings = {"algorithm": "rloo", "seed": 3, "steps": 7, "sft_steps": 200, "test_freq": 5, "rollout": "sglang"}
    stored = {"settings": settings | {"overrides": algorithms.ALGORITHMS["rloo"]}, "final": 0.5}
    (tmp_path / "seed-3").mkdir()
    (tmp_path / "seed-3" / "rloo.json").write_text(json.dumps(stored))
    assert algorithms.one_run(options, tmp_path, "rloo", 3) == stored
    with pytest.raises(SystemExit, match="is of other settings"):
        algorithms.one_run(algorithms.parse(["--steps", "8"]), tmp_path, "rloo", 3)


@pytest.mark.full
def test_algorithms(tmp_path: Path) -> None:
    """Data, model, warm start and two algorithms; nothing is learned in two steps."""
    result = run_benchmark(
        "algorithms.py", tmp_path / "result.json",
        *("--algorithms", "grpo", "ppo", "--seeds", "0", "--steps", "2", "--sft-steps", "2", "--test-freq", "1"),
        *("--rollout", "embedded", "--work", str(tmp_path / "work")),
    )  # fmt: skip
    assert [run["settings"]["algorithm"] for run in result["runs"]] == ["grpo", "ppo"]
    for run in result["runs"]:
        assert {"1", "2"} <= run["validations"].keys() and 0 <= run["final"] <= 1
    assert result["algorithms"]["ppo"]["num_seeds"] == 1


@pytest.mark.full
def test_scalerls_side_of_vs_trl(tmp_path: Path) -> None:
    """TRL needs an environment of its own; its numbers are made up here."""
    options = vs_trl.parse(
        [
            *("--trl", "none", "--prompts", "2", "--n", "2", "--max-tokens", "4", "--steps", "2", "--warmup", "1"),
            *("--cores", "1", "--rollout", "embedded"),
        ]
    )
    assert vs_trl.make_inputs(options, tmp_path) > 0
    ours = vs_trl.run_scalerl(options, tmp_path, tmp_path / "run")
    assert len(ours) == 2 and all(step["tokens"] > 0 and step["cpu_s"] > 0 for step in ours)
    trl = [{"wall_s": 2 * step["wall_s"], "cpu_s": 3 * step["cpu_s"], "tokens": step["tokens"]} for step in ours]
    result = vs_trl.summarize({"scalerl": ours, "trl": trl})
    result["timeline"] = timeline = vs_trl.run_timeline(options, tmp_path, tmp_path / "timeline")
    assert list(timeline) == [*vs_trl.PHASES, "rest"]
    assert timeline["gen"]["wall_s"] > 0 and all(phase["wall_s"] > -1e-9 for phase in timeline.values())
    # Whole runs look at processes for longer than a phase of this one takes.
    assert sum(phase[kind] for phase in timeline.values() for kind in ("trainer ranks", "servers")) > 0
    assert sum(phase["others"] for phase in timeline.values()) == pytest.approx(0, abs=0.01)
    assert result["ratio_tokens_per_s"] == pytest.approx(2)
    assert result["ratio_tokens_per_cpu_s"] == pytest.approx(3)
    assert {"gen", "update_actor", "update_weights"} <= result["scalerl"]["share_of_step"].keys()
    assert "tokens_per_cpu_s" in vs_trl.report(result)


@pytest.mark.full
def test_controller_scale(tmp_path: Path) -> None:
    """What a step asks of its ranks: one call a phase, whatever their number, and none for their memory alone; and what
    passes through the driver: no more than 1 kB a sample."""
    result = run_benchmark(
        "controller_scale.py",
        tmp_path / "result.json",
        *("--dp", "2", "8", "--samples-per-rank", "128", "--steps", "1"),
    )
    for size in result["sizes"]:
        phases = ("old_log_prob", "ref", "update_actor", "update_weights")
        assert size["remote_calls"]["RankProcess"] == dict.fromkeys(phases, size["num_ranks"])
        # Their tokens, cut by one call for these few ranks, and two for the samples.
        assert sum(size["remote_calls"]["InstantRolloutWorker"].values()) == 3
        assert 100 < size["bytes_per_sample"] <= 1000, size["bytes"]
        assert size["driver_cpu_s"]["median"] > 0
    (pair,) = result["growth"]
    assert (pair["from_dp_size"], pair["to_dp_size"]) == (2, 8)
    named = {*phases, "balance", "balance: plan", "balance: place", "step_metrics"}
    assert pair["phases_s"].keys() >= named <= pair["phases_cpu_s"].keys()


@pytest.mark.full
def test_controller_scale_with_a_critic_and_dumps(tmp_path: Path) -> None:
    """A critic on ranks of its own has calls of its own, and a dump its number of workers, whatever the ranks."""
    options = ("--tp", "2", "--critic", "--dump", "--rollout-workers", "2", "--samples-per-rank", "128", "--steps", "1")
    result = run_benchmark("controller_scale.py", tmp_path / "result.json", "--dp", "8", "16", *options)
    for size in result["sizes"]:
        of_actor, of_critic = 2 * size["dp_size"], size["dp_size"]
        assert size["num_ranks"] == of_actor + of_critic
        assert size["remote_calls"]["RankProcess"] == {
            **dict.fromkeys(("old_log_prob", "adv", "update_actor", "update_weights"), of_actor),
            **dict.fromkeys(("values", "update_critic", "metrics"), of_critic),
            # The tokens that differ most.
            "dump_rollout_generations": of_actor,
        }
        # Two workers: each cuts for the other's part, writes its part and drops its samples; of three columns of the
        # trainer (its log-probs, values, advantages), those of up to 16 ranks are dealt by one call.
        assert size["remote_calls"]["InstantRolloutWorker"]["dump_rollout_generations"] == 2 + 2 + 2 + 3
        # Of six passes, where GRPO has three; a rank gets the columns that it reads.
        assert 100 < size["bytes_per_sample"] <= 1000, size["bytes"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("engine", "num_kills", "more"),
    [
        ("embedded", 30, []),
        ("sglang", 30, []),
        ("embedded", 9, ["--async-save"]),
        ("embedded", 6, ["--layout", "tp2", "--critic"]),
    ],
)
def test_chaos(tmp_path: Path, engine: str, num_kills: int, more: list[str]) -> None:
    """A job that is killed at random moments, of every phase where there are enough, ends as one left alone."""
    # A kill comes after at most three steps.
    steps = str(3 * num_kills + 10)
    arguments = ["--engine", engine, "--kills", str(num_kills), "--steps", steps, "--seed", str(num_kills), *more]
    result = run_benchmark("chaos.py", tmp_path / "result.json", *arguments, timeout_s=7200)
    assert result["differences"] == {} and result["kills"] == num_kills
    if num_kills == 30:
        assert result["missed"] == []
    else:
        phases = {phase for phase in result["kills_by_phase"] if not phase.startswith("left ")}
        assert len(phases) > num_kills / 2


@pytest.mark.full
def test_chaos_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    """By a signal after its first kill; nothing of its job is left, and the same command makes the others."""
    directory, out = tmp_path / "chaos", tmp_path / "result.json"
    arguments = ["--kills", "2", "--steps", "12", "--seed", "3", "--directory", str(directory)]
    command = [sys.executable, "-W", "ignore", "benchmarks/chaos.py", "--now", "--out", str(out), *arguments]
    progress = directory / "chaos.json"

    def read() -> dict[str, Any]:
        return json.loads(progress.read_text()) if progress.exists() else {}

    deadline = time.monotonic() + 1200
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL) as cut:
        while not read().get("struck") or not marked_processes(read()["marker"]):
            assert cut.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        cut.terminate()
    assert cut.returncode == 143 and not out.exists()
    first, marker = read()["struck"], read()["marker"]
    assert len(first) == 1 and not read()["is_done"]
    assert marked_processes(marker) == set()

    result = run_benchmark("chaos.py", out, *arguments, timeout_s=7200)
    assert result["differences"] == {} and result["kills"] == 2 and result["each"][:1] == first
    assert read()["is_done"] and result["processes"] == 3
    # Again: nothing is left to do but the comparison.
    assert run_benchmark("chaos.py", out, *arguments) == result
    other = subprocess.run([*command, "--critic"], cwd=REPOSITORY, capture_output=True, text=True)
    assert other.returncode == 1 and "critic False, now True" in other.stderr
