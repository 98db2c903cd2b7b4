"""A package that a library is not to find is hidden in the block alone."""

from __future__ import annotations

import gc
import importlib
import importlib.util
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
