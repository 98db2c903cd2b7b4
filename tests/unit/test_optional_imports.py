"""Packages that a library is not to find."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from scalerl.optional_imports import without


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
