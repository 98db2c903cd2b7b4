"""Writes a dict of tensors, arrays and plain values as one file, and reads it without running anything in it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scalerl.base.files import whole_file

_PLAIN = (bool, int, float, str, bytes, type(None))
# Key under which a packed value that is not plain says its kind.
_MARK = "__kind__"


def write_plain_file(content: dict[str, Any], path: str | Path) -> None:
    """Writes a dict as one file, whole or not at all.

    Raises ValueError, naming its place in the dict, for a value that is no tensor, array or plain value.
    """
    packed = _packed(content, "")
    with whole_file(path) as file:
        torch.save(packed, file)


def read_plain_file(path: str | Path) -> dict[str, Any]:
    """Reads the dict that `write_plain_file` wrote. Raises ValueError where the file holds anything else."""
    try:
        return _unpacked(torch.load(path, map_location="cpu", weights_only=True))
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        raise ValueError(
            f"{path}: not a file of tensors, arrays and plain values: {str(error).splitlines()[0]}"
        ) from None


def _packed(value: Any, place: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, np.generic):
        return _packed(value.item(), place)
    if isinstance(value, np.ndarray):
        return _packed_array(value, place)
    if isinstance(value, dict):
        wrong = [key for key in value if not isinstance(key, _PLAIN)]
        if wrong or _MARK in value:
            raise ValueError(f"{place}: key {(wrong or [_MARK])[0]!r} cannot be saved; use a text or a number")
        return {key: _packed(inner, f"{place}[{key!r}]") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        items = [_packed(inner, f"{place}[{number}]") for number, inner in enumerate(value)]
        return items if isinstance(value, list) else {_MARK: "tuple", "items": items}
    if type(value) in _PLAIN:
        return value
    raise ValueError(
        f"{place} is a {type(value).__name__}: only tensors, arrays, numbers, texts, lists and dicts are saved; drop "
        "or convert it"
    )


def _packed_array(array: np.ndarray, place: str) -> dict[str, Any]:
    if array.dtype.kind in "biuf":
        # A copy: an array may be read-only, which torch warns of.
        return {_MARK: "array", "values": torch.from_numpy(np.array(array))}
    items = [_packed(value, f"{place}[{number}]") for number, value in enumerate(array.ravel().tolist())]
    return {_MARK: "objects", "dtype": array.dtype.str, "shape": list(array.shape), "items": items}


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_MARK)
    if kind == "array":
        return value["values"].numpy()
    if kind == "tuple":
        return tuple(_unpacked(value["items"]))
    if kind == "objects":
        array = np.empty(len(value["items"]), dtype=np.dtype(value["dtype"]))
        for number, item in enumerate(value["items"]):
            array[number] = _unpacked(item)
        return array.reshape(value["shape"])
    return {key: _unpacked(inner) for key, inner in value.items()}
