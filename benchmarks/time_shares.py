"""Where the time of an update goes, by torch's profiler: attention, GEMM, optimizer, communication, other, waiting.

An operation belongs to the first category of CATEGORIES whose pattern its own name or that of any operation around it
matches: a matrix product inside an attention call is attention, one inside the vocabulary head the head's.
CPU: self time of the operations of the thread that runs the update. What is left is communication while one of gloo's
collectives runs (a slower rank's lateness included), else waiting: Python between operations.
GPU: time of the kernels that an operation launched. Waiting is when no kernel runs. Kernels on several streams count
each, so that with overlap the shares add up to more than 1.
The profiler costs time for every operation: shares of small operations are too large.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import Any

CATEGORIES = {
    "optimizer": r"^Optimizer\.step|_fused_adam|FusedAdam|multi_tensor|aten::_foreach|aten::_amp_foreach",
    "communication": r"^c10d::|^gloo:|^nccl|record_param_comms|AllReduce|AllGather|ReduceScatter|SendRecv",
    # By the name of its autograd function, forward and backward: products, float32 passes over logits, the rest.
    "vocabulary head": r"_LinearLogprobs",
    "attention": r"scaled_dot_product|flash|fmha|varlen_attn|_efficient_attention|ScaledDotProduct|FusedAttn",
    "gemm": r"^aten::(mm|addmm|addmm_|bmm|baddbmm|_grouped_mm|mv|dot)$|gemm|nvjet|cutlass|cublas",
}
OTHER, WAITING = "other", "waiting"
# [begin, end) in microseconds
Intervals = list[tuple[float, float]]


def profiled(call: Callable[[], object], device: str) -> dict[str, float]:
    """Shares of the wall time of one call, which every rank makes, and `profiled_s`, that wall time."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile
    from updates import synchronize

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    dist.barrier()
    synchronize()
    with profile(activities=activities) as profiler:
        begin = time.perf_counter()
        with torch.profiler.record_function("update"):
            call()
            synchronize()
        seconds = time.perf_counter() - begin
    events = profiler.events()
    shares = gpu_shares(events, 1e6 * seconds) if device == "cuda" else cpu_shares(events)
    return shares | {"profiled_s": seconds}


def category_of(names: Iterable[str]) -> str:
    """names: of an operation and of those around it."""
    names = list(names)
    for category, pattern in CATEGORIES.items():
        if any(re.search(pattern, name) for name in names):
            return category
    return OTHER


def cpu_shares(events: list[Any]) -> dict[str, float]:
    (update,) = [event for event in events if event.name == "update"]
    begin, end = update.time_range.start, update.time_range.end
    shares = dict.fromkeys([*CATEGORIES, OTHER, WAITING], 0.0)
    busy: Intervals = []
    collectives: Intervals = []
    for event in events:
        interval = (event.time_range.start, event.time_range.end)
        if event.thread != update.thread:
            if event.name.startswith("gloo:"):
                collectives.append(interval)
            continue
        if event is update or not begin <= interval[0] <= end:
            continue
        shares[category_of(_chain(event, update))] += event.self_cpu_time_total
        if event.cpu_parent is update or event.cpu_parent is None:
            busy.append(interval)
    idle = _without([(begin, end)], _union(busy))
    waited = _total(_without(idle, _union(collectives)))
    shares["communication"] += _total(idle) - waited
    shares[WAITING] = waited
    return {category: time_us / (end - begin) for category, time_us in shares.items()}


def gpu_shares(events: list[Any], wall_us: float) -> dict[str, float]:
    from torch.autograd import DeviceType

    shares = dict.fromkeys([*CATEGORIES, OTHER, WAITING], 0.0)
    for event in events:
        for kernel in event.kernels:
            shares[category_of([*_chain(event, None), kernel.name])] += kernel.duration
    kernels = [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    shares[WAITING] = max(0.0, wall_us - _total(_union(kernels)))
    return {category: time_us / wall_us for category, time_us in shares.items()}


def _chain(event: Any, top: Any) -> Iterable[str]:
    while event is not None and event is not top:
        yield event.name
        event = event.cpu_parent


def _union(intervals: Intervals) -> Intervals:
    merged: Intervals = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _without(intervals: Intervals, others: Intervals) -> Intervals:
    """others: as `_union` gives them."""
    left: Intervals = []
    for begin, end in intervals:
        for other_begin, other_end in others:
            if other_end <= begin or other_begin >= end:
                continue
            if other_begin > begin:
                left.append((begin, other_begin))
            begin = max(begin, other_end)
        if begin < end:
            left.append((begin, end))
    return left


def _total(intervals: Intervals) -> float:
    return sum(end - begin for begin, end in intervals)
