"""Garbage collection that leaves out imported modules, and in some processes waits for more objects."""

from __future__ import annotations

import gc

# The log-probs of an answer are a list for each token: those of a long one, and as many again.
MANY_NEW_OBJECTS = 100_000

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


def collect_rarely() -> None:
    """Makes the collector wait for MANY_NEW_OBJECTS new objects; Python's own limit is some hundreds.

    For a process that reads servers' answers, of which each token is an object until the answer has been read. Every
    collection would go through the tokens that are there already.
    """
    _, *older = gc.get_threshold()
    gc.set_threshold(MANY_NEW_OBJECTS, *older)
