"""Files of the user's own: run once, called the same in every process, and blamed by file and line."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from scalerl.algorithms import PolicyObjective, advantages, get_adv_estimator, losses
from scalerl.base import user_code
from scalerl.base.user_code import UserCodeError, absolute, import_file, import_files, imported_files
from scalerl.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    CustomRewardFunctionConfig,
    PolicyLossConfig,
    RewardModelConfig,
)
from scalerl.rewards import (
    RewardError,
    ScoreRequest,
    build_reward_manager,
    default_compute_score,
    default_score,
    load_reward_function,
    manager,
)
from scalerl.tracking import register_backend, unregister_backend

REWARDS = RewardModelConfig(timeout_s=60.0, max_tokens_per_micro_batch=1, megatron=None, resource_pool=None)
ESTIMATOR = """
from scalerl.algorithms import register_adv_est
@register_adv_est("own")
def own(scores_S, uids_S, config):
    return scores_S * 2
"""
RULE = """
from scalerl.rewards import register_reward
@register_reward("own/data")
def rule(solution_str, ground_truth, extra_info=None):
    return float(len(solution_str))
"""


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for place, name in (
        (advantages._REGISTRY, "_functions"),
        (advantages._REGISTRY, "_traits"),
        (losses._REGISTRY, "_functions"),
        (losses._REGISTRY, "_traits"),
        (default_score, "_RULES"),
        (manager, "_MANAGERS"),
        (user_code, "_digests"),
    ):
        monkeypatch.setattr(place, name, dict(getattr(place, name)))
    monkeypatch.setattr(user_code, "_imported", [])


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    monkeypatch.chdir(tmp_path)

    def to(name: str, code: str) -> str:
        (tmp_path / name).write_text(code)
        return name

    return to


def refused(*files: str) -> str:
    with pytest.raises(UserCodeError) as caught:
        import_files(files)
    return str(caught.value)


def test_what_a_file_registers_is_known_by_name(write):
    import_files([write("own.py", ESTIMATOR)])
    own_advantages = get_adv_estimator("own")(torch.tensor([1.0, 2.0]), None, AlgorithmConfig())
    assert own_advantages.tolist() == [2.0, 4.0]


def test_a_file_runs_once_in_a_process_whoever_names_it(write, tmp_path):
    code = f"open({str(tmp_path / 'runs')!r}, 'a').write('x')\n{ESTIMATOR}"
    module = import_file(write("own.py", code), "custom_reward_function.path")
    import_files(["own.py", str(tmp_path / "own.py"), str(tmp_path / ".." / tmp_path.name / "own.py")])
    assert (tmp_path / "runs").read_text() == "x"
    assert import_file("own.py", "any.key") is module
    assert imported_files() == absolute(["own.py"]) == (str(tmp_path / "own.py"),)


def test_a_file_that_was_changed_runs_again_and_takes_its_own_names_back(write):
    import_files([write("own.py", ESTIMATOR + RULE)])
    import_files([write("own.py", ESTIMATOR.replace("* 2", "* 3") + RULE.replace("float(", "2.0 * float("))])
    assert get_adv_estimator("own")(torch.tensor([1.0]), None, AlgorithmConfig()).tolist() == [3.0]
    assert default_compute_score("own/data", "abc", "") == 6.0


def test_a_name_that_is_taken_is_told_with_both_places(write, tmp_path):
    write("first.py", ESTIMATOR)
    write("second.py", "\n" + ESTIMATOR.replace("def own", "def other"))
    message = refused("first.py", "second.py")
    assert f"{tmp_path / 'second.py'} does not import: ValueError: advantage estimator 'own' is already own " in message
    assert f"own ({tmp_path / 'first.py'}:3)" in message and f"other ({tmp_path / 'second.py'}:4)" in message
    message = refused(write("third.py", ESTIMATOR.replace('"own"', '"grpo"')))
    assert "'grpo' is already scalerl.algorithms.advantages.grpo" in message
    assert f"({tmp_path / 'third.py'}:3: @register_adv_est" in message


@pytest.mark.parametrize(
    ("code", "texts"),
    [
        ("import json\nimport no_such_module_abc\n", ["ModuleNotFoundError", "own.py:2: import no_such_module_abc"]),
        ("def broken(:\n", ["SyntaxError", "own.py:1"]),
        ("def f():\n    return 1 / 0\nf()\n", ["ZeroDivisionError", "own.py:2: return 1 / 0"]),
        ("raise SystemExit(3)\n", ["SystemExit: 3", "own.py:1"]),
    ],
)
def test_a_file_that_does_not_import(write, tmp_path, code, texts):
    message = refused(write("own.py", code))
    assert message.startswith(f"trainer.import_files={tmp_path / 'own.py'} does not import: ")
    assert all(text in message for text in texts), message
    assert imported_files() == ()


def test_paths_that_are_no_files(write, tmp_path):
    assert f"trainer.import_files=no.py does not exist (working directory {tmp_path})" in refused("no.py")
    assert "is no Python file" in refused(write("own.txt", ""))


def test_its_functions_go_to_a_process_that_imported_it_too(write):
    import_files([write("own.py", ESTIMATOR)])
    packed = pickle.dumps(get_adv_estimator("own").function)
    code = (
        "import pickle, sys\nfrom scalerl.base.user_code import import_files\n"
        "import_files(sys.argv[1:])\nprint(pickle.loads(sys.stdin.buffer.read()).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *imported_files()], input=packed, capture_output=True, timeout=120, check=False
    )
    assert done.stdout == b"own\n", done.stderr.decode()


def test_prime_processes_know_the_rules_that_were_registered(write):
    import_files([write("own.py", RULE)])
    scorer = build_reward_manager(dataclasses.replace(REWARDS, reward_manager="prime"), CustomRewardFunctionConfig())
    try:
        assert asyncio.run(scorer.score(ScoreRequest("s", "own/data", "", "four", None))).score == 4.0
    finally:
        scorer.close()


@pytest.mark.parametrize(
    ("code", "texts"),
    [
        ("return None", ["returned NoneType; return a tensor of shape [3]", "own.py:4)"]),
        ("return scores_S.mean()", ["returned a tensor of shape []; return a tensor of shape [3]"]),
        ("return scores_S / config.nothing", ["raised AttributeError", "own.py:6: return scores_S / config.nothing"]),
    ],
)
def test_an_estimator_that_fails_in_the_step_is_told_by_its_line(write, code, texts):
    import_files([write("own.py", ESTIMATOR.replace("return scores_S * 2", code).replace("\n", "\n\n", 1))])
    with pytest.raises(UserCodeError) as caught:
        get_adv_estimator("own")(torch.zeros(3), None, AlgorithmConfig())
    assert str(caught.value).startswith("algorithm.adv_estimator")
    assert all(text in str(caught.value) for text in texts), str(caught.value)


LOSS = """
from scalerl.algorithms import register_policy_loss
@register_policy_loss("own")
def own(logprobs_T, old_logprobs_T, advantages_T, config):
    return CODE
