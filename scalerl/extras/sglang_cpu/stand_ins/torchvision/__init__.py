"""torchvision from its wheel where `make setup` has put it, else a stand-in with the names that are used for images.

The Linux wheel on PyPI is linked to CUDA. Next to a CPU build of torch its compiled operators do not load, and its
import fails because two of them are not there; what images need is written in torch. In the stand-in every submodule
exists, every name in it resolves, and calling one raises.
"""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
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


def _import_wheel(package: Path) -> None:
    """Puts the wheel's package in the place of this module."""
    import torch

    # Their schemas, for which the package registers shapes when it is imported. Kept for as long as this module.
    library = torch.library.Library(__name__, "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    spec = importlib.util.spec_from_file_location(__name__, package / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__dict__["_schemas"] = library
    sys.modules[__name__] = module
    spec.loader.exec_module(module)


if (_WHEEL := Path(sys.prefix, "optional/torchvision/torchvision")).is_dir():
    _import_wheel(_WHEEL)
else:
    # Before the default finders, which would look for files that do not exist.
    sys.meta_path.insert(0, _Submodules())
