"""Anthropic's dialect: requests and answers converted, and the endpoint as a client of that API sees it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from scalerl.data import PromptRow
from scalerl.rollout.gateway.anthropic import as_chat, events, message_of
from scalerl.rollout.gateway.session import RequestError, Turn
from scalerl.rollout.gateway.template import is_same
from scalerl.rollout.servers.requests import GenerateOutput
from tests.unit.rollout.gateway.test_gateway import USER, Policy, answered, client, of, said, sample_of

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def turn_of(message: dict[str, Any], reason: str = "stop", matched_stop: str = "") -> Turn:
    output = GenerateOutput("r", 0, [5, 6, 2], [-0.5] * 3, reason, 4)
    answer = {"role": "assistant", "content": ""} | message
    return Turn([USER, answer], None, None, [1, 2], [], output, matched_stop=matched_stop)


def http_of(base_url: str, **headers: str) -> httpx.AsyncClient:
    """A client of the API, whose base URL is the root."""
    return httpx.AsyncClient(base_url=base_url.removesuffix("/v1"), headers={"anthropic-version": "1"} | headers)


def blocks_of(text: str) -> list[dict[str, Any]]:
    """The content blocks of a stream, put together as the API's clients do."""
    blocks: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    for event in text.split("\n\n")[:-1]:
        name, data = (line.partition(": ")[2] for line in event.splitlines())
        value = json.loads(data)
        assert value["type"] == name
        if name == "content_block_start":
            assert value["index"] == len(blocks)
            blocks.append(value["content_block"])
        elif name == "content_block_delta":
            delta = value["delta"]
            if delta["type"] == "input_json_delta":
                inputs[value["index"]] = inputs.get(value["index"], "") + delta["partial_json"]
                continue
            kind = delta["type"].removesuffix("_delta")
            blocks[value["index"]][kind] += delta[kind]
    for index, given in inputs.items():
        blocks[index]["input"] = json.loads(given)
    return blocks


