"""Anthropic's dialect: its requests as those of chat completions, and turns as its messages and events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from scalerl.rollout.gateway.session import RequestError, Turn
from scalerl.rollout.gateway.template import Message, arguments_of

# Fields of a request that change nothing in what is sampled: how long the policy thinks, the run says.
_WITHOUT_EFFECT = {"thinking", "cache_control", "context_management", "betas", "inference_geo", "speed", "diagnostics"}
_CONVERTED = {"system", "messages", "tools", "tool_choice", "stop_sequences", "output_config"}
_ERROR_TYPES = {400: "invalid_request_error", 401: "authentication_error"}


def as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """A request for a message as one for a chat completion, whose checks are then the same.

    A field that both dialects have keeps its name, so that a refusal names what the client sent.
    Raises RequestError for what it has no counterpart of: documents, tools of a provider, a begun answer.
    """
    chat = {name: value for name, value in body.items() if name not in _WITHOUT_EFFECT | _CONVERTED}
    system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise RequestError("messages must be a list of objects that have a role and a content", param="messages")
    chat["messages"] = list(_messages([*system, *messages]))
    if chat["messages"] and chat["messages"][-1]["role"] == "assistant":
        raise RequestError(
            "messages end with the assistant's: the policy is trained on whole answers, and none can be begun for it",
            param="messages",
        )
    if body.get("tools"):
        chat["tools"] = _tools(body["tools"])
    if (choice := body.get("tool_choice")) is not None:
        chat["tool_choice"] = "auto" if isinstance(choice, dict) and choice.get("type") == "auto" else choice
    if (stop := body.get("stop_sequences")) is not None:
        if not isinstance(stop, list) or not all(isinstance(end, str) and end for end in stop):
            raise RequestError(f"stop_sequences is {stop!r:.80}; it must be a list of strings", param="stop_sequences")
        chat["stop"] = stop
    # The effort is as the thinking; a format would be a grammar.
    output = body.get("output_config")
    if output and not (isinstance(output, dict) and output.keys() <= {"effort"}):
        chat["output_config"] = output
    return chat


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message


def _messages(messages: Sequence[Mapping[str, Any]]) -> Iterator[Message]:
    """The messages of chat completions. What assistant's messages in a row have is one answer."""
    for is_answer, group in groupby(messages, lambda message: message["role"] == "assistant"):
        if is_answer:
            yield _answer([block for message in group for block in _blocks(message["content"])])
            continue
        for message in group:
            yield from _questions(message["role"], _blocks(message["content"]))


def _questions(role: str, blocks: Sequence[Mapping[str, Any]]) -> Iterator[Message]:
    """Results of tools are messages, and the texts between them, in their order."""
    for is_result, group in groupby(blocks, lambda block: block.get("type") == "tool_result"):
        if not is_result:
            yield {"role": role, "content": _content(group)}
            continue
        for block in group:
            content = _content(_blocks(block.get("content") or ""))
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}


def _answer(blocks: Sequence[Mapping[str, Any]]) -> Message:
    of_type = {kind: [block for block in blocks if block.get("type") == kind] for kind in ("thinking", "tool_use")}
    rest = [block for block in blocks if block.get("type") not in of_type]
    message: Message = {"role": "assistant", "content": _text(rest)}
    if thoughts := "".join(str(block.get("thinking") or "") for block in of_type["thinking"]):
        message["reasoning_content"] = thoughts
    if calls := of_type["tool_use"]:
        message["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {"name": call.get("name"), "arguments": json.dumps(call.get("input", {}))},
            }
            for call in calls
        ]
    return message


def _blocks(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise RequestError(f"a content is {content!r:.80}; it must be a text or a list of blocks", param="messages")
    return content


def _content(blocks: Iterable[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Text, or with images parts."""
    blocks = list(blocks)
    if not any(block.get("type") == "image" for block in blocks):
        return _text(blocks)
    return [
        _image(block) if block.get("type") == "image" else {"type": "text", "text": _text([block])} for block in blocks
    ]


def _image(block: Mapping[str, Any]) -> dict[str, Any]:
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") != "base64":
        raise RequestError("an image must have a source of type base64", param="messages")
    url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _text(blocks: Iterable[Mapping[str, Any]]) -> str:
    texts = []
    for block in blocks:
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise RequestError(f"a block of type {block.get('type')!r}: messages have text alone", param="messages")
        texts.append(block["text"])
    return "".join(texts)


def _tools(tools: Any) -> list[dict[str, Any]]:
    """Schemas of functions. Raises RequestError for tools that the provider would run."""
    if not isinstance(tools, list):
        raise RequestError(f"tools is {tools!r:.80}; it must be a list", param="tools")
    functions = []
    for tool in tools:
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or "input_schema" not in tool:
            raise RequestError(f"tools have {tool!r:.80}; each must have a name and an input_schema", param="tools")
        described = {"description": tool["description"]} if tool.get("description") else {}
        functions.append({"name": tool["name"]} | described | {"parameters": tool["input_schema"]})
    return [{"type": "function", "function": function} for function in functions]


def message_of(turn: Turn, model: str) -> dict[str, Any]:
    """A turn of the policy as a message of the API."""
    answer = turn.messages[-1]
    blocks: list[dict[str, Any]] = []
    if thoughts := answer.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thoughts, "signature": ""})
    calls = answer.get("tool_calls") or []
    # Clients expect a block in each message.
    if answer["content"] or not (blocks or calls):
        blocks.append({"type": "text", "text": answer["content"]})
    for call in calls:
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments_of(function)})
    reason = {"stop": "end_turn", "length": "max_tokens"}[turn.output.finish_reason]
    if turn.matched_stop:
        reason = "stop_sequence"
    return {
        "id": f"msg_{turn.id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": blocks,
        "stop_reason": "tool_use" if calls else reason,
        "stop_sequence": turn.matched_stop or None,
        "usage": {
            "input_tokens": turn.num_tokens_before,
            "output_tokens": len(turn.output.output_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def events(message: Mapping[str, Any]) -> str:
    """A message as the events of a stream. It is there as a whole, so that each block has one delta of each kind."""
    usage = {**message["usage"], "output_tokens": 0}
    begun = {**message, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    data: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(message["content"]):
        empty, deltas = _deltas(block)
        data.append({"type": "content_block_start", "index": index, "content_block": empty})
        data += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        data.append({"type": "content_block_stop", "index": index})
    ended = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    data.append({"type": "message_delta", "delta": ended, "usage": message["usage"]})
    data.append({"type": "message_stop"})
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in data)


def _deltas(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A content block as it begins, and what is added to it."""
    kind = block["type"]
    if kind == "tool_use":
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    deltas = [{"type": f"{kind}_delta", kind: block[kind]}]
    if kind == "thinking":
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
    return {**block, kind: ""}, deltas


def error_of(error: RequestError) -> dict[str, Any]:
    """A refusal in the API's shape."""
    kind = _ERROR_TYPES.get(error.status, "api_error")
    # The words by which clients know a conversation that must be compacted.
    begin = "prompt is too long: " if error.code == "context_length_exceeded" else ""
    return {"type": "error", "error": {"type": kind, "message": f"{begin}{error}"}}
