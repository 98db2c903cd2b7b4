"""What `scalerl verify-resume` compares: all where a resumed run repeats every sample, else what it can."""

from __future__ import annotations

import pytest

from scalerl.config import compose
from scalerl.verify.resume import runs_ahead, why_others

KEYS = ("data.train_files=a.parquet", "data.val_files=b.parquet", "actor_rollout_ref.model.path=m")
AHEAD = ("trainer.max_staleness=1", "actor_rollout_ref.hybrid_engine=false")


@pytest.mark.parametrize(
    ("engine", "keys", "is_ahead", "said"),
    [
        ("embedded", (), False, None),
        # Servers on the trainer's devices have nothing to do while it trains.
        ("embedded", ("trainer.max_staleness=1",), False, None),
        ("embedded", AHEAD, True, "sample ahead"),
        ("sglang", (), False, "sglang draws others after a resume"),
        ("sglang", AHEAD, True, "sglang draws others after a resume"),
    ],
)
def test_where_samples_are_others(engine: str, keys: tuple[str, ...], is_ahead: bool, said: str | None) -> None:
    cfg = compose("ppo", [*KEYS, f"actor_rollout_ref.rollout.name={engine}", *keys], rules=False)
    assert runs_ahead(cfg) == is_ahead
    reason = why_others(cfg)
    assert reason is None if said is None else reason is not None and said in reason
