"""Stages of `make gpu`: their limits, and what is left of one that is ended."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import gpu

SLEEPS = (
    "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); time.sleep(600)"
)


def of(monkeypatch: pytest.MonkeyPatch, *stages: gpu.Stage) -> None:
    monkeypatch.setattr(gpu, "stages", lambda out, rehearse, run_keys: iter(stages))


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "stages.jsonl").read_text().splitlines()]


def test_a_stage_that_its_limit_ends_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of(monkeypatch, gpu.Stage("slow", 3, ["-c", SLEEPS]), gpu.Stage("next", 3, ["-c", "print('here')"]))
    assert gpu.main(["--limit-s", "600", "--out", str(tmp_path)]) == 1
    assert [(line["stage"], line["code"]) for line in lines(tmp_path)] == [("slow", None), ("next", 0)]
    assert (tmp_path / "next.log").read_text() == "here\n"
    left = int((tmp_path / "slow.log").read_text())
    # One that ended and that nobody waits for is a zombie.
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE


def test_a_stage_without_time_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of(monkeypatch, gpu.Stage("long", 1000, ["-c", "pass"]), gpu.Stage("short", 10, ["-c", "pass"]))
    began = time.monotonic()
    assert gpu.main(["--limit-s", str(gpu.GRACE_S + 20), "--out", str(tmp_path)]) == 0
    assert [line["stage"] for line in lines(tmp_path)] == ["short"] and time.monotonic() - began < 15


def test_stages_are_chosen_by_name(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="upadte"):
        gpu.main(["--out", str(tmp_path), "--only", "upadte"])


@pytest.mark.parametrize("rehearse", [True, False])
def test_each_command_is_of_a_file_that_is_there(tmp_path: Path, rehearse: bool) -> None:
    for stage in gpu.stages(tmp_path, rehearse, ["a=b"]):
        first = stage.arguments[0]
        assert first == "-m" or (gpu.REPOSITORY / first).is_file(), stage
