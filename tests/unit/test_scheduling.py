"""Services' tests side by side (`make test AT_A_TIME=N`): what shares processes stays on one process of pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scheduling import FolderScheduling
from tests.units import KEPT, LONG, place_of, unit_of

REPOSITORY = Path(__file__).parents[2]
CONFTEST = """
import pytest

@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from tests.scheduling import FolderScheduling
    return FolderScheduling(config, log)
"""
TEST = """
import os, pathlib, time, pytest

@pytest.mark.parametrize("i", range(4))
def test_it(i):
    time.sleep(0.05)
    with open(os.environ["SEEN"], "a") as seen:
        seen.write(f"{pathlib.Path(__file__).parent.name} {os.environ['PYTEST_XDIST_WORKER']}\\n")
"""


@pytest.mark.parametrize(
    "nodeid, unit",
    [
        ("tests/dist/test_ulysses.py::test_slices[7-a@b]", "tests/dist"),
        ("tests/slurm/test_launch.py::test_b", "tests/slurm"),
        ("tests/e2e/test_own_run.py::test_b[a::b]", "tests/e2e/test_own_run.py"),
        ("tests/e2e/test_sft.py::test_b", KEPT),
        ("tests/ray/test_cluster.py::TestIt::test_b", KEPT),
        ("test_alone.py::test_b", "test_alone.py"),
    ],
)
def test_unit_of_a_test(nodeid: str, unit: str) -> None:
    assert unit_of(nodeid) == object.__new__(FolderScheduling)._split_scope(nodeid) == unit


def test_long_units_come_first() -> None:
    files = ["tests/e2e/test_termination.py", "tests/e2e/test_quickstart.py", "tests/slurm/test_a.py"]
    files += ["tests/dist/test_a.py", "tests/e2e/test_sft.py", "tests/ray/test_a.py"]
    ordered = sorted(files, key=place_of)
    assert [*dict.fromkeys(map(unit_of, ordered))] == [*LONG[:3], LONG[4], files[0]]
    for unit in LONG:
        assert unit == KEPT or (REPOSITORY / unit).exists()


@pytest.mark.full
def test_files_of_a_folder_that_shares_run_on_one_process(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for folder in ("dist", "e2e"):
        for name in ("a", "b", "c"):
            file = tmp_path / "tests" / folder / f"test_{name}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(TEST)
    seen = tmp_path / "seen"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", "2", "--dist", "loadscope"]
    command += ["--import-mode=importlib", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    command += ["tests/dist", "tests/e2e"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    # Other plugins take three processes a second each.
    environment |= {"PYTHONPATH": str(REPOSITORY), "SEEN": str(seen), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr

    places = [line.split() for line in seen.read_text().splitlines()]
    assert len(places) == 24
    assert len({worker for folder, worker in places if folder == "dist"}) == 1
    # The three files of the other folder are free to go where there is room.
    assert {worker for _, worker in places} == {"gw0", "gw1"}


@pytest.mark.parametrize(
    ("gib", "given", "arguments"),
    [
        (40, (), "-n 2 --dist loadscope tests/ray"),
        (12, (), "-n 2 --dist loadscope tests/ray"),
        (11, (), "tests/ray"),
        (40, ("AT_A_TIME=1",), "tests/ray"),
        (4, ("AT_A_TIME=4",), "-n 4 --dist loadscope tests/ray"),
    ],
)
def test_as_many_side_by_side_as_memory_allows(
    tmp_path: Path, gib: int, given: tuple[str, ...], arguments: str
) -> None:
    memory = tmp_path / "meminfo"
    memory.write_text(f"MemTotal: 1 kB\nMemAvailable: {gib << 20} kB\n")
    command = ["make", "--dry-run", "test", f"MEMORY={memory}", *given]
    # What the make that runs this test was told, and hands on.
    given_to_make = ("AT_A_TIME", "PYTEST_ARGS", "MAKEFLAGS", "MAKEOVERRIDES")
    env = {name: value for name, value in os.environ.items() if name not in given_to_make}
    made = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in made.splitlines() if " tests/ray " in line]
    assert line.partition('-m "not full"')[2].split()[: len(arguments.split())] == arguments.split()
