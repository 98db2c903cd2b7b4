"""Loading and calling of a training loop that the user wrote, in place of `ppo.fit`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from scalerl.base.user_code import UserCodeError, cause_of, file_of, load_function, place_of
from scalerl.config.schema import CustomFitConfig
from scalerl.errors import RunError, UserError

if TYPE_CHECKING:
    from scalerl.trainer.ppo import Run

KEY = "trainer.custom_fit"
# Trains the run and returns the metrics of its last validation, or None.
Fit = Callable[["Run"], Mapping[str, float] | None]


def load_fit(config: CustomFitConfig) -> Fit | None:
    """Loads the function config.name from the file config.path; returns None where no path is set.

    Raises UserCodeError when the file does not exist or import or does not define the name, ValueError when what it
    defines cannot be called with a run alone.
    """
    if config.path is None:
        return None
    return load_function(config.path, config.name, KEY, ["run"], is_kind=inspect.isfunction, kind="function")


def call_fit(fit: Fit, run: Run) -> dict[str, float]:
    """Runs the user's training loop and returns the metrics of its last validation.

    Raises UserCodeError, with the line, for an exception of the user's code; errors of the run (UserError, RunError)
    pass through.
    """
    try:
        return dict(fit(run) or {})
    except (UserError, RunError):
        raise
    except Exception as error:
        raise UserCodeError(f"{KEY}: {place_of(fit)} raised {cause_of(error, file_of(fit))}") from error
