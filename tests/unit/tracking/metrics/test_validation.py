"""Against brute force: every draw and every subset is listed, with the standard library alone."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter

import pytest

from scalerl.tracking.metrics import validation_metrics

# Two prompts of four responses each: values, predictions.
ACC = {"p": [True, False, False, True], "q": [False, False, True, False]}
SCORES = {"p": [1.0, 0.25, -0.5, 1.0], "q": [0.0, 0.0, 2.0, 0.0]}
PREDS = {"p": ["7", "8", "9", "7"], "q": ["1", "1", "5", None]}


def flat(uids: list[str]) -> tuple[list[str], list[str], list[float], list[dict]]:
    """The arguments of the metrics, the responses of the prompts in turn."""
    rows = [(uid, at) for at in range(4) for uid in uids]
    extras = [{"acc": ACC[uid][at], "pred": str(PREDS[uid][at]), "why": "text"} for uid, at in rows]
    return ["a/b"] * len(rows), [uid for uid, _ in rows], [SCORES[uid][at] for uid, at in rows], extras


def over_draws(values: list[float], n: int, of_draw) -> tuple[float, float]:
    """Mean and standard deviation over all draws with replacement. of_draw: places -> value."""
    results = [of_draw(draw) for draw in itertools.product(range(len(values)), repeat=n)]
    return statistics.fmean(results), statistics.pstdev(results)


def mean_over_prompts(prompts: dict[str, list[float]], of_prompt) -> float:
    return statistics.fmean(of_prompt(uid, list(map(float, values))) for uid, values in prompts.items())


def test_one_response_per_prompt_gives_the_mean_alone():
    metrics = validation_metrics(["a", "a", "b"], [0, 1, 2], [1.0, 0.0, 0.25])
    assert metrics == {"val-core/a/reward/mean@1": 0.5, "val-core/b/reward/mean@1": 0.25}


def test_the_keys_and_which_of_them_are_core():
    metrics = validation_metrics(*flat(["p", "q"]))
    names = {"core": {"mean@4", "best@4/mean", "maj@4/mean"}, "aux": {"std@4", "best@4/std", "maj@4/std"}}
    names["aux"] |= {f"{what}@2/{of}" for what in ("best", "worst", "maj") for of in ("mean", "std")}
    names["aux"] |= {"worst@4/mean", "worst@4/std"}
    expected = {f"val-{part}/a/b/reward/{name}" for part, part_names in names.items() for name in part_names}
    expected |= {f"val-{part}/a/b/acc/{name}" for part, part_names in names.items() for name in part_names}
    assert set(metrics) == expected | {"val-core/a/b/acc/pass@4", "val-aux/a/b/acc/pass@2"}


@pytest.mark.parametrize(("variable", "values"), [("reward", SCORES), ("acc", ACC)])
def test_mean_and_std(variable, values):
    metrics = validation_metrics(*flat(["p", "q"]))
    mean = mean_over_prompts(values, lambda _, x: statistics.fmean(x))
    assert metrics[f"val-core/a/b/{variable}/mean@4"] == pytest.approx(mean, rel=1e-12)
    std = mean_over_prompts(values, lambda _, x: statistics.pstdev(x))
    assert metrics[f"val-aux/a/b/{variable}/std@4"] == pytest.approx(std, rel=1e-12)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("name", "pick"), [("best", max), ("worst", min)])
@pytest.mark.parametrize(("variable", "values"), [("reward", SCORES), ("acc", ACC)])
def test_best_and_worst_are_those_of_every_draw(name, pick, n, variable, values):
    metrics = validation_metrics(*flat(["p", "q"]))
    for part, of in enumerate(("mean", "std")):
        wanted = mean_over_prompts(values, lambda _, x: over_draws(x, n, lambda d: pick(x[i] for i in d))[part])  # noqa: B023
        section = "core" if (name, n, of) == ("best", 4, "mean") else "aux"
        assert metrics[f"val-{section}/a/b/{variable}/{name}@{n}/{of}"] == pytest.approx(wanted, abs=1e-12)


def majority(values: list[float], preds: list[str], draw: tuple[int, ...]) -> float:
    # Counter keeps the order of first sight, and max takes the first of equals.
    votes = Counter(preds[i] for i in draw)
    winner = max(votes, key=votes.__getitem__)
    return statistics.fmean(values[i] for i in draw if preds[i] == winner)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("variable", "values"), [("reward", SCORES), ("acc", ACC)])
def test_the_majority_vote_is_that_of_every_draw_within_its_error(variable, values, n):
    metrics = validation_metrics(*flat(["p", "q"]))

    def of_prompt(uid: str, x: list[float]) -> tuple[float, float]:
        return over_draws(x, n, lambda draw: majority(x, [str(pred) for pred in PREDS[uid]], draw))

    mean, std = (mean_over_prompts(values, lambda uid, x: of_prompt(uid, x)[part]) for part in (0, 1))  # noqa: B023
    section = "core" if n == 4 else "aux"
    # 1000 draws a prompt, of a fixed seed: four standard errors.
    error = 4 * std / (1000 * 2) ** 0.5
    assert metrics[f"val-{section}/a/b/{variable}/maj@{n}/mean"] == pytest.approx(mean, abs=error)
    assert metrics[f"val-aux/a/b/{variable}/maj@{n}/std"] == pytest.approx(std, rel=0.1)


def test_a_vote_that_is_unanimous_has_no_error():
    metrics = validation_metrics(["a"] * 3, [0] * 3, [1.0] * 3, [{"pred": "x"}] * 3)
    assert metrics["val-core/a/reward/maj@3/mean"] == 1.0
    assert metrics["val-aux/a/reward/maj@3/std"] == 0.0


def test_votes_need_a_prediction_of_every_response():
    extras = [{"pred": "x"}, {"pred": None}, {"pred": "x"}]
    assert not [key for key in validation_metrics(["a"] * 3, [0] * 3, [1.0] * 3, extras) if "maj@" in key]


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one():
    metrics = validation_metrics(*flat(["p", "q"]))
    for k, section in ((2, "aux"), (4, "core")):

        def share(_: str, x: list[float], k: int = k) -> float:
            return statistics.fmean(max(subset) for subset in itertools.combinations(x, k))

        wanted = mean_over_prompts(ACC, share)
        assert metrics[f"val-{section}/a/b/acc/pass@{k}"] == pytest.approx(wanted, rel=1e-12)


def test_pass_at_k_needs_k_responses_of_each_prompt_and_values_0_and_1():
    metrics = validation_metrics(["a"] * 5, [0, 0, 0, 1, 1], [1.0, 0.0, 0.0, 1.0, 1.0])
    assert metrics["val-aux/a/reward/pass@2"] == pytest.approx((2 / 3 + 1) / 2)
    assert "val-core/a/reward/pass@3" not in metrics
    assert not [key for key in validation_metrics(["a"] * 2, [0, 0], [1.0, 0.5]) if "pass@" in key]


def test_draws_of_a_prompt_are_not_those_of_its_neighbour():
    """Else their errors would add up instead of cancelling."""
    extras = [{"pred": pred} for _ in range(50) for pred in "xyzw"]
    metrics = validation_metrics(["a"] * 200, [row // 4 for row in range(200)], [1.0, 0.0, 0.0, 0.0] * 50, extras)
    # Each prompt alone is off by up to 0.0137 (one standard error); the mean of 50 by a seventh of it.
    draws = over_draws([1.0, 0.0, 0.0, 0.0], 4, lambda draw: majority([1.0, 0.0, 0.0, 0.0], list("xyzw"), draw))
    assert metrics["val-core/a/reward/maj@4/mean"] == pytest.approx(draws[0], abs=4 * draws[1] / (1000 * 50) ** 0.5)


def test_an_extra_counts_where_every_response_of_the_source_has_a_number():
    extras = [{"x": 1, "y": 1.0, "z": "1"}, {"x": 2.0, "y": None, "z": "2"}, {"y": 3}]
    metrics = validation_metrics(["a", "a", "b"], [0, 1, 2], [0.0] * 3, extras)
    assert {key for key in metrics if "/reward/" not in key} == {"val-aux/a/x/mean@1", "val-aux/b/y/mean@1"}
    assert metrics["val-aux/a/x/mean@1"] == 1.5


def test_an_extra_named_reward_does_not_take_the_place_of_the_score():
    both = {"val-core/a/reward/mean@1": 1.0, "val-aux/a/extra/reward/mean@1": 5.0}
    assert validation_metrics(["a"], [0], [1.0], [{"reward": 5.0}]) == both


def test_a_uid_that_two_sources_share_is_two_prompts():
    assert validation_metrics(["a", "b"], [0, 0], [1.0, 0.0]) == {
        "val-core/a/reward/mean@1": 1.0,
        "val-core/b/reward/mean@1": 0.0,
    }


def test_every_prompt_counts_once_even_when_a_response_is_missing():
    assert validation_metrics(["a"] * 3, [0, 0, 1], [1.0, 1.0, 0.0])["val-core/a/reward/mean@2"] == 0.5


def test_an_extra_that_some_responses_lack_has_no_metric_and_is_said(caplog):
    """A reward function that returns {"score": 0.0} where it finds no answer, and `acc` where it finds one."""
    extras = [{"acc": True, "why": "x"}, {"acc": None}, {}, {"acc": False}]
    metrics = validation_metrics(["a", "a", "a", "b"], [0, 0, 0, 0], [1.0, 0.0, 0.0, 0.0], extras)
    assert not [name for name in metrics if name.startswith("val-core/a/acc")] and "val-core/b/acc/mean@1" in metrics
    (line,) = caplog.messages
    assert line.startswith("validation of a: 2 of 3 responses have no number 'acc'")
    caplog.clear()
    # A failed sample counts as wrong in each of them.
    extras, failed = [extras[0], {}, {}, extras[3]], [False, True, True, False]
    metrics = validation_metrics(["a", "a", "a", "b"], [0, 0, 0, 0], [1.0, 0.0, 0.0, 0.0], extras, failed)
    assert "val-core/a/acc/mean@3" in metrics and caplog.messages == []


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ((["a"], [0, 1], [1.0]), "1 data sources, 2 uids"),
        ((["a"], [0], [1.0], []), "1 scores and 0 extras"),
        ((["a"], [3], [float("nan")]), "prompt 3 of 'a' is nan"),
    ],
)
def test_bad_input_is_named(args, problem):
    with pytest.raises(ValueError, match=problem):
        validation_metrics(*args)
