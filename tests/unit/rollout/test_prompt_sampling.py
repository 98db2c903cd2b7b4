from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from scalerl.rollout.prompt_sampling import _FIELDS, override_sampling
from scalerl.rollout.servers.requests import SamplingParams

BASE = SamplingParams(max_new_tokens=64, temperature=1.0, top_p=0.9)


def test_every_sampling_parameter_may_be_set() -> None:
    assert list(_FIELDS) == [field.name for field in fields(SamplingParams)]


def test_a_prompt_overrides_what_it_names_and_nothing_else() -> None:
    # As a parquet struct comes: every key there, numpy values, null for what the row does not set.
    asked = {
        "max_new_tokens": np.int64(16),
        "temperature": np.float32(0.5),
        "top_p": None,
        "top_k": 7,
        "ignore_eos": None,
        "stop": ["</answer>"],
        "stop_token_ids": np.array([5, 6]),
    }
    assert override_sampling(BASE, {"sampling": asked, "index": 3}, "train prompt 7") == SamplingParams(
        max_new_tokens=16, temperature=0.5, top_p=0.9, top_k=7, stop=("</answer>",), stop_token_ids=(5, 6)
    )
    assert override_sampling(BASE, {"sampling": {"stop": "END"}}, "p").stop == ("END",)
    for nothing in (None, {}, {"sampling": None}, {"sampling": {}}):
        assert override_sampling(BASE, nothing, "train prompt 7") == BASE


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([1], r" is \[1\]; write a dict"),
        ({"temprature": 1.0}, r"temprature is not known; did you mean temperature\?"),
        ({"n": 4}, r"n is not known"),
        ({"temperature": -0.5}, r"temperature is -0\.5; it must be a number of at least 0"),
        ({"temperature": "hot"}, r"temperature is 'hot'"),
        ({"temperature": float("nan")}, r"temperature is nan"),
        ({"temperature": True}, r"temperature is True"),
        ({"top_p": 0.0}, r"top_p is 0\.0; it must be a number in \(0, 1\]"),
        ({"top_k": 0}, r"top_k is 0; it must be an integer of at least 1, or -1"),
        ({"max_new_tokens": 2.5}, r"max_new_tokens is 2\.5"),
        ({"max_new_tokens": 65}, r"max_new_tokens is 65, more than data\.max_response_length=64"),
        ({"ignore_eos": 1}, r"ignore_eos is 1; it must be true or false"),
        ({"stop": [""]}, r"stop is \[''\]"),
        ({"stop_token_ids": 7}, r"stop_token_ids is 7; it must be a list of token ids"),
        ({"ignore_eos": True, "stop_token_ids": [4]}, r"ignore_eos=true ignores stop_token_ids=\[4\] too"),
    ],
)
def test_a_bad_override_names_the_prompt_the_field_and_the_value(asked: object, message: str) -> None:
    with pytest.raises(ValueError, match=r"train prompt 7: extra_info\.sampling.*" + message):
        override_sampling(BASE, {"sampling": asked}, "train prompt 7")
