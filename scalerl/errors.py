"""Errors whose message is enough without a stack, and the wrapper of entry points that prints them."""

from __future__ import annotations

import argparse
import os
import select
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

EXIT_USER_ERROR = 2
# EX_SOFTWARE of sysexits.h: the same command may succeed when it is started again.
EXIT_FAILED = 70
EXIT_INTERRUPTED = 130
# 128 + SIGPIPE, as shells have it: whoever read the output stopped, as `head` does.
EXIT_OUTPUT_CLOSED = 141
# Set to 1 to see the stack of an error of which only the message is printed.
TRACEBACK_ENV = "SCALERL_TRACEBACK"


class UserError(ValueError):
    """Base of every error whose message alone tells the user what to change: input, config, environment."""


class RunError(RuntimeError):
    """Base of every error of a part of a run: a rank, a server or a machine failed or is missing.

    The message says which one, and its last output; the cause is not in the input or the configuration.
    """

    # Whether other processes may do what these could not.
    restart_helps = True


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors begin with `error:` as all others do, and end with the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USER_ERROR, f"error: {message}\n\n{self.format_usage()}")


def run_main(fn: Callable[..., int | None], *args: object) -> int:
    """Runs an entry point and returns its exit code; of known errors it prints only the message, on stderr.

    Returns: fn's code (None is 0), 2 for a `UserError` or a missing file, 70 for a `RunError`, 130 when interrupted,
    141 when nobody reads its output any more.
    Raises: anything else, with its stack: that is a defect of scalerl, not of the input.
    """
    try:
        code = int(fn(*args) or 0)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if not _is_output_closed():
            raise
        return EXIT_OUTPUT_CLOSED
    except Exception as error:
        cause = _known_cause(error)
        if cause is None:
            raise
        if os.environ.get(TRACEBACK_ENV) == "1":
            traceback.print_exception(error)
        print(f"{_message(cause)}", file=sys.stderr)
        return EXIT_FAILED if isinstance(cause, RunError) else EXIT_USER_ERROR


def _is_output_closed() -> bool:
    """Whether standard output is a pipe that nobody reads; what is left of the output is then dropped."""
    try:
        output = sys.stdout.fileno()
    except OSError:
        return False
    poll = select.poll()
    poll.register(output, select.POLLOUT)
    is_closed = any(events & select.POLLERR for _, events in poll.poll(0))
    if is_closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return is_closed


def _known_cause(error: BaseException) -> BaseException | None:
    """The error whose message is enough: `error`, or what a remote worker raised (in Ray's `.cause`); else None."""
    remote = getattr(error, "cause", None)
    for candidate in (remote, error):
        if isinstance(candidate, UserError | FileNotFoundError | RunError):
            return candidate
    return None


def _message(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"error: {error.filename}: {error.strerror or 'not found'}"
    return f"error: {error}"
