"""Adapters train to the same numbers on every layout, and to those of transformers and peft."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scalerl.models import ModelShape
from scalerl.models.adapters import ALL_LINEAR, Adapter, adapter_shapes, resolve_targets, write_peft
from tests.dist.layouts import LAYOUTS, MIXTURE_LAYOUTS, ONE
from tests.dist.test_layout_invariance import Outcome, assert_same, make_model, run
from tests.lanes import mostly_full

FAMILIES = ("qwen3", "qwen3_moe", "deepseek_v3", "qwen3_5_text", "glm4")
RANK, ALPHA = 3, 5
# Experts that are split have no adapters.
OF_EXPERTS = {name: sizes for name, sizes in MIXTURE_LAYOUTS.items() if "etp_size" not in sizes}
CASES = [(family, layout) for family in FAMILIES for layout in LAYOUTS]
CASES += [(family, layout) for family in ("qwen3_moe", "deepseek_v3") for layout in OF_EXPERTS]
MAIN = {"tp2": "qwen3", "tp2_ep2_etp1": "qwen3_moe", "pp2": "deepseek_v3"}
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """A family -> its model, and what an engine gets for an adapter whose A and B are both random."""

    def make(family: str) -> tuple[Path, dict[str, Any]]:
        path = make_model(tmp_path_factory.mktemp(family) / "model", family)
        shape = ModelShape.from_hf(path)
        adapter = Adapter(RANK, ALPHA, resolve_targets(shape, ALL_LINEAR))
        generator = torch.Generator().manual_seed(5)
        sizes = adapter_shapes(shape, adapter)
        tensors = {name: 0.1 * torch.randn(size, generator=generator) for name, size in sizes.items()}
        write_peft(path.parent / "adapter", adapter, tensors, str(path))
        return path, {"adapter": adapter, "adapter_path": str(path.parent / "adapter")}

    return functools.cache(make)


@pytest.fixture(scope="module")
def one_process(models: Callable) -> Callable[[str], Outcome]:
    def on_one(family: str) -> Outcome:
        path, adapter = models(family)
        return run(path, ONE, adapter=adapter)

    return functools.cache(on_one)


@pytest.mark.parametrize(("family", "layout"), mostly_full(CASES, lambda case: MAIN.get(case[1]) == case[0]))
def test_layout(models: Callable, one_process: Callable[[str], Outcome], family: str, layout: str) -> None:
    path, adapter = models(family)
    assert_same(run(path, (LAYOUTS | OF_EXPERTS)[layout], adapter=adapter), one_process(family))
