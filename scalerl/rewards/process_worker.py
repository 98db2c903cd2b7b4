"""Program of one process of a ProcessPool, which reads calls and writes their results as pickles.

Usage: `python -m scalerl.rewards.process_worker TARGET MEMORY_BYTES [FILE ...]`. The files are imported first;
they register what the target uses.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


def main() -> None:
    target, memory_bytes = sys.argv[1], int(sys.argv[2])
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    # Keeps what the function prints or reads out of the protocol.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        function, path = _load(target, sys.argv[3:])
    except BaseException as error:
        _reply(replies, "broken", _cause(error, None))
        return
    # Set after the imports, since importing a large library needs more than the call.
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    loop = asyncio.new_event_loop()
    _reply(replies, "value", None)
    while header := requests.read(8):
        timeout_s, arguments = pickle.loads(requests.read(int.from_bytes(header, "little")))
        # Ends this process, whatever it does, even if its caller is gone.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, timeout_s + 5.0)
        kind, value = _call(function, path, arguments, loop)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _reply(replies, kind, value)


def _load(target: str, user_files: list[str]) -> tuple[Callable[..., Any], str | None]:
    if user_files:
        from scalerl.base.user_code import import_files

        import_files(user_files)
    source, _, name = target.rpartition(":")
    if not source.endswith(".py"):
        return getattr(importlib.import_module(source), name), None
    from scalerl.base.user_code import import_file
    from scalerl.rewards.reward_function import FunctionsAsOne

    module = import_file(Path(source), "custom_reward_function.path")
    *several, single = name.split(",")
    if several:
        return FunctionsAsOne({each: getattr(module, each) for each in several}), source
    return getattr(module, single), source


def _call(function: Callable[..., Any], path: str | None, arguments: dict[str, Any], loop: Any) -> tuple[str, Any]:
    try:
        value = function(**arguments)
        return "value", loop.run_until_complete(value) if inspect.iscoroutine(value) else value
    except BaseException as error:
        return "error", _cause(error, path)


def _cause(error: BaseException, path: str | None) -> str:
    from scalerl.rewards.reward_function import cause_of_failed_call

    return cause_of_failed_call(error, path)


def _reply(replies: BinaryIO, kind: str, value: Any) -> None:
    try:
        message = pickle.dumps((kind, value))
    except Exception as error:
        message = pickle.dumps(("error", f"its value cannot be sent to another process: {error}"))
    replies.write(len(message).to_bytes(8, "little") + message)
    replies.flush()


if __name__ == "__main__":
    main()
