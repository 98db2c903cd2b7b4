"""Names and texts as MLflow accepts them, and the addresses of its pages."""

from __future__ import annotations

import hashlib
import json
import logging
import posixpath
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from scalerl.tracking.backend import safe_uri

logger = logging.getLogger(__name__)

# mlflow.utils.validation: MAX_ENTITY_KEY_LENGTH.
_MAX_NAME = 250
# Where `mlflow ui` listens by default.
LOCAL_ADDRESS = "http://127.0.0.1:5000"
# Without this the pages open in their form for GenAI applications, which begins with an empty list of traces.
_TRAINING = "workflowType=machine_learning"


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


def charts_page(address: str, experiment_id: str, run_id: str) -> str:
    """The page with a run's charts.  address: the server's; user and password in it are left out."""
    parts = urlsplit(address)
    host = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
    return f"{host}/#/experiments/{experiment_id}/runs/{run_id}/model-metrics?{_TRAINING}"


def how_to_open(tracking_uri: str, experiment_id: str, run_id: str) -> str:
    """What to open to see a run's charts: the page, or the server to start and then the page."""
    if tracking_uri.startswith(("http://", "https://")):
        return f"charts: {charts_page(tracking_uri, experiment_id, run_id)}"
    if not tracking_uri.startswith("sqlite:"):
        return f"charts: MLflow run {run_id} of experiment {experiment_id}"
    mlflow = ["mlflow"] if shutil.which("mlflow") else [sys.executable, "-m", "mlflow"]
    command = shlex.join([*mlflow, "ui", "--backend-store-uri", tracking_uri])
    return f"charts: {charts_page(LOCAL_ADDRESS, experiment_id, run_id)}\n  once this runs: {command}"
