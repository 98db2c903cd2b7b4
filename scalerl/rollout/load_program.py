"""`load_program`: what makes samples by a run's configuration, a program or an agent of the user's file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from scalerl.base.user_code import load_function
from scalerl.config.schema import ProgramConfig
from scalerl.rollout.gateway.agent import ARGUMENTS as AGENT_ARGUMENTS
from scalerl.rollout.gateway.agent import as_program
from scalerl.rollout.gateway.session import Parsers
from scalerl.rollout.program import KEY, Program, single_turn

ARGUMENTS = ("prompt", "servers", "tools")


def load_program(config: ProgramConfig, options: Mapping[str, Any] | None = None) -> Program:
    """Loads the function config.name of the file config.path; single_turn where no path is set.

    It is a program, an async function of ARGUMENTS, or an agent: a function whose first argument is base_url.
    options: data.chat_template_kwargs, for agents.
    Raises UserCodeError when the file does not exist or import, or does not define such a function, ValueError when it
    cannot be called with the arguments.
    """
    if config.path is None:
        return single_turn
    name, path, kind = config.name, config.path, "async function"
    function = load_function(path, name, KEY, ARGUMENTS, is_kind=_is_program_or_agent, kind=kind)
    if not _is_agent(function):
        return function
    return as_program(function, Parsers(config.tool_call_parser, config.reasoning_parser), options)


def _is_program_or_agent(value: object) -> bool:
    return inspect.iscoroutinefunction(value) or _is_agent(value)


def _is_agent(value: object) -> bool:
    return inspect.isfunction(value) and next(iter(inspect.signature(value).parameters), "") == AGENT_ARGUMENTS[0]
