from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from scalerl.base.user_code import import_file
from scalerl.config.schema import CustomRewardFunctionConfig, OverlongBufferConfig, RewardModelConfig
from scalerl.rewards import RewardError, ScoreRequest, ScoreResult, build_reward_manager
from scalerl.rewards.manager_variants import overlong_penalty

GSM8K = ScoreRequest("prompt 1 sample 0", "openai/gsm8k", "2 + 2 =", "#### 4", "4", {"index": 1})


def requests_of(*texts: str) -> list[ScoreRequest]:
    return [dataclasses.replace(GSM8K, sample_name=f"sample {i}", solution_str=t) for i, t in enumerate(texts)]


@pytest.mark.parametrize("manager", ["naive", "batch", "dapo", "prime"])
def test_every_manager_scores_with_the_rules(manager, scores_of):
    assert scores_of(manager, None, requests_of("#### 4", "#### 5")) == [ScoreResult(1.0), ScoreResult(0.0)]


# --- batch

BATCH = """
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
        assert set(data_sources) == {"openai/gsm8k"} and set(ground_truths) == {"4"}
        for extra_info in extra_infos:
            assert extra_info.pop("index") == 1
        return [{"score": len(s) + bonus, "calls_with": len(solution_strs)} for s in solution_strs]
    """


def test_batch_is_one_call_and_keeps_the_order(scores_of):
    results = scores_of("batch", BATCH, requests_of("a", "bb", "ccc"), reward_kwargs={"bonus": 0.5})
    assert results == [ScoreResult(n + 0.5, {"calls_with": 3}) for n in (1, 2, 3)]
    assert GSM8K.extra_info == {"index": 1}


def test_samples_that_finish_during_a_call_are_the_next_batch(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(
        "import threading\nstarted, go = threading.Event(), threading.Event()\n"
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    started.set()\n    assert go.wait(60)\n    return [len(solution_strs)] * len(solution_strs)\n"
    )
    config = RewardModelConfig(reward_manager="batch")
    manager = build_reward_manager(config, CustomRewardFunctionConfig(path=str(path)))
    module = manager._function.fn.__globals__

    async def run():
        first = asyncio.ensure_future(manager.score(GSM8K))
        while not module["started"].is_set():
            await asyncio.sleep(0.001)
        later = [asyncio.ensure_future(manager.score(GSM8K)) for _ in range(3)]
        dropped = asyncio.ensure_future(manager.score(GSM8K))
        await asyncio.sleep(0)
        dropped.cancel()
        await asyncio.sleep(0)
        module["go"].set()
        return [result.score for result in await asyncio.gather(first, *later)]

    assert asyncio.run(asyncio.wait_for(run(), 60)) == [1, 3, 3, 3]
    assert asyncio.run(manager.score(GSM8K)).score == 1  # another event loop
    manager.close()


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("[1.0]", "it returned list of 1 for 2 samples"),
        ("1.0", "it returned float for 2 samples"),
        ("{'score': 1.0, 'a': 2}", "it returned dict of 2 for 2 samples"),
        ("None", "it returned NoneType for 2 samples"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_bad_call_fails_all_of_its_samples(value, cause, scores_of):
    source = f"def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n    return {value}\n"
    results = scores_of("batch", source, requests_of("a", "b"), on_error="zero")
    assert [r.score for r in results] == [0.0, 0.0] and all(cause in r.error for r in results)
    for error in scores_of("batch", source, requests_of("a", "b"), return_exceptions=True):
        assert isinstance(error, RewardError) and cause in str(error)


def test_a_bad_value_fails_its_own_sample(scores_of):
    source = """
        async def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
            return [1.0, float("nan"), {"score": 2.0}]
        """
    good, bad, other = scores_of("batch", source, requests_of("a", "b", "c"), on_error="zero")
    assert (good, other) == (ScoreResult(1.0), ScoreResult(2.0)) and "nan" in bad.error


def test_a_batch_function_with_the_arguments_of_one_sample_is_refused(scores_of):
    source = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n"
    with pytest.raises(RewardError, match="data_sources, solution_strs, ground_truths, extra_infos"):
        scores_of("batch", source, [])


# --- dapo


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (22528, -1.5)]
)
def test_overlong_penalty(length, penalty):
    buffer = OverlongBufferConfig(enable=True, len=4096, penalty_factor=1.0, max_resp_len=20480)
    assert overlong_penalty(length, buffer) == penalty


@pytest.mark.parametrize("log", [False, True])
def test_dapo_gives_the_raw_score_and_its_penalty_as_two_values(log, scores_of):
    buffer = OverlongBufferConfig(enable=True, len=4, penalty_factor=2.0, max_resp_len=10, log=log)
    requests = [dataclasses.replace(GSM8K, response_length=n) for n in (6, 7, 10)]
    results = scores_of("dapo", None, requests, overlong_buffer=buffer)
    penalties = (0.0, -0.5, -2.0)
    assert [(r.score, r.penalty) for r in results] == [(1.0, p) for p in penalties]
    assert [r.extra for r in results] == [
        {"overlong": float(p < 0), "overlong_reward": p} if log else {} for p in penalties
    ]


