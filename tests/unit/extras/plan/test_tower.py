"""What a plan says that a vision tower keeps, against what autograd keeps of transformers' tower."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scalerl.config.schema import MegatronConfig
from scalerl.extras.plan.activations import tower_bytes
from scalerl.models import ModelShape
from scalerl.parallel.tower import keep_no_activations, make_tower
from tests.tiny_vision import make_tiny_vision_model

NUM_PATCHES = 64


def kept_bytes(path: Path, shape: ModelShape, dtype: torch.dtype, *, recompute: bool) -> int:
    """Of all storages that are not parameters."""
    tower = make_tower(shape, str(path), dtype)
    if recompute:
        keep_no_activations(tower)
    parameters = {parameter.untyped_storage()._cdata for parameter in tower.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage
        return tensor

    pixels = torch.randn(NUM_PATCHES, shape.vision.numbers_per_patch)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        tower.train()(pixels, grid_thw=torch.tensor([[1, 8, 8]]))
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_what_is_kept_for_the_backward_pass(tmp_path: Path, family: str, dtype: str, recompute: bool) -> None:
    path = make_tiny_vision_model(tmp_path, family)
    shape = ModelShape.from_hf(path)
    assert shape.vision is not None
    measured = kept_bytes(path, shape, getattr(torch, dtype), recompute=recompute)
    config = MegatronConfig(dtype=dtype, recompute_granularity="full" if recompute else None)
    kept, _ = tower_bytes(shape, shape.vision, config)
    features, _ = tower_bytes(replace(shape, frozen_tower=True), shape.vision, config)
    assert (kept - features) * NUM_PATCHES / 4 == pytest.approx(measured, rel=0.1)
