"""Thoughts and tool calls of answers, by SGLang's parsers behind every engine's servers."""

from __future__ import annotations

import asyncio
import json

import pytest

from scalerl.rollout.servers.client import RolloutClient
from scalerl.rollout.servers.requests import RolloutError
from tests.sglang.conftest import MAX_MODEL_LEN, Engine

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]


def client_of(engine: Engine) -> RolloutClient:
    return RolloutClient(engine.client.url, engine.kind, key=engine.server.key, max_model_len=MAX_MODEL_LEN)


def test_thoughts_are_kept_apart(engine: Engine) -> None:
    client = client_of(engine)
    parsed = asyncio.run(client.separate_reasoning("<think>\n1 and 2\n</think>\n\nIt is 3.", "qwen3"))
    assert [part.strip() for part in parsed] == ["1 and 2", "It is 3."]
    assert asyncio.run(client.separate_reasoning("It is 3.", "qwen3")) == ("", "It is 3.")


def test_calls_have_a_name_and_arguments(engine: Engine) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    text, calls = asyncio.run(client_of(engine).parse_tool_calls(f"I add.\n{call}\n{call}", "qwen25", TOOLS))
    assert text.strip() == "I add."
    assert [(made["name"], json.loads(made["arguments"])) for made in calls] == [("add", {"a": 1, "b": 2})] * 2
    for wrong in ("I add.", '<tool_call>\n{"name": "add", "arg', '<tool_call>\n{"name": "other"}\n</tool_call>'):
        assert asyncio.run(client_of(engine).parse_tool_calls(wrong, "qwen25", TOOLS))[1] == []


def test_a_parser_that_does_not_exist_is_named(engine: Engine) -> None:
    with pytest.raises(RolloutError, match="qwen26"):
        asyncio.run(client_of(engine).parse_tool_calls("I add.", "qwen26", TOOLS))
