"""Metrics of a run: values with the way in which they are reduced. docs/metrics.md lists the keys."""

from __future__ import annotations

from scalerl.tracking.metrics.data_metrics import compute_data_metrics
from scalerl.tracking.metrics.memory import GPUMemoryLogger, log_gpu_memory_usage, memory_metrics, memory_phase
from scalerl.tracking.metrics.metric import Metric, Metrics, merge_metrics, to_floats
from scalerl.tracking.metrics.mismatch import (
    largest_differences,
    mismatch_metrics,
    rollout_diff_metrics,
    rollout_diff_sums,
    worst_samples,
)
from scalerl.tracking.metrics.timing import Timers, compute_throughput_metrics, compute_timing_metrics
from scalerl.tracking.metrics.token_stats import explained_variance_metrics, explained_variance_sums, token_stat_sums
from scalerl.tracking.metrics.validation import validation_metrics

__all__ = [
    "GPUMemoryLogger",
    "Metric",
    "Metrics",
    "Timers",
    "compute_data_metrics",
    "compute_throughput_metrics",
    "compute_timing_metrics",
    "explained_variance_metrics",
    "explained_variance_sums",
    "largest_differences",
    "log_gpu_memory_usage",
    "memory_metrics",
    "memory_phase",
    "merge_metrics",
    "mismatch_metrics",
    "rollout_diff_metrics",
    "rollout_diff_sums",
    "to_floats",
    "token_stat_sums",
    "validation_metrics",
    "worst_samples",
]
