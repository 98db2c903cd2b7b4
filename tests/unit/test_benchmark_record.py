"""What a benchmark records of its machine, and when it begins."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import record


class Machine:
    """A machine whose load falls while one sleeps; its clock moves only then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, loads: list[float]) -> None:
        self.loads, self.now_s, self.slept = loads, 100.0, 0
        monkeypatch.setattr(record.os, "getloadavg", lambda: (self.loads[0], 1.0, 2.0))
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept += 1
        if len(self.loads) > 1:
            self.loads.pop(0)


def test_a_benchmark_begins_when_the_machine_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, [0.9, 0.31, 0.29, 0.1])
    ran_on = record.machine("cpu", now=False)
    assert ran_on["load_average"] == [0.29, 1.0, 2.0]
    assert ran_on["waited_s"] == 2 * record.QUIET_LOOK_S


def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Machine(monkeypatch, [4.0])
    ran_on = record.machine("cpu", now=False)
    assert (ran_on["load_average"][0], ran_on["waited_s"]) == (4.0, record.QUIET_LIMIT_S)
    assert "not quiet after 180 s (load 4.00)" in capsys.readouterr().out


def test_now_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Machine(monkeypatch, [4.0])
    parser = argparse.ArgumentParser()
    record.add_now(parser)
    ran_on = record.machine("cpu", now=parser.parse_args(["--now"]).now)
    assert (ran_on["load_average"][0], ran_on["waited_s"], busy.slept) == (4.0, None, 0)
    assert parser.parse_args([]).now is False
