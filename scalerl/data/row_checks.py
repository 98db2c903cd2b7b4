"""Checks of rows: the five columns of prompts, messages, tools and images; and a digest of messages."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from scalerl.data.files import Chunk
from scalerl.data.pictures import PictureError, PictureSource, digest_of, sources_of
from scalerl.data.problems import FileProblems, excerpt, type_name

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAPE = 'write it as [{"role": "user", "content": "..."}]'
_REWARD_SHAPE = 'write it as {"style": "rule", "ground_truth": "..."}'
# Takes the place of a value whose column the file does not have.
_ABSENT = object()


@dataclass(frozen=True)
class PromptColumns:
    """Names of the columns of prompts.  sees_images: False makes a row with images a problem."""

    data_source: str = "data_source"
    prompt: str = "prompt"
    images: str = "images"
    videos: str = "videos"
    tools: str = "tools"
    sees_images: bool = False

    @property
    def names(self) -> list[str]:
        """The names of the five columns that every file must have."""
        return [self.data_source, self.prompt, "ability", "reward_model", "extra_info"]

    @property
    def optional(self) -> list[str]:
        """The names of the columns that a file may have."""
        return [self.images, self.videos, self.tools]


class PromptFields(NamedTuple):
    """The checked values of a row of prompts."""

    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    messages: list[dict[str, Any]]
    reward_style: str
    images: list[PictureSource]
    tools: list[dict[str, Any]]


def check_prompt_rows(
    chunk: Chunk, columns: PromptColumns, problems: FileProblems, directory: str | os.PathLike = "."
) -> list[tuple[int, PromptFields]]:
    """Checks the rows of a chunk and returns those that can be used.  directory: of the file, for paths of images.

    Problems are added to `problems`; once there is one, rows are only checked and none is returned.
    """
    rows = []
    for row, values in chunk:
        if not values.keys() >= set(columns.names):
            # The file lacks a column, which is in `problems`: check the others.
            values = {**dict.fromkeys(columns.names, _ABSENT), **values}
        _check_text(values[columns.data_source], row, columns.data_source, problems)
        _check_text(values["ability"], row, "ability", problems, may_be_empty=True)
        _check_reward_model(values["reward_model"], row, problems)
        if values["extra_info"] is not _ABSENT:
            check_extra_info(values["extra_info"], row, "extra_info", problems)
        images = check_images(
            values, row, columns.images, columns.videos, problems, directory, sees_images=columns.sees_images
        )
        tools = check_tools(values.get(columns.tools), row, columns.tools, problems)
        messages = None
        if values[columns.prompt] is not _ABSENT:
            messages = check_messages(
                values[columns.prompt], row, columns.prompt, problems, may_have_parts=columns.sees_images
            )
        if not problems and messages is not None and images is not None:
            reward = values["reward_model"]
            fields = PromptFields(
                values[columns.data_source],
                reward["ground_truth"],
                values["extra_info"] or {},
                messages,
                reward["style"],
                images,
                tools or [],
            )
            rows.append((row, fields))
    return rows


def _check_text(value: Any, row: int, column: str, problems: FileProblems, *, may_be_empty: bool = False) -> None:
    if value is _ABSENT:
        return
    if not isinstance(value, str):
        problems.add(f"{type_name(value)}, not text", "write text", row=row, column=column, value=excerpt(value))
    elif not value and not may_be_empty:
        problems.add("empty text", "name the source of the row", row=row, column=column)


def _check_reward_model(value: Any, row: int, problems: FileProblems) -> None:
    if value is _ABSENT:
        return
    where: dict[str, Any] = {"row": row, "column": "reward_model"}
    if not isinstance(value, dict):
        problems.add(f"{type_name(value)}, not a dict", _REWARD_SHAPE, **where, value=excerpt(value))
        return
    for key in ("style", "ground_truth"):
        if key not in value:
            problems.add(f"no key '{key}' (it has: {', '.join(map(str, value)) or 'none'})", _REWARD_SHAPE, **where)
    style = value.get("style", "rule")
    if not isinstance(style, str) or not style:
        problems.add(f"{type_name(style)} as style, not a name", _REWARD_SHAPE, **where, value=excerpt(style))
    check_ground_truth(value, row, "reward_model", problems)


def check_ground_truth(reward: dict[str, Any], row: int, column: str, problems: FileProblems) -> None:
    """Adds a problem if the ground_truth of a row's reward_model is no answer."""
    where: dict[str, Any] = {"row": row, "column": column}
    truth = reward.get("ground_truth")
    if truth is None and "ground_truth" in reward and reward.get("style", "rule") == "rule":
        problems.add("null as ground_truth", "give the answer that the rule compares with", **where)
    elif (what := no_answer(truth)) is not None:
        advice = "give the answer as text or a number, or leave the row out"
        problems.add(f"{what} in ground_truth", advice, **where, value=excerpt(truth))