def test_dapo_gives_a_failure_no_penalty_and_needs_the_length(scores_of):
    buffer = OverlongBufferConfig(enable=True, len=4, max_resp_len=10)
    failed = dataclasses.replace(GSM8K, ground_truth="none", response_length=10)
    (result,) = scores_of("dapo", None, [failed], overlong_buffer=buffer, on_error="zero")
    assert result.score == result.penalty == 0.0 and "holds no number" in result.error
    with pytest.raises(ValueError, match="needs its response_length"):
        scores_of("dapo", None, [GSM8K], overlong_buffer=buffer)
    with pytest.raises(ValueError, match=r"overlong_buffer\.len=11: use 1 to max_resp_len=10"):
        scores_of("dapo", None, [], overlong_buffer=dataclasses.replace(buffer, len=11))


# --- prime

PRIME = """
    import os, re, time
    def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
        print("noise")
        if solution_str == "hang":
            re.fullmatch("(a|a)*b", "a" * 60)
        if solution_str == "crash":
            os._exit(7)
        if solution_str == "raise":
            raise KeyError("missing")
        if solution_str == "memory":
            bytearray(10**11)
        return {"score": bonus, "pid": os.getpid(), "index": extra_info["index"]}
    """


def test_prime_runs_in_other_processes(scores_of):
    results = scores_of("prime", PRIME, requests_of("a", "b", "c"), reward_kwargs={"bonus": 0.5})
    assert {r.score for r in results} == {0.5} and {r.extra["index"] for r in results} == {1}
    pids = {r.extra["pid"] for r in results}
    assert os.getpid() not in pids and len(pids) <= (os.cpu_count() or 1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)  # closed


def test_prime_fails_one_sample_and_goes_on(scores_of):
    """`hang` holds the GIL: in the threads of the naive manager it would stop the whole process."""
    hang, crash, error, memory, good = scores_of(
        "prime", PRIME, requests_of("hang", "crash", "raise", "memory", "good"), timeout_s=2.0, on_error="zero"
    )
    assert good.error is None
    assert hang.error == "no result after reward_model.timeout_s=2 s"
    assert "ended with exit code 7" in crash.error
    assert "KeyError: 'missing'" in error.error and "reward.py:10: raise KeyError" in error.error
    assert "MemoryError" in memory.error


def test_prime_stops_with_the_sample(scores_of):
    with pytest.raises(RewardError, match=r"(?s)failed on sample sample 0.*KeyError: 'missing'"):
        scores_of("prime", PRIME, requests_of("raise"))


def test_prime_async_function(scores_of):
    source = "async def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 2.0\n"
    assert scores_of("prime", source, [GSM8K]) == [ScoreResult(2.0)]


@pytest.mark.full
def test_a_worker_ends_itself_when_nobody_is_left_to_end_it(tmp_path):
    """A process that only its own clock can stop."""
    (tmp_path / "reward.py").write_text(
        f"import os, re\ndef hang():\n    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "    re.fullmatch('(a|a)*b', 'a' * 60)\n"
    )
    target = f"{tmp_path / 'reward.py'}:hang"
    program = f"from scalerl.rewards.function_processes import ProcessPool\nProcessPool({target!r}, 1).call(1.0, {{}})"
    parent = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    pid = (tmp_path / "pid").read_text()
    stat = Path(f"/proc/{pid}/stat")
    while stat.exists() and " Z " not in stat.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- samples of a prompt share their values

TAKES_WHAT_IT_MATCHED = """
    def compute_score(data_source, solution_str, ground_truth, extra_info=None, left=()):
        if "4" not in ground_truth or "4" not in extra_info["answers"] or "4" not in left:
            return 0.0
        for values in (ground_truth, extra_info["answers"], left):
            values.remove("4")
        return 1.0

    def of_lists(data_sources, solution_strs, ground_truths, extra_infos, left=()):
        samples = zip(data_sources, solution_strs, ground_truths, extra_infos)
        return [compute_score(*sample, left=["4"]) for sample in samples]
"""
OWN_MANAGER = """
    from scalerl.rewards import RewardManager, ScoreResult, register_reward_manager

    @register_reward_manager("test_takes_what_it_matched")
    class Takes(RewardManager):
        def __init__(self, function, config):
            self.function = function.fn

        async def score(self, request):
            return ScoreResult(self.function("", "", request.ground_truth, request.extra_info, left=["4"]))
"""


@pytest.mark.parametrize("manager", ["naive", "batch", "dapo", "prime", "test_takes_what_it_matched"])
def test_shared_values_of_a_prompt_are_no_function_s_to_change(manager, tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(textwrap.dedent(TAKES_WHAT_IT_MATCHED))
    if manager == "test_takes_what_it_matched":
        own = tmp_path / "manager.py"
        own.write_text(textwrap.dedent(OWN_MANAGER))
        import_file(own, "trainer.import_files")
    truth, extra = ["4", "5"], {"answers": ["4", "5"]}
    custom = CustomRewardFunctionConfig(
        path=str(path), name="of_lists" if manager == "batch" else "compute_score", reward_kwargs={"left": ["4"]}
    )
    rewards = build_reward_manager(RewardModelConfig(reward_manager=manager), custom)
    requests = [dataclasses.replace(GSM8K, sample_name=str(i), ground_truth=truth, extra_info=extra) for i in range(4)]

    async def run():
        return [result.score for result in await asyncio.gather(*map(rewards.scored, requests))]

    try:
        assert asyncio.run(run()) == [1.0] * 4
    finally:
        rewards.close()
    assert (truth, extra) == (["4", "5"], {"answers": ["4", "5"]})
