from __future__ import annotations

import logging
import mmap

import pytest
import torch
import torch.distributed as dist

from scalerl.tracking.metrics import GPUMemoryLogger, log_gpu_memory_usage, memory_metrics, memory_phase

needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="resident size is reported where there is no GPU")


@pytest.fixture
def log(caplog) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG)
    return caplog


def test_metrics_reduce_by_max_and_are_in_gib():
    metrics = memory_metrics()
    assert set(metrics) == {
        "perf/max_memory_allocated_gb",
        "perf/max_memory_reserved_gb",
        "perf/cpu_memory_used_gb",
    }
    assert {metric.reduction for metric in metrics.values()} == {"max"}
    assert 0 < metrics["perf/cpu_memory_used_gb"].value < 1e5


def fill(num_mib: int) -> mmap.mmap:
    """Pages straight from the system: an allocator may have as much in hand from the tests before."""
    block = mmap.mmap(-1, num_mib * 1024**2)
    for start in range(0, len(block), mmap.PAGESIZE):
        block[start] = 1
    return block


@needs_cpu
def test_each_call_gives_the_peak_since_the_one_before():
    memory_metrics()
    before = memory_metrics()["perf/max_memory_allocated_gb"].value
    fill(256)
    during = memory_metrics()["perf/max_memory_allocated_gb"].value
    after = memory_metrics()["perf/max_memory_allocated_gb"].value
    assert during - before == pytest.approx(0.25, abs=0.02)
    assert during - after == pytest.approx(0.25, abs=0.02)


@needs_cpu
def test_a_phase_has_its_own_peak_and_what_is_left_at_its_end():
    memory_metrics()
    with memory_phase("small"):
        kept = fill(64)
    with memory_phase("large"):
        fill(256)
    metrics = memory_metrics()
    assert {metric.reduction for metric in metrics.values()} == {"max"}
    gib = {key.removeprefix("perf/"): metric.value for key, metric in metrics.items()}
    start = gib["memory_current_gb/small"] - 64 / 1024
    assert gib["memory_peak_gb/small"] == pytest.approx(start + 64 / 1024, abs=0.02)
    assert gib["memory_peak_gb/large"] == pytest.approx(start + (64 + 256) / 1024, abs=0.02)
    assert gib["memory_current_gb/large"] == pytest.approx(start + 64 / 1024, abs=0.02)
    # The whole step's peak is that of its largest phase, though each phase reset the counter.
    assert gib["max_memory_allocated_gb"] == gib["memory_peak_gb/large"]
    assert len(kept) and not any("memory_peak_gb" in key for key in memory_metrics())


@needs_cpu
def test_a_phase_that_runs_twice_keeps_its_larger_peak():
    memory_metrics()
    for num_mib in (256, 1):
        with memory_phase("update"):
            fill(num_mib)
    metrics = memory_metrics()
    peak, current = (metrics[f"perf/memory_{kind}_gb/update"].value for kind in ("peak", "current"))
    assert peak - current == pytest.approx(0.25, abs=0.02)


def test_usage_goes_to_the_logger_at_its_level_or_to_stdout(log, capsys):
    logger = logging.getLogger("test.memory")
    log_gpu_memory_usage("after load", logger, level=logging.INFO)
    record = log.records[-1]
    assert record.levelno == logging.INFO
    assert record.getMessage().startswith("after load: ") and "GiB" in record.getMessage()
    log_gpu_memory_usage("to stdout")
    assert capsys.readouterr().out.startswith("to stdout: ")


def test_other_ranks_are_silent(log, monkeypatch):
    logger = logging.getLogger("test.memory")
    monkeypatch.setenv("RANK", "1")
    log_gpu_memory_usage("rank 0 only", logger)
    assert not log.records
    log_gpu_memory_usage("that rank", logger, rank=1)
    log_gpu_memory_usage("all ranks", logger, rank=None)
    assert len(log.records) == 2


def test_decorator_keeps_the_function_and_logs_around_it(log):
    @GPUMemoryLogger(role="actor")
    def update_actor(x: int) -> int:
        """Doubles."""
        log.records.append(logging.makeLogRecord({"msg": "inside"}))
        return 2 * x

    assert (update_actor.__name__, update_actor.__doc__) == ("update_actor", "Doubles.")
    assert update_actor(x=4) == 8
    heads = [record.getMessage().partition(":")[0] for record in log.records]
    assert heads == ["before actor update_actor", "inside", "after actor update_actor"]
    assert log.records[0].name == __name__


def test_decorator_logs_a_function_that_raises(log):
    @GPUMemoryLogger(role="actor")
    def fails() -> None:
        raise KeyError("cause")

    with pytest.raises(KeyError, match="cause"):
        fails()
    assert [r.getMessage().partition(":")[0] for r in log.records] == ["before actor fails", "failed in actor fails"]


def test_decorator_takes_the_rank_when_it_is_called(log, monkeypatch):
    calls = []
    decorated = GPUMemoryLogger(role="actor")(lambda: calls.append(1))
    everywhere = GPUMemoryLogger(role="actor", log_only_rank_0=False)(lambda: calls.append(2))

    def num_logged() -> int:
        return sum(record.name == __name__ for record in log.records)

    monkeypatch.setenv("RANK", "1")
    decorated()
    assert num_logged() == 0
    everywhere()
    assert num_logged() == 2
    # A process group knows better than the environment.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        decorated()
    finally:
        dist.destroy_process_group()
    assert num_logged() == 4 and calls == [1, 2, 1]
