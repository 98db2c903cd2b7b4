"""Several reward functions of a file (custom_reward_function.weights): one score, each logged by its name."""

from __future__ import annotations

import pytest

from scalerl.config.schema import CustomRewardFunctionConfig
from scalerl.rewards import RewardError, ScoreRequest, load_reward_function

WEIGHTS = {"correct": 1.0, "form": 0.25}
EACH = """
{correct_def} correct(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    extra_info["seen"].append(solution_str)
    right = solution_str == ground_truth
    return {{"score": right + bonus, "acc": right, "pred": solution_str}}

{form_def} form(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    assert extra_info == {{"seen": []}}
    return 2.0 if solution_str.isdigit() else -1.0
"""
BATCH = """
def correct(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    for extra_info, text in zip(extra_infos, solution_strs):
        extra_info["seen"].append(text)
    pairs = zip(solution_strs, ground_truths)
    return [{"score": (text == truth) + bonus, "acc": text == truth, "pred": text} for text, truth in pairs]

def form(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    assert all(extra_info == {"seen": []} for extra_info in extra_infos)
    return [2.0 if text.isdigit() else -1.0 for text in solution_strs]
"""
SYNC, ASYNC = "def", "async def"


@pytest.fixture
def scored(scores_of):
    """scored(source, *texts): the responses, to which 4 is right, scored by both functions."""

    def score(source, *texts, manager="naive", weights=WEIGHTS, **more):
        requests = [ScoreRequest(f"sample {t}", "sums", "2 + 2 =", t, "4", {"seen": []}) for t in texts]
        return scores_of(manager, source, requests, weights=weights, **more)

    return score


@pytest.mark.parametrize(
    ("manager", "source"),
    [
        ("naive", EACH.format(correct_def=SYNC, form_def=SYNC)),
        ("naive", EACH.format(correct_def=ASYNC, form_def=SYNC)),
        ("naive", EACH.format(correct_def=ASYNC, form_def=ASYNC)),
        ("dapo", EACH.format(correct_def=SYNC, form_def=SYNC)),
        ("prime", EACH.format(correct_def=SYNC, form_def=ASYNC)),
        ("batch", BATCH),
    ],
    ids=["sync", "mixed", "async", "dapo", "prime", "batch"],
)
def test_the_score_is_the_weighted_sum_and_each_has_its_name(scored, manager, source):
    right, wrong = scored(source, "4", "four", manager=manager, reward_kwargs={"bonus": 0.5})
    assert (right.score, wrong.score) == (1.5 + 0.25 * 2.0, 0.5 - 0.25)
    assert right.extra == {"correct": 1.5, "acc": True, "pred": "4", "form": 2.0}
    assert wrong.extra == {"correct": 0.5, "acc": False, "pred": "four", "form": -1.0}


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("return None", "form: it returned NoneType None, not a number"),
        ("return {'score': 1.0, 'acc': 1.0}", "form: what it returns and its name have acc in common"),
        ("return {'score': 1.0, 'correct': 1.0}", "form: what it returns and its name have correct in common"),
        ("raise ValueError('no form')", "ValueError: no form"),
    ],
)
def test_one_that_fails_fails_the_sample_and_is_named(scored, form, words):
    source = EACH.format(correct_def=SYNC, form_def=SYNC).replace(
        "return 2.0 if solution_str.isdigit() else -1.0", form
    )
    with pytest.raises(RewardError) as caught:
        scored(source, "4")
    assert words in str(caught.value) and "sample 4" in str(caught.value)
    (failed,) = scored(source, "4", on_error="zero")
    assert failed.score == 0.0 and words in failed.error and failed.extra == {}


@pytest.mark.parametrize(
    ("manager", "source"),
    [(manager, EACH.format(correct_def=SYNC, form_def=ASYNC)) for manager in ("naive", "prime")] + [("batch", BATCH)],
    ids=["naive", "prime", "batch"],
)
def test_weights_of_one_function_are_weights_too(scored, manager, source):
    (right,) = scored(source, "4", manager=manager, weights={"form": 0.5})
    assert (right.score, right.extra) == (1.0, {"form": 2.0})


def test_a_batch_of_another_length_is_named(scored):
    source = BATCH.replace("return [2.0 if", "return [1.0] + [2.0 if")
    with pytest.raises(RewardError, match="form returned list of 2 for 1 samples"):
        scored(source, "4", manager="batch")


def test_weights_that_name_nothing(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(EACH.format(correct_def=SYNC, form_def=SYNC))
    for config, words in (
        ({"path": None, "weights": WEIGHTS}, "custom_reward_function.path is not"),
        ({"path": str(path), "weights": {"corect": 1.0}}, "write correct in custom_reward_function.weights"),
        ({"path": str(path), "weights": WEIGHTS, "name": "form"}, "custom_reward_function.name=form"),
        ({"path": str(path), "weights": WEIGHTS, "reward_kwargs": {"other": 1}}, "'other'"),
    ):
        with pytest.raises(RewardError) as caught:
            load_reward_function(CustomRewardFunctionConfig(**config))
        assert words in str(caught.value)
