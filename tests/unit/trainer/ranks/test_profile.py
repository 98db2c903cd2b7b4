"""The profile of a step on a GPU: what it asks of CUDA for a memory snapshot and Nsight Systems, and what it writes.

CUDA's own functions are stood in for; torch's functions above them, its profiler, traces and files are real. What a
profile of a CPU holds is in tests/e2e, and on a GPU in tests/gpu/test_profile.py.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import pickle
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scalerl.config.schema import SFTTrainerConfig
from scalerl.parallel.layout import Layout
from scalerl.tracking.metrics import Timers
from scalerl.trainer.profiling import profiled
from scalerl.trainer.ranks.profile import MAX_MEMORY_EVENTS, StepProfile
from scalerl.trainer.ranks.worker import MegatronWorker

SNAPSHOT = {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": 512, "stream": 0, "frames": []}]]}


class Cuda:
    """CUDA as torch calls it; remembers the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []

        def answer(call: str, result: Any = None) -> Callable[..., Any]:
            def called(*args: Any) -> Any:
                self.calls.append((call, *args) if args else call)
                return result

            return called

        monkeypatch.setattr(torch.cuda, "synchronize", answer("synchronize"))
        # Not in a build for CPUs.
        monkeypatch.setattr(torch._C, "_cuda_record_memory_history", answer("history"), raising=False)
        monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", answer("snapshot", SNAPSHOT), raising=False)
        monkeypatch.setattr(torch.cuda.profiler, "start", answer("start"))
        monkeypatch.setattr(torch.cuda.profiler, "stop", answer("stop"))
        ranges = types.SimpleNamespace(rangePushA=answer("push"), rangePop=answer("pop"))
        monkeypatch.setattr(torch.cuda.nvtx, "_nvtx", ranges)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def multiply() -> None:
    torch.mm(torch.ones(4, 4), torch.ones(4, 4))


def test_a_trace_and_a_memory_snapshot(cuda: Cuda, tmp_path: Path) -> None:
    # That is how torch answers on a CPU to a recording of CUDA's kernels.
    with pytest.warns(UserWarning, match="CUDA is not available, disabling CUDA profiling"):
        profile = StepProfile("torch", "cuda")
    with profile.phase("actor update_actor"):
        multiply()
    profile.stop(tmp_path, "actor_rank_3")

    assert {file.name for file in tmp_path.iterdir()} == {"actor_rank_3.trace.json.gz", "actor_rank_3.memory.pickle"}
    # What https://pytorch.org/memory_viz reads.
    assert pickle.loads((tmp_path / "actor_rank_3.memory.pickle").read_bytes()) == SNAPSHOT
    with gzip.open(tmp_path / "actor_rank_3.trace.json.gz", "rt") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {"actor update_actor", "aten::mm"} <= names

    waited, begun, waited_again, read, ended = cuda.calls
    assert (waited, waited_again, read) == ("synchronize", "synchronize", ("snapshot", None))
    # With the Python stacks of each allocation (C++ stacks take long to write), a bounded number of them, and no longer
    # than the step.
    assert begun[:5] == ("history", "all", "all", "python", MAX_MEMORY_EVENTS)
    assert ended[:2] == ("history", None)


def test_nsight_systems_is_told_when_a_step_begins_and_ends_and_the_names_of_its_phases(
    cuda: Cuda, tmp_path: Path
) -> None:
    profile = StepProfile("nsys", "cuda")
    with profile.phase("actor update_actor"):
        multiply()
        # A range ends also where the phase fails.
        with contextlib.suppress(ValueError), profile.phase("inner"):
            raise ValueError
    profile.stop(tmp_path, "actor_rank_0")
    assert cuda.calls == [
        *("synchronize", "start"),
        *(("push", "actor update_actor"), ("push", "inner"), "pop", "pop"),
        *("synchronize", "stop"),
    ]
    assert list(tmp_path.iterdir()) == []


class Ranks:
    """The calls of a group of ranks, in this process."""

    def __init__(self, world_size: int) -> None:
        layout = Layout(world_size)
        self.workers = [
            MegatronWorker(rank, layout, device="cuda", collective_timeout_s=1.0, seed=1) for rank in range(world_size)
        ]
        for worker in self.workers:
            worker.engines = {"ref": None, "critic": None}

    def call(self, method: Callable, *args: Any) -> list[Any]:
        return [method(worker, *args) for worker in self.workers]


class Tracker:
    def __init__(self) -> None:
        self.artifacts: list[set[str]] = []

    def log_artifact(self, directory: Path) -> None:
        self.artifacts.append({file.name for file in directory.iterdir()})


@contextlib.contextmanager
def step_of(ranks: Ranks, tracker: Tracker, run: Path, step: int, tool: str) -> Iterator[None]:
    cfg = SFTTrainerConfig(
        default_local_dir=str(run), profile_steps=[2], profile_tool=tool, profile_ranks=[1], total_training_steps=3
    )
    groups: Any = [ranks]
    recorded: Any = tracker
    with profiled(cfg, groups, recorded, Timers(), step):
        yield


@pytest.mark.parametrize(
    ("tool", "files"), [("torch", {"critic_rank_1.trace.json.gz", "critic_rank_1.memory.pickle"}), ("nsys", None)]
)
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_the_ranks_that_are_asked_for_record_the_steps_that_are(
    cuda: Cuda, tmp_path: Path, tool: str, files: set[str] | None
) -> None:
    ranks, tracker = Ranks(2), Tracker()
    for step in (1, 2, 3):
        with step_of(ranks, tracker, tmp_path, step, tool):
            recording = [worker.profile is not None for worker in ranks.workers]
            assert recording == [False, step == 2], step
            for worker in ranks.workers:
                with worker.recorded("critic values"):
                    multiply()
        assert [worker.profile for worker in ranks.workers] == [None, None]
    assert tracker.artifacts == ([] if files is None else [files])
    # What Nsight Systems records goes where it was told to: no empty directory stays.
    assert [path.name for path in tmp_path.iterdir()] == ([] if files is None else ["profile_step_2"])
    assert cuda.calls.count(("push", "critic values")) == (tool == "nsys")


@pytest.mark.parametrize("tool", ["torch", "nsys"])
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_step_that_fails_is_no_longer_recorded_when_its_run_is_over(cuda: Cuda, tmp_path: Path, tool: str) -> None:
    """The processes may go on as another run's, which records its own steps."""
    ranks, tracker = Ranks(2), Tracker()
    with pytest.raises(ValueError, match="of the step"), step_of(ranks, tracker, tmp_path, 2, tool):
        raise ValueError("of the step")
    begun = len(cuda.calls)
    for worker in ranks.workers:
        worker.leave()
    ended = [call if isinstance(call, str) else call[:2] for call in cuda.calls[begun:]]
    assert ended == ([("history", None)] if tool == "torch" else ["synchronize", "stop"])
    with step_of(Ranks(2), tracker, tmp_path / "next", 2, tool):
        multiply()
