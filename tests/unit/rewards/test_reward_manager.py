from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
from fractions import Fraction

import numpy as np
import pytest
import uvloop

from scalerl.config.schema import CustomRewardFunctionConfig, RewardModelConfig
from scalerl.rewards import (
    NaiveRewardManager,
    RewardError,
    RewardFunction,
    RewardManager,
    ScoreRequest,
    ScoreResult,
    build_reward_manager,
    calls,
    get_reward_manager,
    register_reward_manager,
)

SAMPLE = ScoreRequest("step 3, prompt 17, sample 2", "openai/gsm8k", "2 + 2 =", "it is #### 4", "4", {"index": 17})


def manager_of(fn, **config) -> NaiveRewardManager:
    return NaiveRewardManager(RewardFunction(fn, "compute_score"), RewardModelConfig(**config))


def score(fn, request=SAMPLE, **config) -> ScoreResult:
    manager = manager_of(fn, **config)
    try:
        return asyncio.run(manager.score(request))
    finally:
        manager.close()


def manager_of_file(tmp_path, source: str, **config) -> RewardManager:
    path = tmp_path / "reward.py"
    path.write_text(textwrap.dedent(source))
    return build_reward_manager(RewardModelConfig(**config), CustomRewardFunctionConfig(path=str(path)))


# --- results


@pytest.mark.parametrize(
    "value",
    [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), Fraction(1), {"score": 1}, {"score": np.float64(1)}],
)
def test_numbers_are_scores(value):
    result = score(lambda **_: value)
    assert result == ScoreResult(1.0) and type(result.score) is float


def test_dict_keeps_the_other_values():
    assert score(lambda **_: {"score": 0.5, "acc": True, "pred": "4"}) == ScoreResult(0.5, {"acc": True, "pred": "4"})


def test_what_is_a_number_beside_the_score_is_decided_where_the_result_is_read():
    beside = {
        "bool": np.bool_(True), "float": np.float32(0.5), "int": np.int64(3), "fraction": Fraction(1, 4), "python": 2,
        "nan": np.float64("nan"), "inf": float("-inf"), "huge": 10**400, "text": "4", "list": [1.0], "none": None,
    }  # fmt: skip
    extra = score(lambda **_: {"score": 1.0, **beside}).extra
    numbers = {"bool": True, "float": 0.5, "int": 3, "fraction": 0.25, "python": 2}
    assert extra == {**beside, **numbers, "nan": None, "inf": None, "huge": None}
    assert {name: type(extra[name]) for name in numbers} == dict(
        zip(numbers, (bool, float, int, float, int), strict=True)
    )


def test_function_gets_the_sample_and_its_own_extra_info():
    seen = {}

    def fn(data_source, solution_str, ground_truth, extra_info):
        seen.update(
            data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra=dict(extra_info)
        )
        extra_info["index"] = "changed"
        return 0.0

    score(fn)
    assert seen == {
        "data_source": "openai/gsm8k", "solution_str": "it is #### 4", "ground_truth": "4", "extra": {"index": 17}
    }  # fmt: skip
    assert SAMPLE.extra_info == {"index": 17}


def test_sync_function_that_returns_a_coroutine():
    async def later():
        return 1.0

    assert score(lambda **_: later()) == ScoreResult(1.0)


def test_async_calls_share_one_loop_so_clients_can_be_kept():
    loops = []

    async def fn(**_):
        loops.append(asyncio.get_running_loop())
        return 0.0

    manager = manager_of(fn)
    for _ in range(2):  # Another loop of the caller each time.
        asyncio.run(manager.score(SAMPLE))
    manager.close()
    assert loops[0] is loops[1]


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def loop_policy(request):
    """Rollout workers have Ray's event loop, which is uvloop's."""
    asyncio.set_event_loop_policy(request.param())
    yield
    asyncio.set_event_loop_policy(None)


@pytest.mark.usefixtures("loop_policy")
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_calls_run_at_the_same_time_and_beside_the_callers_loop(kind):
    """Each call waits until the others have started, and the caller's loop lets them go on: one after another hangs."""
    started = threading.Semaphore(0)
    go = threading.Event()

    def sync_fn(**_):
        started.release()
        assert go.wait(30)
        return 1.0

    async def async_fn(**_):
        started.release()
        while not go.is_set():
            await asyncio.sleep(0.001)
        return 1.0

    async def main():
        scores = [asyncio.ensure_future(manager.score(SAMPLE)) for _ in range(calls.NUM_THREADS)]
        num_started = 0
        while num_started < len(scores):
            num_started += started.acquire(blocking=False)
            await asyncio.sleep(0.001)
        go.set()
        return await asyncio.gather(*scores)

    manager = manager_of(sync_fn if kind == "sync" else async_fn)
    results = asyncio.run(asyncio.wait_for(main(), 30))
    manager.close()
    assert results == [ScoreResult(1.0)] * calls.NUM_THREADS


