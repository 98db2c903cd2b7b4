"""The user's reward, program and estimator are tried on rows of the data before a run starts anything."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalerl.base.user_code import forget_files
from scalerl.config import ConfigError, compose
from scalerl.rewards.trial import TRIAL_RESPONSE
from scalerl.trainer.checks.preflight import check_ppo
from tests.tiny_models import make_tiny_model

RULE = {"style": "rule", "ground_truth": "2"}


def row(data_source: str, reward_model: dict[str, Any] = RULE) -> dict[str, Any]:
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": "1+1="}],
        "ability": "math",
        "reward_model": reward_model,
        "extra_info": {"index": 0},
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_layers=1)


class Run:
    def __init__(self, directory: Path, model: Path) -> None:
        self.directory, self.model = directory, model

    def check(self, train: list[dict], val: list[dict], reward: str | None, *overrides: str) -> list[str]:
        """The violations. reward: body of the reward function."""
        for name, rows in (("train", train), ("val", val)):
            pq.write_table(pa.Table.from_pylist(rows), self.directory / f"{name}.parquet")
        own = []
        if reward is not None:
            signature = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):"
            (self.directory / "reward.py").write_text(f"{signature}\n    {reward}\n")
            own = [f"custom_reward_function.path={self.directory / 'reward.py'}"]
        cfg = compose(
            "ppo",
            [
                f"data.train_files={self.directory / 'train.parquet'}",
                f"data.val_files={self.directory / 'val.parquet'}",
                "data.max_prompt_length=64",
                "data.max_response_length=8",
                "data.train_batch_size=2",
                f"actor_rollout_ref.model.path={self.model}",
                "actor_rollout_ref.actor.ppo_mini_batch_size=2",
                "actor_rollout_ref.rollout.n=2",
                "trainer.device=cpu",
                "trainer.n_gpus_per_node=1",
                f"trainer.default_local_dir={self.directory / 'run'}",
                *own,
                *overrides,
            ],
        )
        try:
            check_ppo(cfg)
        except ConfigError as error:
            return error.violations
        return []


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Run:
    return Run(tmp_path, model)


def test_a_data_source_without_a_rule(run: Run) -> None:
    known = row("openai/gsm8k")
    assert run.check([known] * 2, [known], None) == []
    (violation,) = run.check([known, known, row("sums")], [known], None)
    assert "train prompt 2" in violation and "no reward rule for data_source 'sums'" in violation
    (violation,) = run.check([known] * 2, [known, row("sums")], None)
    assert "val prompt 1" in violation and "no reward rule for data_source 'sums'" in violation


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("return {}['answer']", "KeyError: 'answer'"),
        ("return float('nan')", "it returned nan, not a finite number"),
        ("return 'good'", "it returned str 'good', not a number"),
        ("raise ConnectionError('http://judge:80 is down')", "ConnectionError: http://judge:80 is down"),
    ],
)
def test_a_reward_that_fails(run: Run, body: str, cause: str) -> None:
    violations = run.check([row("a")] * 2, [row("a")], body, "reward_model.reward_manager=dapo")
    assert len(violations) == 2, "train and val"
    for text in violations:
        assert cause in text and "reward_model.on_error=zero" in text and repr(TRIAL_RESPONSE) in text


def test_a_reward_that_takes_too_long(run: Run) -> None:
    body = "import threading; threading.Event().wait(30)"
    violations = run.check([row("a")] * 2, [row("a")], body, "reward_model.timeout_s=0.2")
    assert "no result after reward_model.timeout_s=0.2 s" in violations[0]


def test_each_data_source_is_scored_once_with_its_own_row(run: Run) -> None:
    calls = run.directory / "calls"
    body = f"open({str(calls)!r}, 'a').write(f'{{data_source}} {{ground_truth}} {{solution_str}}\\n'); return 0.0"
    rows = [row("a"), row("b", RULE | {"ground_truth": "3"}), row("a", RULE | {"ground_truth": "4"})]
    assert run.check(rows, [row("b")], body) == []
    assert sorted(calls.read_text().splitlines()) == sorted(
        f"{call} {TRIAL_RESPONSE}" for call in ("a 2", "b 3", "b 2")
    )


def test_failures_that_score_zero_are_said_and_no_error(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert run.check([row("a")] * 2, [row("a")], "return 1 / 0", "reward_model.on_error=zero") == []
    assert "counts as wrong (reward_model.on_error=zero): ZeroDivisionError" in caplog.text


def test_rows_of_a_judge_or_reward_model_are_left_to_it(run: Run, model: Path) -> None:
    judge = "reward_model.judge"
    on = [
        f"{judge}.enable=true",
        f"{judge}.model.path={model}",
        f"{judge}.max_prompt_length=1000",
        f"{judge}.resource_pool.nnodes=1",
    ]
    rows = [row("a", RULE | {"style": "judge"})] * 2
    assert run.check(rows, rows, "return 1 / 0", *on) == []
    (violation,) = run.check([*rows, row("a")], rows, "return 1 / 0", *on)
    assert "train prompt 2" in violation and "ZeroDivisionError" in violation


FILTER = ["algorithm.filter_groups.enable=true"]


@pytest.mark.parametrize(("metric", "known"), [("flag", True), ("pred", False), ("accuracy", False)])
def test_the_metric_of_a_filter_is_held_against_what_the_reward_function_returns(
    run: Run, metric: str, known: bool
) -> None:
    body = "import numpy; return {'score': -1.0, 'acc': numpy.float32(0), 'flag': numpy.bool_(False), 'pred': 'x'}"
    violations = run.check([row("a")] * 2, [row("a")], body, *FILTER, f"algorithm.filter_groups.metric={metric}")
    assert bool(violations) is not known
    for text in violations:
        assert f"algorithm.filter_groups.metric = {metric}" in text and "'a'" in text and "score or acc or flag" in text


def test_a_filter_needs_its_metric_of_every_data_source_that_trains(run: Run) -> None:
    body = "return {'score': 0.0, 'acc': 0.0} if data_source == 'a' else 0.0"
    asked = [*FILTER, "algorithm.filter_groups.metric=acc"]
    assert run.check([row("a")] * 2, [row("b")], body, *asked) == []
    (violation,) = run.check([row("a"), row("b")], [row("a")], body, *asked)
    assert "data_source 'b'" in violation


BEST = ["trainer.best_ckpt_to_keep=1", "trainer.save_freq=1", "trainer.test_freq=1", "trainer.max_actor_ckpt_to_keep=1"]


@pytest.mark.parametrize(
    ("metric", "known"),
    [
        ("val-core/*/reward/mean@*", True),
        ("val-core/a/acc/maj@2/mean", True),
        ("val-core/a/num_failed", False),
        ("val-core/a/acc/mean@1", False),
        ("val-core/a/pred/mean@2", False),
    ],
)
def test_the_metric_of_the_best_checkpoint_is_held_against_a_validation_of_the_trial(
    run: Run, metric: str, known: bool
) -> None:
    body = "return {'score': 0.0, 'acc': False, 'pred': 'x', 'part': 0.5}"
    val = "actor_rollout_ref.rollout.val_kwargs"
    asked = [*BEST, f"{val}.n=2", f"{val}.do_sample=true", f"trainer.best_ckpt_metric='{metric}'"]
    violations = run.check([row("a")] * 2, [row("a")], body, *asked)
    assert bool(violations) is not known
    for text in violations:
        assert f"trainer.best_ckpt_metric = {metric}" in text and "val-core/a/acc/mean@2" in text
    # Of a score that failed nobody knows what would come with it.
    assert run.check([row("a")] * 2, [row("a")], "return 1 / 0", *asked, "reward_model.on_error=zero") == []


def test_many_failures_are_counted(run: Run) -> None:
    rows = [row(f"source_{number}") for number in range(9)]
    violations = run.check(rows, rows[:1], None)
    assert len(violations) == 4 and violations[-1].startswith("10 of 10 trial scores failed")


def test_the_batch_manager(run: Run) -> None:
    path = run.directory / "batch.py"
    path.write_text("def scores(data_sources, solution_strs, ground_truths, extra_infos):\n    return [None] * 9\n")
    own = [f"custom_reward_function.path={path}", "custom_reward_function.name=scores"]
    violations = run.check([row("a")] * 2, [row("b")], None, *own, "reward_model.reward_manager=batch")
    assert len(violations) == 2 and "list of 9 for 2 samples" in violations[0]


OWN_PROGRAM = """
async def program(prompt, servers, tools):
    trajectory = servers.begin()
    turn = await servers.generate(trajectory, max_new_tokens=2)
    trajectory.observe(tools.encode("1"))
    await servers.generate(trajectory)
    {end}
