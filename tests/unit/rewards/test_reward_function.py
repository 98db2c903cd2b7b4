from __future__ import annotations

import asyncio
import pickle
import sys
from pathlib import Path

import pytest

from scalerl.config.schema import CustomRewardFunctionConfig
from scalerl.rewards import RewardError, default_compute_score, load_reward_function

GOOD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"


@pytest.fixture
def reward_file(tmp_path):
    def write(source: str, name: str = "reward.py") -> str:
        path = tmp_path / name
        path.write_text(source)
        return str(path)

    return write


def refused(path: str | Path, **config) -> str:
    with pytest.raises(RewardError) as caught:
        load_reward_function(CustomRewardFunctionConfig(path=str(path), **config))
    return str(caught.value)


def test_calls_the_named_function_with_the_four_arguments_and_kwargs(reward_file):
    path = reward_file(
        "def other(*, data_source, solution_str, ground_truth, extra_info, bonus, sign=1):\n"
        "    return [data_source, solution_str, ground_truth, extra_info, bonus, sign]\n"
    )
    config = CustomRewardFunctionConfig(path=path, name="other", reward_kwargs={"bonus": 3})
    function = load_reward_function(config)
    assert function("d", "s", "g", {"i": 1}) == ["d", "s", "g", {"i": 1}, 3, 1]
    assert not function.is_async and str(function) == f"other of {path}"


def test_async_functions_and_objects(reward_file):
    path = reward_file(
        "async def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 2.0\n"
        "class Judge:\n"
        "    async def __call__(self, data_source, solution_str, ground_truth, extra_info=None):\n        return 3.0\n"
        "judge = Judge()\n"
    )
    for name, score in (("compute_score", 2.0), ("judge", 3.0)):
        function = load_reward_function(CustomRewardFunctionConfig(path=path, name=name))
        assert function.is_async
        assert asyncio.run(function("d", "s", "g")) == score


def test_without_a_path_the_rules_by_data_source():
    function = load_reward_function(CustomRewardFunctionConfig())
    assert function.fn is default_compute_score
    assert function("openai/gsm8k", "#### 3", "3") == 1.0


def test_kwargs_without_a_path_are_refused():
    with pytest.raises(RewardError, match=r"reward_kwargs=.*'a': 1.*path is not"):
        load_reward_function(CustomRewardFunctionConfig(reward_kwargs={"a": 1}))


def test_two_files_of_one_name_are_two_modules_and_pickle_works(reward_file, tmp_path):
    (tmp_path / "sub").mkdir()
    scores = []
    for name, value in (("reward.py", 1.0), ("sub/reward.py", 2.0)):
        path = reward_file(GOOD.replace("1.0", str(value)), name)
        scores.append(load_reward_function(CustomRewardFunctionConfig(path=path)))
    assert [function("d", "s", "g") for function in scores] == [1.0, 2.0]
    assert pickle.loads(pickle.dumps(scores[0]))("d", "s", "g") == 1.0


def test_file_that_is_not_there_or_does_not_import(reward_file, tmp_path):
    """tests/unit/base/test_user_code.py has more causes."""
    message = refused(tmp_path / "no.py")
    assert f"custom_reward_function.path={tmp_path / 'no.py'} does not exist" in message
    path = reward_file("x = 1\nvalue = {}['key']\n")
    before = set(sys.modules)
    message = refused(path)
    assert f"path={path} does not import: KeyError: 'key'" in message and f"{path}:2: value = {{}}['key']" in message
    assert not {name for name in set(sys.modules) - before if name.startswith("scalerl_user")}


def test_name_that_is_not_defined_lists_the_functions(reward_file):
    path = reward_file(
        "import json\nfrom math import floor\nLIMIT = 3\ndef compute_scores(): ...\ndef _hidden(): ...\n"
    )
    message = refused(path)
    assert "does not define 'compute_score' (it defines: compute_scores)" in message
    assert "custom_reward_function.name=compute_scores" in message
    assert "(it defines: nothing)" in refused(reward_file("LIMIT = 3\n", "b.py"))


@pytest.mark.parametrize(
    ("signature", "kwargs", "words"),
    [
        ("solution_str, ground_truth", {}, "unexpected keyword argument 'data_source'"),
        ("data_source, solution_str, ground_truth, extra_info, weight", {}, "'weight'"),
        ("data_source, solution_str, ground_truth, extra_info", {"bonus": 1}, "unexpected keyword argument 'bonus'"),
        ("data_source, solution_str, ground_truth, extra_info, /", {}, "data_source"),
    ],
)
def test_signature_that_does_not_fit(reward_file, signature, kwargs, words):
    message = refused(reward_file(f"def compute_score({signature}):\n    return 0\n"), reward_kwargs=kwargs)
    wanted = ", ".join(["data_source", "solution_str", "ground_truth", "extra_info", *kwargs])
    assert words in message and f"compute_score({signature})" in message
    assert f"define it as compute_score({wanted})" in message


def test_kwargs_that_each_sample_gives(reward_file):
    message = refused(reward_file(GOOD), reward_kwargs={"ground_truth": "x"})
    assert "reward_kwargs sets ground_truth" in message
