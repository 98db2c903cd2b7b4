"""The attention by which kernels are tried, on the CPU's: what is as before passes, anything else is said."""

from __future__ import annotations

import pytest
import torch

from scalerl.parallel.attention import PackedAttention
from scalerl.parallel.attention_trial import BOUND, RESULTS, attended, first_difference


def test_the_same_attention_is_the_same() -> None:
    expected = {size: attended(size, "cpu") for size in (32, 64)}
    assert [tuple(tensor.shape[1:]) for tensor in expected[32]] == [(4, 32), (4, 32), (2, 32), (2, 32)]
    assert all(tensor.dtype == torch.bfloat16 and bool(tensor.any()) for tensor in expected[64])
    assert first_difference(expected, "cpu") is None


@pytest.mark.parametrize("wrong", range(len(RESULTS)))
@pytest.mark.parametrize("factor", [1 + 2 * BOUND, float("nan")])
def test_another_result_is_named(wrong: int, factor: float) -> None:
    expected = {32: attended(32, "cpu"), 64: attended(64, "cpu")}
    expected[64][wrong] = expected[64][wrong] * factor
    difference = first_difference(expected, "cpu")
    assert difference is not None and difference.startswith(f"with heads of 64 its {RESULTS[wrong]} is ")


def test_a_kernel_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {64: attended(64, "cpu")}

    def forward(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(PackedAttention, "forward", forward)
    assert first_difference(expected, "cpu") == ("a small call with heads of 64 fails (no kernel image is available)")
