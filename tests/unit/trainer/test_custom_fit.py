"""A training loop of the user's own: what is told before a run starts, and how its errors read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scalerl.base.user_code import UserCodeError
from scalerl.cluster.failures import WorkerError
from scalerl.config.schema import CustomFitConfig
from scalerl.trainer.custom_fit import call_fit, load_fit

LOOP = """
steps = 3

def fit(run):
    return {"val": run / 2}

def fits(run):
    return None

def fit_of_two(run, other):
    pass

def broken(run):
    return {}["nothing"]

def worker_lost(run):
    raise run
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "loop.py"
    path.write_text(LOOP)
    return str(path)


def test_without_a_file_there_is_none() -> None:
    assert load_fit(CustomFitConfig()) is None


def test_the_function_is_called_with_the_run(file: str) -> None:
    run: Any = 5
    assert call_fit(load_fit(CustomFitConfig(file)), run) == {"val": 2.5}
    assert call_fit(load_fit(CustomFitConfig(file, "fits")), run) == {}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "fitt",
            r"define the function 'fitt' \(its functions: fit, fits.*\); set trainer.custom_fit.name=fit",
        ),
        ("steps", r"does not define the function 'steps'"),
        ("fit_of_two", r"trainer.custom_fit: fit_of_two \(.*loop.py:10\) cannot be called with run: .*'other'"),
    ],
)
def test_what_is_no_loop(file: str, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_fit(CustomFitConfig(file, name))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match=r"^trainer.custom_fit.path=.*none.py does not exist"):
        load_fit(CustomFitConfig(str(tmp_path / "none.py")))


def test_an_error_of_the_loop_names_its_line(file: str) -> None:
    broken = load_fit(CustomFitConfig(file, "broken"))
    message = r"trainer.custom_fit: broken \(.*loop.py:13\) raised KeyError: 'nothing' \(.*loop.py:14: return"
    with pytest.raises(UserCodeError, match=message):
        call_fit(broken, 0)


def test_what_the_run_met_stays_what_it_is(file: str) -> None:
    lost = WorkerError("values: the process of rank 1 died")
    with pytest.raises(WorkerError) as error:
        call_fit(load_fit(CustomFitConfig(file, "worker_lost")), lost)
    assert error.value is lost
