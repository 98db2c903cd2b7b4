"""The end of a process's stderr among the logs of a Ray session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scalerl.cluster.worker_logs import TAIL_LINES, shown, tail_of


def test_the_last_lines_of_that_process(tmp_path: Path) -> None:
    (tmp_path / "worker-a-01000000-12.err").write_text("another\n")
    (tmp_path / "worker-b-ffffffff-112.out").write_text("stdout\n")
    path = tmp_path / "worker-b-ffffffff-112.err"
    path.write_text("".join(f"line {i}\n\n" for i in range(50_000)))
    log_path, lines = tail_of(str(tmp_path), 112)
    assert log_path == str(path)
    assert lines == [f"line {i}" for i in range(50_000 - TAIL_LINES, 50_000)]


def test_a_number_that_came_again(tmp_path: Path) -> None:
    for name, age in (("a", 100), ("b", 0), ("c", 200)):
        path = tmp_path / f"worker-{name}-01000000-12.err"
        path.write_text(f"{name}\n")
        os.utime(path, (1e9 - age, 1e9 - age))
    assert tail_of(str(tmp_path), 12)[1] == ["b"]


def test_no_log(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no worker-\*-12\.err in"):
        tail_of(str(tmp_path), 12)


def test_shown() -> None:
    assert shown(["one", "two"], "/x") == "Last lines of its stderr, the whole is /x:\n  | one\n  | two"
    assert "(it wrote nothing)" in shown([], "/x")
