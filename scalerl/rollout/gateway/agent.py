"""Agents: functions that talk to a chat endpoint, and are programs by the sessions of a gateway."""

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


def as_program(
    agent: Callable[[str, str, PromptRow], Any], parsers: Parsers, options: Mapping[str, Any] | None
) -> Program:
    """The program of an agent, a coroutine function or another one, which runs in a thread.

    options: data.chat_template_kwargs.  It returns the sample's reward, a dict of `score`, `turn_rewards` (id of an
    answer -> the turn's reward) and other values, any of which may be missing, or None.
    """
    gateway = Gateway()
    threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="agent")
    templates: dict[int, ChatTemplate] = {}

    @wraps(agent)
    async def program(prompt: PromptRow, servers: Servers, tools: Tools) -> list[Trajectory]:
        tokenizer = tools.tokenizer
        if id(tokenizer) not in templates:
            templates[id(tokenizer)] = ChatTemplate(tokenizer, options)
        session = Session(servers, templates[id(tokenizer)], parsers)
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def fail(error: BaseException) -> None:
            if not failed.done():
                failed.set_exception(error)

        async with gateway.serving(session, fail) as base_url:
            returned = await _first(_called(agent, threads, base_url, session.key, prompt), failed)
        trajectories = session.trajectories()
        if not trajectories:
            raise UserCodeError(
                f"{KEY}: {place_of(agent)} ended without an answer of the policy, on prompt {prompt.uid} sample "
                f"{servers.sample_index}"
            )
        last = trajectories[-1]
        last.reward, last.extra = session.reward, session.extra
        _take(agent, returned, last, session)
        return trajectories

    return program


async def _called(
    agent: Callable[..., Any], threads: ThreadPoolExecutor, base_url: str, key: str, prompt: PromptRow
) -> Any:
    if inspect.iscoroutinefunction(agent):
        return await agent(base_url, key, prompt)
    return await asyncio.get_running_loop().run_in_executor(threads, agent, base_url, key, prompt)


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


def _take(agent: Callable[..., Any], returned: Any, last: Trajectory, session: Session) -> None:
    """Puts what an agent returned into the trajectory that is scored, and into its turns."""
    if returned is None:
        return
    values = dict(returned) if isinstance(returned, Mapping) else {"score": returned}
    try:
        session.reward_turns(values.pop("turn_rewards", {}))
    except ValueError as error:
        raise UserCodeError(f"{KEY}: {place_of(agent)} returned {returned!r:.200}: {error}") from error
    if "score" in values:
        last.reward = values.pop("score")
        if number_of(last.reward) is None:
            raise UserCodeError(
                f"{KEY}: {place_of(agent)} returned {returned!r:.200}; return a finite number, a dict with `score` and "
                "other values, or None for the reward function's score"
            )
    last.extra = last.extra | values
