"""Interrupted samples: what they keep, what they may still get, what a server's answer adds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from scalerl.rollout.servers.engines import ENGINES
from scalerl.rollout.servers.requests import (
    EVENT_END,
    LAST_EVENT,
    GenerateOutput,
    GenerateRequest,
    RolloutError,
    SamplingParams,
    ServerLostError,
    check_request,
    output_of,
    read_events,
    slots_of,
    unfinished_requests,
)

REQUEST = GenerateRequest("p", [5, 6, 7], 3, SamplingParams(max_new_tokens=10), seeds=[70, 71, 72])

ON_SGLANG = ENGINES["sglang"].undone_by_abort


def output(index: int, ids: list[int], reason: str = "abort", spans: tuple[tuple[int, int], ...] = ()) -> Any:
    version = spans[0][1] if spans else 4
    return GenerateOutput("p", index, ids, [-0.1 * token for token in ids], reason, version, spans)


def answer(ids: list[int], reason: str, spans: list[tuple[int, int, int]]) -> dict[str, Any]:
    """As SGLang answers. spans: (version, start, end)."""
    return {
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": reason},
            "weight_version": str(spans[-1][0]),
            "weight_versions": [{"version": str(v), "start": start, "end": end} for v, start, end in spans],
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        },
    }


def test_token_versions_follow_the_spans() -> None:
    assert output(0, [1, 2, 3], spans=((0, 7), (2, 9))).token_versions() == [7, 7, 9]
    assert output(0, [1, 2]).token_versions() == [4, 4]
    assert output(0, []).token_versions() == []


def test_what_is_left_of_a_request_keeps_its_samples_seeds_and_tokens() -> None:
    outputs = [output(0, [9], "stop"), output(1, [8, 8]), output(2, [])]
    (rest,) = unfinished_requests([REQUEST], outputs)
    assert (rest.n, rest.seeds, rest.sample_keys()) == (2, [71, 72], [("p", 1), ("p", 2)])
    assert [o.output_ids for o in rest.progress] == [[8, 8], []]
    # Interrupted again: the seeds are still those of the samples.
    (again,) = unfinished_requests([rest], [output(1, [8, 8, 8], "length"), output(2, [3])])
    assert (again.n, again.seeds, again.sample_keys()) == (1, [72], [("p", 2)])
    assert unfinished_requests([REQUEST], [output(i, [1], "stop") for i in range(3)]) == []


def test_the_rest_asks_for_the_tokens_that_remain_behind_those_it_has() -> None:
    (rest,) = unfinished_requests([REQUEST], [output(1, [8, 9]), output(2, [])])
    slots = slots_of(rest, max_model_len=100)
    assert [slot.room for slot in slots] == [8, 10]
    body = ENGINES["embedded"].generate(rest, slots).body
    assert body["input_ids"] == [[5, 6, 7, 8, 9], [5, 6, 7]]
    assert [(p["max_new_tokens"], p["sampling_seed"], p["sampling_position"]) for p in body["sampling_params"]] == [
        (8, 71, 2),
        (10, 72, 0),
    ]
    # The model's length cuts deeper than the response's.
    assert [slot.room for slot in slots_of(rest, max_model_len=6)] == [1, 3]
    assert [slot.room for slot in slots_of(rest, max_model_len=5)] == [0, 2]


def test_new_tokens_are_appended_with_their_own_versions() -> None:
    (rest,) = unfinished_requests([REQUEST], [output(1, [8, 9], spans=((0, 3), (1, 4)))])
    (slot,) = slots_of(rest, 100)
    finished = output_of(slot, answer([1, 2, 3], "stop", [(4, 0, 1), (5, 1, 3)]), undone_by_abort=ON_SGLANG)
    assert finished.output_ids == [8, 9, 1, 2, 3]
    assert finished.logprobs == pytest.approx([-0.8, -0.9, -0.5, -0.5, -0.5])
    assert finished.version_spans == ((0, 3), (1, 4), (3, 5))
    assert finished.token_versions() == [3, 4, 4, 5, 5]
    assert (finished.policy_version, finished.finish_reason) == (3, "stop")


def test_an_interrupted_sample_without_tokens_has_the_version_of_those_that_follow() -> None:
    (rest,) = unfinished_requests([REQUEST], [output(1, [])])
    (slot,) = slots_of(rest, 100)
    finished = output_of(slot, answer([1], "length", [(6, 0, 1)]), undone_by_abort=ON_SGLANG)
    assert (finished.version_spans, finished.policy_version) == (((0, 6),), 6)


def test_the_unchecked_last_token_of_an_aborted_sglang_sample_is_dropped() -> None:
    """It may be an end of text, behind which nobody may go on."""
    slot = slots_of(REQUEST, 100)[0]
    aborted = answer([1, 2, 3], "abort", [(4, 0, 2), (5, 2, 3)])
    assert output_of(slot, aborted, undone_by_abort=ON_SGLANG).output_ids == [1, 2]
    assert output_of(slot, aborted, undone_by_abort=ON_SGLANG).version_spans == ((0, 4),)
    # The embedded engine stops between two tokens.
    assert output_of(slot, aborted).output_ids == [1, 2, 3]
    # Aborted before it ran.
    never = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "4"}}
    assert output_of(slot, never, undone_by_abort=ON_SGLANG).output_ids == []


def test_an_answer_that_contradicts_itself_or_the_request_is_an_error() -> None:
    slot = slots_of(REQUEST, 100)[0]
    bad = answer([1, 2], "stop", [(4, 0, 2)])
    bad["output_ids"] = [1, 3]
    with pytest.raises(RolloutError, match="'p' sample 0: the server's log-probs are of other tokens"):
        output_of(slot, bad, undone_by_abort=ON_SGLANG)
    with pytest.raises(RolloutError, match="'p' sample 0: the server sent 11 tokens, at most 10"):
        output_of(slot, answer([1] * 11, "length", [(4, 0, 11)]), undone_by_abort=ON_SGLANG)


def test_a_log_prob_that_is_no_number_is_an_error() -> None:
    """JSON has none: NaN comes as null."""
    slot = slots_of(REQUEST, 100)[0]
    bad = answer([1, 2], "stop", [(4, 0, 2)])
    bad["meta_info"]["output_token_logprobs"][1][0] = None
    error = r"'p' sample 0: the log-prob of token 1 is not a number, .* \(trainer\.resume_from_path\)$"
    with pytest.raises(RolloutError, match=error):
        output_of(slot, bad)


def test_an_error_of_the_server_is_no_interruption() -> None:
    slot = slots_of(REQUEST, 100)[0]
    failed = answer([], "abort", [(4, 0, 0)])
    failed["meta_info"]["finish_reason"] |= {"status_code": 400, "message": "top_p must be in (0, 1]"}
    with pytest.raises(RolloutError, match=r"'p' sample 0 was refused: top_p must be in"):
        output_of(slot, failed, undone_by_abort=ON_SGLANG)


EVENTS = [{"index": 1, "text": "a\nb"}, {"index": 0, "text": "x" * 300}]
STREAM = b"".join(b"data: " + json.dumps(event).encode() + EVENT_END for event in EVENTS)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_read_wherever_the_stream_is_cut(size: int) -> None:
    whole = STREAM + b"data: " + LAST_EVENT + EVENT_END
    assert asyncio.run(_read([whole[at : at + size] for at in range(0, len(whole), size)])) == EVENTS


def test_a_single_line_break_ends_no_event() -> None:
    lines = b'data: {"index":\n0}' + EVENT_END
    stream = [lines[:16], lines[16:-1], lines[-1:] + b"data: " + LAST_EVENT + EVENT_END]
    assert asyncio.run(_read(stream)) == [{"index": 0}]


@pytest.mark.parametrize("sent", [b"", STREAM, STREAM[:-1]])
def test_a_stream_without_its_last_event_is_a_lost_server(sent: bytes) -> None:
    with pytest.raises(ServerLostError, match="the answer to request 'p' ends before its last event"):
        asyncio.run(_read([sent]))


async def _read(chunks: list[bytes]) -> list[dict[str, Any]]:
    async def stream() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    return [event async for event in read_events(stream(), "request 'p'")]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_ids": []}, "a prompt of 0 tokens"),
        ({"input_ids": [1] * 21}, "a prompt of 21 tokens; it must have 1 to max_model_len=20"),
        ({"n": 0, "seeds": None}, "asks for n=0"),
        ({"n": 2}, "3 seeds for n=2"),
        ({"sampling": SamplingParams(4, ignore_eos=True, stop_token_ids=(9,))}, r"stop_token_ids=\[9\] too"),
        ({"progress": (output(0, [1]),)}, r"n=3 but continues samples \[0\]"),
        ({"progress": (output(0, []), output(1, []), output(2, [3], "stop"))}, r"cannot continue sample \('p', 2\)"),
        (
            {"progress": tuple(output(i, [1]) for i in range(3)), "sampling": SamplingParams(4, stop=("END",))},
            "stop strings .* cannot be continued",
        ),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    arguments = {"request_id": "p", "input_ids": [5], "n": 3, "sampling": SamplingParams(4), "seeds": [1, 2, 3]}
    with pytest.raises(ValueError, match=f"request 'p'.*{message}"):
        check_request(GenerateRequest(**(arguments | fields)), 20)


def test_a_sample_with_stop_strings_begins_again() -> None:
    request = GenerateRequest("p", [5], 1, SamplingParams(9, stop=("END",)), [1])
    (rest,) = unfinished_requests([request], [output(0, [1, 2])])
    assert rest.progress[0].output_ids == rest.progress[0].logprobs == []
    check_request(rest, 20)