"""
OWN_ESTIMATOR = """
from scalerl.algorithms import register_adv_est, register_token_adv_est

@register_adv_est("own_s", needs=({needs}))
def own_s(scores_S, uids_S, config, **columns):
    assert scores_S.tolist() == [0, 1, 1, 1] and len(set(uids_S)) == 2
    return {s}

@register_token_adv_est("own_t", needs=("old_logprobs",))
def own_t(rewards_T, response_mask_T, cu_seqlens, config, old_logprobs):
    assert rewards_T.sum() == 3 and rewards_T.shape == response_mask_T.shape == old_logprobs.shape
    return {t}
"""


def own_code(run: Run, name: str, *more: str, **parts: str) -> list[str]:
    """What the preflight finds with a program and estimators of these parts."""
    right = {"end": "return trajectory", "needs": "", "s": "scores_S", "t": "(rewards_T, rewards_T)"} | parts
    (run.directory / "program.py").write_text(OWN_PROGRAM.format(**right))
    (run.directory / "estimator.py").write_text(OWN_ESTIMATOR.format(**right))
    own = [f"trainer.import_files=[{run.directory / 'estimator.py'}]", f"algorithm.adv_estimator={name}"]
    own += [f"actor_rollout_ref.rollout.program.path={run.directory / 'program.py'}", *more]
    try:
        return run.check([row("a")] * 2, [row("a")], "return 0.0", *own)
    finally:
        forget_files()


@pytest.mark.parametrize("name", ["own_s", "own_t"])
def test_a_program_and_an_estimator_that_are_right_pass_their_trial(run: Run, name: str) -> None:
    assert own_code(run, name, needs="'num_turns', 'reward_extra',") == []


def test_an_estimator_is_tried_on_turns(run: Run) -> None:
    """Two of each of the four samples; with one of tokens there is nothing to try."""
    (said,) = own_code(run, "own_s", "algorithm.turn_level=true", s="scores_S[: len(scores_S) - 7]")
    assert "AssertionError" in said and "own_s" in said
    (said,) = own_code(run, "own_t", "algorithm.turn_level=true")
    assert "own_t" in said and "register it with register_adv_est, or set algorithm.turn_level=false" in said


@pytest.mark.parametrize(("reward", "is_scored"), [("0.5", True), ("None if prompt.uid else 0.5", False)])
def test_a_program_that_scores_its_samples_needs_no_rule_for_them(run: Run, reward: str, is_scored: bool) -> None:
    path = run.directory / "program.py"
    path.write_text(OWN_PROGRAM.format(end=f"trajectory.reward = {reward}\n    return trajectory"))
    asked = f"actor_rollout_ref.rollout.program.path={path}"
    violations = run.check([row("game")] * 2, [row("game")], None, asked)
    assert bool(violations) is not is_scored
    assert all("no reward rule for data_source 'game'" in text for text in violations)
    # A function that the user names is tried all the same.
    (violation, *_) = run.check([row("game")] * 2, [row("game")], "return 1 / 0", asked)
    assert "ZeroDivisionError" in violation


@pytest.mark.parametrize(
    ("name", "parts", "parts_of_message"),
    [
        ("own_s", {"end": "return turn"}, ["program.py:2", "returned GenerateOutput", "on prompt 0 sample 0"]),
        ("own_s", {"s": "scores_S[:1]"}, ["algorithm.adv_estimator, advantages", "own_s (", "estimator.py"]),
        ("own_s", {"s": "1 / 0"}, ["algorithm.adv_estimator", "ZeroDivisionError", "estimator.py:7"]),
        (
            "own_s",
            {"needs": "'entropies',"},
            ["algorithm.adv_estimator=own_s needs entropies, which this run does not"],
        ),
        (
            "own_s",
            {"s": "scores_S / (scores_S - 1)"},
            ["estimator.py:4", "not finite", "[0.0, 1.0, 1.0, 1"],
        ),
        ("own_x", {}, ["algorithm.adv_estimator='own_x'", "no such advantage estimator"]),
        ("own_t", {"t": "(rewards_T, missing)"}, ["NameError", "estimator.py:12"]),
    ],
)
def test_mistakes_in_a_program_or_estimator_are_found_before_the_start(
    run: Run, name: str, parts: dict[str, str], parts_of_message: list[str]
) -> None:
    (message,) = own_code(run, name, **parts)
    assert all(part in message for part in parts_of_message), message
    assert ("before the run starts" in message) == (name != "own_x")
