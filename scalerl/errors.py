"""Errors that a user caused and can mend, and the wrapper that prints them without a stack."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
# Set to 1 to see the stack of an error that is printed as one message.
TRACEBACK_ENV = "SCALERL_TRACEBACK"


class UserError(ValueError):
    """Base of every error whose message alone tells the user what to change: input, config, environment."""


def run_main(fn: Callable[..., int | None], *args: object) -> int:
    """Run an entry point and return its exit code; a user's error becomes one message on stderr.

    Returns: fn's code (None is 0), 2 for a `UserError` or a missing file, 130 when interrupted.
    Raises: anything else, with its stack: that is a defect of scalerl, not of the input.
    """
    try:
        return int(fn(*args) or 0)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        cause = _user_cause(error)
        if cause is None:
            raise
        if os.environ.get(TRACEBACK_ENV) == "1":
            traceback.print_exception(error)
        print(f"{_message(cause)}", file=sys.stderr)
        return EXIT_USER_ERROR


def _user_cause(error: BaseException) -> BaseException | None:
    """The error that a user can mend: `error` itself, or what a remote worker raised (Ray keeps it in `.cause`)."""
    remote = getattr(error, "cause", None)
    for candidate in (remote, error):
        if isinstance(candidate, UserError | FileNotFoundError):
            return candidate
    return None


def _message(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"error: {error.filename}: {error.strerror or 'not found'}"
    return f"error: {error}"
