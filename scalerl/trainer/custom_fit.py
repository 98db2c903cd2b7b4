"""A training loop of the user's own, in place of `ppo.fit`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from scalerl.config.schema import CustomFitConfig
from scalerl.errors import RunError, UserError
from scalerl.user_code import UserCodeError, cause_of, file_of, load_function, place_of

if TYPE_CHECKING:
    from scalerl.trainer.ppo import Run

KEY = "trainer.custom_fit"
# Trains the run; what it returns are the metrics of its last validation, if any.
Fit = Callable[["Run"], Mapping[str, float] | None]


def load_fit(config: CustomFitConfig) -> Fit | None:
    """The function config.name of the file config.path; None where no path is set.

    Raises UserCodeError when the file does not exist or import or does not define the name, ValueError when what it
    defines cannot be called with a run alone.
    """
    if config.path is None:
        return None
    return load_function(config.path, config.name, KEY, ["run"], is_kind=inspect.isfunction, kind="function")


def call_fit(fit: Fit, run: Run) -> dict[str, float]:
    """The last validation. Raises UserCodeError, with the line, for what the user's code raises; errors of the run that
    its calls met pass through."""
    try:
        return dict(fit(run) or {})
    except (UserError, RunError):
        raise
    except Exception as error:
        raise UserCodeError(f"{KEY}: {place_of(fit)} raised {cause_of(error, file_of(fit))}") from error