"""


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("-logprobs_T", "must return the loss [T] and a dict of metrics"),
        ("-logprobs_T.mean(), {}", "the loss: own ("),
        ("-logprobs_T, {'my/ratio': logprobs_T.mean()}", "my/ratio: own ("),
        ("1 / 0, {}", "raised ZeroDivisionError: division by zero ("),
    ],
)
def test_a_loss_that_fails_in_the_step_is_told_by_its_line(write, tmp_path, code, text):
    import_files([write("own.py", LOSS.replace("CODE", code))])
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="own"))
    columns = {"old_logprobs": torch.zeros(3), "advantages": torch.zeros(3), "response_mask": torch.ones(3)}
    with pytest.raises(UserCodeError) as caught:
        PolicyObjective(config, 3, 1)(torch.zeros(3), None, columns | {"cu_seqlens": torch.tensor([0, 3])})
    message = str(caught.value)
    assert message.startswith("actor_rollout_ref.actor.policy_loss.loss_mode") and text in message
    assert f"({tmp_path / 'own.py'}:" in message


@pytest.mark.parametrize(
    ("code", "texts"),
    [
        (ESTIMATOR.replace(", config)", ")"), ["own.py:3)", "cannot be called with scores_S, uids_S, config", "own("]),
        (
            ESTIMATOR.replace('"own")', '"own", needs=("response_length",))'),
            [
                "cannot be called with scores_S, uids_S, config, response_length",
                "own(scores_S, uids_S, config, *, resp",
            ],
        ),
        (LOSS.replace(", config)", ", config, beta)"), ["missing a required argument: 'beta'", "own.py:3)"]),
    ],
)
def test_a_function_with_other_arguments_is_refused_when_it_is_registered(write, code, texts):
    message = refused(write("own.py", code))
    assert all(text in message for text in texts), message


@pytest.mark.parametrize(
    "definition",
    ["def mine(): ...", "class Mine: ...", "from scalerl.rewards import RewardManager\nclass M(RewardManager): ..."],
)
def test_a_reward_manager_that_is_none(write, definition):
    lines = definition.splitlines()
    code = "from scalerl.rewards import register_reward_manager\n" + "\n".join(
        [*lines[:-1], '@register_reward_manager("mine")', lines[-1]]
    )
    message = refused(write("own.py", code))
    assert "must be a class that derives from RewardManager" in message and f"own.py:{len(lines) + 1}" in message


MANAGER = """
from scalerl.rewards import NaiveRewardManager, register_reward_manager
@register_reward_manager("own")
class Own(NaiveRewardManager):
    async def score(self, request):
        return CODE
"""


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("request.nothing", "raised AttributeError"),
        ("1.0", "returned 1.0; return a ScoreResult with a finite score"),
        ("__import__('scalerl.rewards').rewards.ScoreResult(float('nan'))", "returned ScoreResult(score=nan"),
    ],
)
def test_a_manager_that_fails_is_told_by_its_place_and_the_sample(write, tmp_path, code, text):
    import_files([write("own.py", MANAGER.replace("CODE", code))])
    scorer = manager.get_reward_manager("own")(load_reward_function(CustomRewardFunctionConfig()), REWARDS)
    with pytest.raises(RewardError) as caught:
        asyncio.run(scorer.scored(ScoreRequest("sample 7", "d", "", "", None)))
    message = str(caught.value)
    assert message.startswith(f"reward manager Own ({tmp_path / 'own.py'}:") and text in message
    assert message.endswith("on sample sample 7")


def test_a_backend_is_known_once_its_file_is_imported_and_may_be_again(write):
    code = "from scalerl.tracking import register_backend\n@register_backend('own')\nclass Own: ...\n"
    try:
        import_files([write("own.py", code)])
        import_files([write("own.py", code + "# changed\n")])
        with pytest.raises(ValueError, match=r"'own' is registered already \(scalerl_user_.*Own\)"):
            register_backend("own")(dict)
    finally:
        unregister_backend("own")
