"""The smallest form of each benchmark runs and leaves a result file with what it promises. Nothing is about speed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
COMMON = {"benchmark", "command", "options", "machine", "versions", "commit", "result"}
PHASES = {"gen", "balance", "old_log_prob", "ref", "adv", "update_actor", "update_weights", "untimed"}


def run_benchmark(script: str, out: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", f"benchmarks/{script}", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
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
        *("--budget", "64", "--repeats", "2", "--warmup", "1", "--ceiling-s", "0.1"),
    )  # fmt: skip


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


def test_train_step_counts_the_padding(train_step: dict[str, Any]) -> None:
    """tp 2 pads each micro-batch by at most one token."""
    padded = train_step["padding_frac"] / (1 - train_step["padding_frac"]) * train_step["num_tokens"]
    assert padded == pytest.approx(round(padded))
    assert 0 <= round(padded) <= train_step["num_micro_batches_per_rank"]
    assert (train_step["num_tokens"] + round(padded)) % 2 == 0


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


def test_a_failing_trainer_is_reported_in_its_own_words(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "benchmarks/end_to_end.py",
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
