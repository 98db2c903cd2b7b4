"""Checks of a column of messages, each of which is {"role": str, "content": str}, and of the tools beside it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from scalerl.data.problems import FileProblems, excerpt, type_name

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAPE = 'write it as [{"role": "user", "content": "..."}]'


class MessagesDigest:
    """The digest of rows' messages, by which a run that goes on knows that its rows are those that it began with.

    Not of tokens, as another chat template may go on, nor of the rest of a row, such as an answer that was corrected.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, messages: Any) -> None:
        """Adds the messages of the next row."""
        # What JSON has no form for, as images of a user's class, counts by its type: its text may be an address.
        text = json.dumps(messages, sort_keys=True, skipkeys=True, default=type_name)
        self._hash.update(text.encode() + b"\n")

    def hexdigest(self) -> str:
        return self._hash.hexdigest()[:32]


def check_messages(value: Any, row: int, column: str, problems: FileProblems) -> list[dict[str, Any]] | None:
    """Checks one row's messages and drops their null keys at every depth: Arrow fills in those of other rows.

    Returns the messages, or None with the reason added to `problems`.
    """
    if not isinstance(value, list):
        problem = f"{type_name(value)}, not a list of messages"
        problems.add(problem, _SHAPE, row=row, column=column, value=excerpt(value))
        return None
    if not value:
        problems.add("an empty list", "remove the row or give it a message", row=row, column=column)
        return None
    messages = [_check_message(message, i, row, column, problems) for i, message in enumerate(value)]
    known = [message for message in messages if message is not None]
    return known if len(known) == len(messages) else None


def _check_message(message: Any, i: int, row: int, column: str, problems: FileProblems) -> dict[str, Any] | None:
    if not isinstance(message, dict):
        problem = f"{type_name(message)} as message {i}"
        problems.add(problem, _SHAPE, row=row, column=column, value=excerpt(message))
        return None
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        # Chat templates silently drop messages of roles that they do not know.
        problem = (
            f"no known role in message {i}" if isinstance(role, str) else f"{type_name(role)} as role of message {i}"
        )
        problems.add(problem, f"use one of {', '.join(ROLES)}", row=row, column=column, value=excerpt(role))
        return None
    if content is None and message.get("tool_calls"):
        return _without_nulls(message)
    if not isinstance(content, str):
        problem = f"{type_name(content)} as content of message {i}, not text"
        problems.add(problem, _SHAPE, row=row, column=column, value=excerpt(content))
        return None
    if not content.strip() and not message.get("tool_calls"):
        problems.add(f"empty content in message {i}", "remove the message or give it text", row=row, column=column)
        return None
    return _without_nulls(message)


def check_tools(value: Any, row: int, column: str, problems: FileProblems) -> list[dict[str, Any]] | None:
    """Checks one row's function schemas: a list of dicts, JSON text of one, or null. Null keys of a list, which Arrow
    fills in, are dropped.

    Returns the schemas; None for a row without any, or with the reason added to `problems`.
    """
    tools = value
    if isinstance(value, str) and value:
        try:
            tools = json.loads(value)
        except ValueError:
            tools = value
    if not tools:
        return None
    if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools):
        return tools if isinstance(value, str) else _without_nulls(tools)
    advice = 'write [{"type": "function", "function": {"name": ..., "parameters": ...}}], as a list or as JSON text'
    what = (
        "text that is no JSON list of schemas" if isinstance(value, str) else f"{type_name(value)}, not a list of them"
    )
    problems.add(f"tools: {what}", advice, row=row, column=column, value=excerpt(value))
    return None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
