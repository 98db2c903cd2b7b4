"""Garbage collection that leaves out imported modules."""

from __future__ import annotations

import gc

_frozen = False


def collect_garbage() -> None:
    """Frees what an earlier run left; the first call also freezes all objects that exist then.

    Those are mostly the imported modules, which live as long as the process. Otherwise every full collection, also
    within a step, would go through their half a million objects, which takes a quarter of a second.
    """
    global _frozen
    gc.collect()
    if not _frozen:
        gc.freeze()
        _frozen = True
