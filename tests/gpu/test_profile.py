"""A profile of a step on a GPU: kernels of its phases, allocations with their stacks, and Nsight Systems' ranges.

    python -m pytest tests/gpu/test_profile.py -q

What is asked of CUDA, and in which order,
tests/unit/trainer/ranks/test_profile.py shows on a CPU.
"""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from scalerl.trainer.ranks.profile import MAX_MEMORY_EVENTS, StepProfile
from tests.dist.trainee import Trainee
from tests.gpu.isolated import run_isolated
from tests.gpu.test_main_ppo import check_main_ppo
from tests.tiny_models import make_tiny_model

NAME = "actor_rank_0"
PHASES = ("actor old_log_prob", "actor update_actor")


def record(model: str, tool: str, directory: str, device: str = "cuda") -> list[int]:
    """Runs alone in a process: a step of two phases. Returns the events of the memory history after it, and later."""
    import torch

    trainee = Trainee(model, (1, 1, 1), dtype="bfloat16")
    # Kernels are compiled outside of the record.
    trainee.update()
    profile = StepProfile(tool, device)
    with profile.phase(PHASES[0]):
        trainee.logprobs()
    with profile.phase(PHASES[1]):
        trainee.update()
    profile.stop(Path(directory), NAME)
    counts = []
    for _ in range(2) if device == "cuda" else ():
        counts.append(sum(map(len, torch.cuda.memory._snapshot()["device_traces"])))
        trainee.update()
    return counts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", num_layers=4, hidden_size=256, head_dim=64))


def test_kernels_and_memory_of_a_step(model: str, tmp_path: Path) -> None:
    after, later = run_isolated(record, model, "torch", str(tmp_path), device="cuda")
    assert after == later, "the history goes on after the step"
    assert {file.name for file in tmp_path.iterdir()} == {f"{NAME}.trace.json.gz", f"{NAME}.memory.pickle"}

    with gzip.open(tmp_path / f"{NAME}.trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    ranges = {event["name"]: event for event in events if event.get("cat") == "user_annotation"}
    kernels = {event["args"]["correlation"] for event in events if event.get("cat") == "kernel"}
    for phase in PHASES:
        start, end = ranges[phase]["ts"], ranges[phase]["ts"] + ranges[phase]["dur"]
        launches = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
        launched = {event["args"].get("correlation") for event in launches if start < event["ts"] < end}
        assert len(launched & kernels) > 10, f"{phase}: no kernels"

    snapshot = pickle.loads((tmp_path / f"{NAME}.memory.pickle").read_bytes())
    assert snapshot["segments"], "no memory"
    history = [event for device in snapshot["device_traces"] for event in device]
    assert 0 < len(history) <= MAX_MEMORY_EVENTS
    allocated = [event for event in history if event["action"] == "alloc"]
    assert any("scalerl" in frame["filename"] for event in allocated for frame in event["frames"]), "no stacks"


def test_without_nsight_systems_its_tool_records_nothing(model: str, tmp_path: Path) -> None:
    run_isolated(record, model, "nsys", str(tmp_path), device="cuda")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("nsys") is None, reason="Nsight Systems is not installed")
def test_nsight_systems_records_a_step_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of docs/tracking.md: ranks are processes of Ray's."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    options = ["--trace=cuda,nvtx", "--capture-range=cudaProfilerApi", "--capture-range-end=repeat"]
    under = ["nsys", "profile", *options, f"--output={tmp_path}/profile_%p"]
    keys = ["trainer.profile_steps=[2]", "trainer.profile_tool=nsys"]
    check_main_ppo(tmp_path, "cuda", *keys, under=under)
    assert not (tmp_path / "run" / "profile_step_2").exists()
    reports = list(tmp_path.glob("profile_*.nsys-rep"))
    assert set(PHASES[1:]) <= {name for report in reports for name in names_of_ranges(report)}


def names_of_ranges(report: Path) -> set[str]:
    database = report.with_suffix(".sqlite")
    export = ["nsys", "export", "--type=sqlite", "--force-overwrite=true", f"--output={database}", str(report)]
    subprocess.run(export, check=True, capture_output=True, timeout=300)
    with closing(sqlite3.connect(database)) as connection:
        found = connection.execute(
            "SELECT COALESCE(text, value) FROM NVTX_EVENTS LEFT JOIN StringIds ON textId = StringIds.id"
        )
        return {name for (name,) in found}
