"""What `scalerl launch status` reads in the files of a run; on a real Slurm: tests/slurm/test_launch.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scalerl.launch import command
from scalerl.launch.command import LAUNCHERS_OWN, last_line, last_step


def test_the_launchers_line_is_found_whatever_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"

    def last() -> str | None:
        return last_line(out, lambda line: line.startswith(LAUNCHERS_OWN))

    assert last() is None
    out.write_text("")
    assert last() is None
    out.write_text("[scalerl    1s] first\n[scalerl    2s] sécond\n" + "a line of the run, which is long\n" * 5000)
    assert last() == "[scalerl    2s] sécond"
    # Wherever a block begins, in the middle of a letter, too.
    for size in range(1, 60):
        monkeypatch.setattr(command, "BLOCK_BYTES", size)
        out.write_text("[scalerl    1s] first\n[scalerl    2s] sécond\nother\n\n" + "x" * size)
        assert last() == "[scalerl    2s] sécond"
    out.write_text("[scalerl    1s] first")
    assert last() == "[scalerl    1s] first"
    out.write_text("nothing of it\n")
    assert last() is None


def test_the_last_step_is_told(tmp_path: Path) -> None:
    """From the metrics, of which the last line may be torn, else from the driver's output."""
    attempt = tmp_path / "attempt"
    attempt.mkdir()
    assert last_step(tmp_path, attempt) is None
    (attempt / "driver.log").write_text("step 11/40  reward 0.1\nstep 12/40  reward 0.5  | 3.1s\nCheckpoint\n")
    assert last_step(tmp_path, attempt) == "step 12/40  reward 0.5  | 3.1s"
    lines = [json.dumps({"step": step, "data": {"x": 1.0}}) for step in (13, 14)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 1']))
    told = last_step(tmp_path, attempt)
    assert told is not None and told.startswith("14, logged 0:00:") and told.endswith(" ago")
