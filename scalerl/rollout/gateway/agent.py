"""Agents: what talks to a chat endpoint, and is a program by the sessions of a gateway."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import TYPE_CHECKING, Any

from scalerl.base.user_code import UserCodeError, place_of
from scalerl.rewards.manager import number_of
from scalerl.rollout.gateway.server import Gateway
from scalerl.rollout.gateway.session import Parsers, Session
from scalerl.rollout.gateway.template import ChatTemplate
from scalerl.rollout.program import KEY, Program, Servers, Tools, Trajectory

if TYPE_CHECKING:
    from scalerl.data import PromptRow

ARGUMENTS = ("base_url", "api_key", "row")
# Agents that are no coroutines run at a time, each in a thread that mostly waits.
MAX_THREADS = 1024
# Seconds in which a cancelled agent may end.
_END_S = 10.0
# Lets an agent make a sample: (gateway, base URL, key of the sample, its row) -> what the agent returns.
Call = Callable[[Gateway, str, str, "PromptRow"], Awaitable[Any]]


def as_program(
    agent: Callable[[str, str, PromptRow], Any], parsers: Parsers, options: Mapping[str, Any] | None
) -> Program:
    """The program of an agent, a coroutine function or another one, which runs in a thread.

    options: data.chat_template_kwargs.  It returns the sample's reward, a dict of `score`, `turn_rewards` (id of an
    answer -> the turn's reward) and other values, any of which may be missing, or None.
    """
    threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="agent")

    async def called(gateway: Gateway, base_url: str, key: str, row: PromptRow) -> Any:
        if inspect.iscoroutinefunction(agent):
            return await agent(base_url, key, row)
        return await asyncio.get_running_loop().run_in_executor(threads, agent, base_url, key, row)

    return wraps(agent)(program_of(called, place_of(agent), parsers, options))


def program_of(call: Call, name: str, parsers: Parsers, options: Mapping[str, Any] | None) -> Program:
    """The program whose samples `call` makes.  name: of the agent, for errors.  options: data.chat_template_kwargs."""
    gateway = Gateway()
    templates: dict[int, ChatTemplate] = {}

    async def program(prompt: PromptRow, servers: Servers, tools: Tools) -> list[Trajectory]:
        tokenizer = tools.tokenizer
        if id(tokenizer) not in templates:
            templates[id(tokenizer)] = ChatTemplate(tokenizer, options, tools.processor)
        session = Session(servers, templates[id(tokenizer)], parsers)
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def fail(error: BaseException) -> None:
            if not failed.done():
                failed.set_exception(error)

        async with gateway.serving(session, fail) as base_url:
            returned = await _first(call(gateway, base_url, session.key, prompt), failed)
        _take(name, returned, session)
        trajectories = session.trajectories()
        if not trajectories:
            raise UserCodeError(
                f"{KEY}: {name} ended without an answer of the policy, on prompt {prompt.uid} sample "
                f"{servers.sample_index}"
            )
        return trajectories

    return program


async def _first(agent: Awaitable[Any], failed: asyncio.Future[None]) -> Any:
    """What the agent returns. Raises what failed in its requests, whatever it makes of that itself."""
    task = asyncio.ensure_future(agent)
    try:
        await asyncio.wait({task, failed}, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
        return await task
    finally:
        task.cancel()
        failed.cancel()
        # So that nothing of a sample outlives it.
        await asyncio.wait({task}, timeout=_END_S)


def _take(name: str, returned: Any, session: Session) -> None:
    """Makes what an agent returned the score of the sample, and of its turns."""
    if returned is None:
        return
    values = dict(returned) if isinstance(returned, Mapping) else {"score": returned}
    try:
        session.reward_turns(values.pop("turn_rewards", {}))
    except ValueError as error:
        raise UserCodeError(f"{KEY}: {name} returned {returned!r:.200}: {error}") from error
    if (score := values.pop("score", None)) is not None:
        session.reward = score
        if number_of(score) is None:
            raise UserCodeError(
                f"{KEY}: {name} returned {returned!r:.200}; return a finite number, a dict with `score` and "
                "other values, or None for the reward function's score"
            )
    session.extra = session.extra | values
