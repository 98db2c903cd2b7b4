"""Agents that are commands: what they see, what they give, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from scalerl.base.user_code import UserCodeError
from scalerl.config.schema import ProgramConfig
from scalerl.rewards.sandbox import SandboxedCommand, SandboxLimits
from scalerl.rollout.load_program import load_program
from scalerl.rollout.program import Sample, Servers, Tools, attempt_program
from scalerl.rollout.servers.requests import SamplingParams
from tests.unit.rollout.gateway.test_gateway import PROMPT, TOKENIZER, Policy

# What a user's agent has at the least: the standard library.
ASK = """
import json, os, sys, time, urllib.request
row = json.loads(sys.stdin.read())
def post(path, body):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers={
        "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))
def ask(messages):
    answer = post("/chat/completions", {"model": "policy", "messages": messages})
    return answer["choices"][0]["message"]["content"]
"""


def sample_of(tmp_path: Path, source: str, **config: object) -> Sample:
    (tmp_path / "agent.py").write_text(ASK + textwrap.dedent(source))
    command = shlex.join([sys.executable, str(tmp_path / "agent.py"), "--flag"])
    return asyncio.run(attempt(ProgramConfig(command=command, **config)))  # type: ignore[arg-type]


async def attempt(config: ProgramConfig) -> Sample:
    servers = Servers(Policy(), PROMPT.input_ids, SamplingParams(200), uid=7, sample_index=1, seed=5)
    return await attempt_program(load_program(config), PROMPT, servers, Tools(TOKENIZER, 0), config)


def test_a_command_talks_to_the_policy_and_its_last_line_is_the_score(tmp_path: Path) -> None:
    sample = sample_of(
        tmp_path,
        """
        first = ask(row["messages"])
        answers = [first, ask([*row["messages"], {"role": "assistant", "content": first},
                               {"role": "user", "content": "again"}])]
        print("chatter")
        print(json.dumps({"score": 0.5, "right": answers == ["a0", "a1"], "data_source": row["data_source"]}))
        """,
    )
    (trajectory,) = sample.trajectories
    assert trajectory.reward == 0.5 and len(trajectory.turns) == 2
    assert trajectory.extra == {"right": True, "data_source": PROMPT.data_source}


@pytest.mark.parametrize(
    ("last", "reward"), [('print("7")', None), ("", None), ('post("/reward", {"reward": 0.25})', 0.25)]
)
def test_without_a_score_there_is_what_it_posted_or_the_reward_function(
    tmp_path: Path, last: str, reward: float | None
) -> None:
    sample = sample_of(tmp_path, f"ask(row['messages'])\n{last}")
    assert sample.trajectories[0].reward == reward


def test_a_command_sees_its_files_and_the_gateway_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_RUN", "x")
    shown, hidden = tmp_path / "shown", tmp_path / "hidden.txt"
    shown.mkdir(mode=0o755)
    (shown / "data.txt").write_text("text")
    hidden.write_text("hidden")
    sample = sample_of(
        tmp_path,
        f"""
        import socket, subprocess
        ask(row["messages"])
        try:
            socket.create_connection(("127.0.0.1", 22), timeout=2)
        except OSError as error:
            network = type(error).__name__
        try:
            open({str(shown / "new")!r}, "w")
        except OSError as error:
            written = error.strerror
        open("/tmp/mine", "w").write("x")
        told = dict(data=open({str(shown / "data.txt")!r}).read(), hidden=os.path.exists({str(hidden)!r}),
                    network=network, written=written, secret="SECRET_OF_THE_RUN" in os.environ,
                    argument=sys.argv[1], shell=subprocess.run("echo $HOME; pwd", shell=True, text=True,
                    capture_output=True).stdout.split())
        print(json.dumps(dict(score=1.0, told=told)))
        """,
        read_only_paths=[str(shown)],
    )
    assert sample.trajectories[0].extra["told"] == {
        "data": "text",
        "hidden": False,
        "network": "ConnectionRefusedError",
        "written": "Read-only file system",
        "secret": False,
        "argument": "--flag",
        "shell": ["/box", "/box"],
    }


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("ask(row['messages'])\nsys.exit('no container') if False else os._exit(75)", "ended with exit code 75"),
        ("ask(row['messages'])\nimport ctypes; ctypes.string_at(0)", "ended with signal SIGSEGV"),
        ("ask(row['messages'])\ntime.sleep(60)", "no result within actor_rollout_ref.rollout.program.timeout_s=2"),
    ],
)
def test_failures_of_the_surroundings_leave_a_sample_out(tmp_path: Path, source: str, why: str) -> None:
    began = time.monotonic()
    sample = sample_of(tmp_path, source, timeout_s=2.0)
    assert sample.error is not None and why in sample.error and time.monotonic() - began < 20
    assert not sample.trajectories[0].turns
    # One reason for all samples that fail alike.
    assert "prompt 3" not in sample.error and "\n" not in sample.error


def test_a_mistake_in_a_command_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match=r"(?s)ended with exit code 1, on prompt 3; correct .*KeyError: 'nothing'"):
        sample_of(tmp_path, "row['nothing']")
    with pytest.raises(UserCodeError, match="ended without an answer of the policy, on prompt 3 sample 1"):
        sample_of(tmp_path, "print(json.dumps({'score': 1.0}))")


def test_a_command_that_is_not_there_is_told_before_a_run_starts(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match="there is no executable 'no_such_agent'; correct the command"):
        load_program(ProgramConfig(command="no_such_agent --x"))
    with pytest.raises(UserCodeError, match="read_only_paths: /no/such does not exist; correct the path"):
        load_program(ProgramConfig(command="true", read_only_paths=["/no/such"]))


def test_a_path_of_the_sandbox_itself_is_not_covered_by_the_machines(tmp_path: Path) -> None:
    """Arguments that are /, /tmp or /dev/null are paths in the sandbox."""
    (tmp_path / "agent.py").write_text(
        f"{ASK}\nask(row['messages'])\n"
        "open('/tmp/mine', 'w').write('x'); open('/dev/null', 'w').write('x')\n"
        f"print(json.dumps(dict(score=1.0, seen=os.path.exists({str(tmp_path / 'hidden')!r}))))\n"
    )
    (tmp_path / "hidden").write_text("")
    command = shlex.join([sys.executable, str(tmp_path / "agent.py"), "/", "/tmp", "/dev/null", "/proc"])
    (trajectory,) = asyncio.run(attempt(ProgramConfig(command=command))).trajectories
    assert trajectory.reward == 1.0 and trajectory.extra == {"seen": False}
    with pytest.raises(UserCodeError, match="read_only_paths: / would be the machine's whole system"):
        load_program(ProgramConfig(command="true", read_only_paths=["/"]))


@pytest.mark.parametrize(
    ("last", "reward"),
    [
        ('print(json.dumps({"score": 1.0, "said": "a\\u2028b"}, ensure_ascii=False))', 1.0),
        ('print("[" * 100000)', None),
    ],
)
def test_the_last_line_ends_at_a_new_line_alone(tmp_path: Path, last: str, reward: float | None) -> None:
    assert sample_of(tmp_path, f"ask(row['messages'])\n{last}").trajectories[0].reward == reward


def test_a_command_that_does_not_start_says_so(tmp_path: Path) -> None:
    """It is the command's mistake, not one of the sandbox."""
    script = tmp_path / "agent.sh"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    with pytest.raises(
        UserCodeError, match=r"(?s)exit code 127, on prompt 3; correct .*agent.sh does not start: .*interpreter"
    ):
        asyncio.run(attempt(ProgramConfig(command=str(script))))
    with pytest.raises(UserCodeError, match="No closing quotation; correct its quotes"):
        load_program(ProgramConfig(command="true 'a"))


def test_a_command_has_the_systems_programs_and_a_limit_of_memory(tmp_path: Path) -> None:
    """Also those that are links by way of /etc, and those that reserve more addresses than the limit."""
    sample = sample_of(
        tmp_path,
        """
        import mmap, subprocess
        ask(row["messages"])
        reserved = mmap.mmap(-1, 2**36, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, prot=mmap.PROT_READ)
        try:
            bytearray(9 * 2**30)
        except MemoryError:
            print(json.dumps({"score": float(subprocess.check_output(["awk", "BEGIN {print 0.5}"]))}))
        """,
    )
    assert sample.trajectories[0].reward == 0.5


def test_a_command_that_is_ended_while_it_starts_is_not_left_running() -> None:
    """At any moment of its start."""
    limits = SandboxLimits(wall_s=60)
    for delay_s in (0.0, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02) * 2:
        running = SandboxedCommand(["sleep", "60"], "", {}, [], limits)
        time.sleep(delay_s)
        began = time.monotonic()
        running.kill()
        running.wait()
        running.listener.close()
        assert time.monotonic() - began < 20


def test_all_that_a_command_started_ends_with_its_sample(tmp_path: Path) -> None:
    """With a sample that is cancelled while it waits, whose processes are in sessions of their own."""
    marker = f"marker-{os.getpid()}-{time.monotonic_ns()}"
    (tmp_path / "agent.py").write_text(
        f"{ASK}\nimport subprocess\n"
        f"sleep = [sys.executable, '-c', 'import time; time.sleep(600)', '{marker}']\n"
        "subprocess.Popen(sleep, start_new_session=True)\n"
        "ask(row['messages'])\ntime.sleep(600)\n"
    )
    config = ProgramConfig(command=shlex.join([sys.executable, str(tmp_path / "agent.py")]))

    def running() -> bool:
        return subprocess.run(["pgrep", "-f", marker], capture_output=True).returncode == 0

    async def cancelled() -> None:
        task = asyncio.ensure_future(attempt(config))
        while not running():
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not running()

    asyncio.run(cancelled())
