"""Stand-in for torchvision, with the names that SGLang and transformers import and use only for images.

torchvision's Linux wheel on PyPI is linked to CUDA and cannot be imported next to a CPU build of torch.
Every submodule exists, every name in it resolves, and calling one raises.
"""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType

__version__ = "0.0.0"


class InterpolationMode(enum.Enum):
    """The interpolation modes, which are used as dictionary keys at import and so must be real and distinct."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _missing(name: str) -> type:
    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"{name} needs torchvision, which the CPU rollout server does without: text only")

    return type(name.rpartition(".")[2], (), {"__init__": refuse})


class _Submodule(ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "InterpolationMode":
            return InterpolationMode
        return _missing(f"{self.__name__}.{name}")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(__name__ + "."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Submodule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


# Before the default finders, which would look for files that do not exist.
sys.meta_path.insert(0, _Submodules())
