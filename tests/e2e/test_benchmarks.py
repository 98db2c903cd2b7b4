"""The smallest form of each benchmark runs and leaves a result file with what it promises. Nothing is about speed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import marked_processes
from tests.lanes import full

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import algorithms  # noqa: E402
import vs_trl  # noqa: E402

COMMON = {"benchmark", "command", "options", "machine", "versions", "commit", "result"}


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


ONCE = "--repeats 1 --warmup 0"
TINY = "--hidden 128 --layers 1 --ceiling-s 0.1"
# A script, its smallest form, and what of its numbers may be nothing; None: they are not numbers alone.
SMALLEST = [
    # Two ranks of tensor parallelism, so that alignment padding and the sum over ranks occur.
    full(
        "train_step.py",
        f"--world 2 --tp 2 {TINY} --seqs 5 --mean-len 21 --max-tokens-per-micro-batch 64 --repeats 2 --warmup 1",
        ("/padding_frac",),
    ),
    full(
        "actor_update.py",
        f"--lengths long --max-tokens-per-micro-batch 128 --seqs 8 {TINY} --rounds 1 --repeats 2 --warmup 1",
        tuple(
            f"/long/{name}"
            for name in ("padding_frac", "time_share", "padded_to_update/first", "padded_to_micro_batch/first")
        ),
    ),
    ("packing.py", "--batches 3 --samples 32 --dp 4 --large 256 --repeats 1", None),
    # Rewards may all have come before the last sample, and the clock's rest may round to nothing. Not every sync is
    # verified.
    full(
        "end_to_end.py",
        "--world 1 --tp 1 --rollout embedded --steps 2 --warmup 1 --prompts 4 --mini-batch 2 --n 2 --ceiling-s 0.1 "
        "-- trainer.val_before_train=false",
        ("/seconds/gen/reward_wait", "/seconds/untimed", "/share_of_step/untimed", "/seconds/update_weights/verify"),
    ),
    full(
        "weight_sync.py",
        f"--gb 0.006 --layouts tp2 --bucket-mb 2 64 {ONCE} --rollout embedded --dtype float32 "
        "--paths shared gathered in-turn",
        None,
    ),
    full("weight_sync.py", f"--gb 0.006 --layouts 1 --bucket-mb 64 {ONCE} --dtype float32 --adapter-rank 4", None),
    # The memory of a rank is there from the repeat before; a CPU is no GPU.
    *(
        full(
            "checkpoint.py",
            f"--hidden 128 --layers 2 --repeats 1 {more}",
            ("/peak_bytes_of_a_rank/", "/gpu_peak_bytes_of_a_rank/"),
        )
        for more in ("", "--cold")
    ),
    full("merge.py", "--gb 0.04 --repeats 1", ()),
    # Processor time may round to nothing.
    full(
        "rollout_client.py",
        "--prompts 5 --n 2 --prompt-len 4 --response-len 3 --max-num-seqs 4 --hidden 64 --layers 1 --repeats 3 "
        "--warmup 0",
        ("/client_cpu_s", "/server_cpu_s"),
    ),
    ("answers.py", "--samples 3 --tokens 5 --repeats 2", ()),
    (
        "embedded_engine.py",
        "--prompts 7 --n 6 --prompt-len 2 5 --response-len 4 --max-num-seqs 40 --hidden 64 --layers 1 --repeats 2 "
        "--warmup 0 --alone 3",
        ("/cpu_s", "/tokens_per_cpu_s", "/ratio_cpu"),
    ),
    # Phases of the start have one decimal.
    full("first_hour.py", f"--steps 1 {ONCE}", ("/once_s/start", "/measured/python/cpu_s")),
    # Data, model, warm start and two algorithms; nothing is learned in two steps.
    full(
        "algorithms.py",
        "--algorithms grpo ppo --seeds 0 --steps 2 --sft-steps 2 --test-freq 1 --rollout embedded --work WORK",
        None,
    ),
]


@pytest.mark.parametrize(("script", "arguments", "may_be_zero"), SMALLEST)
def test_smallest_form_of_a_benchmark(
    tmp_path: Path, script: str, arguments: str, may_be_zero: tuple[str, ...] | None
) -> None:
    words = arguments.replace("WORK", str(tmp_path / "work")).split()
    result = run_benchmark(script, tmp_path / "result.json", *words)
    for path, number in ({} if may_be_zero is None else numbers(result)).items():
        assert math.isfinite(number), path
        assert number >= 0 if path.startswith(may_be_zero) else number > 0, (path, number)


@pytest.mark.full
def test_a_failing_trainer_is_reported_in_its_own_words(tmp_path: Path) -> None:
    arguments = f"--now --ceiling-s 0.1 --world 1 --tp 1 --out {tmp_path / 'result.json'} -- data.no_such_key=1"
    command = [sys.executable, "-W", "ignore", "benchmarks/end_to_end.py", *arguments.split()]
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
        ("embedded", 30, ["--agents"]),
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
