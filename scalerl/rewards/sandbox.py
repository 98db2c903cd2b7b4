"""Sandbox for untrusted programs, with limits on time, memory, files, processes and network."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scalerl.rewards.errors import RewardError

# Of the loopback that a command has for itself.
PORT = 8000
# Run as a file, not as a module, because it must not import the package.
_JAIL = Path(__file__).with_name("sandbox_jail.py")


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of a sandboxed program.

    wall_s: seconds from start to end.  cpu_s: CPU seconds of one process.  memory_bytes: address space of one
    process, of a command its private memory alone.  num_processes: at one time, threads included.
    file_bytes: size of one file.  disk_bytes, num_files: size and number of all files.  output_bytes: stdout and stderr
    together.
    """

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_bytes: int = 512 * 1024**2
    num_processes: int = 32
    file_bytes: int = 16 * 1024**2
    disk_bytes: int = 64 * 1024**2
    num_files: int = 4096
    output_bytes: int = 1024**2


@dataclass(frozen=True)
class SandboxResult:
    """The end of a sandboxed program.

    stdout, stderr: as far as they were read.  failure: None for exit code 0, else the limit, signal or exit code.
    """

    stdout: str
    stderr: str
    failure: str | None


def run_python(source: str, stdin: str = "", limits: SandboxLimits | None = None) -> SandboxResult:
    """Runs `source` as a program with the standard library only, in an empty working directory that is then removed.

    It runs in separate namespaces (user, mount, process, network, IPC, host name). It sees the files of the system and
    of Python (read-only), its working directory and its own processes; it has no network, not even the loopback, no
    environment variable of this process, and no privilege. It ends when its first process or this process ends.
    Not covered: side channels, and defects of the kernel, whose system calls the program can make.

    Thread-safe; takes two short-lived processes. Raises RewardError if the kernel or the container does not allow such
    namespaces: there is no weaker mode.
    """
    limits = limits or SandboxLimits()
    with _sealed_file(source, stdin) as program:
        process, status = _start(program, limits, source_bytes=len(source.encode(errors="replace")))
    return _finish(process, status, limits)


class SandboxedCommand:
    """A command in the sandbox of `run_python`, started: any executable that the sandbox sees.

    stdin: text that the command reads.  env: variables of its environment, which also has PATH, HOME, LANG and
    OMP_NUM_THREADS.
    read_only: absolute paths that it sees as they are, in addition to the system's and Python's.
    listener: a socket that listens on PORT of the command's own loopback, for this process to accept on: all of a
    network that the command has.
    Blocks for as long as a process takes to start. Raises RewardError as `run_python`.
    """

    def __init__(
        self,
        command: Sequence[str],
        stdin: str,
        env: Mapping[str, str],
        read_only: Sequence[str],
        limits: SandboxLimits,
    ) -> None:
        self.limits = limits
        ours, theirs = socket.socketpair()
        # Not on the jail's command line, where other users of the machine would see keys.
        variables = json.dumps(dict(env))
        with ours:
            with theirs, _sealed_file(variables, stdin) as program:
                self._process, self._status = _start(
                    program,
                    limits,
                    source_bytes=len(variables),
                    command=list(command),
                    read_only=list(read_only),
                    socket_fd=theirs.fileno(),
                    port=PORT,
                )
            _, fds, _, _ = socket.recv_fds(ours, 64, 1)
        if not fds:
            self.wait()
            raise RewardError("the sandbox did not start its network")
        self.listener = socket.socket(fileno=fds[0])

    def wait(self) -> SandboxResult:
        """Waits for its end, or ends it at a limit."""
        return _finish(self._process, self._status, self.limits)

    def kill(self) -> None:
        """Ends it and all that it started; `wait` returns. From any thread."""
        # The kernel ends process 1 of its namespace with the jail, and all others with that.
        self._process.kill()


@functools.cache
def check_sandbox() -> None:
    """Raises RewardError, saying what is missing, if programs cannot be sandboxed on this machine."""
    if run_python("print(1)").stdout != "1\n":
        raise RewardError("the sandbox for model-written code starts, but Python does not run in it")


