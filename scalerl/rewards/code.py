"""Reward rule of programming tasks: runs the last Python block of the response against tests, in a sandbox."""

from __future__ import annotations

import json
import re
import secrets
import time
from dataclasses import replace
from typing import Any

from scalerl.rewards.errors import RewardError
from scalerl.rewards.sandbox import SandboxLimits, check_sandbox, run_python

# Seconds for all tests of a sample; must be within reward_model.timeout_s.
TOTAL_TIME_S = 40.0
_BLOCK = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
# Reads the tests after the program has run, and reports their end by a word that the program did not know.
_ASSERTS = """

import json as _json, sys as _sys
_tests, _word = _json.loads(_sys.stdin.readline())
for _test in _tests:
    exec(_test, globals())
print(_word, flush=True)
"""


def extract_program(solution_str: str) -> str | None:
    """The program in a response; None if there is none.

    It is the last closed ``` block marked python, py or python3, else the last one without a mark.
    """
    blocks = _BLOCK.findall(solution_str)
    marked = [body for mark, body in blocks if mark.lower() in ("python", "py", "python3")]
    plain = [body for mark, body in blocks if not mark]
    candidates = marked or plain
    return candidates[-1] if candidates else None


def compute_score(solution_str: str, ground_truth: Any, limits: SandboxLimits | None = None) -> dict[str, Any]:
    """Scores a program by its tests.

    Returns score: 1.0 if every test passes, else 0.0; acc: the same as a bool; failure: "", or why the first test
    failed.

    ground_truth: a dict, or its JSON:
      {"inputs": [str, ...], "outputs": [str, ...]}: one run for each; stdout equals, line by line, without white space
        at the end of lines and of the text.
      {"asserts": [str, ...]}: Python statements, run after the program in its process. A program that tries to cheat
        can pass them (by redefining what they call): prefer inputs and outputs if you can.
    Limits: SandboxLimits for each run, TOTAL_TIME_S for all of them.

    Raises RewardError for another ground_truth, and if no sandbox is possible (see run_python).
    """
    tests = _tests_of(ground_truth)
    check_sandbox()
    program = extract_program(solution_str)
    failure = "no Python block in the response" if program is None else _first_failure(program, tests, limits)
    return {"score": float(not failure), "acc": not failure, "failure": failure}


def _first_failure(program: str, tests: dict[str, list[str]], limits: SandboxLimits | None) -> str:
    limits = limits or SandboxLimits()
    if "asserts" in tests:
        return _run_asserts(program, tests["asserts"], limits)
    deadline = time.monotonic() + TOTAL_TIME_S
    for number, (stdin, wanted) in enumerate(zip(tests["inputs"], tests["outputs"], strict=True), start=1):
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return f"test {number}: time: more than {TOTAL_TIME_S:g} s for all tests"
        result = run_python(program, stdin, replace(limits, wall_s=min(limits.wall_s, remaining_s)))
        if result.failure:
            return f"test {number}: {result.failure}{_last_line(result.stderr)}"
        if _lines(result.stdout) != _lines(wanted):
            return f"test {number}: wrong output"
    return ""


def _run_asserts(program: str, asserts: list[str], limits: SandboxLimits) -> str:
    word = secrets.token_hex(16)
    result = run_python(program + _ASSERTS, json.dumps([asserts, word]) + "\n", limits)
    if result.failure:
        return f"{result.failure}{_last_line(result.stderr)}"
    return "" if result.stdout.rstrip().endswith(word) else "the program ended before the tests"


def _tests_of(ground_truth: Any) -> dict[str, list[str]]:
    try:
        tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    except json.JSONDecodeError as error:
        raise RewardError(f"code: ground truth {ground_truth!r:.200} is no JSON: {error}") from None
    if isinstance(tests, dict):
        # Parquet gives numpy arrays, and gives every row all keys of a dict column, with None for missing values.
        lists = {
            key: list(map(str, tests[key])) for key in ("inputs", "outputs", "asserts") if _has_items(tests.get(key))
        }
        if lists.keys() == {"asserts"}:
            return lists
        if lists.keys() == {"inputs", "outputs"} and len(lists["inputs"]) == len(lists["outputs"]):
            return lists
    raise RewardError(
        f"code: ground truth {tests!r:.200}: needs lists 'inputs' and 'outputs' of one length, or a list 'asserts', "
        "at least one test; correct reward_model.ground_truth"
    )


def _has_items(value: Any) -> bool:
    return value is not None and not isinstance(value, str) and len(value) > 0


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _last_line(stderr: str) -> str:
    lines = stderr.strip().splitlines()
    return f": {lines[-1][:200]}" if lines else ""
