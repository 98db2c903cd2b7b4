"""Who needs how much free memory at each point of a hand-over, by numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from scalerl.base.files import GIB
from scalerl.rollout.servers.engines import ENGINES
from scalerl.rollout.sync import handover
from scalerl.rollout.sync.handover import (
    Handover,
    HandoverError,
    RankMemory,
    bucket_bytes_that_fit,
    check_largest,
    measure,
    trainer_needs,
)

MIB = 2**20
ACTOR = {"params": 10 * GIB, "grads": 20 * GIB, "optimizer": 30 * GIB}
REF = {"params": 10 * GIB}


def rank(number: int, free_gib: float, *, device: str | None = None, returning: dict | None = None) -> RankMemory:
    return RankMemory(
        number, device or f"node GPU-{number}", int(free_gib * GIB), 80 * GIB, (number + 1) * GIB, returning or {}
    )


def a_step(books: Handover, *, released: tuple[float, float, float], before_sync: float, after_sync: float) -> None:
    """One rank; free GiB at each point. released: before, with the KV cache gone, with the weights gone."""
    books.record("before_release", [rank(0, released[0])])
    books.record("after_release_kv", [rank(0, released[1])])
    books.record("after_release", [rank(0, released[2], returning={"actor": ACTOR, "ref": REF})])
    books.record("before_sync", [rank(0, before_sync, returning={"actor": {"params": 10 * GIB}})])
    books.record("after_sync", [rank(0, after_sync)])


def test_a_step_that_fits_exactly() -> None:
    """KV cache 40, weights 8. Training brings 60 back; the sync 8 of the server and 10 of the trainer; then 40."""
    books = Handover()
    a_step(books, released=(12, 52, 60), before_sync=18, after_sync=40)
    metrics = {key: (metric.value, metric.reduction) for key, metric in books.metrics().items()}
    points = {"before_release": 12, "after_release_kv": 52, "after_release": 60, "before_sync": 18, "after_sync": 40}
    assert metrics == {
        **{f"perf/handover/free_gb/{point}": (pytest.approx(free), "min") for point, free in points.items()},
        **{f"perf/handover/used_gb/{point}": (1.0, "max") for point in points},
        "perf/handover/kv_gb": (40.0, "max"),
        "perf/handover/weights_gb": (8.0, "max"),
    }
    # What servers gave back stays known, what was measured is reported once.
    assert books.metrics().keys() == {"perf/handover/kv_gb", "perf/handover/weights_gb"}


@pytest.mark.parametrize(
    ("released", "before_sync", "after_sync", "words"),
    [
        ((12, 52, 59.9), 18, 40, ["after_release", "59.90 of 80.00 GiB", "60.00 GiB", "actor 60.00", "tensor_model"]),
        (
            (12, 52, 60), 17.9, 40,
            ["before_sync", "17.90", "18.00 GiB", "actor 10.00", "weights 8.00", "grad_offload", "gpu_memory_util"],
        ),
        ((12, 52, 60), 18, 39.9, ["after_sync", "39.90", "KV cache 40.00", "gpu_memory_utilization", "param_offload"]),
    ],
)  # fmt: skip
def test_too_little_is_an_error_that_says_what_to_change(
    released: tuple[float, float, float], before_sync: float, after_sync: float, words: list[str]
) -> None:
    with pytest.raises(HandoverError) as error:
        a_step(Handover(), released=released, before_sync=before_sync, after_sync=after_sync)
    message = str(error.value)
    assert "rank 0 on node GPU-0" in message
    assert [word for word in words if word not in message] == []


def test_the_rank_that_lacks_most_is_named_and_the_others_are_counted() -> None:
    ranks = [rank(number, free, returning={"actor": ACTOR}) for number, free in enumerate((59, 70, 40, 58))]
    with pytest.raises(HandoverError, match=r"rank 2 on node GPU-2 has 40\.00 .*\(2 other ranks lack memory too\)"):
        Handover().record("after_release", ranks)


def test_models_take_turns_and_ranks_of_one_machine_do_not() -> None:
    ranks = [rank(number, 100, device="node cpu", returning={"actor": ACTOR, "ref": REF}) for number in (0, 1)]
    assert trainer_needs(ranks) == {"node cpu": {"the trainer's actor": 120 * GIB}}
    assert trainer_needs(ranks, role="actor", parts=["params"]) == {"node cpu": {"the trainer's actor": 20 * GIB}}
    assert trainer_needs([rank(0, 1)]) == {}
    with pytest.raises(HandoverError, match=r"on node cpu has 100\.00 .*120\.00 GiB are needed"):
        Handover().record("after_release", ranks)


def test_a_server_that_has_its_memory_needs_none() -> None:
    """One that was restarted meanwhile."""
    books = Handover()
    a_step(books, released=(12, 52, 60), before_sync=18, after_sync=40)
    books.record("before_sync", [rank(0, 0)], servers=[])
    books.record("after_sync", [rank(0, 0)], servers=[])
    with pytest.raises(HandoverError, match="KV cache"):
        books.record("after_sync", [rank(0, 0)], servers=[0])


def test_nothing_was_released_so_nothing_comes_back() -> None:
    """As on a CPU, and before the first sync."""
    books = Handover()
    for point in ("after_release", "before_sync", "after_sync"):
        books.record(point, [rank(0, 0)])
    assert len(books.metrics()) == 6


@pytest.mark.parametrize(
    ("free", "expected"),
    [(6000, 512), (3072, 512), (3071, 256), (1536, 256), (700, 64), (600, 64), (1, 48)],
)
def test_buckets_shrink_by_halves_to_fit_and_never_below_the_largest_tensor(free: int, expected: int) -> None:
    """Three copies in half of what is free."""
    bucket_bytes = bucket_bytes_that_fit(free * MIB, limit_bytes=512 * MIB, largest_bytes=48 * MIB, num_copies=3)
    assert bucket_bytes == expected * MIB


def test_a_limit_below_the_largest_tensor_gives_it_room() -> None:
    assert bucket_bytes_that_fit(10**9, limit_bytes=100, largest_bytes=1000, num_copies=3) == 1000


def test_no_room_for_the_largest_tensor() -> None:
    check_largest([(300, "a"), (400, "b")], largest_bytes=100, num_copies=3)
    with pytest.raises(HandoverError, match=r"rank 1 on node GPU has 0\.29 GiB free.*1\.46 GiB \(3 copies of 0\.49\)"):
        check_largest([(10**10, "a"), (300 * MIB, "node GPU")], largest_bytes=500 * MIB, num_copies=3)


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


class Device:
    """Reports its free memory from a table: GiB at each look of each rank; the last line stays."""

    def __init__(self, *looks: tuple[float, ...], returning: dict | None = None) -> None:
        self.looks, self.returning, self.num_looks = looks, returning, 0

    def __call__(self) -> list[RankMemory]:
        free = self.looks[min(self.num_looks, len(self.looks) - 1)]
        self.num_looks += 1
        return [rank(number, gib, returning=self.returning) for number, gib in enumerate(free)]


def release(books: Handover, kv: Device, weights: Device, *, wait_s: float = 1.0) -> None:
    """Of a server on two devices, which had 10 GiB free."""
    books.record("before_release", Device((10, 10))())
    books.record_released("after_release_kv", kv, wait_s=wait_s, pause=lambda _: None)
    books.record_released("after_release", weights, wait_s=wait_s, pause=lambda _: None)


def released(books: Handover) -> dict[str, float]:
    return {
        key.removeprefix("perf/handover/"): metric.value
        for key, metric in books.metrics().items()
        if key.endswith(("kv_gb", "weights_gb"))
    }


def test_the_first_release_is_over_when_nothing_more_comes_free() -> None:
    """The first rank answers before the second has given anything back."""
    books = Handover()
    kv, weights = Device((50, 10), (50, 30), (50, 50), (50, 50)), Device((60, 60), (60, 60))
    release(books, kv, weights)
    assert (kv.num_looks, weights.num_looks) == (4, 2)
    assert released(books) == {"kv_gb": 40.0, "weights_gb": 10.0}
    # From then on it is known how much comes, and one look is enough where all of it is there.
    kv, weights = Device((50, 50)), Device((60, 10), (60, 10), (60, 60))
    release(books, kv, weights)
    assert (kv.num_looks, weights.num_looks) == (1, 3)


def test_a_release_that_comes_late_is_no_error_and_one_that_does_not_come_is() -> None:
    books = Handover()
    release(books, Device((50, 50)), Device((60, 60)))
    late = Device((60, 55), (60, 55), (60, 60), returning={"actor": ACTOR})
    release(books, Device((50, 50)), late)
    assert late.num_looks == 3
    never = Device((60, 55), returning={"actor": ACTOR})
    with pytest.raises(HandoverError, match=r"after_release: rank 1 on node GPU-1 has 55\.00"):
        release(books, Device((50, 50)), never, wait_s=2.0)
    assert never.num_looks == 1 + round(2.0 / handover.RELEASE_LOOK_S)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_server_keeps_is_made_less_by_a_setting_of_its_own_engine(engine: str) -> None:
    waiting = rank(0, 39, returning={"actor": ACTOR})
    for point in ("after_release", "before_save_alone"):
        with pytest.raises(HandoverError) as error:
            Handover(ENGINES[engine].keep_less).record(point, [waiting])
        said = re.findall(r"engine_kwargs\.(\w+)\.", str(error.value))
        assert said == (["sglang"] if engine == "sglang" and point == "after_release" else [])


def test_a_save_without_room_though_the_servers_weights_left_is_an_error() -> None:
    """At `before_save_alone`, when nothing of the servers is left that could leave."""
    books = Handover()
    waiting = rank(0, 39, returning={"actor": ACTOR, "ref": REF})
    said = r"before_save_alone: rank 0 .* has 39\.00 of 80\.00 GiB free, and 40\.00 GiB are needed: .*actor 40\.00"
    with pytest.raises(HandoverError, match=said):
        books.record_released("before_save_alone", lambda: [waiting], pause=lambda _: None)
    books.record_released("before_save_alone", lambda: [rank(0, 40, returning={"actor": ACTOR})], pause=lambda _: None)


def test_a_save_needs_parameters_and_optimizer_and_the_cache_comes_back_after_it() -> None:
    books = Handover()
    release(books, Device((50, 50)), Device((60, 60)))
    books.record("before_save", Device((40, 40), returning={"actor": ACTOR, "ref": REF})())
    with pytest.raises(HandoverError, match=r"before_save: rank 1 .* 39\.00 of .* 40\.00 GiB are needed.*actor 40\.00"):
        books.record("before_save", Device((40, 39), returning={"actor": ACTOR, "ref": REF})())
    books.record("after_save", Device((40, 40))())
    with pytest.raises(HandoverError, match=r"after_save: rank 0 .*KV cache 40\.00.*gpu_memory_utilization"):
        books.record("after_save", Device((39, 40))())
