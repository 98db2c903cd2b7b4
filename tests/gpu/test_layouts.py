"""An engine over several GPUs against one: NCCL's exchanges of every layout, pipelines' batched sends, experts.

The ranks run what tests/dist runs on the CPU (test_layout_invariance.py), on as many GPUs as there are. NOT RUN YET on
two GPUs or more.

    python -m pytest tests/gpu/test_layouts.py -q
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.dist.layouts import LAYOUTS, MIXTURE_LAYOUTS, ONE
from tests.dist.test_layout_invariance import LENGTHS, NUM_UPDATES, Outcome, joined, make_model, relative, train
from tests.gpu.isolated import run_isolated_ranks

CASES = [("qwen3", name) for name in LAYOUTS] + [("qwen3_moe", name) for name in MIXTURE_LAYOUTS]
# float32 without TF32: the order of additions differs, and each update of Adam makes more of that (test_engine_update).
LOGPROB_BOUND, FIRST_UPDATE_BOUND, LATER_BOUND = 1e-5, 1e-4, 1e-3


def run(model: Path, sizes: dict[str, int], device: str) -> Outcome:
    return joined(run_isolated_ranks(sizes["world_size"], train, str(model), sizes, {}, device=device))


def assert_near(actual: Outcome, expected: Outcome) -> None:
    assert actual.logprobs.keys() == set(range(len(LENGTHS))) and len(actual.updates) == NUM_UPDATES
    for row, logprobs in expected.logprobs.items():
        assert relative(actual.logprobs[row], logprobs) < LOGPROB_BOUND, row
    for step, (mine, theirs) in enumerate(zip(actual.updates, expected.updates, strict=True)):
        bound = LATER_BOUND if step else FIRST_UPDATE_BOUND
        assert mine == pytest.approx(theirs, rel=bound, abs=bound), step
    for name, weight in expected.weights.items():
        assert relative(actual.weights[name], weight) < LATER_BOUND, name


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: make_model(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="module")
def one_gpu(models: Callable[[str], Path]) -> Callable[[str], Outcome]:
    return cache(lambda family: run(models(family), ONE, "cuda"))


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_the_numbers_of_one_gpu(
    models: Callable[[str], Path], one_gpu: Callable[[str], Outcome], family: str, layout: str
) -> None:
    sizes = (LAYOUTS | MIXTURE_LAYOUTS)[layout]
    if torch.cuda.device_count() < sizes["world_size"]:
        pytest.skip(f"needs {sizes['world_size']} GPUs")
    assert_near(run(models(family), sizes, "cuda"), one_gpu(family))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_one_gpu_has_the_numbers_of_a_cpu(
    models: Callable[[str], Path], one_gpu: Callable[[str], Outcome], family: str
) -> None:
    assert_near(one_gpu(family), run(models(family), ONE, "cpu"))
