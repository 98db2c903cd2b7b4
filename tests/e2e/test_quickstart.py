"""`make quickstart`, as a new user runs it: it learns, and the merged model scores what the trainer measured."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "arithmetic" / "quickstart.py"
TIMEOUT_S = 1800


def run(out: Path, *overrides: str) -> tuple[float, float, float]:
    """-> validation scores before SFT, after it, after RL."""
    done = subprocess.run(
        [sys.executable, str(QUICKSTART), "--out", str(out), *overrides],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    # 0 also says that transformers scored the merged model exactly as the trainer's last validation did.
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    scores = re.search(r"before SFT ([\d.]+)\s+after SFT ([\d.]+)\s+after RL ([\d.]+)", done.stdout)
    assert scores, done.stdout[-3000:]
    assert (out / "merged" / "model.safetensors").is_file()
    assert "mlflow ui" in done.stdout and "n_gpus_per_node=8" in done.stdout
    before_sft, after_sft, after_rl = map(float, scores.groups())
    return before_sft, after_sft, after_rl


@pytest.mark.full
def test_quickstart_learns(tmp_path: Path) -> None:
    before_sft, after_sft, after_rl = run(tmp_path / "out")
    assert before_sft < 0.1 < after_sft <= 0.5
    assert after_rl >= 0.8


def test_its_first_steps_learn(tmp_path: Path) -> None:
    """A fifth of its steps of RL: the learning rate falls as in the whole."""
    before_sft, after_sft, after_rl = run(tmp_path / "out", "trainer.total_training_steps=20")
    assert before_sft < 0.1 < after_sft <= 0.5
    assert after_rl >= after_sft + 0.2
