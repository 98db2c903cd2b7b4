"""Program of one process of a ProcessPool, which calls a function for each message that it receives.

Usage: `python -m scalerl.rewards.process_worker DESCRIPTOR TARGET MEMORY_BYTES [FILE ...]`. The descriptor is that of
its connection. The files are imported first; they register what the target uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def main() -> None:
    """Sends ("value", None) once the function is loaded, then for each call ("value", value) or ("error", cause)."""
    connection, target, memory_bytes = Connection(int(sys.argv[1])), sys.argv[2], int(sys.argv[3])
    try:
        function, path = _load(target, sys.argv[4:])
    except BaseException as error:
        connection.send(("error", _cause(error, None)))
        return
    # Set after the imports, since importing a large library needs more than the call.
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    loop = asyncio.new_event_loop()
    connection.send(("value", None))
    with contextlib.suppress(EOFError):
        while True:
            timeout_s, arguments = connection.recv()
            # Ends this process, whatever it does, even if its caller is gone.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, timeout_s + 5.0)
            answer = _answer(function, path, arguments, loop)
            signal.setitimer(signal.ITIMER_REAL, 0)
            try:
                connection.send(answer)
            except OSError:
                raise
            except Exception as error:
                connection.send(("error", f"its value cannot be sent to another process: {error}"))


def _load(target: str, user_files: list[str]) -> tuple[Callable[..., Any], str | None]:
    from scalerl.base.user_code import import_file, import_files
    from scalerl.rewards.reward_function import FunctionsAsOne

    import_files(user_files)
    source, _, name = target.rpartition(":")
    if not source.endswith(".py"):
        return getattr(importlib.import_module(source), name), None
    module = import_file(Path(source), "custom_reward_function.path")
    *several, single = name.split(",")
    if several:
        return FunctionsAsOne({each: getattr(module, each) for each in several}), source
    return getattr(module, single), source


def _answer(function: Callable[..., Any], path: str | None, arguments: dict[str, Any], loop: Any) -> tuple[str, Any]:
    try:
        value = function(**arguments)
        return "value", loop.run_until_complete(value) if inspect.iscoroutine(value) else value
    except BaseException as error:
        return "error", _cause(error, path)


def _cause(error: BaseException, path: str | None) -> str:
    from scalerl.rewards.reward_function import cause_of_failed_call

    return cause_of_failed_call(error, path)


if __name__ == "__main__":
    main()
