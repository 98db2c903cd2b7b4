"""A training loop of the user's own, in place of `ppo.fit`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from scalerl.config.schema import CustomFitConfig
from scalerl.errors import RunError, UserError
from scalerl.user_code import UserCodeError, cause_of, check_arguments, defined_in, file_of, import_file, place_of

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
    module = import_file(config.path, f"{KEY}.path")
    fit = getattr(module, config.name, None)
    if not inspect.isfunction(fit):
        own = [name for name, value in defined_in(module).items() if inspect.isfunction(value)]
        near = difflib.get_close_matches(config.name, own, n=1)
        raise UserCodeError(
            f"{KEY}.path={config.path} does not define the function {config.name!r} (its functions: "
            f"{', '.join(own) or 'none'}); set {KEY}.name{f'={near[0]}' if near else ' to a function of it'}"
        )
    check_arguments(fit, ["run"], [], KEY)
    return fit


def call_fit(fit: Fit, run: Run) -> dict[str, float]:
    """The last validation. Raises UserCodeError, with the line, for what the user's code raises; errors of the run that
    its calls met pass through."""
    try:
        return dict(fit(run) or {})
    except (UserError, RunError):
        raise
    except Exception as error:
        raise UserCodeError(f"{KEY}: {place_of(fit)} raised {cause_of(error, file_of(fit))}") from error
