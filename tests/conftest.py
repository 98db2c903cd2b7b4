"""Settings of all tests: one thread per process, a marker per folder, no GPU test without a GPU, no skip in CI."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

import psutil
import pytest
from hypothesis import settings

from tests import families
from tests.units import place_of

if TYPE_CHECKING:
    from scalerl.cluster.processes import Processes

# Before torch or numpy is imported: tests run several processes on few cores.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# A test that would load something from the network is a defect: fail at once instead of waiting.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# No deadline per example: how long one takes says how busy the machine is. `make check` and `make test` take "quick".
settings.register_profile("whole", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=25)
settings.load_profile("whole")

MARKED_FOLDERS = ("dist", "ray", "sglang", "slurm", "e2e", "gpu")
TESTS = Path(__file__).parent
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)
# Places for all runs and groups of workers that a test has at a time; a place is a number to Ray, no core.
NUM_WORKERS = 28
# Share of the memory. Ray kills workers when 0.05 are left, and a test may start processes of a few GiB.
MIN_AVAILABLE = 0.25
_processes = pytest.StashKey["Processes"]()


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.register(families)


@pytest.fixture(scope="session")
def processes(pytestconfig: pytest.Config) -> Iterator[Processes]:
    """Ray, and what runs and groups of workers leave for each other: started once."""
    from scalerl.cluster.processes import Processes

    with Processes.start(num_workers=NUM_WORKERS, device="cpu", keep=True) as started:
        pytestconfig.stash[_processes] = started
        yield started


@pytest.fixture
def peft(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Another implementation of adapters, which lies apart from what scalerl needs: .ci/run installs it."""
    from transformers.utils import is_peft_available

    monkeypatch.syspath_prepend(str(Path(sys.prefix, "optional/peft")))
    # transformers keeps the answer.
    is_peft_available.cache_clear()
    return pytest.importorskip("peft")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """What waits for a later test ends where memory is short: two that run side by side each leave some GiB."""
    if _processes not in item.config.stash:
        return
    memory = psutil.virtual_memory()
    if memory.available < MIN_AVAILABLE * memory.total:
        item.config.stash[_processes].end_waiting()


def pytest_itemcollected(item: pytest.Item) -> None:
    folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
    if folder in MARKED_FOLDERS:
        item.add_marker(folder)
    if folder == "gpu":
        item.add_marker(_skip_without_gpu())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place_of(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With `--dist loadscope`, as `make test` has it for the services' tests."""
    if config.getvalue("dist") != "loadscope":
        return None
    from tests.scheduling import FolderScheduling

    return FolderScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return report if item.get_closest_marker("gpu") else _no_skip_in_ci(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _no_skip_in_ci((yield))


def _no_skip_in_ci(report: Report) -> Report:
    """What CI's machine lacks is to be installed there: a skip would look green."""
    if os.environ.get("CI") == "true" and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which in CI is a failure: {report.longrepr}"
    return report


@functools.cache
def _skip_without_gpu() -> pytest.MarkDecorator:
    import torch

    reason = "no GPU; on a machine with one: python -m pytest tests/gpu -q"
    return pytest.mark.skipif(not torch.cuda.is_available(), reason=reason)
