"""The imports of transformers and SGLang, without packages that a process of scalerl does not use.

transformers imports scikit-learn, and with it SciPy and pandas, for one of its assisted generations, and SciPy for
losses of object detection. It imports torch's compiler to mark functions for it. Python's garbage collector goes
through all new modules again and again while they are imported. Processor seconds and memory of a start of the
embedded server, on one core:

    all imports                      4.0 s   540 MB
    `lean_imports()`                 2.5 s   411 MB
    `lean_imports(compiler=False)`   1.7 s   265 MB

The drivers, servers and rollout workers of `make test` are some hundreds of starts.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

UNUSED = ("sklearn", "scipy")
_COMPILER = "torch._dynamo"
# transformers imports this mode of the compiler by name, for masks that are given as functions.
_TRACED, _MODE = f"{_COMPILER}._trace_wrapped_higher_order_op", "TransformGetItemToIndex"


@contextmanager
def lean_imports(unused: tuple[str, ...] = UNUSED, compiler: bool = True) -> Iterator[None]:
    """Hides packages from libraries that ask for them in the block, and collects no garbage there.

    A package that was imported before stays visible. Other threads do not find the packages in the block either.
    With `compiler=False` the block does not import torch's compiler either: for processes that compile nothing, because
    the marks that libraries put on their functions in the block are lost.
    """
    absent: dict[str, Any] = dict.fromkeys(unused)  # None is what the import system takes for "not there".
    if not compiler and _COMPILER not in sys.modules:
        importlib.import_module("torch")  # It looks for its compiler while it is imported.
        traced = ModuleType(_TRACED)
        setattr(traced, _MODE, lambda: getattr(importlib.import_module(_TRACED), _MODE)())
        absent |= {_COMPILER: _Marks(_COMPILER), _TRACED: traced}
    hidden = {name: value for name, value in absent.items() if name not in sys.modules}
    sys.modules.update(hidden)
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        if collects:
            gc.enable()


class _Marks(ModuleType):
    """Stands for torch's compiler while libraries mark functions for it."""

    @staticmethod
    def disable(function: Any = None, *_: Any, **__: Any) -> Any:
        return function if function is not None else _unmarked

    allow_in_graph = assume_constant_result = disable


def _unmarked(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