def no_answer(truth: Any) -> str | None:
    """The first part of a ground truth, at any depth, that is no answer (NaN, infinite, bytes), as text; else None."""
    if isinstance(truth, dict):
        return next((what for item in truth.values() if (what := no_answer(item)) is not None), None)
    if isinstance(truth, list | tuple | np.ndarray):
        return next((what for item in truth if (what := no_answer(item)) is not None), None)
    if isinstance(truth, bytes | bytearray):
        return "bytes"
    return str(float(truth)) if isinstance(truth, float | np.floating) and not math.isfinite(truth) else None


def check_extra_info(value: Any, row: int, column: str, problems: FileProblems) -> None:
    """Adds a problem if a row's extra_info is neither a dict nor null."""
    if value is not None and not isinstance(value, dict):
        problem = f"{type_name(value)}, not a dict"
        problems.add(problem, "write a dict, or null", row=row, column=column, value=excerpt(value))


def check_images(
    values: dict[str, Any],
    row: int,
    images: str,
    videos: str,
    problems: FileProblems,
    directory: str | os.PathLike,
    *,
    sees_images: bool,
) -> list[PictureSource] | None:
    """Checks one row's images and videos; returns the images, or None with the reason added to `problems`.

    images, videos: names of the columns.  directory: of the file.  sees_images: whether the model does.
    """
    if values.get(videos):
        advice = f"put frames of them into '{images}' as images, or remove the rows"
        problems.add("videos, which scalerl does not take", advice, row=row, column=videos)
        return None
    value = values.get(images)
    where: dict[str, Any] = {"row": row, "column": images}
    if value is not None and not isinstance(value, list):
        problems.add(f"{type_name(value)}, not a list of images", "write a list, or null", **where)
    elif value and not sees_images:
        problem = "images, for a model without a vision part"
        advice = (
            "give a model that takes images (with its preprocessor_config.json, and rollout.name=sglang), remove the "
            "images or the rows, or name another column with data.image_key if these are no images"
        )
        problems.add(problem, advice, **where, value=f"{len(value)} of them")
    elif value:
        try:
            return sources_of(value, directory)
        except PictureError as error:
            problems.add(error.problem, error.advice, **where)
    else:
        return []
    return None


# --- messages and tools


def check_messages(
    value: Any, row: int, column: str, problems: FileProblems, *, may_have_parts: bool = False
) -> list[dict[str, Any]] | None:
    """Checks one row's messages and drops their null keys at every depth: Arrow fills in those of other rows.

    may_have_parts: a content may be a list of parts of the types text and image.

    Returns the messages, or None with the reason added to `problems`.
    """
    if not isinstance(value, list):
        problem = f"{type_name(value)}, not a list of messages"
        problems.add(problem, _SHAPE, row=row, column=column, value=excerpt(value))
        return None
    if not value:
        problems.add("an empty list", "remove the row or give it a message", row=row, column=column)
        return None
    messages = [_check_message(message, i, row, column, problems, may_have_parts) for i, message in enumerate(value)]
    known = [message for message in messages if message is not None]
    return known if len(known) == len(messages) else None


def _check_message(
    message: Any, i: int, row: int, column: str, problems: FileProblems, may_have_parts: bool
) -> dict[str, Any] | None:
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
    if may_have_parts and isinstance(content, list) and content:
        wrong = next((part for part in content if not _is_part(part)), None)
        if wrong is None:
            return _without_nulls(message)
        problem = f"a part of message {i} that is neither text nor an image"
        advice = 'write {"type": "text", "text": ...} or {"type": "image"}, with the image itself in its own column'
        problems.add(problem, advice, row=row, column=column, value=excerpt(wrong))
        return None
    if not isinstance(content, str):
        problem = f"{type_name(content)} as content of message {i}, not text"
        problems.add(problem, _SHAPE, row=row, column=column, value=excerpt(content))
        return None
    if not content.strip() and not message.get("tool_calls"):
        problems.add(f"empty content in message {i}", "remove the message or give it text", row=row, column=column)
        return None
    return _without_nulls(message)


def _is_part(part: Any) -> bool:
    """Whether it is a part of a message. Arrow gives each the keys of all."""
    given = _without_nulls(part)
    if not isinstance(given, dict):
        return False
    if given.get("type") == "text":
        return isinstance(given.get("text"), str)
    return given == {"type": "image"}


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


class MessagesDigest:
    """The digest of rows' messages, by which a resumed run knows that its rows are those that it began with.

    It leaves out the tokens, since a run may resume with another chat template, and the rest of a row, such as a
    corrected answer.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, messages: Any, images: Sequence[PictureSource] = ()) -> None:
        """Adds the messages of the next row, and its images."""
        if images:
            messages = [messages, [digest_of(image) for image in images]]
        # What JSON has no form for, as images of a user's class, counts by its type: its text may be an address.
        text = json.dumps(messages, sort_keys=True, skipkeys=True, default=type_name)
        self._hash.update(text.encode() + b"\n")

    def hexdigest(self) -> str:
        return self._hash.hexdigest()[:32]
