"""Addresses of MLflow's pages, as its server has them."""

from __future__ import annotations

import shlex
import shutil
import sys
from urllib.parse import urlsplit

# Where `mlflow ui` listens by default.
LOCAL_ADDRESS = "http://127.0.0.1:5000"
# Without this the pages open in their form for GenAI applications, which begins with an empty list of traces.
_TRAINING = "workflowType=machine_learning"


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
