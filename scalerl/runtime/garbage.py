"""What a process has imported is kept out of Python's garbage collections."""

from __future__ import annotations

import gc

_frozen = False


def collect_garbage() -> None:
    """Frees what an earlier run left; at the first call also freezes what is there.

    That are the modules, which live as long as the process: else every full collection, in the midst of a step as well,
    goes through their half a million objects, which takes a quarter of a second.
    """
    global _frozen
    gc.collect()
    if not _frozen:
        gc.freeze()
        _frozen = True
