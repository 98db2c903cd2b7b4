"""Rows of experts that come in parts: they are whole, each once, and the first that came stays."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalerl.errors import UserError
from scalerl.models.routing import RoutingShape, is_known
from scalerl.rollout.sampling.policy_servers import require_experts
from scalerl.rollout.servers.client import RolloutClient
from scalerl.rollout.servers.engines import ENGINES
from scalerl.rollout.servers.requests import (
    GenerateOutput,
    GenerateRequest,
    RolloutError,
    SamplingParams,
    output_of,
    slots_of,
    unfinished_requests,
)

ROUTING = RoutingShape((False, True, True), 900, 2)
REQUEST = GenerateRequest("p", [5, 6, 7], 1, SamplingParams(max_new_tokens=40), routing=ROUTING)
ON_SGLANG = ENGINES["sglang"].undone_by_abort


def experts(positions: Sequence[int], version: int = 0) -> np.ndarray:
    """[positions, 3, 2], different at each position, in each layer and under each version of the weights."""
    return np.array([[[7 * p % 100 + 100 * version, 100 + layer + version] for layer in range(3)] for p in positions])


def answer(prompt: list[int], ids: list[int], reason: str, start: int, version: int = 0, **meta: Any) -> dict[str, Any]:
    """As SGLang answers: rows from `start` to the last token but one. prompt: with all that was drawn before."""
    rows = experts(range(start, len(prompt) + len(ids) - 1), version)
    encoded = base64.b64encode(rows.astype("<i4").tobytes()).decode()
    return {
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": reason},
            "weight_version": str(version),
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "routed_experts": encoded,
        }
        | meta,
    }


@given(st.lists(st.integers(0, 6), max_size=4), st.integers(0, 3), st.booleans())
def test_rows_of_an_interrupted_sample_are_appended_and_never_replaced(
    parts: list[int], routed_from: int, sends_all: bool
) -> None:
    """Each continuation is under newer weights, with which the server has computed the whole prefix again."""
    request = replace(REQUEST, input_ids=[5, 6, 7, 8], routed_from=routed_from)
    expected, output = [], GenerateOutput("p", 0, [], [], "abort", -1)
    for version, num_new in enumerate([*parts, 3]):
        is_last = version == len(parts)
        (asked,) = [request] if version == 0 else unfinished_requests([request], [output])
        (slot,) = slots_of(asked, 100)
        prompt = request.input_ids + slot.output_ids
        body = ENGINES["sglang"].generate(asked, [slot]).body or {}
        assert body["return_routed_experts"] is True
        start = body["routed_experts_start_len"]
        assert start == routed_from + len(expected) <= len(prompt) - 1 or not expected
        ids = [100 * version + i for i in range(num_new)]
        given_from = 0 if sends_all else start
        got = answer(prompt, ids, "stop" if is_last else "abort", given_from, version)
        output = output_of(slot, got, undone_by_abort=ON_SGLANG)
        kept = num_new if is_last else max(0, num_new - ON_SGLANG)
        if num_new:
            end = len(prompt) + kept - 1
            expected += list(experts(range(routed_from + len(expected), end), version))
        assert output.routed_experts is not None
        assert len(output.routed_experts) == len(expected)
    assert (
        output.routed_experts is not None and len(output.routed_experts) == 4 + len(output.output_ids) - 1 - routed_from
    )
    assert np.array_equal(output.routed_experts[:, 1:].numpy(), np.array(expected).reshape(-1, 3, 2)[:, 1:])
    # The layer without experts, which SGLang fills with zeros or whatever was there.
    assert not is_known(output.routed_experts[:, 0]).any()


def test_samples_of_one_continuation_are_asked_from_where_the_first_needs_it() -> None:
    """SGLang has one start for all samples of a request; the others leave out what they have."""
    request = replace(REQUEST, n=2)
    outputs = []
    for slot, ids in zip(slots_of(request, 100), ([1, 2], [1, 2, 3, 4, 9]), strict=True):
        outputs.append(output_of(slot, answer([5, 6, 7], ids, "abort", 0), undone_by_abort=ON_SGLANG))
    assert [len(output.routed_experts) for output in outputs] == [3, 6]
    (rest,) = unfinished_requests([request], outputs)
    slots = slots_of(rest, 100)
    body = ENGINES["sglang"].generate(rest, slots).body or {}
    assert body["routed_experts_start_len"] == 3
    whole = output_of(slots[1], answer([5, 6, 7, 1, 2, 3, 4], [8], "stop", 3, version=1), undone_by_abort=ON_SGLANG)
    rows = np.concatenate([experts(range(6)), experts([6], version=1)])
    assert whole.routed_experts is not None and np.array_equal(whole.routed_experts[:, 1:].numpy(), rows[:, 1:])


def test_a_request_that_does_not_ask_has_no_field_and_no_rows() -> None:
    request = replace(REQUEST, routing=None)
    (slot,) = slots_of(request, 100)
    assert slot.routed is None
    assert not [field for field in ENGINES["sglang"].generate(request, [slot]).body or {} if "routed" in field]
    assert output_of(slot, answer([5, 6, 7], [1], "stop", 0)).routed_experts is None


def test_what_is_aborted_before_its_first_token_keeps_what_it_had() -> None:
    """Its prompt may be computed in part; and an answer that was aborted while it waited has no rows at all."""
    (slot,) = slots_of(REQUEST, 100)
    none = output_of(slot, answer([5, 6, 7], [], "abort", 0), undone_by_abort=ON_SGLANG)
    assert none.routed_experts is not None and len(none.routed_experts) == 0
    one = output_of(slot, answer([5, 6, 7], [1, 2], "abort", 0), undone_by_abort=ON_SGLANG)
    (slot,) = slots_of(*unfinished_requests([REQUEST], [one]), 100)
    waited = output_of(slot, answer([5, 6, 7, 1], [8, 9], "abort", 0, routed_experts=None), undone_by_abort=ON_SGLANG)
    assert waited.output_ids == [1, 8] and torch.equal(waited.routed_experts, one.routed_experts)
    # The next one asks for all that is missing.
    (slot,) = slots_of(*unfinished_requests([REQUEST], [waited]), 100)
    assert slot.routed is not None and slot.routed.next == 3


def test_tokens_that_are_dropped_lose_their_rows() -> None:
    """With stop strings an interrupted sample begins anew."""
    request = replace(REQUEST, sampling=SamplingParams(40, stop=("x",)))
    (slot,) = slots_of(request, 100)
    cut = output_of(slot, answer([5, 6, 7], [1, 2, 3], "abort", 0), undone_by_abort=ON_SGLANG)
    (slot,) = slots_of(*unfinished_requests([request], [cut]), 100)
    assert slot.routed is not None and slot.routed.next == 0


@pytest.mark.parametrize(
    ("got", "message"),
    [
        (answer([5, 6, 7], [1], "stop", 0, routed_experts=None), "the server gave no experts of its tokens"),
        (
            answer([5, 6, 7], [1, 2], "stop", 1),
            "3 rows of experts, which end with token 3, and token 0 needs",
        ),
        (answer([5, 6, 7], [1, 2], "stop", 0, routed_experts="AAAA"), "4 characters are no rows of 3 x 2 experts"),
        (
            answer([5, 6], [1], "stop", 0, routed_experts=base64.b64encode(bytes(72)).decode()),
            r"row 0 of 3: layer 1 has \[0, 0\]",
        ),
    ],
)
def test_rows_that_cannot_be_the_answers_are_refused(got: dict[str, Any], message: str) -> None:
    (slot,) = slots_of(REQUEST, 100)
    with pytest.raises(RolloutError, match=f"request 'p' sample 0: .*{message}.*algorithm.routing_replay"):
        output_of(slot, got, undone_by_abort=ON_SGLANG)


def test_a_server_that_ends_at_the_first_request_for_experts_is_refused_with_the_key() -> None:
    """As SGLang's does where the routers of a model have no number."""
    gone = RolloutClient("http://127.0.0.1:9", "sglang", key="", max_model_len=8, timeout_s=5.0)
    with pytest.raises(UserError, match=r"set algorithm\.routing_replay=null"):
        require_experts(gone, ROUTING, "models/mixture")
