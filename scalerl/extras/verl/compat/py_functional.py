"""Collects metric values as lists in a dict, as verl does.

A run of scalerl merges its metrics with `metrics.merge_metrics`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def append_to_dict(data: dict[str, list[Any]], new_data: Mapping[str, Any], prefix: str = "") -> None:
    """Appends each value of new_data to data[prefix + key], in place; a key that starts with prefix keeps its name.

    A value that is a list is appended as one value.
    """
    for key, value in new_data.items():
        data.setdefault(key if key.startswith(prefix) else prefix + key, []).append(value)
