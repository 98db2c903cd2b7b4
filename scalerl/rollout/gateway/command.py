"""Commands that are agents: each sample is a run of one in the sandbox, where the gateway is all of the network."""

from __future__ import annotations

import asyncio
import configparser
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.base.user_code import UserCodeError
from scalerl.config.schema import ProgramConfig
from scalerl.data.pictures import with_image_urls
from scalerl.rewards.sandbox import PORT, SandboxedCommand, SandboxLimits, SandboxResult
from scalerl.rollout.gateway.agent import MAX_THREADS, program_of
from scalerl.rollout.gateway.server import Gateway
from scalerl.rollout.gateway.session import Parsers
from scalerl.rollout.program import KEY, EnvironmentFailed, Program

if TYPE_CHECKING:
    from scalerl.data import PromptRow

COMMAND = f"{KEY}.command"
# The exit code EX_TEMPFAIL of sysexits.h: not the command has failed, but what is around it.
ENVIRONMENT_FAILED = 75
# Of a sample that has no limit of time: more than any run takes.
_NO_LIMIT_S = 10**6
LIMITS = SandboxLimits(
    wall_s=_NO_LIMIT_S,
    cpu_s=_NO_LIMIT_S,
    memory_bytes=8 * 2**30,
    num_processes=256,
    file_bytes=2**28,
    disk_bytes=2**30,
    num_files=2**16,
    output_bytes=2**24,
)
# Of what a command wrote, in a message.
_MAX_SHOWN = 2000


def from_anywhere(config: ProgramConfig) -> ProgramConfig:
    """The configuration with the absolute paths of the command and of the files that it names.

    Raises UserCodeError where there is no such command or path.
    """
    if config.command is None:
        return config
    try:
        executable, *arguments = shlex.split(config.command) or [""]
    except ValueError as error:
        raise UserCodeError(f"{COMMAND}={config.command}: {error}; correct its quotes") from error
    found = shutil.which(executable)
    if found is None:
        raise UserCodeError(f"{COMMAND}={config.command}: there is no executable {executable!r}; correct the command")
    paths = [os.path.abspath(os.path.expanduser(path)) for path in config.read_only_paths]
    if missing := [path for path in paths if not os.path.exists(path)]:
        raise UserCodeError(f"{KEY}.read_only_paths: {missing[0]} does not exist; correct the path")
    if "/" in paths:
        raise UserCodeError(f"{KEY}.read_only_paths: / would be the machine's whole system; name the paths of need")
    arguments = [os.path.abspath(text) if os.path.exists(text) else text for text in arguments]
    return replace(config, command=shlex.join([os.path.abspath(found), *arguments]), read_only_paths=paths)


def as_program(config: ProgramConfig, parsers: Parsers, options: Mapping[str, Any] | None) -> Program:
    """The program that runs config.command for each sample.  options: data.chat_template_kwargs.

    The command has OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY in its environment, and
    the row as one JSON object on its stdin. A JSON object with `score` as the last line of its stdout is the result, as
    that of an agent; without one there is none.
    Raises UserCodeError as `from_anywhere`; a sample raises it, with the end of stderr, for an exit code that is not 0,
    and EnvironmentFailed, with the last line of stderr, for exit code 75, a limit of the sandbox and a signal.
    """
    config = from_anywhere(config)
    assert config.command is not None, "asked for"
    threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="command")
    run = partial(_run, threads, shlex.split(config.command), config)
    return program_of(run, f"{COMMAND}={config.command}", parsers, options)


async def _run(
    threads: ThreadPoolExecutor,
    command: list[str],
    config: ProgramConfig,
    gateway: Gateway,
    base_url: str,
    key: str,
    row: PromptRow,
) -> dict[str, Any] | None:
    """Runs the command for one sample. However this ends, the command and all that it started have ended before."""
    loop = asyncio.get_running_loop()
    started: asyncio.Future[SandboxedCommand] = loop.create_future()

    def start_and_wait() -> SandboxResult:
        # In one thread: the kernel ends the command with the thread that started it.
        running = SandboxedCommand(command, _row_text(row), _environment(key), list(_seen(command, config)), LIMITS)
        loop.call_soon_threadsafe(started.set_result, running)
        return running.wait()

    ended = loop.run_in_executor(threads, start_and_wait)
    try:
        await asyncio.wait({started, ended}, return_when=asyncio.FIRST_COMPLETED)
        if started.done():
            async with gateway.listening(started.result().listener):
                await asyncio.wait({ended})
    finally:
        await asyncio.shield(_end(started, ended))
    return _result(ended.result(), config, row)


async def _end(started: asyncio.Future[SandboxedCommand], ended: asyncio.Future[SandboxResult]) -> None:
    """Ends a command, even one that is just being started."""
    await asyncio.wait({started, ended}, return_when=asyncio.FIRST_COMPLETED)
    if started.done():
        running = started.result()
        running.kill()
        running.listener.close()
    await asyncio.wait({ended})


def _environment(key: str) -> dict[str, str]:
    root = f"http://127.0.0.1:{PORT}"
    return {
        "OPENAI_BASE_URL": f"{root}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": key,
        "PYTHONDONTWRITEBYTECODE": "1",
        "USER": "nobody",
    }


def _row_text(row: PromptRow) -> str:
    names = ("uid", "data_source", "messages", "tools", "ground_truth", "extra_info")
    values = {name: getattr(row, name) for name in names} | {"messages": with_image_urls(row.messages, row.images)}
    return json.dumps(values, default=str) + "\n"


def _seen(command: list[str], config: ProgramConfig) -> Iterator[str]:
    """The paths that a command needs: files that it names, the environment of its Python, and those of the user."""
    yield from config.read_only_paths
    yield from (text for text in command if os.path.isabs(text) and os.path.exists(text) and not _is_own(text))
    environment = Path(command[0]).parent.parent
    if (settings := environment / "pyvenv.cfg").is_file():
        yield str(environment)
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        parser.read_string(f"[venv]\n{settings.read_text(encoding='utf-8')}")
        yield str(Path(parser["venv"]["home"]).parent)


def _is_own(path: str) -> bool:
    """Whether the sandbox makes this path itself, so that the machine's path must not cover it."""
    return path in ("/", "/tmp") or f"{path}/".startswith(("/dev/", "/proc/", "/sys/"))


def _result(result: SandboxResult, config: ProgramConfig, row: PromptRow) -> dict[str, Any] | None:
    """What a command gave. Raises what `as_program` says."""
    if result.failure is not None:
        said, stderr = f"{COMMAND} ended with {result.failure}", result.stderr.strip()[-_MAX_SHOWN:]
        code = result.failure.partition("exit code ")[2]
        if not code or code == str(ENVIRONMENT_FAILED):
            # Without the prompt: what fails alike in many samples is counted as one reason.
            last = stderr.rpartition("\n")[2]
            raise EnvironmentFailed(f"{said}: {last}" if last else said)
        said += f", on prompt {row.uid}; correct {config.command}"
        raise UserCodeError(f"{said}:\n{stderr}" if stderr else said)
    # Not splitlines, which also splits at characters that JSON may have in a text.
    last = result.stdout.strip().rpartition("\n")[2]
    try:
        given = json.loads(last)
    except (ValueError, RecursionError):
        return None
    return given if isinstance(given, dict) and "score" in given else None
