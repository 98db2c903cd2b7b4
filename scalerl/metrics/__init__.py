"""Metrics of a run: values with the way in which they are reduced. docs/metrics.md lists the keys."""

from __future__ import annotations

from scalerl.metrics.data_metrics import compute_data_metrics
from scalerl.metrics.flops import FlopsShape, device_peak_flops, measured_matmul_peak, mfu
from scalerl.metrics.memory import GPUMemoryLogger, log_gpu_memory_usage, memory_metrics, memory_phase
from scalerl.metrics.metric import Metric, Metrics, merge_metrics, to_floats
from scalerl.metrics.mismatch import largest_differences, mismatch_metrics, worst_samples
from scalerl.metrics.rollout_diff import rollout_diff_metrics, rollout_diff_sums
from scalerl.metrics.timing import Timers, compute_throughput_metrics, compute_timing_metrics
from scalerl.metrics.token_stats import explained_variance_metrics, explained_variance_sums, token_stat_sums
from scalerl.metrics.validation import validation_metrics

__all__ = [
    "FlopsShape",
    "GPUMemoryLogger",
    "Metric",
    "Metrics",
    "Timers",
    "compute_data_metrics",
    "compute_throughput_metrics",
    "compute_timing_metrics",
    "device_peak_flops",
    "explained_variance_metrics",
    "explained_variance_sums",
    "largest_differences",
    "log_gpu_memory_usage",
    "measured_matmul_peak",
    "memory_metrics",
    "memory_phase",
    "merge_metrics",
    "mfu",
    "mismatch_metrics",
    "rollout_diff_metrics",
    "rollout_diff_sums",
    "to_floats",
    "token_stat_sums",
    "validation_metrics",
    "worst_samples",
]
