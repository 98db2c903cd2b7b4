"""What `scalerl verify-resume` compares: all where a resumed run repeats every sample, else what it can; its runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalerl.config import compose
from scalerl.extras.verify.resume import RunKind, read_kind, run_keys, runs_ahead, why_others

KEYS = ("data.train_files=a.parquet", "data.val_files=b.parquet", "actor_rollout_ref.model.path=m")
KEYS_OF: dict[RunKind, tuple[str, ...]] = {
    "ppo": KEYS,
    "sft": ("data.train_files=a.parquet", "data.val_files=b.parquet", "model.path=m"),
}
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


@pytest.mark.parametrize(
    ("arguments", "kind", "keys"),
    [
        ([], "ppo", []),
        (["a=1", "b=2"], "ppo", ["a=1", "b=2"]),
        (["train", "a=1"], "ppo", ["a=1"]),
        (["sft", "a=1", "--config-name", "sft"], "sft", ["a=1", "--config-name", "sft"]),
        (["--config-name", "sft"], "ppo", ["--config-name", "sft"]),
    ],
)
def test_which_command_the_keys_are_of(arguments: list[str], kind: str, keys: list[str]) -> None:
    assert read_kind(arguments) == (kind, keys)


@pytest.mark.parametrize("kind", ["ppo", "sft"])
def test_what_a_long_run_asks_for_does_not_refuse_its_verification(kind: RunKind, tmp_path: Path) -> None:
    """Saves, validations and profiles of later steps are left out, whatever the user's keys say of them."""
    given = [
        *KEYS_OF[kind],
        *("trainer.save_freq=20", "trainer.test_freq=20", "trainer.best_ckpt_to_keep=2", "trainer.profile_steps=[50]"),
        *("trainer.ckpt_every_to_keep=100", "trainer.checkpoint_mirror=file:///mirror", "trainer.total_epochs=3"),
        "trainer.max_actor_ckpt_to_keep=1",
        *("trainer.resume_mode=resume_path", "trainer.resume_from_path=old/global_step_7", "trainer.logger=[console]"),
    ]
    keys = run_keys(kind, given, tmp_path / "straight", 4)
    # Raises ConfigError for a rule that is broken.
    trainer = compose(kind, keys).trainer
    assert (trainer.total_training_steps, trainer.save_freq, trainer.resume_mode) == (4, -1, "auto")
    assert trainer.default_local_dir == str(tmp_path / "straight") and trainer.checkpoint_mirror is None
    assert trainer.profile_steps == [] and trainer.logger == ["file", "mlflow"]