def test_no_more_sync_calls_at_once_than_threads_on_one_loop_after_the_other():
    lock, running, most = threading.Lock(), 0, 0

    def fn(**_):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.002)
        with lock:
            running -= 1
        return 1.0

    async def main():
        # More calls than threads: some have to wait, which binds what they wait for to the loop.
        return await asyncio.gather(*(manager.score(SAMPLE) for _ in range(5 * calls.NUM_THREADS)))

    manager = manager_of(fn)
    assert [asyncio.run(main()) for _ in range(2)] == [[ScoreResult(1.0)] * (5 * calls.NUM_THREADS)] * 2
    assert most <= calls.NUM_THREADS


# --- failures


def boom(**_):
    return 1 / 0


async def async_boom(**_):
    return 1 / 0


def leave(**_):
    raise SystemExit(3)


async def async_leave(**_):
    raise SystemExit(3)


async def cancel_itself(**_):
    raise asyncio.CancelledError


def stop_iteration(**_):
    return next(iter(()))


FAILURES = [
    (boom, "ZeroDivisionError: division by zero"),
    (async_boom, "ZeroDivisionError: division by zero"),
    (leave, "SystemExit: 3"),
    (async_leave, "SystemExit: 3"),
    (cancel_itself, "CancelledError"),
    (stop_iteration, "StopIteration"),
    (lambda **_: float("nan"), "it returned nan, not a finite number"),
    (lambda **_: float("-inf"), "it returned -inf, not a finite number"),
    (lambda **_: 10**400, "it returned an integer of 1329 bits, not a finite number"),
    (lambda **_: None, "it returned NoneType None, not a number"),
    (lambda **_: "0.5", "it returned str '0.5', not a number"),
    (lambda **_: (1.0, "why"), "it returned tuple (1.0, 'why'), not a number"),
    (lambda **_: {"acc": 1.0}, "it returned a dict without 'score' (keys: 'acc')"),
    (lambda **_: {"score": "high"}, "its 'score' is str 'high', not a number"),
    (lambda **_: {"score": float("nan")}, "its 'score' is nan, not a finite number"),
]


@pytest.mark.parametrize(("fn", "cause"), FAILURES)
def test_failure_stops_with_the_sample_or_scores_zero_with_the_reason(fn, cause):
    with pytest.raises(RewardError) as caught:
        score(fn)
    message = str(caught.value)
    assert cause in message
    assert "step 3, prompt 17, sample 2" in message
    for part in ("data_source: 'openai/gsm8k'", "ground_truth: '4'", "response: 'it is #### 4'", "on_error=zero"):
        assert part in message
    result = score(fn, on_error="zero")
    assert result.score == 0.0 and result.extra == {} and cause in result.error


def test_error_shows_the_users_line_even_when_a_library_raised(tmp_path):
    manager = manager_of_file(
        tmp_path,
        """\
        import json
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return helper(solution_str)
        def helper(text):
            return json.loads(text)
        """,
    )
    with pytest.raises(RewardError) as caught:
        asyncio.run(manager.score(SAMPLE))
    assert f"({tmp_path / 'reward.py'}:5: return json.loads(text))" in str(caught.value)
    assert "JSONDecodeError" in str(caught.value)
    assert type(caught.value.__cause__).__name__ == "JSONDecodeError"


def test_unknown_data_source_says_which_key_to_set():
    manager = build_reward_manager(RewardModelConfig(), CustomRewardFunctionConfig())
    with pytest.raises(RewardError, match=r"custom_reward_function\.path"):
        asyncio.run(manager.score(ScoreRequest("s", "my/data", "p", "r", "g")))
    assert asyncio.run(manager.score(SAMPLE)) == ScoreResult(1.0)


# --- deadlines


