"""Names and texts as MLflow accepts them."""

from __future__ import annotations

import hashlib
import json
import logging
import posixpath
import re
from collections.abc import Mapping
from typing import Any

from scalerl.tracking.backend import safe_uri

logger = logging.getLogger(__name__)

# mlflow.utils.validation: MAX_ENTITY_KEY_LENGTH.
_MAX_NAME = 250


class MetricNames:
    """Distinct MLflow names of metric keys, also of keys that `metric_name` makes equal (a@b and a_at_b)."""

    def __init__(self) -> None:
        # Keys by their names.
        self._keys: dict[str, str] = {}

    def of(self, key: str) -> str:
        """The name of a key: its `metric_name`, or that with a digest of the key appended if it is taken."""
        name = metric_name(key)
        owner = self._keys.setdefault(name, key)
        if owner == key:
            return name
        digest = hashlib.sha256(key.encode()).hexdigest()[:8]
        own = f"{name[: _MAX_NAME - 9]}_{digest}"
        if own not in self._keys:
            self._keys[own] = key
            logger.warning("mlflow: the metrics %r and %r have one name there; the second is %r", owner, key, own)
        return own


def metric_name(key: str) -> str:
    """The key as a name that MLflow accepts (mlflow.utils.validation): `@` as _at_, other invalid characters as _."""
    name = re.sub(r"[^/\w.\- :]", "_", key.replace("@", "_at_"))
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    return posixpath.join(*parts)[:_MAX_NAME].rstrip("/") if parts else "_"


def param_text(value: Any) -> str:
    """A configuration value as text; lists and mappings as JSON."""
    return safe_uri(json.dumps(value, default=str) if isinstance(value, list | tuple | Mapping) else str(value))
