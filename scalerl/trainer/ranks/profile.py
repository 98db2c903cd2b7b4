"""`StepProfile`: a recording of a step on one rank, by torch's profiler or for Nsight Systems."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

# Most allocations and frees of a memory snapshot; older ones are dropped.
MAX_MEMORY_EVENTS = 200_000
# Operations in a table of memory.
_ROWS_OF_TABLE = 50


class StepProfile:
    """A recording that begins when it is made and ends with `stop` or `end`.

    tool: torch (a trace of all operations, and memory), or nsys (CUDA's profiler API, which starts and stops an
    `nsys profile --capture-range=cudaProfilerApi` that the process runs under, and NVTX ranges).
    device: cpu or cuda.
    """

    def __init__(self, tool: str, device: str) -> None:
        self.tool, self.device = tool, device
        self._recorded: Any = None
        if tool == "nsys":
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            return
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=MAX_MEMORY_EVENTS)
            activities.append(ProfilerActivity.CUDA)
        self._recorded = profile(activities=activities, profile_memory=True)
        self._recorded.start()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Marks the block as a range of that name."""
        if self.tool == "nsys":
            with torch.cuda.nvtx.range(name):
                yield
            return
        with torch.profiler.record_function(name):
            yield

    def stop(self, directory: Path, name: str) -> None:
        """Ends the recording and writes, of torch's, NAME.trace.json.gz (Chrome's trace format; Perfetto shows it).

        Memory: on a GPU NAME.memory.pickle, a snapshot for https://pytorch.org/memory_viz; on a CPU NAME.memory.txt,
        the operations that allocate most.
        """
        if self.tool == "nsys":
            self.end()
            return
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.memory._dump_snapshot(str(directory / f"{name}.memory.pickle"))
        self.end()
        if self.device == "cpu":
            table = self._recorded.key_averages().table(
                sort_by="self_cpu_memory_usage", row_limit=_ROWS_OF_TABLE, max_name_column_width=80
            )
            (directory / f"{name}.memory.txt").write_text(table, encoding="utf-8")
        self._recorded.export_chrome_trace(str(directory / f"{name}.trace.json.gz"))

    def end(self) -> None:
        """Ends the recording, of which nothing is written."""
        if self.tool == "nsys":
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            return
        if self.device == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)
        self._recorded.stop()
