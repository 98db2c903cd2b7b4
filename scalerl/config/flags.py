"""The flags that every command with keys takes in addition to keys: `--help`, `--cfg job` and `--multirun`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from scalerl.config.compose import composed
from scalerl.config.errors import ConfigError
from scalerl.config.help import help_text
from scalerl.config.schema import Kind
from scalerl.errors import UserError

DRY_RUN = "--dry-run"
_MULTIRUN = ("--multirun", "-m")
_CFG = ("--cfg", "-c")


def asked_text(kind: Kind, arguments: Sequence[str]) -> str | None:
    """The text that `--help` or `--cfg job` asks for; None where the arguments have neither.

    Raises ConfigError for `--cfg job` with a configuration that cannot be composed, and UserError for another `--cfg`.
    """
    if not {"-h", "--help"}.isdisjoint(arguments):
        return help_text(kind)
    place = next((place for place, text in enumerate(arguments) if text.partition("=")[0] in _CFG), None)
    if place is None:
        return None
    _, has_value, value = arguments[place].partition("=")
    rest = [*arguments[:place], *arguments[place + (1 if has_value else 2) :]]
    if (value if has_value else "".join(arguments[place + 1 : place + 2])) != "job":
        raise UserError("--cfg: write --cfg job, which prints the composed configuration")
    config = composed(kind, [text for text in rest if text != DRY_RUN], rules=False).config
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))).rstrip()


def jobs_of(arguments: Sequence[str]) -> list[list[str]] | None:
    """The arguments of each job of `--multirun`, where `key=a,b` has a job for each value; None without that flag."""
    if set(_MULTIRUN).isdisjoint(arguments):
        return None
    values = [_values(text) for text in arguments if text not in _MULTIRUN]
    return [list(job) for job in itertools.product(*values)]


def _values(text: str) -> list[str]:
    """The arguments that Hydra's sweeper makes of one argument."""
    if text.startswith("-") or "=" not in text:
        return [text]
    try:
        override = OverridesParser.create().parse_overrides([text])[0]
    except HydraException:  # The job says what is wrong with it.
        return [text]
    if not override.is_sweep_override():
        return [text]
    (batch,) = BasicSweeper.split_arguments([override], None)
    return [argument for job in batch for argument in job]


def run_jobs(
    jobs: Sequence[list[str]], run: Callable[[list[str]], int], output: Callable[[list[str]], str | None], key: str
) -> int:
    """Runs jobs one after the other, and stops at the first whose exit code is not 0, which it returns.

    output: composes a job, and returns the directory or file that it writes.  key: of that output, for the message.
    Raises ConfigError, before the first job, where a job cannot be composed or two jobs have one output.
    """
    outputs = [output([text for text in job if text != DRY_RUN]) for job in jobs]
    refuse_same_output(outputs, key)
    for number, job in enumerate(jobs, start=1):
        print(f"job {number} of {len(jobs)}: {' '.join(job)}", flush=True)
        if code := run(job):
            return code
    return 0


def refuse_same_output(outputs: Sequence[str | None], key: str) -> None:
    """Raises ConfigError where two jobs write to one directory or file.  key: of that output."""
    written = [each for each in outputs if each is not None]
    twice = sorted({each for each in written if written.count(each) > 1})
    if twice:
        raise ConfigError(
            [
                f"{key} = {each}: several jobs of --multirun would write there; let it name their values, for example "
                f"{key}='{each}-${{the.key}}'"
                for each in twice
            ]
        )
