"""`make quickstart`, as a new user runs it: it learns, and the merged model scores what the trainer measured."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "arithmetic" / "quickstart.py"
TIMEOUT_S = 1800


def test_quickstart_learns(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(QUICKSTART), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    # 0 also says that transformers scored the merged model exactly as the trainer's last validation did.
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    scores = re.search(r"before SFT ([\d.]+)\s+after SFT ([\d.]+)\s+after RL ([\d.]+)", done.stdout)
    assert scores, done.stdout[-3000:]
    before_sft, after_sft, after_rl = map(float, scores.groups())
    assert before_sft < 0.1 < after_sft <= 0.5
    assert after_rl >= 0.8
    assert (tmp_path / "out" / "merged" / "model.safetensors").is_file()
    assert "mlflow ui" in done.stdout and "n_gpus_per_node=8" in done.stdout
