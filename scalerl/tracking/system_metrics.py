"""Load of the driver's node under the names by which MLflow shows it in the tab System metrics."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

_INTERVAL_S = 10.0


class SystemMetrics:
    """Samples CPU, memory, disk, network and the GPUs that NVML sees, every interval_s in a thread of its own."""

    def __init__(self, interval_s: float = _INTERVAL_S) -> None:
        from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
        from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
        from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
        from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

        self._monitors: list[Any] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
        # No NVML, or no GPU that it sees.
        with contextlib.suppress(ImportError, RuntimeError):
            self._monitors.append(GPUMonitor())
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tracking-system-metrics", daemon=True)
        self._thread.start()

    def take(self) -> dict[str, float]:
        """`system/{name}` -> mean since the last call; {} when nothing was sampled in between."""
        with self._lock:
            found: dict[str, float] = {}
            for monitor in self._monitors:
                # An interval without a sample leaves nothing to average.
                if monitor.metrics:
                    found |= {f"system/{name}": float(value) for name, value in monitor.aggregate_metrics().items()}
                monitor.clear_metrics()
            return found

    def stop(self) -> None:
        """Does not wait for a sample that is being taken."""
        self._stop.set()

    def _run(self) -> None:
        while True:
            with self._lock:
                for monitor in self._monitors:
                    # A sensor that goes away costs its numbers.
                    with contextlib.suppress(Exception):
                        monitor.collect_metrics()
            if self._stop.wait(self._interval_s):
                return
