"""An adapter that servers get alone: the model below it is the trainer's, or the run is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalerl.config import compose
from scalerl.models import ModelShape
from scalerl.models.adapters import Adapter
from scalerl.trainer.checks.adapters import served_adapter_violations
from tests.model_configs import read_config

POLICY = "actor_rollout_ref"
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tmp_path


def violations(model: Path, *given: str, **changed: Any) -> list[str]:
    (model / "config.json").write_text(json.dumps(read_config("qwen3-8b") | changed))
    required = ["data.train_files=a", "data.val_files=b", f"{POLICY}.model.path={model}", f"{POLICY}.rollout.n=2"]
    cfg = compose("ppo", [*required, f"{POLICY}.rollout.name=sglang", f"{POLICY}.model.lora_rank=8", *given])
    shape = replace(ModelShape.from_hf(model), adapter=Adapter(8, 16, ("q_proj",)))
    return list(served_adapter_violations(cfg, shape, device="cuda"))


def test_a_model_that_servers_read_as_the_trainer_does(model: Path) -> None:
    assert violations(model) == []
    # A trainer that rounds nothing, and one that rounds as the servers do.
    assert violations(model, f"{POLICY}.actor.megatron.dtype=float32", dtype="float32") == []
    assert violations(model, dtype="float32") == []


@pytest.mark.parametrize(("given", "changed", "cause", "remedy"), [
    ([f"{POLICY}.rollout.dtype=float32"], {"dtype": "float32"}, "files in float32, which the trainer has rounded to "
     "bfloat16", f"{POLICY}.rollout.dtype=bfloat16"),
    ([], FP8, "weights in fp8", f"{POLICY}.model.lora.merge=true"),
    ([f"{POLICY}.rollout.quantization=fp8"], {}, "are not quantized so", f"{POLICY}.model.lora.merge=true"),
])  # fmt: skip
def test_another_one_is_refused_with_what_mends_it(
    model: Path, given: list[str], changed: dict[str, Any], cause: str, remedy: str
) -> None:
    (found,) = violations(model, *given, **changed)
    assert cause in found and found.endswith(f"; set {remedy}")
    assert violations(model, *given, remedy, **changed) == []
    # These servers take all weights.
    for whole in (f"{POLICY}.model.lora.merge=true", f"{POLICY}.rollout.name=embedded"):
        if not given or "quantization" not in given[0] or "embedded" not in whole:
            assert violations(model, *given, whole, **changed) == []
