"""Metrics and logs of the memory of this process, its device and its node.

Values are in GiB (1024^3 bytes); the keys say gb, as users know them from verl.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

import psutil

from scalerl.base.files import GIB
from scalerl.tracking.metrics.metric import Metric

P = ParamSpec("P")
R = TypeVar("R")


# Bytes. _peaks: largest (allocated, reserved) since memory_metrics before a phase last reset the counters. _phases: by
# phase its largest peak, and the size at its latest end.
_peaks = (0, 0)
_phases: dict[str, tuple[int, int]] = {}


def memory_metrics() -> dict[str, Metric]:
    """Memory metrics since the previous call, all reduced by max.

    perf/max_memory_allocated_gb, perf/max_memory_reserved_gb: with cuda the peaks of this process' allocator; without,
    both are the peak resident size of this process (since its start if the kernel refuses to reset that peak).
    perf/cpu_memory_used_gb: used on this node, by all processes.
    perf/memory_peak_gb/{phase}, perf/memory_current_gb/{phase}: of each `memory_phase`, its peak, and the size at its
    end.
    """
    global _peaks
    _pop_peaks()
    (allocated, reserved), _peaks = _peaks, (0, 0)
    num_bytes_by_key = {
        "perf/max_memory_allocated_gb": allocated,
        "perf/max_memory_reserved_gb": reserved,
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used,
    }
    for name, (peak, current) in _phases.items():
        num_bytes_by_key |= {f"perf/memory_peak_gb/{name}": peak, f"perf/memory_current_gb/{name}": current}
    _phases.clear()
    return {key: Metric(num_bytes / GIB, "max") for key, num_bytes in num_bytes_by_key.items()}


@contextlib.contextmanager
def memory_phase(name: str) -> Iterator[None]:
    """Measures the block for the next `memory_metrics`: its memory peak, and the size at its end.

    With cuda: bytes allocated by this process. Without: its resident size. Phases do not nest.
    """
    _pop_peaks()
    try:
        yield
    finally:
        peak = _pop_peaks()
        _phases[name] = max(peak, _phases.get(name, (0, 0))[0]), _current_bytes()


def _pop_peaks() -> int:
    """Peak of the allocated bytes since the previous call; it is also recorded for memory_metrics."""
    global _peaks
    if _has_cuda():
        import torch

        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
    else:
        allocated = reserved = _pop_peak_rss_bytes()
    _peaks = max(_peaks[0], allocated), max(_peaks[1], reserved)
    return allocated


def _current_bytes() -> int:
    if _has_cuda():
        import torch

        return torch.cuda.memory_allocated()
    return psutil.Process().memory_info().rss


def log_gpu_memory_usage(
    head: str, logger: logging.Logger | None = None, level: int = logging.DEBUG, rank: int | None = 0
) -> None:
    """Logs the memory in use as "head: ..." on one rank (None: on all); prints it to stdout without a logger.

    With cuda: allocated and reserved by this process, used of total on the device by all processes. Without: resident
    size of this process, used of total on the node.
    """
    if rank is not None and _rank() != rank:
        return
    if logger is not None and not logger.isEnabledFor(level):
        return
    message = f"{head}: {_usage()}"
    if logger is None:
        print(message, flush=True)
    else:
        logger.log(level, message)


class GPUMemoryLogger:
    """Decorator that logs the memory in use before and after each call, also when it raises.

    logger: default the logger of the function's module.  The rank is read at the time of the call.
    """

    def __init__(
        self,
        role: str,
        logger: logging.Logger | None = None,
        level: int = logging.DEBUG,
        log_only_rank_0: bool = True,
    ) -> None:
        self.role = role
        self.logger = logger
        self.level = level
        self.rank = 0 if log_only_rank_0 else None

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        logger = self.logger or logging.getLogger(function.__module__)
        name = f"{self.role} {function.__name__}"

        def log(when: str) -> None:
            log_gpu_memory_usage(f"{when} {name}", logger, self.level, self.rank)

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            log("before")
            try:
                result = function(*args, **kwargs)
            except BaseException:
                log("failed in")
                raise
            log("after")
            return result

        return wrapper


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _rank() -> int:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def _usage() -> str:
    if _has_cuda():
        import torch

        free, total = torch.cuda.mem_get_info()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        return (
            f"allocated {allocated / GIB:.2f} GiB, reserved {reserved / GIB:.2f} GiB, "
            f"device used {(total - free) / GIB:.2f} of {total / GIB:.2f} GiB"
        )
    node = psutil.virtual_memory()
    rss = psutil.Process().memory_info().rss
    return f"resident {rss / GIB:.2f} GiB, node used {node.used / GIB:.2f} of {node.total / GIB:.2f} GiB"


def _pop_peak_rss_bytes() -> int:
    """Peak resident size of this process since the previous call.

    Writing 5 to clear_refs resets it (proc_pid_clear_refs(5)).
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        peak_kib = re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)
    except OSError:
        peak_kib = None
    if peak_kib is None:
        return psutil.Process().memory_info().rss
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return int(peak_kib[1]) * 1024
