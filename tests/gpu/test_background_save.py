"""A save in the background on a GPU: what changes or moves the weights waits for the copy, which has its own stream.

    pytest tests/gpu/test_background_save.py

On a CPU tests/dist/test_background_save.py runs the same code, where there are no streams.
"""

from __future__ import annotations

from pathlib import Path

from tests.dist.test_background_save import change_while_copying
from tests.gpu.isolated import run_isolated
from tests.tiny_models import make_tiny_model


def test_what_changes_or_moves_the_weights_waits_for_the_copy(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen3", num_layers=4, hidden_size=256, head_dim=64)
    digest_pairs = run_isolated(change_while_copying, str(model), (1, 1, 1), str(tmp_path / "run"), device="cuda")
    assert len(digest_pairs) == 3 and all(waited == beside for waited, beside in digest_pairs)
