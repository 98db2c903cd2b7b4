"""Metrics of the load of the driver's node, with the names that MLflow shows in the tab System metrics."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

_INTERVAL_S = 10.0


class SystemMetrics:
    """Samples CPU, memory, disk, network and the GPUs that NVML sees, every interval_s, in a thread."""

    def __init__(self, interval_s: float = _INTERVAL_S) -> None:
        from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
        from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
        from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
        from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

        self._monitors: list[Any] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
        # Raised without NVML, or without a GPU that it sees.
        with contextlib.suppress(ImportError, RuntimeError):
            self._monitors.append(GPUMonitor())
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tracking-system-metrics", daemon=True)
        self._thread.start()

    def drain(self) -> dict[str, float]:
        """The means of the samples since the last call, as `system/{name}`; empty when nothing was sampled."""
        with self._lock:
            means: dict[str, float] = {}
            for monitor in self._monitors:
                # Without a sample there is nothing to average.
                if monitor.metrics:
                    means |= {f"system/{name}": float(value) for name, value in monitor.aggregate_metrics().items()}
                monitor.clear_metrics()
            return means

    def stop(self) -> None:
        """Ends the sampling, without waiting for a sample in progress."""
        self._stop.set()

    def _run(self) -> None:
        while True:
            with self._lock:
                for monitor in self._monitors:
                    # A sensor that fails loses only its numbers.
                    with contextlib.suppress(Exception):
                        monitor.collect_metrics()
            if self._stop.wait(self._interval_s):
                return
