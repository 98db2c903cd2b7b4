"""SGLang's parsers of answers, as its servers offer them. Their import takes seconds, which the first request waits."""

from __future__ import annotations

import logging
from typing import Any

from scalerl.rollout.servers.embedded.engine import RefusedError


def separate_reasoning(body: dict[str, Any]) -> dict[str, Any]:
    """Separates the thoughts of a text from the rest."""
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    try:
        thoughts, text = ReasoningParser(body["reasoning_parser"]).parse_non_stream(body["text"])
    except ValueError as error:
        raise RefusedError(str(error)) from error
    return {"reasoning_text": thoughts, "text": text}


def parse_tool_calls(body: dict[str, Any]) -> dict[str, Any]:
    """Parses the tool calls of a text."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    # Its warnings repeat what the policy wrote.
    logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)
    try:
        parser = FunctionCallParser([Tool(**tool) for tool in body["tools"]], body["tool_call_parser"])
        text, calls = parser.parse_non_stream(body["text"])
    except ValueError as error:
        raise RefusedError(str(error)) from error
    return {"normal_text": text, "calls": [call.model_dump() for call in calls]}
