"""What `scalerl train` says at its end."""

from __future__ import annotations

from scalerl.trainer.main_ppo import validation_lines

VALIDATION = {"val-core/a/reward/mean@1": 0.25, "val-aux/a/score/std@1": 1.0}


def test_a_validation_of_the_last_step() -> None:
    assert validation_lines(VALIDATION, 5, 5) == ["val-core/a/reward/mean@1 0.2500"]


def test_a_validation_of_an_earlier_step_says_which() -> None:
    assert validation_lines(VALIDATION, 0, 5) == [
        "val-core/a/reward/mean@1 0.2500 (of step 0; the run ended at step 5)"
    ]
    assert validation_lines({}, None, 5) == []
