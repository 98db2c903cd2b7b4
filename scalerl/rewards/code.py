"""Reward rule of programming tasks: runs the last Python block of the response against tests, in a sandbox."""

from __future__ import annotations

import json
import math
import secrets
import time
from dataclasses import replace
from typing import Any

from scalerl.rewards.code_block import DEFINES, READS_INPUT, extract_program
from scalerl.rewards.errors import RewardError
from scalerl.rewards.sandbox import SandboxLimits, check_sandbox, run_python

# Seconds for all tests of a sample; must be within reward_model.timeout_s.
TOTAL_TIME_S = 40.0
# Two decimals are equal that differ by less than this, and less than this share.
ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE = 1e-8, 1e-5
# Reads the tests after the program has run, and reports their end by a word that the program did not know.
_ASSERTS = """

import json as _json, sys as _sys
_tests, _word = _json.loads(_sys.stdin.readline())
for _test in _tests:
    exec(_test, globals())
print(_word, flush=True)
"""
# Calls a function of the program; stdin holds the program and the arguments. The program's own output is dropped, and
# its stdin is empty. Solutions omit the import of these modules where a site's tasks name a function.
_CALL = """
import io as _io, json as _json, os as _os, sys as _sys
_task = _json.load(_sys.stdin)
_result = _os.fdopen(_os.dup(1), "w")
_os.dup2(2, 1)
_sys.stdin = _io.StringIO()
_names = {"__name__": "solution"}
exec('''
import bisect, collections, copy, datetime, functools, heapq, itertools, json, math, operator, random, re, string, sys
from typing import *
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
del pow
''', _names)
exec(compile(_task["program"], "solution.py", "exec"), _names)
_owner = _names["Solution"]() if "Solution" in _names else None
_function = getattr(_owner, _task["fn_name"], None) or _names[_task["fn_name"]]
_json.dump(_function(*_task["arguments"]), _result)
_result.flush()
"""


def compute_score(solution_str: str, ground_truth: Any, limits: SandboxLimits | None = None) -> dict[str, Any]:
    """Scores a program by its tests.

    Returns score: 1.0 if every test passes, else 0.0; acc: the same as a bool; failure: "", or why the first test
    failed.

    ground_truth: a dict, or its JSON:
      {"inputs": [str, ...], "outputs": [str, ...]}: one run for each; stdout equals, word by word in each line that is
        not empty. Decimals may differ by ABSOLUTE_TOLERANCE or RELATIVE_TOLERANCE.
      {"fn_name": str, "inputs": [[argument, ...], ...], "outputs": [value, ...]}: one call for each, of the function or
        of that method of a class Solution; the value equals, as JSON, decimals as above. An input may be text with the
        JSON of an argument on each line, and its output the JSON of the value; [value] stands for the value, too.
      {"asserts": [str, ...]}: Python statements, run after the program in its process. A program that tries to cheat
        can pass them (by redefining what they call): prefer the others if you can.
    Limits: SandboxLimits for each run, TOTAL_TIME_S for all of them.

    Raises RewardError for another ground_truth, and if no sandbox is possible (see run_python).
    """
    tests = _tests_of(ground_truth)
    check_sandbox()
    program = extract_program(solution_str, READS_INPUT if tests.keys() == {"inputs", "outputs"} else DEFINES)
    failure = "no Python block in the response" if program is None else _first_failure(program, tests, limits)
    return {"score": float(not failure), "acc": not failure, "failure": failure}


def _first_failure(program: str, tests: dict[str, Any], limits: SandboxLimits | None) -> str:
    limits = limits or SandboxLimits()
    if tests.get("fn_name", "") not in program:
        return f"the program does not define {tests['fn_name']}"
    if "asserts" in tests:
        return _run_asserts(program, tests["asserts"], limits)
    deadline = time.monotonic() + TOTAL_TIME_S
    for number, (given, wanted) in enumerate(zip(tests["inputs"], tests["outputs"], strict=True), start=1):
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return f"test {number}: time: more than {TOTAL_TIME_S:g} s for all tests"
        allowed = replace(limits, wall_s=min(limits.wall_s, remaining_s))
        if fn_name := tests.get("fn_name"):
            task = {"program": program, "fn_name": fn_name, "arguments": given}
            result = run_python(_CALL, json.dumps(task), allowed)
        else:
            result = run_python(program, given, allowed)
        if result.failure:
            return f"test {number}: {result.failure}{_last_line(result.stderr)}"
        if fn_name and not result.stdout:
            return f"test {number}: the program ended before the function returned"
        if not (_is_value(result.stdout, wanted) if fn_name else _is_output(result.stdout, wanted)):
            return f"test {number}: wrong {'value' if fn_name else 'output'}"
    return ""


