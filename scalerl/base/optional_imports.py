"""What libraries import and most processes do without: left out of a process' start."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
# Where a mode is that transformers imports by its name, for masks that are given as functions.
_TRACED, _MODE = f"{_COMPILER}._trace_wrapped_higher_order_op", "TransformGetItemToIndex"


@contextmanager
def without(name: str) -> Iterator[None]:
    """Hides the package `name` from libraries that ask for it in the block, unless it was imported before.

    transformers imports scikit-learn, and with it SciPy and pandas, for one of its assisted generations: a second and a
    half of each start of a process that loads a tokenizer. SciPy is also imported for losses of object detection. Other
    threads do not find it in the block either.
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


def torch_compiler_when_needed() -> None:
    """Lets this process import torch's compiler when something asks it for more than a mark, if it has not done so yet.

    It is about a second of a start, and transformers imports it only to mark functions as not to be looked into. Those
    that it marks before are compiled as if it had not.
    """
    # torch itself looks at its compiler while it is imported.
    importlib.import_module("torch")
    if _COMPILER in sys.modules:
        return
    traced = ModuleType(_TRACED)
    setattr(traced, _MODE, lambda: getattr(_compiler_module(_TRACED), _MODE)())
    sys.modules |= {_COMPILER: _CompilerWhenNeeded(_COMPILER), _TRACED: traced}


class _CompilerWhenNeeded(ModuleType):
    """Stands for torch's compiler until anything but a mark is looked up in it, a module of it included."""

    @staticmethod
    def disable(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        return function if function is not None else lambda function: function

    allow_in_graph = assume_constant_result = disable

    @property
    def __path__(self) -> Any:
        return _compiler_module(_COMPILER).__path__

    def __getattr__(self, name: str) -> Any:
        # Such as __file__, which `inspect` asks of all modules, also while torch is half imported.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_compiler_module(_COMPILER), name)


def _compiler_module(name: str) -> ModuleType:
    """The compiler itself, or a module of it."""
    if isinstance(sys.modules.get(_COMPILER), _CompilerWhenNeeded):
        del sys.modules[_COMPILER], sys.modules[_TRACED]
    return importlib.import_module(name)
