"""The imports of transformers and SGLang, without packages that a process of scalerl does not use.

transformers imports scikit-learn, and with it SciPy and pandas, for one of its assisted generations, and SciPy for
losses of object detection. Python's garbage collector goes through all new modules again and again while they are
imported. Processor seconds and memory of a start of the embedded server, on one core:

    all imports       4.0 s   540 MB
    `lean_imports`    2.4 s   413 MB

The drivers, servers and rollout workers of the tests are some hundreds of starts.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNUSED = ("sklearn", "scipy")


@contextmanager
def lean_imports(unused: tuple[str, ...] = UNUSED) -> Iterator[None]:
    """Hides packages from libraries that ask for them in the block, and collects no garbage there.

    A package that was imported before stays visible. Other threads do not find the packages in the block either.
    """
    hidden = [name for name in unused if name not in sys.modules]
    # What the import system takes for "not there".
    sys.modules.update(dict.fromkeys(hidden))  # pyright: ignore[reportArgumentType, reportCallIssue]
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        if collects:
            gc.enable()