def _run_asserts(program: str, asserts: list[str], limits: SandboxLimits) -> str:
    word = secrets.token_hex(16)
    result = run_python(program + _ASSERTS, json.dumps([asserts, word]) + "\n", limits)
    if result.failure:
        return f"{result.failure}{_last_line(result.stderr)}"
    return "" if result.stdout.rstrip().endswith(word) else "the program ended before the tests"


def _tests_of(ground_truth: Any) -> dict[str, Any]:
    try:
        tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    except json.JSONDecodeError as error:
        raise RewardError(f"code: ground truth {ground_truth!r:.200} is no JSON: {error}") from None
    if isinstance(tests, dict):
        # Parquet gives numpy arrays, and gives every row all keys of a dict column, with None for missing values.
        lists = {key: _as_lists(tests[key]) for key in ("inputs", "outputs", "asserts") if _has_items(tests.get(key))}
        if lists.keys() == {"asserts"}:
            return {"asserts": list(map(str, lists["asserts"]))}
        if lists.keys() == {"inputs", "outputs"} and len(lists["inputs"]) == len(lists["outputs"]):
            if fn_name := tests.get("fn_name"):
                return {"fn_name": str(fn_name)} | _calls_of(lists["inputs"], lists["outputs"])
            return {key: list(map(_as_text, value)) for key, value in lists.items()}
    raise RewardError(
        f"code: ground truth {tests!r:.200}: needs lists 'inputs' and 'outputs' of one length, or a list 'asserts', "
        "at least one test; correct reward_model.ground_truth"
    )


def _calls_of(inputs: list[Any], outputs: list[Any]) -> dict[str, Any]:
    """The arguments and the value of each call; each is the value itself, or its JSON where the arguments are text."""
    try:
        texts = [isinstance(given, str) for given in inputs]
        arguments = [
            [json.loads(line) for line in given.splitlines()] if text else list(given)
            for given, text in zip(inputs, texts, strict=True)
        ]
        values = [
            json.loads(wanted) if text and isinstance(wanted, str) else wanted
            for wanted, text in zip(outputs, texts, strict=True)
        ]
    except (json.JSONDecodeError, TypeError) as error:
        raise RewardError(
            f"code: ground truth with fn_name: inputs {inputs!r:.200}, outputs {outputs!r:.200}: an input is a list of "
            f"arguments, or text with the JSON of one on each line ({error}); correct reward_model.ground_truth"
        ) from None
    return {"inputs": arguments, "outputs": values}


def _as_lists(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    return [_as_lists(item) for item in value] if isinstance(value, list | tuple) else value


def _as_text(lines: Any) -> str:
    return "\n".join(map(str, lines)) if isinstance(lines, list) else str(lines)


def _has_items(value: Any) -> bool:
    return value is not None and not isinstance(value, str) and len(value) > 0


def _is_output(stdout: str, wanted: str) -> bool:
    got_lines, wanted_lines = (
        [line.split() for line in text.splitlines() if line.strip()] for text in (stdout, wanted)
    )
    return len(got_lines) == len(wanted_lines) and all(
        len(got) == len(words) and all(map(_is_word, got, words))
        for got, words in zip(got_lines, wanted_lines, strict=True)
    )


def _is_word(got: str, wanted: str) -> bool:
    if got == wanted:
        return True
    # "1.0" may be printed as 1, but "1" not as 1.0.
    return ("." in wanted or "e" in wanted.lower()) and _is_close(_decimal(got), _decimal(wanted))


def _decimal(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan


def _is_close(got: float, wanted: float) -> bool:
    return math.isclose(got, wanted, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)


def _is_value(stdout: str, wanted: Any) -> bool:
    try:
        got = json.loads(stdout)
    except (ValueError, RecursionError):
        return False
    return _is_same(got, wanted) or (isinstance(wanted, list) and len(wanted) == 1 and _is_same(got, wanted[0]))


def _is_same(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, list) and isinstance(got, list):
        return len(got) == len(wanted) and all(map(_is_same, got, wanted))
    if isinstance(wanted, dict) and isinstance(got, dict):
        return got.keys() == wanted.keys() and all(_is_same(got[key], wanted[key]) for key in wanted)
    if isinstance(wanted, float) and isinstance(got, int | float):
        return _is_close(_decimal(str(got)), wanted)
    return got == wanted


def _last_line(stderr: str) -> str:
    lines = stderr.strip().splitlines()
    return f": {lines[-1][:200]}" if lines else ""
