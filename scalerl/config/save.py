"""Writes a configuration as a YAML file, and flattens it to one dict of dotted keys."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from scalerl.base.files import whole_file

# The file in a run's directory that has every key with the value that the run was started with.
RESOLVED_CONFIG = "config.yaml"
Scalar = str | int | float | bool | None


def save_resolved(cfg: Any, path: str | Path) -> None:
    """Writes a config dataclass as YAML, whole or not at all; `--config-dir D --config-name NAME` reads it back.

    Raises: OSError where the directory cannot be written. Missing parent directories are made.
    """
    with whole_file(path) as file:
        file.write(OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(cfg))).encode())


def read_resolved(path: str | Path) -> dict[str, Any] | None:
    """The nested values in a file of `save_resolved`; None where nothing can be read."""
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, yaml.YAMLError, OmegaConfBaseException):
        return None
    return {str(key): value for key, value in content.items()} if isinstance(content, dict) else None


def saved_value(path: str | Path, key: str) -> str | None:
    """The value of a key in a file of `save_resolved`, as text; None where it is null, or nothing can be read."""
    value = OmegaConf.select(OmegaConf.create(read_resolved(path) or {}), key)
    return None if value is None else str(value)


def flatten(cfg: Any) -> dict[str, Scalar]:
    """Flattens a config dataclass to dotted key -> scalar. A list and an empty dict become their JSON text."""
    flat: dict[str, Scalar] = {}
    _flatten_into(flat, "", dataclasses.asdict(cfg))
    return flat


def _flatten_into(flat: dict[str, Scalar], key: str, value: Any) -> None:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            _flatten_into(flat, f"{key}.{name}" if key else str(name), inner)
    elif isinstance(value, dict | list):
        flat[key] = json.dumps(value)
    else:
        flat[key] = value
