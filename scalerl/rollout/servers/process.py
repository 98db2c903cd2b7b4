"""`RolloutServer`, one supervised server process and the address at which it answers."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from scalerl.base.process import inherited_by_servers
from scalerl.errors import EXIT_USER_ERROR, RunError, UserError
from scalerl.rollout.servers.connection import KEY_VARIABLE, OPEN_PATH, ask, new_key
from scalerl.rollout.servers.purpose import POLICY, Purpose
from scalerl.rollout.servers.supervise import descendants

# Seconds that a server may take to start where nobody gives a number; less than trainer.timeout_s, so that a server
# that does not start is named with the last lines of its log.
START_TIMEOUT_S = {"cpu": 600.0, "cuda": 1500.0}

LOG_TAIL_LINES = 30
POLL_INTERVAL_S = 0.2
STOP_TIMEOUT_S = 45.0
# Seconds in which a supervisor ends after its server, whose other processes and files it removes first.
END_NOTICE_S = 5.0
PORT_START_ATTEMPTS = 3
ADDRESS_IN_USE = "address already in use"


class ServerStartError(Exception):
    """Base of the errors of a server that ended or did not answer when started; the message has its last log lines."""


class ServerArgumentsError(ServerStartError, UserError):
    """Raised for a server that refused its arguments; it would do so again."""


class ServerNotReadyError(ServerStartError, RunError):
    """Raised for a server that did not answer in time, ended for another reason than its arguments, or has less memory
    than planned.

    It may have been killed, have lost its device, or wait for a slow disk: the next start may succeed.
    """


@contextlib.contextmanager
def reserved_port(host: str = "127.0.0.1") -> Iterator[int]:
    """Yields a TCP port that a bound socket holds inside the block."""
    # Ports below the range from which the kernel picks those of outgoing connections, as such a connection could take
    # the port in the seconds of imports between the end of the block and the server's bind.
    ephemeral_low = _ephemeral_port_low()
    candidates = random.SystemRandom().sample(range(max(1024, ephemeral_low - 12000), ephemeral_low), 64)
    for port in (*candidates, 0):
        with socket.socket(address_family(host), socket.SOCK_STREAM) as holder:
            try:
                holder.bind((host, port))
            except OSError:
                continue
            yield holder.getsockname()[1]
            return
    raise OSError(f"no free TCP port on {host}: 64 ports below {ephemeral_low} and the kernel's own choice are taken")


def address_family(host: str) -> socket.AddressFamily:
    """The family of a numeric address, IPv6 without brackets."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def free_port(host: str) -> int:
    """The number of a port that is free now."""
    with reserved_port(host) as port:
        return port


