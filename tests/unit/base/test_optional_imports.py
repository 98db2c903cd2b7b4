"""Packages that a library is not to find."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from scalerl.base.optional_imports import without
from tests.lanes import full


def test_a_package_is_not_found_in_the_block_and_found_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with without("colorsys"):
        assert importlib.util.find_spec("colorsys") is None
        with pytest.raises(ImportError):
            importlib.import_module("colorsys")
    assert importlib.import_module("colorsys").rgb_to_hsv(0, 0, 0) == (0, 0, 0)


def test_what_was_imported_before_stays() -> None:
    with without("json"):
        assert importlib.import_module("json") is sys.modules["json"]
    assert "json" in sys.modules


def test_it_is_found_after_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with pytest.raises(ValueError, match="in the block"), without("colorsys"):
        raise ValueError("in the block")
    assert importlib.util.find_spec("colorsys") is not None


MASKS = """
import sys
from scalerl.base.optional_imports import torch_compiler_when_needed
torch_compiler_when_needed()
def loaded():
    return "torch._dynamo.convert_frame" in sys.modules
from transformers.masking_utils import TransformGetItemToIndex
from transformers.integrations import finegrained_fp8, flash_paged, flex_attention, moe
assert not loaded(), "transformers asks for more than marks"
# It registers operations, for which torch asks each module for its file.
import torch.distributed.checkpoint
assert not loaded()
import torch
{use}
assert loaded()
torch_compiler_when_needed()
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
assert torch._dynamo.__spec__ is not None and torch._dynamo.config.cache_size_limit
"""


@pytest.mark.parametrize(
    "use",
    [
        # What each of them finds is torch's own.
        full("torch._dynamo.reset()"),
        full("from torch._dynamo.exc import Unsupported; assert issubclass(Unsupported, Exception)"),
        full("import torch._dynamo.config"),
        full("with TransformGetItemToIndex() as mode: assert isinstance(mode, torch.overrides.TorchFunctionMode)"),
        "torch.compile(lambda x: x, backend='eager')(torch.ones(1))",
    ],
)
def test_torchs_compiler_is_there_when_it_is_asked_for_more_than_marks(use: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MASKS.format(use=use)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
