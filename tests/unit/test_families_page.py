"""The page of families says what tests showed: no more, whoever ran them, and whatever became of the run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.families import cells_of
from tests.lanes import full

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests import families

def pytest_addoption(pluginmanager):
    pluginmanager.register(families)
"""
# A marker that is not known is an error, as it is here.
INI = """
[pytest]
addopts = --strict-markers
markers =
    shows(*things, **where): what the page says
"""
TESTS = """
import time
import pytest

shows = pytest.mark.shows

@shows("train step", "log-probs")
@pytest.mark.parametrize(("family", "layout"), [("qwen3", "one"), ("qwen3", "tp2"), ("llama", "tp2_dp2")])
def test_numbers(family, layout):
    assert (family, layout) != ("qwen3", "tp2"), "other numbers"

@shows("log-probs", layout="one", dtype="bfloat16")
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_low(family):
    assert family == "qwen3"

@shows("sync", "serve", family="model", server="kind")
@pytest.mark.parametrize(("kind", "tp_size", "ep_size"), [("sglang", 2, 2), ("embedded", 1, 1)])
@pytest.mark.parametrize("model", ["qwen3"])
def test_server(model, kind, tp_size, ep_size):
    pass

@pytest.fixture
def broken():
    raise OSError("no such server")

@shows("merge", family="qwen3", layout="one")
def test_that_does_not_begin(broken):
    pass

@shows("save/load", family="qwen3", layout="one")
def test_that_is_skipped():
    pytest.skip()

@shows("serve", family="qwen3", layout="one")
@pytest.mark.xfail(strict=False)
def test_that_is_expected_to_fail():
    pass

def test_without_a_mark():
    pass
"""
QWEN3 = """
## qwen3

| layout | train step | log-probs | save/load | merge | sync | serve |
|---|---|---|---|---|---|---|
| one | ok | ok, bfloat16 |  | FAILED (2) |  |  |
| tp2 | FAILED (1) | FAILED (1) |  |  |  |  |
| embedded |  |  |  |  | ok | ok |
| sglang tp2_ep2 |  |  |  |  | ok | ok |

1. [`test_all.py::test_numbers[qwen3-tp2]`](../test_all.py#L7): AssertionError: other numbers

2. [`test_all.py::test_that_does_not_begin`](../test_all.py#L27): OSError: no such server
"""
LLAMA = """
## llama

| layout | train step | log-probs | save/load | merge | sync | serve |
|---|---|---|---|---|---|---|
| one |  | bfloat16 FAILED (1) |  |  |  |  |
| tp2_dp2 | ok | ok |  |  |  |  |
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text(INI)
    (tmp_path / "test_all.py").write_text(TESTS)
    return tmp_path


def start(project: Path, part: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--families",
        f"out/families/{part}.json",
        *arguments,
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # As from a terminal: a suite in the background of a shell ignores SIGINT, and its children would too.
    interruptible = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, cwd=project, env=environment, preexec_fn=interruptible, **pipes)


def page_after(project: Path, part: str, *arguments: str) -> str:
    output, _ = start(project, part, *arguments).communicate(timeout=300)
    assert f"what tests showed of each family: {project / 'out/families.md'}" in output, output
    return (project / "out" / "families.md").read_text()


@pytest.mark.parametrize("arguments", [(), full(("-n", "2"), id="xdist")])
def test_cells_and_failures(project: Path, arguments: tuple[str, ...]) -> None:
    page = page_after(project, "all", *arguments)
    assert ", ended: 3 failed, 6 passed, 2 skipped\n" in page
    assert page[page.index("\n## llama") :].startswith(LLAMA) and page.endswith(QWEN3)


def test_parts_make_one_page_and_say_what_was_left_out(project: Path) -> None:
    assert "\n## qwen3\n" not in page_after(project, "low", "-k", "test_low and llama")
    page = page_after(project, "numbers", "-k", "test_numbers", "-x")
    # The first of its tests that fails ends the run: a cell that it would have shown is empty.
    assert "-k 'test_low and llama'`" in page and "ended: 1 failed\n" in page
    assert re.search(
        r"-k test_numbers -x`, started .* NOT WHOLE \(stopping after 1 failures\): 1 failed, 1 passed\n", page
    )
    assert "| one |  | bfloat16 FAILED (1) |  |  |  |  |\n" in page and "tp2_dp2" not in page
    assert "| one | ok | ok |  |  |  |  |\n| tp2 | FAILED (1) | FAILED (1) |" in page


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended(project: Path, signum: signal.Signals) -> None:
    (project / "test_long.py").write_text(
        "import time\n\ndef test_long():\n    open('here', 'w')\n    time.sleep(60)\n"
    )
    with start(project, "long", "-k", "test_numbers or test_long") as run:
        deadline = time.monotonic() + 60
        while not (project / "here").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        run.send_signal(signum)
        run.communicate(timeout=300)
    page = page_after(project, "other", "-k", "test_without_a_mark")
    if signum == signal.SIGKILL:
        assert "not ended, or killed: no test\n" in page and "##" not in page
    else:
        assert "NOT WHOLE (exit code 2): 1 failed, 2 passed\n" in page and "| tp2_dp2 | ok | ok |" in page


@pytest.mark.parametrize(
    ("things", "said"),
    [
        (("training",), {"family": "a", "layout": "one"}),
        ((), {"family": "a", "layout": "one"}),
        (("merge",), {"layout": "one"}),
        (("merge",), {"family": "a"}),
        (("merge",), {"family": "a", "layout": "one", "kind": "b"}),
    ],
)
def test_a_mark_that_says_too_little_is_refused(things: tuple[str, ...], said: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="a family and a layout"):
        cells_of(things, said, {})


def test_a_mark_that_is_wrong_is_named(project: Path) -> None:
    (project / "test_all.py").write_text("import pytest\n\n@pytest.mark.shows('merge')\ndef test_it():\n    pass\n")
    output, _ = start(project, "all").communicate(timeout=300)
    assert "ERROR: test_all.py::test_it: shows('merge',) of {'dtype': 'float32'}: needs " in output
