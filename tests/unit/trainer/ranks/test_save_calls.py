"""What the driver does for a save that ranks write beside the run."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scalerl.checkpoint.store import CheckpointWriteError
from scalerl.cluster.worker_group import Limit
from scalerl.trainer.ranks.roles import TrainedModel


@pytest.mark.parametrize("answers", [0, 2])
def test_a_save_that_is_given_up_asks_no_rank_any_more(answers: int, tmp_path) -> None:
    """Ray may be gone by then, and a call would start it anew."""
    given_up, asked = threading.Event(), []
    if not answers:
        given_up.set()

    def ask(rank: int, *_: Any) -> None:
        asked.append(rank)
        if len(asked) == answers:
            given_up.set()

    workers = SimpleNamespace(world_size=2, limit=lambda name: Limit("a", 60), ask=ask, call=lambda *_: None)
    finish = TrainedModel(cast(Any, workers)).begin_save(str(tmp_path))
    with pytest.raises(CheckpointWriteError, match="the run ended before it was written"):
        finish(given_up)
    assert asked == [0] * answers
