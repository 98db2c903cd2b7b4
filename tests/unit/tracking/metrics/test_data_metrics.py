from __future__ import annotations

import numpy as np
import pytest

from scalerl.tracking.metrics import compute_data_metrics


def columns(**changes) -> dict[str, np.ndarray]:
    samples = {
        "score": np.array([1.0, 0.0, 0.5, 9.0]),
        "prompt_length": np.array([3, 5, 8, 8]),
        "response_length": np.array([2, 10, 4, 0]),
        "finish_reason": np.array(["stop", "length", "stop", "abort"], dtype=object),
    }
    return samples | changes


def test_score_leaves_aborted_samples_out():
    metrics = compute_data_metrics(columns())
    assert [metrics[f"critic/score/{k}"] for k in ("mean", "max", "min")] == [0.5, 1.0, 0.0]
    assert metrics["critic/rewards/mean"] == 0.5
    assert metrics["response/aborted_ratio"] == 0.25


def test_advantages_count_once_per_response_token():
    advantages = np.array([1.0, -0.5, 2.0, 100.0])
    metrics = compute_data_metrics(columns(), advantages)
    tokens = np.repeat(advantages, [2, 10, 4, 0])
    for name in ("advantages", "returns"):
        assert metrics[f"critic/{name}/mean"] == pytest.approx(tokens.mean())
        assert (metrics[f"critic/{name}/max"], metrics[f"critic/{name}/min"]) == (2.0, -0.5)
    assert compute_data_metrics(columns(), advantages, returns_S=np.ones(4))["critic/returns/mean"] == 1.0


def test_rewards_after_penalties_are_kept_apart_from_scores():
    metrics = compute_data_metrics(columns(rewards=np.array([0.0, 0.0, 3.0, 0.0])))
    assert (metrics["critic/score/mean"], metrics["critic/rewards/mean"]) == (0.5, 1.0)


def test_clip_ratio_counts_responses_cut_at_the_limit_not_the_longest_of_the_batch():
    reasons = np.array(["stop", "stop", "stop", "abort"], dtype=object)
    assert compute_data_metrics(columns())["response_length/clip_ratio"] == 0.25
    assert compute_data_metrics(columns(finish_reason=reasons))["response_length/clip_ratio"] == 0.0
    assert compute_data_metrics(columns())["response_length_non_aborted/clip_ratio"] == pytest.approx(1 / 3)


def test_prompt_clip_ratio_counts_truncated_prompts():
    before = np.array([3, 5, 8, 12])
    assert compute_data_metrics(columns(prompt_length_before=before))["prompt_length/clip_ratio"] == 0.25
    assert compute_data_metrics(columns(), max_prompt_length=8)["prompt_length/clip_ratio"] == 0.5
    assert "prompt_length/clip_ratio" not in compute_data_metrics(columns())


def test_lengths():
    metrics = compute_data_metrics(columns())
    assert [metrics[f"response_length/{k}"] for k in ("mean", "max", "min")] == [4.0, 10.0, 0.0]
    done = [metrics[f"response_length_non_aborted/{k}"] for k in ("mean", "max", "min")]
    assert done == [pytest.approx(16 / 3), 10.0, 2.0]
    assert [metrics[f"prompt_length/{k}"] for k in ("mean", "max", "min")] == [6.0, 8.0, 3.0]


def test_a_step_of_aborted_samples_has_no_score_and_no_warning(recwarn):
    samples = columns(finish_reason=np.array(["abort"] * 4, dtype=object), response_length=np.zeros(4, dtype=int))
    metrics = compute_data_metrics(samples, np.ones(4))
    assert metrics["response/aborted_ratio"] == 1.0
    assert not [key for key in metrics if key.startswith(("critic/", "response_length_non_aborted/"))]
    assert not recwarn.list


@pytest.mark.parametrize(
    ("samples", "kwargs", "problem"),
    [
        ({"score": np.ones(1)}, {}, "lack prompt_length, response_length, finish_reason"),
        ({name: values[:0] for name, values in columns().items()}, {}, "no samples"),
        (columns(prompt_length=np.ones(3)), {}, r"prompt_length has shape \(3,\), expected \(4,\)"),
        (columns(), {"advantages_S": np.ones((4, 1))}, r"advantages has shape \(4, 1\)"),
        (columns(), {"max_response_length": 9}, "response_length of sample 1 is 10: over the limit of 9"),
    ],
)
def test_bad_columns_are_named(samples, kwargs, problem):
    with pytest.raises(ValueError, match=problem):
        compute_data_metrics(samples, **kwargs)
