"""`tool_agent`: the program in which the policy calls tools, and an interaction answers it."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from scalerl.base.user_code import UserCodeError, cause_of, file_of, place_of
from scalerl.config.schema import ProgramConfig
from scalerl.data.pictures import with_image_urls
from scalerl.errors import RunError, UserError
from scalerl.rollout.gateway.session import Parsers, RequestError, Session
from scalerl.rollout.gateway.template import ChatTemplate, Message, arguments_of
from scalerl.rollout.program import KEY, EnvironmentFailed, Program, Servers, Tools, Trajectory
from scalerl.rollout.tools import OWN, load_interactions, load_tools, schema_of
from scalerl.tracking.timeline import Spans

if TYPE_CHECKING:
    from scalerl.data import PromptRow

log = logging.getLogger(__name__)
# What stands where a long answer of a tool was cut.
_CUT = "(truncated)"


@dataclass
class Counts:
    """What happened in a sample, which is logged and goes to the reward function in its extra_info.

    tool_rewards, turn_scores: of each call of a tool, and of each answer of an interaction.
    """

    num_tool_calls: int = 0
    num_tool_errors: int = 0
    tool_rewards: list[float] = field(default_factory=list)
    turn_scores: list[float] = field(default_factory=list)


def as_program(config: ProgramConfig, parsers: Parsers, options: Mapping[str, Any] | None) -> Program:
    """The program with the tools and interactions of the files in config.  options: data.chat_template_kwargs.

    Raises UserCodeError as `load_tools`.
    """
    tools: dict[str, Any] = {}
    interactions: dict[str, Any] = {}
    if config.tool_config_path is not None:
        tools = load_tools(config.tool_config_path, f"{KEY}.tool_config_path")
    if config.interaction_config_path is not None:
        interactions = load_interactions(config.interaction_config_path, f"{KEY}.interaction_config_path")
    templates: dict[int, ChatTemplate] = {}

    async def tool_agent(prompt: PromptRow, servers: Servers, own: Tools) -> Trajectory:
        if id(own.tokenizer) not in templates:
            templates[id(own.tokenizer)] = ChatTemplate(own.tokenizer, options, own.processor)
        session = Session(servers, templates[id(own.tokenizer)], parsers)
        counts = Counts()
        interaction = await _Interaction.begun(interactions, prompt)
        try:
            await _conversation(session, prompt, tools, interaction, config, counts)
        finally:
            await interaction.end()
        (trajectory,) = session.trajectories()
        trajectory.extra = dict(vars(counts))
        return trajectory

    return tool_agent


async def _conversation(
    session: Session,
    prompt: PromptRow,
    tools: Mapping[str, Any],
    interaction: _Interaction,
    config: ProgramConfig,
    counts: Counts,
) -> None:
    """Lets the policy answer until it calls no tool and nobody answers, or a limit is reached."""
    schemas = [schema_of(tool) for tool in tools.values()] or None
    messages, num_users = with_image_urls(prompt.messages, prompt.images), 0
    while True:
        try:
            turn = await session.answer(messages, schemas)
        except RequestError as error:
            if session.turns and error.code == "context_length_exceeded":
                return
            raise UserCodeError(
                f"{KEY}.tool_config_path: prompt {prompt.uid} with its tools: {error}; raise data.max_prompt_length, "
                "or give a chat template that writes tools (data.chat_template_path)"
            ) from error
        session.turns.append(turn)
        messages = list(turn.messages)
        if turn.output.finish_reason == "length" or _is_at(config.max_assistant_turns, len(session.turns)):
            return
        if calls := messages[-1].get("tool_calls"):
            kept = calls[: config.max_parallel_calls]
            spans = session.servers.spans
            messages += await asyncio.gather(*(_called(tools, call, prompt, config, counts, spans) for call in kept))
            continue
        if _is_at(config.max_user_turns, num_users):
            return
        with session.servers.spans("user"):
            text = await interaction.answer(messages, counts)
        if text is None:
            return
        messages.append({"role": "user", "content": text})
        num_users += 1


def _is_at(limit: int | None, number: int) -> bool:
    return limit is not None and number >= limit


async def _called(
    tools: Mapping[str, Any], call: Message, prompt: PromptRow, config: ProgramConfig, counts: Counts, spans: Spans
) -> Message:
    """The message with what a tool answers. A call that fails answers with its error: the policy may have made it."""
    function = call["function"]
    own = (prompt.extra_info.get("tools_kwargs") or {}).get(function["name"]) or {}
    counts.num_tool_calls += 1
    try:
        tool, arguments = tools[function["name"]], arguments_of(function)
        if not isinstance(arguments, dict):
            raise TypeError(f"arguments are {json.dumps(arguments)[:80]}, not an object")
        # Of tools that there are: no other text of the policy's gets onto the timeline.
        with spans(f"tool {function['name']}"):
            created = await tool.create(create_kwargs=dict(own.get("create_kwargs") or {}))
            instance = created[0] if isinstance(created, tuple) else created
            try:
                response, reward, _ = await tool.execute(instance, arguments, **(own.get("execute_kwargs") or {}))
            finally:
                await tool.release(instance, **(own.get("release_kwargs") or {}))
        text = response if isinstance(response, str) else response.text or ""
        counts.tool_rewards.append(float(reward or 0.0))
    except (EnvironmentFailed, UserError, RunError):
        # Of what is around the tool, such as a sandbox that this machine does not allow: the policy cannot mend it.
        raise
    except Exception as error:
        counts.num_tool_errors += 1
        text = f"Error: {type(error).__name__}: {error}"
        _log_mistake(tools.get(function["name"]), error)
    text = shortened(text, config.max_tool_response_length, config.tool_response_truncate_side)
    return {"role": "tool", "name": function["name"], "tool_call_id": call["id"], "content": text}


def _log_mistake(tool: Any, error: Exception) -> None:
    """Logs an error that a line of the user's tool raised, who may have to mend it. The policy's text stays out."""
    if tool is None or type(tool).__module__ == OWN:
        return
    file = file_of(type(tool))
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if lines:
        _log_once(f"{KEY}.tool_config_path: tool {tool.name!r} raised {type(error).__name__} ({file}:{lines[-1]})")


@functools.cache
def _log_once(text: str) -> None:
    log.warning("%s; the policy sees it, and num_tool_errors counts such errors", text)


def shortened(text: str, most: int, side: str) -> str:
    """A text of at most `most` characters and the mark of a cut.  side: where it is cut, left | right | middle.

    As verl has it: cut at the left keeps the beginning, at the right the end.
    """
    if len(text) <= most:
        return text
    if side == "left":
        return f"{text[:most]}...{_CUT}"
    if side == "right":
        return f"{_CUT}...{text[len(text) - most :]}"
    half = most // 2
    return f"{text[:half]}...{_CUT}...{text[len(text) - half :]}"


class _Interaction:
    """The interaction of one sample; of a sample without one, nobody answers."""

    def __init__(self, made: Any, instance: str, kwargs: dict[str, Any], uid: int) -> None:
        self.made, self.instance, self.kwargs, self.uid = made, instance, kwargs, uid

    @classmethod
    async def begun(cls, interactions: Mapping[str, Any], prompt: PromptRow) -> _Interaction:
        kwargs = dict(prompt.extra_info.get("interaction_kwargs") or {})
        if not interactions or not kwargs:
            return cls(None, "", {}, prompt.uid)
        name = str(kwargs.get("name") or next(iter(interactions)))
        if name not in interactions:
            raise UserCodeError(
                f"{KEY}.interaction_config_path: prompt {prompt.uid} asks for the interaction {name!r} "
                f"(extra_info.interaction_kwargs.name); there are {', '.join(interactions)}"
            )
        made = interactions[name]
        with _told(made, prompt.uid):
            return cls(made, await made.start_interaction(None, **kwargs), kwargs, prompt.uid)

    async def answer(self, messages: list[Message], counts: Counts) -> str | None:
        """The user's next message; None: the conversation ends."""
        if self.made is None:
            return None
        with _told(self.made, self.uid):
            is_over, text, score, _ = await self.made.generate_response(self.instance, messages, **self.kwargs)
            counts.turn_scores.append(float(score or 0.0))
            if not (is_over or text is None or isinstance(text, str)):
                raise TypeError(f"its answer is {text!r:.80}, not a text")
        return None if is_over else text

    async def end(self) -> None:
        if self.made is not None:
            with _told(self.made, self.uid):
                await self.made.finalize_interaction(self.instance, **self.kwargs)


@contextmanager
def _told(made: Any, uid: int) -> Iterator[None]:
    """Raises UserCodeError, with its line, for what an interaction raises inside the block."""
    try:
        yield
    except (EnvironmentFailed, UserError, RunError):
        raise
    except Exception as error:
        cause = cause_of(error, file_of(type(made)))
        raise UserCodeError(
            f"{KEY}.interaction_config_path: {place_of(type(made))} raised {cause}, on prompt {uid}"
        ) from error
