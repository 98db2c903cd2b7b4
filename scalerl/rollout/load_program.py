"""`load_program`: what makes samples by a run's configuration: a program, an agent, a command, or tools."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from scalerl.base.user_code import absolute, load_function
from scalerl.config.schema import ProgramConfig
from scalerl.rollout import tool_agent
from scalerl.rollout.gateway import command
from scalerl.rollout.gateway.agent import ARGUMENTS as AGENT_ARGUMENTS
from scalerl.rollout.gateway.agent import as_program
from scalerl.rollout.gateway.session import Parsers
from scalerl.rollout.program import KEY, Program, single_turn

ARGUMENTS = ("prompt", "servers", "tools")


def load_program(config: ProgramConfig, options: Mapping[str, Any] | None = None) -> Program:
    """Loads the function config.name of the file config.path, what runs config.command, or what calls tools; without
    any of them single_turn.

    It is a program, an async function of ARGUMENTS, or an agent: a function whose first argument is base_url.
    options: data.chat_template_kwargs, for agents.
    Raises UserCodeError when the file does not exist or import, or does not define such a function, ValueError when it
    cannot be called with the arguments.
    """
    parsers = Parsers(config.tool_call_parser, config.reasoning_parser)
    if config.command is not None:
        return command.as_program(config, parsers, options)
    if config.has_tools:
        return tool_agent.as_program(config, parsers, options)
    if config.path is None:
        return single_turn
    name, path, kind = config.name, config.path, "async function"
    function = load_function(path, name, KEY, ARGUMENTS, is_kind=_is_program_or_agent, kind=kind)
    if not _is_agent(function):
        return function
    return as_program(function, parsers, options)


def from_anywhere(config: ProgramConfig) -> ProgramConfig:
    """The configuration with absolute paths, by which processes on other nodes find the files.

    Raises UserCodeError for a command that does not exist.
    """
    names = ("path", "tool_config_path", "interaction_config_path")
    paths = {name: absolute([path])[0] for name in names if (path := getattr(config, name)) is not None}
    return command.from_anywhere(replace(config, **paths))


def _is_program_or_agent(value: object) -> bool:
    return inspect.iscoroutinefunction(value) or _is_agent(value)


def _is_agent(value: object) -> bool:
    return inspect.isfunction(value) and next(iter(inspect.signature(value).parameters), "") == AGENT_ARGUMENTS[0]
