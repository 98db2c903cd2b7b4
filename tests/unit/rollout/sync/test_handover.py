"""Who needs how much free memory at each point of a hand-over, by numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from scalerl.base.files import GIB
from scalerl.rollout.servers.engines import ENGINES
from scalerl.rollout.sync import handover
from scalerl.rollout.sync.handover import (
    DeviceMemory,
    HandoverError,
    Lack,
    Part,
    Point,
    RankMemory,
    bucket_bytes_that_fit,
    check_largest,
    check_room,
    measure,
    trainer_needs,
)

MIB = 2**20
ACTOR = {"params": 10 * GIB, "grads": 20 * GIB, "optimizer": 30 * GIB}
REF = {"params": 10 * GIB}


def seen(free_gib: float, *, rank: int = 0, returning: dict | None = None) -> RankMemory:
    return RankMemory(rank, f"node GPU-{rank}", int(free_gib * GIB), 80 * GIB, (rank + 1) * GIB, returning or {})


class Device:
    """Reports its free memory from a table: GiB at each look; the last one stays."""

    def __init__(self, *looks: float, returning: dict | None = None) -> None:
        self.looks, self.returning, self.num_looks = looks, returning, 0

    def __call__(self) -> RankMemory:
        self.num_looks += 1
        return seen(self.looks[min(self.num_looks, len(self.looks)) - 1], returning=self.returning)


def memory_of(device: Callable[[], RankMemory], **options: bool | str | None) -> DeviceMemory:
    return DeviceMemory(device, **options)  # type: ignore[arg-type]


def lack_at(
    memory: DeviceMemory, point: Point, free: float, returning: Sequence[Part] = (), away: dict | None = None
) -> Lack | None:
    memory.measure = Device(free, returning=away)
    return memory.lack(point, memory.record(point), returning)


def after_a_release(kv_gib: float = 40, weights_gib: float = 8) -> DeviceMemory:
    """Of a server that had left 12 GiB free."""
    memory = memory_of(Device(12, 12 + kv_gib, 12 + kv_gib, 12 + kv_gib + weights_gib))
    before = memory.record("before_release")
    before = memory.record_released("kv_cache", "after_release_kv", before, pause=lambda _: None)
    memory.record_released("weights", "after_release", before, pause=lambda _: None)
    return memory


def test_a_step_that_fits_exactly() -> None:
    """KV cache 40, weights 8. Training brings 60 back; the sync 8 of the server and 10 of the trainer; then 40."""
    memory = after_a_release()
    assert lack_at(memory, "after_release", 60, away={"actor": ACTOR, "ref": REF}) is None
    assert lack_at(memory, "before_sync", 18, ["weights"], away={"actor": {"params": 10 * GIB}}) is None
    assert lack_at(memory, "after_sync", 40, ["kv_cache"]) is None
    metrics = {key: (metric.value, metric.reduction) for key, metric in memory.metrics().items()}
    points = {"before_release": 12, "after_release_kv": 52, "after_release": 60, "before_sync": 18, "after_sync": 40}
    assert metrics == {
        **{f"perf/handover/free_gb/{point}": (pytest.approx(free), "min") for point, free in points.items()},
        **{f"perf/handover/used_gb/{point}": (1.0, "max") for point in points},
        "perf/handover/kv_gb": (40.0, "max"),
        "perf/handover/weights_gb": (8.0, "max"),
    }
    # What servers gave back stays known, what was measured is reported once.
    assert memory.metrics().keys() == {"perf/handover/kv_gb", "perf/handover/weights_gb"}


@pytest.mark.parametrize(
    ("point", "free", "returning", "away", "words"),
    [
        ("after_release", 59.9, [], {"actor": ACTOR, "ref": REF}, ["59.90 of 80.00", "actor 60.00", "tensor_model"]),
        ("before_sync", 17.9, ["weights"], {"actor": REF}, ["17.90", "18.00", "actor 10.00", "weights 8.00", "gpu_"]),
        ("after_sync", 39.9, ["kv_cache"], {}, ["39.90", "KV cache 40.00", "gpu_memory_utilization", "param_offload"]),
        ("after_save", 39.9, ["kv_cache"], {}, ["39.90", "KV cache 40.00", "gpu_memory_utilization"]),
        ("before_save", 39, [], {"actor": ACTOR, "ref": REF}, ["39.00", "actor 40.00"]),
        ("before_save_alone", 39, [], {"actor": ACTOR, "ref": REF}, ["39.00", "actor 40.00"]),
    ],
)  # fmt: skip
def test_too_little_is_an_error_that_says_what_to_change(
    point: Point, free: float, returning: list[Part], away: dict, words: list[str]
) -> None:
    memory = after_a_release()
    lack = lack_at(memory, point, free, returning, away)
    assert lack is not None and f"{point}: rank 0 on node GPU-0" in lack[1]
    assert [word for word in words if word not in lack[1]] == []
    assert lack_at(memory, point, free + 1.01, returning, away) is None


def test_the_rank_that_lacks_most_is_named_and_the_others_are_counted() -> None:
    memory = memory_of(Device(0))
    ranks = [seen(free, rank=rank, returning={"actor": ACTOR}) for rank, free in enumerate((59, 70, 40, 58))]
    lacks = [memory.lack("after_release", rank) for rank in ranks]
    with pytest.raises(HandoverError, match=r"rank 2 on node GPU-2 has 40\.00 .*\(2 other ranks lack memory too\)"):
        check_room(lacks)
    check_room([None, None])


def test_models_take_turns() -> None:
    rank = seen(100, returning={"actor": ACTOR, "ref": REF})
    assert trainer_needs(rank) == {"the trainer's actor": 60 * GIB}
    assert trainer_needs(rank, role="actor", parts=["params"]) == {"the trainer's actor": 10 * GIB}
    assert trainer_needs(seen(1)) == {}


def test_a_server_that_has_its_memory_needs_none() -> None:
    """A server that was restarted meanwhile; and before the first release nothing comes back."""
    assert lack_at(after_a_release(), "before_sync", 0) is None and lack_at(after_a_release(), "after_sync", 0) is None
    assert lack_at(memory_of(Device(0)), "after_sync", 0, ["kv_cache"]) is None


def test_the_trainer_needs_room_beside_servers_that_release_nothing() -> None:
    away = {"actor": ACTOR}
    lack = lack_at(memory_of(Device(0), hands_over=False), "after_sync", 59, away=away)
    assert lack is not None and "actor 60.00" in lack[1]
    assert lack_at(memory_of(Device(0)), "after_sync", 59, away=away) is None


@pytest.mark.parametrize(
    ("free", "expected"),
    [(6000, 512), (3072, 512), (3071, 256), (1536, 256), (700, 64), (600, 64), (1, 48)],
)
def test_buckets_shrink_by_halves_to_fit_and_never_below_the_largest_tensor(free: int, expected: int) -> None:
    """Three copies in half of what is free."""
    bucket_bytes = bucket_bytes_that_fit(free * MIB, limit_bytes=512 * MIB, largest_bytes=48 * MIB)
    assert bucket_bytes == expected * MIB


def test_a_limit_below_the_largest_tensor_gives_it_room() -> None:
    assert bucket_bytes_that_fit(10**9, limit_bytes=100, largest_bytes=1000) == 1000


def test_no_room_for_the_largest_tensor() -> None:
    check_largest([(300, "a"), (400, "b")], largest_bytes=100)
    with pytest.raises(HandoverError, match=r"rank 1 on node GPU has 0\.29 GiB free.*1\.46 GiB \(3 copies of 0\.49\)"):
        check_largest([(10**10, "a"), (300 * MIB, "node GPU")], largest_bytes=500 * MIB)


class Engine:
    def away_bytes(self) -> dict[str, int]:
        return {"params": 5}


def test_this_machine() -> None:
    memory = measure(3, "cpu", {"actor": Engine()})
    assert memory.rank == 3 and memory.device.endswith(" cpu")
    assert 0 < memory.free_bytes <= memory.total_bytes and 10 * MIB < memory.used_bytes < memory.total_bytes
    assert memory.returning == {"actor": {"params": 5}}


@pytest.fixture
def cgroup(tmp_path: Path) -> Callable[..., Path]:
    def write(limit: str, current: int = 0, inactive_file: int = 0) -> Path:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{current}\n")
        (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_file}\n")
        return tmp_path

    return write


def test_a_control_group_limits_what_is_free(cgroup: Callable[..., Path], tmp_path: Path) -> None:
    # Cached file pages go when memory is wanted.
    assert handover.host_free_bytes(cgroup("1000", current=700, inactive_file=200)) == 500
    assert handover.host_free_bytes(cgroup("1000", current=1200, inactive_file=100)) == 0
    for unlimited in (cgroup("max"), tmp_path / "none"):
        assert handover.host_free_bytes(unlimited) > 100 * MIB


def release(memory: DeviceMemory, kv: Device, weights: Device) -> None:
    """Of a server on a device that had 10 GiB free."""
    memory.measure = kv
    before = memory.record_released("kv_cache", "after_release_kv", seen(10), pause=lambda _: None)
    memory.measure = weights
    memory.record_released("weights", "after_release", before, pause=lambda _: None)


def test_the_first_release_is_over_when_nothing_more_comes_free() -> None:
    """The first rank answers before the second has given anything back."""
    memory, kv, weights = memory_of(Device(0)), Device(10.1, 30, 50, 50), Device(60, 60)
    release(memory, kv, weights)
    assert (kv.num_looks, weights.num_looks) == (4, 2)
    assert memory.released == {"kv_cache": 40 * GIB, "weights": 10 * GIB}
    # From then on the bytes are known, and one look is enough where all of them are free.
    kv, weights = Device(50), Device(50, 50, 60)
    release(memory, kv, weights)
    assert (kv.num_looks, weights.num_looks) == (1, 3)


def test_a_release_that_comes_late_is_waited_for_and_one_that_does_not_come_is_not() -> None:
    memory = memory_of(Device(0))
    release(memory, Device(50), Device(60))
    late = Device(55, 55, 60, returning={"actor": ACTOR})
    release(memory, Device(50), late)
    assert late.num_looks == 3
    never = Device(55, returning={"actor": ACTOR})
    memory.wait_s = 2.0
    release(memory, Device(50), never)
    assert never.num_looks == 1 + round(2.0 / handover.RELEASE_LOOK_S)
    lack = memory.lack("after_release", never())
    assert lack is not None and "after_release: rank 0 on node GPU-0 has 55.00" in lack[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_server_keeps_is_made_less_by_a_setting_of_its_own_engine(engine: str) -> None:
    memory = memory_of(Device(0), keep_less=ENGINES[engine].keep_less)
    for point in ("after_release", "before_save_alone"):
        lack = lack_at(memory, point, 39, away={"actor": ACTOR})
        assert lack is not None
        said = re.findall(r"engine_kwargs\.(\w+)\.", lack[1])
        assert said == (["sglang"] if engine == "sglang" and point == "after_release" else [])
