"""A package that a library is not to find is hidden in the block alone."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import subprocess
import sys

import pytest

from scalerl.base.lean_imports import lean_imports


def test_a_package_is_not_found_in_the_block_and_found_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with pytest.raises(ValueError, match="in the block"), lean_imports(("colorsys", "json")):
        assert importlib.util.find_spec("colorsys") is None and not gc.isenabled()
        with pytest.raises(ImportError):
            importlib.import_module("colorsys")
        # It was imported before.
        assert importlib.import_module("json") is sys.modules["json"]
        raise ValueError("in the block")
    assert importlib.import_module("colorsys").rgb_to_hsv(0, 0, 0) == (0, 0, 0)
    assert "json" in sys.modules and gc.isenabled()


# A transformers model computes, with a mask that is a function, and torch compiles, as if nothing had been hidden.
_WITHOUT_COMPILER = """
import sys
from scalerl.base.lean_imports import lean_imports
with lean_imports(compiler=False):
    from transformers import Qwen3Config, Qwen3ForCausalLM
import torch
from transformers import masking_utils
sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
model = Qwen3ForCausalLM(Qwen3Config(intermediate_size=16, vocab_size=8, **sizes))
assert model(torch.arange(5)[None]).logits.shape == (1, 5, 8)
assert "torch._dynamo" not in sys.modules and "sympy" not in sys.modules
masks = torch.vmap(lambda at: torch.arange(3)[at])
with masking_utils.TransformGetItemToIndex():
    assert masks(torch.arange(3)).tolist() == [0, 1, 2]
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).tolist() == [2]
"""


def test_a_process_without_torchs_compiler_has_it_when_it_compiles() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT_COMPILER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
