"""Dotted names of sections and keys that several messages and rules speak of."""

from __future__ import annotations

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
HYBRID = "actor_rollout_ref.hybrid_engine"
JUDGE = "reward_model.judge"
CORRECTION = "algorithm.rollout_correction"
IMPORT_FILES = "trainer.import_files"
