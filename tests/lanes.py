"""Which cases of a test are in `make test`; the others have the mark `full`, for `make test-all` (docs/testing.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def full(*values: Any, id: str | None = None) -> Any:
    """A case of `parametrize` that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.full, id=id)


def mostly_full(cases: Iterable[Any], is_main: Callable[[Any], bool]) -> list[Any]:
    """cases, each a value or a tuple of values; those for which `is_main` says no are `full`. At least one is not."""
    cases = list(cases)
    assert any(map(is_main, cases)), "make test would show nothing of this"
    return [case if is_main(case) else full(*(case if isinstance(case, tuple) else (case,))) for case in cases]