@pytest.fixture
def release():
    """Lets hung calls of a test go when it ends."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def fn_that_may_hang(release):
    """Scores 1; where the response is `hang`, not before the test ends."""

    def fn(solution_str, **_):
        if solution_str == "hang":
            release.wait()
        return 1.0

    return fn


HANG = ScoreRequest("h", "d", "p", "hang", "g")


def hang_of(kind, release):
    def sync_hang(**_):
        release.wait()

    async def async_hang(**_):
        await asyncio.Event().wait()

    async def async_that_blocks_its_loop(**_):
        release.wait()

    return {"sync": sync_hang, "async": async_hang, "async that blocks": async_that_blocks_its_loop}[kind]


@pytest.mark.usefixtures("loop_policy")
@pytest.mark.parametrize("kind", ["sync", "async", "async that blocks"])
def test_deadline(kind, release):
    fn = hang_of(kind, release)
    with pytest.raises(RewardError, match=r"(?s)step 3, prompt 17.*no result after reward_model\.timeout_s=0\.05 s"):
        score(fn, timeout_s=0.05)
    result = score(fn, timeout_s=0.05, on_error="zero")
    assert result.score == 0.0 and "timeout_s=0.05" in result.error


def test_hung_calls_do_not_take_the_threads_of_others(fn_that_may_hang):
    async def main():
        manager = manager_of(fn_that_may_hang, timeout_s=0.05, on_error="zero")
        hung = [HANG] * (2 * calls.NUM_THREADS)
        assert all(result.error for result in await asyncio.gather(*(manager.score(r) for r in hung)))
        manager._caller._timeout_s = 30.0  # Time enough on a busy machine; a lost thread would never come back.
        return await manager.score(SAMPLE)

    assert asyncio.run(main()) == ScoreResult(1.0)


def test_waiting_for_a_thread_does_not_count(fn_that_may_hang, monkeypatch):
    """The second call waits for the only thread as long as the deadline is, and still has all of its own time."""
    monkeypatch.setattr(calls, "NUM_THREADS", 1)

    async def main():
        manager = manager_of(fn_that_may_hang, timeout_s=2.0, on_error="zero")
        return await asyncio.gather(manager.score(HANG), manager.score(SAMPLE))

    late, in_time = asyncio.run(main())
    assert late.error and in_time == ScoreResult(1.0)


def test_no_thread_is_left(fn_that_may_hang, release):
    async def main():
        manager = manager_of(fn_that_may_hang, timeout_s=1.0, on_error="zero")
        await asyncio.gather(*(manager.score(SAMPLE) for _ in range(50)))
        assert (await manager.score(HANG)).error
        manager.close()

    before = set(threading.enumerate())
    asyncio.run(main())
    release.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=60)
    assert set(threading.enumerate()) <= before


def test_too_many_hung_calls_stop_the_run_even_with_on_error_zero(release, monkeypatch):
    monkeypatch.setattr(calls, "MAX_HUNG", 3)

    async def main():
        manager = manager_of(hang_of("sync", release), timeout_s=0.01, on_error="zero")
        for _ in range(3):
            assert (await manager.score(SAMPLE)).error
        with pytest.raises(RewardError, match="3 calls are past"):
            await manager.score(SAMPLE)
        release.set()
        while manager._caller.num_hung:
            await asyncio.sleep(0.001)
        # They came back: scoring goes on, in the time that a loaded machine may take.
        manager._caller._timeout_s = 60.0
        return await manager.score(SAMPLE)

    assert "NoneType" in asyncio.run(main()).error


def test_cancelled_score_cancels_the_async_call():
    started, cancelled = threading.Event(), threading.Event()

    async def fn(**_):
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def main():
        task = asyncio.ensure_future(manager.score(SAMPLE))
        while not started.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    manager = manager_of(fn)
    asyncio.run(main())
    assert cancelled.wait(30)
    manager.close()


def test_a_closed_manager_holds_no_event_loop():
    loops = []

    async def fn(**_):
        loops.append(asyncio.get_running_loop())
        return 1.0

    assert score(fn) == ScoreResult(1.0)
    deadline = time.monotonic() + 60
    while not loops[0].is_closed():
        assert time.monotonic() < deadline, "its sockets are still open"
        time.sleep(0.001)


def test_a_process_with_a_hung_call_can_exit(tmp_path):
    program = """
        import asyncio, threading
        from scalerl.config.schema import RewardModelConfig
        from scalerl.rewards import NaiveRewardManager, RewardFunction, ScoreRequest
        def hang(**_): threading.Event().wait()
        config = RewardModelConfig(timeout_s=0.05, on_error="zero")
        manager = NaiveRewardManager(RewardFunction(hang, "hang"), config)
        print(asyncio.run(manager.score(ScoreRequest("s", "d", "p", "r", "g"))).error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120, check=True
    )
    assert "timeout_s=0.05" in done.stdout


# --- registry and configuration


def test_registry():
    assert get_reward_manager("naive") is NaiveRewardManager

    @register_reward_manager("test-constant")
    class Constant(RewardManager):
        def __init__(self, function, config):
            self.function = function

        async def score(self, request):
            return ScoreResult(7.0)

    manager = build_reward_manager(RewardModelConfig(reward_manager="test-constant"), CustomRewardFunctionConfig())
    assert isinstance(manager, Constant) and manager.function.name == "default_compute_score"
    assert asyncio.run(manager.score(SAMPLE)).score == 7.0
    with pytest.raises(ValueError, match=r"naive.*NaiveRewardManager is registered already"):
        register_reward_manager("naive")(Constant)


def test_unknown_manager_lists_the_known():
    with pytest.raises(
        ValueError, match=r"reward_model\.reward_manager='nave': no such reward manager; .*mean 'naive'"
    ):
        build_reward_manager(RewardModelConfig(reward_manager="nave"), CustomRewardFunctionConfig())