def test_a_request_becomes_the_messages_that_a_session_knows() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    request = {
        "model": "policy",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief", "cache_control": {}}],
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "I add"},
                    {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}},
                    {"type": "tool_use", "id": "2", "name": "add", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": "4"},
                    {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "5"}]},
                    {"type": "text", "text": "and"},
                    {"type": "text", "text": " now?"},
                ],
            },
        ],
        "tools": [{"name": "add", "description": "adds", "input_schema": schema, "cache_control": {}}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "1"},
        "temperature": 0.5,
    }
    calls = [
        {"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}}
        for id, arguments in (("1", '{"a": 1}'), ("2", "{}"))
    ]
    assert as_chat(request) == {
        "model": "policy",
        "max_tokens": 5,
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "I add", "reasoning_content": "hm", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": "4"},
            {"role": "tool", "tool_call_id": "2", "content": "5"},
            {"role": "user", "content": "and now?"},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": schema}}],
        "tool_choice": "auto",
        "stop": ["x"],
        "metadata": {"user_id": "1"},
        "temperature": 0.5,
    }


@pytest.mark.parametrize(
    ("message", "reason", "blocks", "told"),
    [
        ({"content": "four"}, "stop", [{"type": "text", "text": "four"}], "end_turn"),
        ({"content": "fo"}, "length", [{"type": "text", "text": "fo"}], "max_tokens"),
        # Clients take the first block of a message.
        ({}, "stop", [{"type": "text", "text": ""}], "end_turn"),
        (
            {"reasoning_content": "hm", "content": "I add", "tool_calls": [CALL]},
            "stop",
            [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I add"},
                {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
            ],
            "tool_use",
        ),
        (
            {"tool_calls": [CALL | {"function": {"name": "add", "arguments": arguments}} for arguments in ("", "[1")]},
            "stop",
            [
                {"type": "tool_use", "id": "call_1", "name": "add", "input": {}},
                {"type": "tool_use", "id": "call_1", "name": "add", "input": "[1"},
            ],
            "tool_use",
        ),
    ],
)
def test_a_turn_becomes_a_message_that_is_known_again(
    message: dict[str, Any], reason: str, blocks: list[dict[str, Any]], told: str
) -> None:
    turn = turn_of(message, reason)
    given = message_of(turn, "policy")
    assert given["content"] == blocks == blocks_of(events(given)) and given["stop_reason"] == told
    assert given["usage"]["input_tokens"] == 2 and given["usage"]["output_tokens"] == 3
    sent_back = as_chat({"messages": [USER, {"role": "assistant", "content": given["content"]}, USER]})
    assert is_same(turn.messages[-1], sent_back["messages"][1])


def test_events_come_in_the_order_of_the_api() -> None:
    given = message_of(turn_of({"content": "four", "tool_calls": [CALL]}, matched_stop="x"), "policy")
    data = [json.loads(event.partition("data: ")[2]) for event in events(given).split("\n\n")[:-1]]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [event["type"] for event in data] == ["message_start", *block, *block, "message_delta", "message_stop"]
    begun, ended = data[0]["message"], data[-2]
    assert begun == given | {
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": given["usage"] | {"output_tokens": 0},
    }
    assert ended["delta"] == {"stop_reason": "tool_use", "stop_sequence": "x"} and ended["usage"]["output_tokens"] == 3


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"messages": "2+2?"}, "messages must be a list of objects"),
        ({"messages": [{"role": "user"}]}, "messages must be a list of objects"),
        ({"messages": [{"role": "user", "content": 5}]}, "a content is 5"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "a source of type base64"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "document"}]}]}]},
            "a block of type 'document'",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "The answer is ("}]},
            "messages end with the assistant's",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools have .*web_search"),
        ({"stop_sequences": "x"}, "stop_sequences is 'x'"),
    ],
)
def test_what_has_no_counterpart_is_refused(more: dict[str, Any], error: str) -> None:
    with pytest.raises(RequestError, match=error):
        as_chat({"messages": [USER]} | more)


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.5},
        {"tool_choice": {"type": "any"}},
        {"output_config": {"format": {"type": "json_schema"}}},
        {"output_config": 5},
        {"container": "c"},
    ],
)
def test_what_would_be_drawn_otherwise_is_refused_by_name(more: dict[str, Any]) -> None:
    async def agent(base_url: str, api_key: str, row: PromptRow) -> None:
        async with http_of(base_url, **{"x-api-key": api_key}) as http:
            refused = await http.post("/v1/messages", json={"messages": [USER], "max_tokens": 9} | more)
            error = refused.json()
            assert refused.status_code == 400 and set(error) == {"type", "error"} and error["type"] == "error"
            assert error["error"]["type"] == "invalid_request_error"
            assert error["error"]["message"].startswith(f"{next(iter(more))} is ")
            same = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "tool_choice": {"type": "auto"}}
            taken = await http.post("/v1/messages", json={"messages": [USER], "max_tokens": 9} | same)
            assert taken.status_code == 200

    assert len(sample_of(agent).trajectories) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_of_both_dialects_is_one(stream: bool) -> None:
    async def agent(base_url: str, api_key: str, row: PromptRow) -> float:
        openai = client(base_url, api_key)
        first = await said(openai, {"role": "system", "content": "add"}, USER)
        messages: list[Any] = [USER, answered(first), {"role": "user", "content": [{"type": "text", "text": "why?"}]}]
        body = {"model": "policy", "max_tokens": 20, "system": "add", "messages": messages, "stream": stream}
        async with http_of(base_url, authorization=f"Bearer {api_key}") as http:
            answer = await http.post("/v1/messages", json=body)
            content = blocks_of(answer.text) if stream else answer.json()["content"]
        assert content == [{"type": "text", "text": "a1"}]
        before = [USER, answered(first), {"role": "user", "content": "why?"}, answered("a1")]
        await said(openai, {"role": "system", "content": "add"}, *before, {"role": "user", "content": "sure?"})
        return 1.0

    (trajectory,) = sample_of(agent).trajectories
    assert [text for text, is_trained in of(trajectory)[1] if is_trained] == [f"a{turn}<|im_end|>" for turn in range(3)]


def test_refusals_have_the_shape_that_clients_of_the_api_know() -> None:
    async def agent(base_url: str, api_key: str, row: PromptRow) -> None:
        async with http_of(base_url, **{"x-api-key": api_key}) as http:
            long = {"max_tokens": 9, "messages": [{"role": "user", "content": "x" * 200}]}
            refused = (await http.post("/v1/messages", json=long)).json()["error"]
            assert refused["type"] == "invalid_request_error"
            assert refused["message"].startswith("prompt is too long: the conversation has ")
            await http.post("/v1/messages", json={"max_tokens": 9, "messages": [USER]})
        async with http_of(base_url, **{"x-api-key": "guessed"}) as http:
            refused = await http.post("/v1/messages", json={"max_tokens": 9, "messages": [USER]})
            assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"

    assert len(sample_of(agent).trajectories) == 1


@pytest.mark.parametrize(("ends", "text", "told"), [(["0"], "a", "0"), (["zz"], "a0", None), (["<|im"], "a0", None)])
def test_what_ended_an_answer_is_told_and_left_out(ends: list[str], text: str, told: str | None) -> None:
    """Also where the last token has more than the end."""

    async def agent(base_url: str, api_key: str, row: PromptRow) -> None:
        async with http_of(base_url, **{"x-api-key": api_key}) as http:
            body = {"max_tokens": 9, "messages": [USER], "stop_sequences": ends}
            answer = (await http.post("/v1/messages", json=body)).json()
        assert answer["content"] == [{"type": "text", "text": text}] and answer["stop_sequence"] == told
        assert answer["stop_reason"] == ("end_turn" if told is None else "stop_sequence")

    (trajectory,) = sample_of(agent, Policy()).trajectories
    assert of(trajectory)[1] == [("a0<|im_end|>", True)]