@contextlib.contextmanager
def _sealed_file(source: str, stdin: str):
    """Yields a descriptor of an immutable file in memory with the program and its stdin.

    Nothing has to be fed through a pipe, so reading the output cannot deadlock with it.
    """
    import fcntl

    fd = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(source.encode(errors="replace") + stdin.encode(errors="replace"))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def _start(program: int, limits: SandboxLimits, **own: Any) -> tuple[subprocess.Popen, int]:
    """Starts the jail.  program: descriptor of its stdin.  own: what differs from one sandbox to another.

    Returns it, and the descriptor from which its report is read.
    """
    status_read, status_write = os.pipe()
    settings: dict[str, Any] = {"command": None, "read_only": [], "socket_fd": None}
    settings |= {"python_prefix": sys.base_prefix, "status_fd": status_write} | asdict(limits) | own
    try:
        process = subprocess.Popen(
            # -I -S: no code of the environment, the user's directory or site-packages runs with privileges.
            [sys.executable, "-I", "-S", str(_JAIL), json.dumps(settings)],
            stdin=program,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[status_write, *([] if settings["socket_fd"] is None else [settings["socket_fd"]])],
            env={},
            start_new_session=True,
        )
    except BaseException:
        os.close(status_read)
        raise
    finally:
        os.close(status_write)
    return process, status_read


def _finish(process: subprocess.Popen, status_read: int, limits: SandboxLimits) -> SandboxResult:
    """Reads what a sandboxed program writes, until it ends or is at a limit."""
    assert process.stdout is not None and process.stderr is not None
    with os.fdopen(status_read, "rb") as status, process.stdout, process.stderr:
        deadline = time.monotonic() + limits.wall_s
        output = {"stdout": bytearray(), "stderr": bytearray()}
        try:
            failure = _read_output(process, output, deadline, limits) or _wait(process, deadline, limits)
        finally:
            # The jail's child, process 1 of the namespace, is set to die with the jail, which kills all others.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        report = status.read()
    stdout, stderr = (bytes(output[name]).decode(errors="replace") for name in ("stdout", "stderr"))
    return SandboxResult(stdout, stderr, failure or _failure_of(report, code, stderr, limits))


def _read_output(
    process: subprocess.Popen, output: dict[str, bytearray], deadline: float, limits: SandboxLimits
) -> str | None:
    """Fills `output` until the program closes both pipes; returns the limit that it exceeded, or None."""
    with selectors.PollSelector() as selector:
        for name in output:
            selector.register(getattr(process, name), selectors.EVENT_READ, name)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                return f"time: more than {limits.wall_s:g} s"
            for key, _ in ready:
                part = os.read(key.fd, 1 << 16)
                output[key.data] += part
                if not part:
                    selector.unregister(key.fileobj)
                if sum(map(len, output.values())) > limits.output_bytes:
                    return f"output: more than {limits.output_bytes} bytes"
    return None


def _wait(process: subprocess.Popen, deadline: float, limits: SandboxLimits) -> str | None:
    """Waits for a program that may have closed its pipes and run on; returns the limit that it exceeded, or None."""
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return f"time: more than {limits.wall_s:g} s"
    return None


def _failure_of(report: bytes, jail_code: int, stderr: str, limits: SandboxLimits) -> str | None:
    if not report and jail_code < 0:
        return f"signal {signal.Signals(-jail_code).name} to the process above it: the machine's memory, or an operator"
    ended: dict[str, Any] = json.loads(report) if report else {"setup": f"exit code {jail_code}: {stderr[-500:]}"}
    if "setup" in ended:
        raise RewardError(
            f"model-written code cannot be run safely here: {ended['setup']}\n"
            "  The sandbox needs root, or user namespaces (sysctl user.max_user_namespaces > 0; in a container: "
            "CAP_SYS_ADMIN, or a seccomp profile that allows unshare and mount), and Linux 5.12 or newer."
        )
    code = ended["code"]
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        # Only the CPU limit, or the kernel when memory runs out, sends these signals in the sandbox.
        return f"signal {signal.Signals(-code).name}: more than {limits.cpu_s} s of CPU time, or the machine's memory"
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}" if code else None
