"""Garbage collection that leaves out imported modules, and in some processes waits for more objects."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# The log-probs of an answer are a list for each token: those of a long one, and as many again.
MANY_NEW_OBJECTS = 100_000

_frozen = False


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Keeps what is imported in the block out of garbage collections, and with it all that the process has by then.

    Where the block imports nothing new, as in a second run of a process, everything stays as it was.
    Imports make what stays. The collector would go through all of it again and again: a sixth of a rank's imports, a
    third of SGLang's. For processes that have not begun their work.
    """
    collects, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
        if collects:
            gc.enable()


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
