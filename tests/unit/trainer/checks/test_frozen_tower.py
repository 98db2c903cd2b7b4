"""The key that leaves the vision tower as it is: it says so of the model's shape, or is refused."""

from __future__ import annotations

from typing import Any

import pytest

from scalerl.config import compose
from scalerl.config.errors import ErrorCollector
from scalerl.models import ModelShape
from scalerl.trainer.checks.models import trained_shape
from tests.model_configs import read_config

PPO = ["data.val_files=v", "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.model.path=MODEL"]
# Role -> its section, and what the run needs.
ROLES: dict[str, tuple[str, list[str]]] = {
    "actor": ("actor_rollout_ref.model", PPO),
    "critic": ("critic.model", [*PPO, "algorithm.adv_estimator=gae"]),
    "sft": ("model", ["model.path=MODEL"]),
}


def shape_of(role: str, changes: dict[str, Any]) -> tuple[ModelShape, list[str]]:
    section, needed = ROLES[role]
    overrides = ["data.train_files=t", f"{section}.freeze_vision_tower=true", *needed]
    cfg = compose("sft", overrides) if role == "sft" else compose("ppo", overrides)
    errors, shape = ErrorCollector(), ModelShape.from_config(read_config("qwen3-8b") | changes)
    return trained_shape(errors, cfg, shape, "actor" if role == "sft" else role), errors.violations


@pytest.mark.parametrize("role", ROLES)
def test_a_tower_is_frozen(role: str) -> None:
    shape, violations = shape_of(role, {"model_type": "qwen3_vl", "text_config": read_config("qwen3-8b")})
    assert shape.frozen_tower and shape.vision is not None and not violations


@pytest.mark.parametrize("role", ROLES)
def test_a_model_without_a_tower_is_refused_by_name(role: str) -> None:
    shape, violations = shape_of(role, {})
    key = f"{ROLES[role][0]}.freeze_vision_tower"
    assert not shape.frozen_tower and violations == [
        f"{key} = true: MODEL is a qwen3 model, of which no vision tower is trained; set {key}=false"
    ]
