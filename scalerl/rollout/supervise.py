"""`python -m scalerl.rollout.supervise --log FILE -- COMMAND ...`: run a command that never outlives its parent.

The command gets a session of its own and writes to FILE. Its whole process tree is killed when this process's standard
input closes (the parent ended, in whatever way), on SIGTERM, and when the command itself ends; daemons that detached
from the tree are included (Linux: this process is their subreaper). Exits with the command's code, 128 + N after
signal N. Standard library only: it starts in a fraction of a second.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_INTERVAL_S = 0.5
KILL_TIMEOUT_S = 30.0


def _prctl() -> Callable[[int, int], int]:
    """prctl(2), loaded before any fork: a forked child must not import."""
    if not sys.platform.startswith("linux"):
        return lambda option, value: 0
    libc = ctypes.CDLL(None, use_errno=True)
    return lambda option, value: libc.prctl(option, value, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Live processes below `pid` in the process tree, zombies excluded."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                # "pid (name) state ppid ...": the name may hold spaces and parentheses.
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:  # gone between listdir and open
            continue
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(entry))
    found: list[int] = []
    queue = [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _reap() -> None:
    """Collect every child that ended, adopted ones included."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def kill_descendants(timeout_s: float = KILL_TIMEOUT_S) -> list[int]:
    """SIGKILL everything below this process until nothing is left; returns what survived `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        alive = descendants(os.getpid())
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.01)


def supervise(command: list[str], log_path: str) -> int:
    """Run `command` until it ends, standard input closes, the parent is gone or SIGTERM comes; its exit code."""
    prctl = _prctl()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    stop_requested = False

    def request_stop(signum: int, frame: FrameType | None) -> None:
        nonlocal stop_requested
        stop_requested = True

    signal.signal(signal.SIGTERM, request_stop)
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # SIGQUIT is how a crashing SGLang ends its parent
        signal.signal(signum, signal.SIG_IGN)
    parent = os.getppid()

    def child_setup() -> None:
        for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # an ignored signal stays ignored over exec
            signal.signal(signum, signal.SIG_DFL)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # should this process itself be killed

    with open(log_path, "ab") as log:
        try:
            # This process has one thread, so preexec_fn is safe.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=child_setup,
            )
        except OSError as error:
            log.write(f"cannot start {command[0]}: {error}\n".encode())
            return 127
    stdin_fd = sys.stdin.fileno()
    while not stop_requested and process.poll() is None:
        if os.getppid() != parent:  # a forked sibling may still hold the pipe open
            break
        readable, _, _ = select.select([stdin_fd], [], [], POLL_INTERVAL_S)
        if readable and not os.read(stdin_fd, 4096):
            break
    code = process.poll()
    if code is None:
        process.kill()
        code = process.wait()
    survivors = kill_descendants()
    if survivors:
        with open(log_path, "ab") as log:
            log.write(f"still alive {KILL_TIMEOUT_S:.0f} s after SIGKILL: processes {survivors}\n".encode())
    return code if code >= 0 else 128 - code


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scalerl.rollout.supervise", description=__doc__)
    parser.add_argument("--log", required=True, help="file that the command's output is appended to")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND ARG ...")
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("no command after --")
    sys.exit(supervise(command, args.log))


if __name__ == "__main__":
    main()
