"""Hostile programs run here: each must be bounded, fail with a reason, and leave this process and its files alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import numpy as np
import pytest

from scalerl.rewards import RewardError, code, default_compute_score, sandbox
from scalerl.rewards.sandbox import SandboxLimits, run_python

LIMITS = SandboxLimits(wall_s=30.0)


@pytest.fixture(autouse=True)
def _needs_a_sandbox():
    try:
        sandbox.check_sandbox()
    except RewardError as error:
        pytest.skip(str(error))


def fenced(source: str) -> str:
    return f"Here it is:\n```python\n{textwrap.dedent(source)}\n```\nDone."


def run(source: str, stdin: str = "", **limits):
    return run_python(textwrap.dedent(source), stdin, replace(LIMITS, **limits))


# --- the rule

SUM = {"inputs": ["1 2\n", "5 -7\n"], "outputs": ["3\n", "-2"]}


@pytest.mark.parametrize(
    ("program", "score", "failure"),
    [
        ("print(sum(map(int, input().split())))", 1.0, ""),
        ("print(sum(map(int, input().split())), '  ')\nprint()", 1.0, ""),
        ("print(3)", 0.0, "test 2: wrong output"),
        ("print('3 3')", 0.0, "test 1: wrong output"),
        ("1/0", 0.0, "test 1: exit code 1: ZeroDivisionError: division by zero"),
        ("print(3); import sys; sys.exit(4)", 0.0, "test 1: exit code 4"),
        ("def f(:", 0.0, "test 1: exit code 1: SyntaxError: invalid syntax"),
    ],
)
def test_stdin_tests(program, score, failure):
    result = default_compute_score("codecontests", fenced(program), json.dumps(SUM))
    assert result == {"score": score, "acc": score == 1.0, "failure": failure}


ASSERTS = {"asserts": ["assert add(1, 2) == 3", "assert add(5, -7) == -2"]}


@pytest.mark.parametrize(
    ("program", "score", "failure"),
    [
        ("def add(a, b):\n    return a + b", 1.0, ""),
        ("def add(a, b):\n    return 3", 0.0, "exit code 1: AssertionError"),
        ("def sub(a, b):\n    return a", 0.0, "exit code 1: NameError: name 'add' is not defined"),
        ("import sys; sys.exit(0)", 0.0, "the program ended before the tests"),
        ("import os; os._exit(0)", 0.0, "the program ended before the tests"),
    ],
)
def test_assert_tests(program, score, failure):
    result = code.compute_score(fenced(program), ASSERTS | {"inputs": None, "outputs": None})
    assert result == {"score": score, "acc": score == 1.0, "failure": failure}


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\n```py\nb\n```", "b\n"),
        ("```python\na\n```\n```\nb\n```", "a\n"),
        ("```\na\n```\n```\nb\n```", "b\n"),
        ("```cpp\na\n```", None),
        ("```python\nunclosed", "unclosed"),
        ("print(1)", "print(1)"),
        ("It prints 1.", None),
    ],
)
def test_program_of_a_response(text, program):
    assert code.extract_program(text) == program


def test_no_program_is_told():
    assert code.compute_score("It is 3.", SUM)["failure"] == "no Python block in the response"


def test_calls_of_a_named_function():
    tests = {"fn_name": "total", "inputs": np.array([[[1, 2]], [[3, 4]]]), "outputs": np.array([3, 7]), "asserts": None}
    assert code.compute_score(fenced("def total(xs):\n    return sum(xs)"), tests)["score"] == 1.0
    failures = {
        "def total(xs):\n    return 3": "test 2: wrong value",
        "def total(xs):\n    raise SystemExit": "test 1: the program ended before the function returned",
        "def total(xs):\n    return {3}": "test 1: exit code 1: TypeError: Object of type set is not JSON serializable",
        "print(3)": "the program does not define total",
    }
    for program, failure in failures.items():
        assert code.compute_score(fenced(program), tests) == {"score": 0.0, "acc": False, "failure": failure}


@pytest.mark.parametrize(
    "truth",
    [
        "{",
        "[]",
        {},
        {"inputs": ["1"]},
        {"inputs": ["1"], "outputs": []},
        {"inputs": [], "outputs": []},
        {"fn_name": "f", "inputs": ["no json"], "outputs": ["1"]},
        {"fn_name": "f", "inputs": [1], "outputs": [1]},
    ],
)
def test_bad_ground_truth(truth):
    with pytest.raises(RewardError, match="code: ground truth"):
        code.compute_score(fenced("print(3)"), truth)


# --- hostile programs


def test_environment_and_files_of_the_run_are_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("A_SECRET", "hunter2")
    secret = tmp_path / "secret.txt"
    secret.write_text("hunter2")
    secret.chmod(0o644)
    result = run(
        f"""
        import os, pathlib
        print(dict(os.environ))
        print(os.path.exists({str(secret)!r}), os.path.exists({os.getcwd()!r} + '/pyproject.toml'))
        for path in ('/etc/passwd', '/proc/self/environ', '/proc/1/environ', '/root/.bashrc', '/home', '/dev/sda'):
            print(os.path.exists(path))
        for fd in range(3, 1000):
            try: os.fstat(fd)
            except OSError: continue
            flags = os.read(fd, 100) if fd > 3 else b''
            print('fd', fd, flags)
        """
    )
    assert "hunter2" not in result.stdout and "A_SECRET" not in result.stdout
    # Descriptor 3 may be Python's own; it holds nothing of this process.
    lines = [line for line in result.stdout.splitlines()[1:] if not line.startswith("fd 3 ")]
    assert lines == ["False False", *["False"] * 6], result


def test_nothing_outside_can_be_written(tmp_path):
    tmp_path.chmod(0o777)
    result = run(
        f"""
        import os, sys
        written = []
        for place in ({str(tmp_path)!r}, '/', '/usr', '/usr/lib', '/etc', '/dev', '/root', sys.base_prefix, '/var/tmp'):
            try:
                open(place + '/hostile', 'w').write('x')
                written.append(place)
            except OSError: pass
        open('/tmp/inside', 'w').write('x')
        print(written, os.listdir('.'), os.access(sys.executable, os.W_OK))
        """
    )
    assert result.stdout == "[] ['inside', 'program.py'] False\n" or result.stdout == (
        "[] ['program.py', 'inside'] False\n"
    )
    assert list(tmp_path.iterdir()) == [] and run("import os; print(os.listdir('.'))").stdout == "['program.py']\n"


def test_no_privileges():
    result = run(
        """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        print(os.getuid() != 0, os.geteuid() != 0, os.getgroups() in ([], [65534]))
        for call in (lambda: os.setuid(0), lambda: os.chroot('/'), lambda: os.chown('program.py', 0, 0)):
            try: call(); print('done')
            except OSError as error: print(type(error).__name__)
        print(libc.mount(b'tmpfs', b'/box', b'tmpfs', 0, None), libc.umount(b'/usr'), libc.prctl(39, 0, 0, 0, 0))
        """
    )
    assert result.stdout.splitlines()[0] == "True True True", result
    assert "done" not in result.stdout and result.stdout.splitlines()[-1] == "-1 -1 1"


def test_no_network():
    server = socket.create_server(("127.0.0.1", 0))
    with server:
        result = run(
            f"""
            import socket
            for address in (('127.0.0.1', {server.getsockname()[1]}), ('1.1.1.1', 53), ('169.254.169.254', 80)):
                try: socket.create_connection(address, timeout=3); print('connected')
                except OSError as error: print('refused')
            print([name for _, name in socket.if_nameindex()])
            """
        )
    assert result.stdout.splitlines()[:3] == ["refused"] * 3, result


@pytest.mark.parametrize(
    ("source", "limits", "reason"),
    [
        ("while True: pass", {"wall_s": 1.0}, "time: more than 1 s"),
        ("while True: pass", {"cpu_s": 1}, "CPU time"),
        ("import time; time.sleep(1000)", {"wall_s": 1.0}, "time: more than 1 s"),
        ("import os, time; os.close(1); os.close(2); time.sleep(1000)", {"wall_s": 1.0}, "time: more than 1 s"),
        ("import signal; [signal.signal(s, signal.SIG_IGN) for s in (2, 15, 24)]\nwhile 1: 0", {"wall_s": 1.0}, "time"),
        ("while True: print('x' * 10000)", {}, "output: more than 1048576 bytes"),
        ("import sys\nwhile True: sys.stderr.write('x' * 10000)", {}, "output: more than"),
        ("x = bytearray(10**10)", {}, "exit code 1"),
        ("x = []\nwhile True: x.append(bytearray(10**7))", {}, "exit code 1"),
        ("open('f', 'wb').write(bytes(10**6) * 30)", {}, "exit code 1"),
        ("for i in range(20): open(str(i), 'wb').write(bytes(10**7))", {}, "exit code 1"),
        ("for i in range(10**5): open(str(i), 'wb').close()", {}, "exit code 1"),
        ("import ctypes; ctypes.string_at(0)", {}, "signal SIGSEGV"),
    ],
)
def test_limits(source, limits, reason):
    result = run(source, **limits)
    assert result.failure is not None and reason in result.failure, result.failure
    assert len(result.stdout) + len(result.stderr) < 2 * 1024**2


def test_fork_bomb_is_bounded_and_leaves_nothing():
    marker = f"bomb-{os.getpid()}"
    result = run(
        f"""
        import os, subprocess, sys
        children = 0
        try:
            while children < 500:
                subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)', {marker!r}])
                children += 1
        except (OSError, RuntimeError):
            print('stopped', flush=True)
        print(children, flush=True)
        while True: os.fork()
        """,
        num_processes=8,
        wall_s=20.0,
    )
    assert result.failure
    assert result.stdout.split()[0] == "stopped" and int(result.stdout.split()[1]) < 8
    assert not running(marker)


def running(marker: str) -> list[str]:
    """Processes that have the marker in their command."""

    def command(pid: str) -> str:
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                return file.read()
        except OSError:
            return ""

    return [pid for pid in os.listdir("/proc") if pid.isdigit() and marker in command(pid)]


def test_it_cannot_signal_what_started_it():
    result = run(
        f"""
        import os, signal
        print(os.getpid(), os.getppid())
        for pid in (os.getppid(), {os.getpid()}, {os.getppid()}, -1):
            try: os.kill(pid, signal.SIGKILL) if pid else os.killpg(0, signal.SIGKILL)
            except OSError as error: print(type(error).__name__)
        print('alive')
        """
    )
    assert result.stdout.startswith("1 0\n") and result.stdout.endswith("alive\n"), result
    assert os.getpid() and run("print(1)").stdout == "1\n"


def test_processes_it_leaves_behind_end_with_it():
    marker = f"left-{os.getpid()}"
    result = run(
        f"""
        import subprocess, sys
        subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)', {marker!r}], start_new_session=True)
        """
    )
    assert result.failure is None
    assert not running(marker)


def test_it_ends_when_the_process_that_asked_is_killed():
    marker = f"orphan-{os.getpid()}"
    sleep = f"[sys.executable, '-c', 'import time; time.sleep(60)', '{marker}']"
    program = f"import subprocess, sys; subprocess.run({sleep})"
    scorer = f"from scalerl.rewards.sandbox import *; run_python({program!r}, '', SandboxLimits(wall_s=60.0))"
    parent = subprocess.Popen([sys.executable, "-c", scorer])

    # The marker is an argument of its own in the program's child alone.
    try:
        _wait_until(lambda: running(f"\0{marker}\0"))
    finally:
        parent.kill()
        parent.wait()
    _wait_until(lambda: not running(f"\0{marker}\0"))


def _wait_until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_where_there_is_no_sandbox_it_refuses(monkeypatch, tmp_path):
    jail = tmp_path / "jail.py"
    jail.write_text(sandbox._JAIL.read_text().replace("_checked(LIBC.unshare(CLONE_OTHERS)", "_checked(-1"))
    monkeypatch.setattr(sandbox, "_JAIL", jail)
    with pytest.raises(RewardError, match=r"(?s)cannot be run safely here.*needs root, or user namespaces"):
        run("print(1)")
