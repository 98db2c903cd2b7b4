from __future__ import annotations

from decimal import Decimal

import pytest

from scalerl.rewards import RewardError, default_compute_score, gsm8k, register_reward


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("6 * 12 = 72\n#### 72", "72", "72"),
        ("####72", "72", "72"),
        ("#### 1\n#### 2", "2", "2"),
        ("#### $1,234.50.", "1234.50", "1234.50"),
        ("#### -3 and then 9", "-3", "9"),
        ("The answer is 72.", None, "72"),
        ("from 1,000 to 2,000,000", None, "2000000"),
        ("10-3", None, "3"),
        ("x = -5", None, "-5"),
        ("3,4", None, "4"),
        ("none at all", None, None),
        ("#### none", None, None),
        ("### 5", None, "5"),
        ("", None, None),
    ],
)
def test_gsm8k_answer(text, strict, flexible):
    wanted = [None if number is None else Decimal(number) for number in (strict, flexible)]
    assert [gsm8k.extract_answer(text, method) for method in ("strict", "flexible")] == wanted


def test_gsm8k_flexible_and_format_score():
    assert gsm8k.compute_score("it is 72", "72", method="flexible", score=2.0) == 2.0
    assert gsm8k.compute_score("#### 1", "72", format_score=0.1) == 0.1
    assert gsm8k.compute_score("it is 1", "72", format_score=0.1) == 0.0


def test_gsm8k_bad_arguments():
    with pytest.raises(ValueError, match="ground truth 'unknown' holds no number"):
        gsm8k.compute_score("#### 1", "unknown")
    with pytest.raises(ValueError, match="method='loose'"):
        gsm8k.compute_score("#### 1", "1", method="loose")


def test_unknown_data_source_lists_the_known_and_the_key_to_set():
    with pytest.raises(RewardError, match="'my/data'") as caught:
        default_compute_score("my/data", "x", "y")
    assert "openai/gsm8k" in str(caught.value) and "custom_reward_function.path" in str(caught.value)


def test_registered_rule_gets_the_sample_and_a_second_one_is_refused():
    @register_reward("test/registered")
    def rule(solution_str, ground_truth, extra_info=None):
        return {"score": 0.5, "seen": (solution_str, ground_truth, extra_info)}

    result = default_compute_score("test/registered", "s", "g", {"a": 1})
    assert result == {"score": 0.5, "seen": ("s", "g", {"a": 1})}
    register_reward("test/registered")(rule)  # The same again: a module that is imported twice.
    with pytest.raises(ValueError, match=r"test/registered.*rule is registered already"):
        register_reward("test/registered")(lambda *_: 0.0)
