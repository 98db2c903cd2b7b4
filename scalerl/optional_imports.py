"""Optional dependencies of libraries that are left out of a process' start."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(name: str) -> Iterator[None]:
    """Hides the package `name` from libraries that ask for it in the block, unless it was imported before.

    transformers imports scikit-learn, and with it SciPy and pandas, for one of its assisted generations: a second and a
    half of each start of a process that loads a tokenizer. Other threads do not find it in the block either.
    """
    hidden = name not in sys.modules
    if hidden:
        # What the import system takes for "not there".
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules[name]