def netloc(host: str, port: int) -> str:
    """HOST:PORT of a numeric address, IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url_of(host: str, port: int) -> str:
    return f"http://{netloc(host, port)}"


def _ephemeral_port_low() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        return 32768


@dataclass(eq=False)
class RolloutServer:
    """A server command under `rollout.servers.supervise`, which ends with this process, however that ends.

    url: where it will answer, such as http://127.0.0.1:30000.  env: variables to add to this process's environment.
    purpose: for errors.  key: every request must have it (`rollout.servers.connection`); a new one by default.
    ready_path: the engine's (`Engine.ready_path`).
    """

    command: Sequence[str]
    # Not in the representation: it may have secrets.
    env: Mapping[str, str] = field(repr=False)
    url: str
    log_path: Path
    start_timeout_s: float = 600.0
    purpose: Purpose = POLICY
    key: str = field(default_factory=new_key, repr=False)
    ready_path: str = OPEN_PATH
    _supervisor: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)

    def start(self) -> None:
        """Starts the process and returns; `wait_ready` waits until it answers."""
        if self._supervisor is not None:
            raise RuntimeError(f"{self.purpose.who} {self.url} was started already; make a new RolloutServer")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path.write_bytes(b"")
        environment = inherited_by_servers(os.environ) | {**self.env, KEY_VARIABLE: self.key}
        # The supervisor must import this scalerl, even if it was found only by the working directory.
        package_root = str(Path(__file__).resolve().parents[3])
        paths = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), package_root]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        self._supervisor = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "scalerl.rollout.servers.supervise",
                "--log",
                str(self.log_path),
                "--",
                *self.command,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        """Waits until GET `ready_path` answers 200, from this server and not another on the same port.

        Raises a `ServerStartError` with the server's last log lines when it ends first or start_timeout_s
        passes; the server is stopped then.
        """
        deadline = time.monotonic() + self.start_timeout_s
        # If another job's server took the port first, that one answers until this one finds the port taken and ends.
        while not (self._answers() and self._listens()):
            if not self.alive():
                code = self.exit_code()
                # argparse's code, and `run_main`'s.
                kind = ServerArgumentsError if code == EXIT_USER_ERROR else ServerNotReadyError
                raise self._start_error(kind, f"ended with exit code {code} before it was ready")
            if time.monotonic() > deadline:
                self.stop()
                raise self._start_error(
                    ServerNotReadyError,
                    f"was not ready after {self.start_timeout_s:.0f} s; raise {self.purpose.key('start_timeout_s')} if "
                    "its log shows progress",
                )
            time.sleep(POLL_INTERVAL_S)

    def alive(self) -> bool:
        return self._supervisor is not None and self._supervisor.poll() is None

    def wait_end(self) -> None:
        """Returns when the process has ended, or at once if it was never started."""
        while self.alive():
            time.sleep(POLL_INTERVAL_S)

    def exit_code(self) -> int | None:
        """The command's exit code (128 + N after signal N); None while it runs or before it started."""
        return None if self._supervisor is None else self._supervisor.poll()

    def stop(self) -> None:
        """Kills the server and everything it started, and returns when all of it is gone; may be called twice."""
        if self._supervisor is None:
            return
        # A supervisor that somebody has suspended would not see its input close.
        self._supervisor.send_signal(signal.SIGCONT)
        if self._supervisor.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._supervisor.stdin.close()
        try:
            self._supervisor.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            below = descendants(self._supervisor.pid)
            self._supervisor.kill()
            self._supervisor.wait()
            for pid in below:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def end(self) -> str:
        """Stops the server; returns how it ended, with the last lines of its log."""
        deadline = time.monotonic() + END_NOTICE_S
        while self.alive() and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_S)
        how = "was still running and was killed" if self.alive() else f"ended with exit code {self.exit_code()}"
        self.stop()
        return f"It {how}.\n{self._shown_tail()}"

    def log_tail(self, num_lines: int = LOG_TAIL_LINES) -> list[str]:
        """The last non-empty lines that the server wrote."""
        if not self.log_path.exists():
            return []
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line.rstrip() for line in lines if line.strip()][-num_lines:]

    def __enter__(self) -> RolloutServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _answers(self) -> bool:
        try:
            status, _ = ask(self.url + self.ready_path, headers={}, timeout_s=5.0)
        except (http.client.HTTPException, OSError):
            return False
        return status == 200

    def _listens(self) -> bool:
        """True if a process of this server listens on its port, or if the system does not tell."""
        assert self._supervisor is not None
        port = urllib.parse.urlsplit(self.url).port
        for pid in descendants(self._supervisor.pid):
            try:
                connections = psutil.Process(pid).net_connections("tcp")
            except psutil.AccessDenied:
                return True
            except psutil.NoSuchProcess:
                continue
            if any(conn.status == psutil.CONN_LISTEN and conn.laddr.port == port for conn in connections):
                return True
        return False

    def _start_error(self, kind: type[ServerStartError], what: str) -> ServerStartError:
        return kind(
            f"{self.purpose.who} {self.url} {what}.\n{self._shown_tail()}\n"
            f"It was started with: {' '.join(self.command)}"
        )

    def _shown_tail(self) -> str:
        tail = self.log_tail()
        shown = "\n".join(f"  | {line}" for line in tail) if tail else "  | (it wrote nothing)"
        return f"Last lines of its log {self.log_path}:\n{shown}"


def start_on_free_port(make_server: Callable[[int], RolloutServer], host: str = "127.0.0.1") -> RolloutServer:
    """Starts `make_server(port)` on a free port and waits until it is ready; retries on another if it was taken."""
    for attempt in range(1, PORT_START_ATTEMPTS + 1):
        with reserved_port(host) as port:
            server = make_server(port)
        server.start()
        try:
            server.wait_ready()
            return server
        except ServerStartError as error:
            if attempt == PORT_START_ATTEMPTS or ADDRESS_IN_USE not in str(error).lower():
                raise
        except BaseException:  # an interrupt must not leave a server behind
            server.stop()
            raise
    raise AssertionError("unreachable")
