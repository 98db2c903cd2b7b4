"""The key that leaves the vision tower as it is: it says so of the model's shape, or is refused."""

from __future__ import annotations

from typing import Any

import pytest

from scalerl.config import compose
from scalerl.config.errors import ErrorCollector
from scalerl.models import ModelShape
from scalerl.trainer.checks.models import trained_shape
from tests.model_configs import read_config

KINDS: dict[str, tuple[str, list[str]]] = {
    "ppo": ("actor_rollout_ref.model", ["data.val_files=v", "actor_rollout_ref.rollout.n=2"]),
    "sft": ("model", []),
}


def shape_of(kind: Any, changes: dict[str, Any]) -> tuple[ModelShape, list[str]]:
    section, needed = KINDS[kind]
    overrides = ["data.train_files=t", f"{section}.path=MODEL", f"{section}.freeze_vision_tower=true", *needed]
    errors = ErrorCollector()
    cfg = compose(kind, overrides)
    return trained_shape(errors, cfg, ModelShape.from_config(read_config("qwen3-8b") | changes)), errors.violations


@pytest.mark.parametrize("kind", KINDS)
def test_a_tower_is_frozen(kind: str) -> None:
    shape, violations = shape_of(kind, {"model_type": "qwen3_vl", "text_config": read_config("qwen3-8b")})
    assert shape.frozen_tower and shape.vision is not None and not violations


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_a_tower_is_refused_by_name(kind: str) -> None:
    shape, violations = shape_of(kind, {})
    key = f"{KINDS[kind][0]}.freeze_vision_tower"
    assert not shape.frozen_tower and violations == [
        f"{key} = true: MODEL is a qwen3 model, of which no vision tower is trained; set {key}=false"
    ]
