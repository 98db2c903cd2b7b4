"""The program `python -m scalerl.rollout.servers.supervise --log FILE -- COMMAND`: the command ends with its parent.

The command runs in its own session and writes to FILE. Its whole process tree is killed when this process's standard
input closes (the parent has ended, however), on SIGTERM, and when the command itself ends; that includes daemons that
detached from the tree (Linux: this process is their subreaper). Exits with the command's code, 128 + N after signal N.
The command's temporary files, and files it leaves in /dev/shm when killed, are removed. Only the standard library is
used, so that it starts in a fraction of a second.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import getpass
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from scalerl.base.files import scratch_directory

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_INTERVAL_S = 0.5
KILL_TIMEOUT_S = 30.0
SCRATCH_PREFIX = "scalerl-server-"
SHARED_MEMORY = Path("/dev/shm")
# Seconds between two looks at the files that the command's processes have there.
LOOK_INTERVAL_S = 5.0
# File in the scratch directory with the names that were seen or are to come, one glob pattern per line.
SEEN_FILE = "shared_memory"
# Files of SGLang and joblib whose names contain the id of the process that created them.
OF_PROCESS = re.compile(r"(?:sem\.loky-(\d+)-|sgl_shm_.*_(\d+)_[0-9a-f]+$|multi_tokenizer_args_(\d+)$)")
# Environment variable with a random name of the server; the names of its other files begin with OWN_PREFIX and this.
SERVER_ID = "SCALERL_SERVER_ID"
OWN_PREFIX = "sglang_loads_"


def _prctl() -> Callable[[int, int], int]:
    """The function prctl(2), loaded before any fork, because a forked child must not import."""
    if not sys.platform.startswith("linux"):
        return lambda option, value: 0
    libc = ctypes.CDLL(None, use_errno=True)
    return lambda option, value: libc.prctl(option, value, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """The live processes below `pid` in the process tree, without zombies."""
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
    below_pid: list[int] = []
    queue = [pid]
    while queue:
        below = children.get(queue.pop(), [])
        below_pid += below
        queue += below
    return below_pid


def _reap() -> None:
    """Reaps every child that has ended, adopted ones included."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def kill_descendants(timeout_s: float = KILL_TIMEOUT_S) -> list[int]:
    """Kills everything below this process until nothing is left; returns the processes that survived `timeout_s`."""
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


class SharedFiles:
    """The files in /dev/shm that the processes below this one would leave there when they are killed.

    Files of others that they only read, such as the trainer's weights, have other names.
    """

    def __init__(self, scratch: Path, server_id: str) -> None:
        self._seen_file = scratch / SEEN_FILE
        self._seen_file.write_text(f"{OWN_PREFIX}{server_id}_*\n", encoding="utf-8")
        self._pids: set[int] = set()
        self._names: set[str] = set()
        self._last_look = 0.0

    def follow(self, pid: int) -> None:
        """Counts a process among those below, which may have ended before the next look."""
        self._pids.add(pid)

    def look(self, *, now: bool = False) -> None:
        """Records the files that exist now; without `now` at most every LOOK_INTERVAL_S."""
        if not now and time.monotonic() - self._last_look < LOOK_INTERVAL_S:
            return
        self._last_look = time.monotonic()
        self._pids.update(descendants(os.getpid()))
        names = set()
        for name in os.listdir(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else ():
            match = OF_PROCESS.match(name)
            if match and int(next(filter(None, match.groups()))) in self._pids:
                names.add(name)
        if new := names - self._names:
            self._names |= new
            with open(self._seen_file, "a", encoding="utf-8") as file:
                file.writelines(f"{name}\n" for name in sorted(new))


def remove_shared_files(scratch: Path) -> None:
    """Removes the files that `SharedFiles` wrote down."""
    seen = scratch / SEEN_FILE
    for pattern in seen.read_text(encoding="utf-8").splitlines() if seen.exists() else ():
        for path in SHARED_MEMORY.glob(pattern):
            with contextlib.suppress(OSError):
                if path.parent == SHARED_MEMORY and path.lstat().st_uid == os.getuid():
                    path.unlink()


def supervise(command: list[str], log_path: str) -> int:
    """Runs a command until it, standard input or the parent ends, or SIGTERM arrives; returns its exit code."""
    parent = Path(tempfile.gettempdir())
    with scratch_directory(SCRATCH_PREFIX, parent, remove_shared_files) as scratch:
        server_id = secrets.token_hex(6)
        environment = os.environ | {"TMPDIR": str(scratch), SERVER_ID: server_id}
        # This cache is worth keeping.
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(parent / f"torchinductor_{getpass.getuser()}"))
        return _supervise(command, log_path, environment, SharedFiles(scratch, server_id))


def _supervise(command: list[str], log_path: str, environment: dict[str, str], shared: SharedFiles) -> int:
    prctl = _prctl()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    stop_requested = False

    def request_stop(signum: int, frame: FrameType | None) -> None:
        nonlocal stop_requested
        stop_requested = True

    # Each signal with a handler wakes the wait below: SIGTERM, and SIGCHLD, with which the command ends.
    woken_fd, wake_fd = os.pipe()
    os.set_blocking(wake_fd, False)
    signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, request_stop)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # SIGQUIT is how a crashing SGLang ends its parent
        signal.signal(signum, signal.SIG_IGN)
    parent = os.getppid()

    def child_setup() -> None:
        for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # an ignored signal stays ignored over exec
            signal.signal(signum, signal.SIG_DFL)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # in case this process itself is killed

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
                env=environment,
            )
        except OSError as error:
            log.write(f"cannot start {command[0]}: {error}\n".encode())
            return 127
    shared.follow(process.pid)
    stdin_fd = sys.stdin.fileno()
    while not stop_requested and process.poll() is None:
        if os.getppid() != parent:  # a forked sibling may still hold the pipe open
            break
        readable, _, _ = select.select([stdin_fd, woken_fd], [], [], POLL_INTERVAL_S)
        if woken_fd in readable:
            os.read(woken_fd, 4096)
        if stdin_fd in readable and not os.read(stdin_fd, 4096):
            break
        shared.look()
    shared.look(now=True)
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
    parser = argparse.ArgumentParser(prog="python -m scalerl.rollout.servers.supervise", description=__doc__)
    parser.add_argument("--log", required=True, help="file that the command's output is appended to")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND ARG ...")
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("no command after --")
    sys.exit(supervise(command, args.log))


if __name__ == "__main__":
    main()
