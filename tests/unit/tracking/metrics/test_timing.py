from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl.tracking.metrics import Timers, compute_throughput_metrics, compute_timing_metrics


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def parts_of(seconds: dict[str, float]) -> float:
    return sum(value for name, value in seconds.items() if "/" not in name and name != "step")


def test_sequential_parts_and_the_rest_add_up_to_the_step(clock):
    timers = Timers(clock)
    with timers("step"):
        with timers("gen"):
            clock.now += 4
        clock.now += 1
        for _ in range(2):
            with timers("update_actor"):
                clock.now += 3
    assert timers.pop() == {"gen": 4, "update_actor": 6, "untimed": 1, "step": 11}


def test_an_inner_part_is_named_by_its_outer_and_not_counted_twice(clock):
    timers = Timers(clock)
    with timers("step"), timers("gen"):
        clock.now += 2
        with timers("reward"):
            clock.now += 5
            with timers("sandbox"):
                clock.now += 1
    assert timers.pop() == {"gen/reward/sandbox": 1, "gen/reward": 6, "gen": 8, "untimed": 0, "step": 8}


def test_the_timeline_has_the_parts_that_are_in_no_other(clock):
    timers = Timers(clock)
    with timers("step"), timers("gen"), timers("reward"):
        pass
    with pytest.raises(KeyError), timers("testing"):
        raise KeyError
    assert [(span.who, span.what) for span in timers.spans.pop()] == [("driver", "gen"), ("driver", "testing")]
    assert timers.spans.pop() == []


def test_a_part_outside_the_step_is_added_to_it(clock):
    timers = Timers(clock)
    with timers("step"), timers("gen"):
        clock.now += 2
    clock.now += 50
    with timers("testing"):
        clock.now += 3
    assert timers.pop() == {"gen": 2, "testing": 3, "untimed": 0, "step": 5}


def test_without_a_step_timer_the_step_lasts_from_pop_to_pop(clock):
    timers = Timers(clock)
    for _ in range(2):
        clock.now += 1
        with timers("gen"):
            clock.now += 2
        clock.now += 1
        assert timers.pop() == {"gen": 2, "untimed": 2, "step": 4}


def test_time_until_an_exception_counts_and_the_timers_go_on(clock):
    timers = Timers(clock)
    with pytest.raises(KeyError), timers("step"), timers("gen"):
        clock.now += 2
        raise KeyError
    with timers("step"), timers("ref"):
        clock.now += 3
    assert timers.pop() == {"gen": 2, "ref": 3, "untimed": 0, "step": 5}


names = st.sampled_from(["gen", "ref", "adv", "update_actor"])
trees = st.recursive(
    st.integers(1, 9), lambda inner: st.lists(st.tuples(names, inner) | st.integers(1, 9), max_size=4), max_leaves=15
)


@given(trees, trees)
def test_parts_add_up_whatever_the_nesting(inside, outside):
    clock = Clock()
    timers = Timers(clock)

    def run(tree) -> None:
        if isinstance(tree, int):
            clock.now += tree
            return
        for node in tree:
            if isinstance(node, int):
                clock.now += node
            else:
                with timers(node[0]):
                    run(node[1])

    with timers("step"):
        run(inside)
    step_s = clock.now - 100
    with timers("outside"):
        begin = clock.now
        run(outside)
    seconds = timers.pop()
    assert seconds["step"] == step_s + clock.now - begin == parts_of(seconds)
    assert seconds["untimed"] >= 0


def test_on_enter_hears_of_the_phases_of_a_step(clock):
    heard: list[str] = []
    timers = Timers(clock, on_enter=heard.append)
    with timers("step"):
        with timers("gen"), timers("reward"):
            pass
        with timers("ref"):
            pass
    with timers("testing"):
        pass
    assert heard == ["gen", "ref", "testing"]


@pytest.mark.parametrize("name", ["", "untimed", "a/b"])
def test_names_that_would_break_the_sum_are_refused(clock, name):
    with pytest.raises(ValueError, match="timer name"), Timers(clock)(name):
        pass


def test_step_inside_a_part_and_pop_inside_a_timer_are_refused(clock):
    timers = Timers(clock)
    with pytest.raises(ValueError, match="'step' inside gen"), timers("gen"), timers("step"):
        pass
    with pytest.raises(RuntimeError, match="pop while gen"), timers("gen"):
        timers.pop()


def test_timing_per_token_uses_the_tokens_that_the_phase_touches():
    metrics = compute_timing_metrics({"gen": 2.0, "ref": 3.0, "update_weights": 1.0, "step": 6.0}, 100, 200)
    assert metrics == {
        "timing_s/gen": 2.0,
        "timing_s/ref": 3.0,
        "timing_s/update_weights": 1.0,
        "timing_s/step": 6.0,
        "timing_per_token_ms/gen": 10.0,
        "timing_per_token_ms/ref": 10.0,
    }
    assert "timing_per_token_ms/gen" not in compute_timing_metrics({"gen": 2.0}, 100, 0)


def test_throughput_is_per_device():
    metrics = compute_throughput_metrics(1200, 3.0, 4)
    assert metrics["perf/throughput"] == 100.0
    assert (metrics["perf/total_num_tokens"], metrics["perf/time_per_step"]) == (1200.0, 3.0)
    assert metrics["perf/cpu_memory_used_gb"] > 0
    with pytest.raises(ValueError, match="must be positive"):
        compute_throughput_metrics(1, 0.0, 4)
