"""The command `scalerl plan`: memory and seconds of a run on devices that are not here, and what makes it fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl.config import ConfigError, PPOConfig, SFTConfig, composed, violations_of
from scalerl.config.value_checks import DEVICE_MEMORY_LIMIT
from scalerl.errors import UserError

if TYPE_CHECKING:
    from scalerl.extras.plan.hardware import Hardware

USAGE = f"""\
usage: scalerl plan [train | sft] [FILE.yaml] key=value ... [--device-memory MEMORY] [--summary]
       scalerl plan [FILE.yaml] key=value ... --tune --devices N --device-memory MEMORY
       scalerl plan --calibrate RUN [RUN ...] [--device-memory MEMORY | --hardware FILE]

Memory of each device of a run and seconds of a step, phase by phase, from its configuration and the config.json of its
models: no device, no data (data.train_files and data.val_files may be missing) and no weights are needed. A run that
does not fit is refused with the nearest settings that do (exit code 2).

  FILE.yaml        the same as --config-dir and --config-name of that file
  --device-memory  {DEVICE_MEMORY_LIMIT}; the same as trainer.device_memory. Seconds are those
                   of the device that is named, of an H100 for a size
  --mean-response  tokens of a response on average; default: half of data.max_response_length
  --hardware       a file with the rates of a device (of --calibrate), in the place of the named one
  --tune           layouts of a run on N devices that fit, by tokens/s of each device, and why others do not
  --devices        devices of --tune, those of servers with devices of their own included
  --calibrate      reads the seconds of runs in their directories (trainer.default_local_dir), and writes
                   hardware.yaml there: the rates with which the plan has nearly the same seconds, for --hardware.
                   A small and a large model together show what takes time by FLOP or byte, and what by operation or
                   message. With --hardware it writes nothing, and prints the runs' seconds beside those that the
                   rates of the file predict
  model.path       a directory with config.json, the path of such a file (configs/models has those of large models),
                   or a name on the hub, of which config.json alone is fetched
  --summary        what a run prints at its start, without the table

Keys are those of `scalerl train --help`; with trainer.device=cpu the tensors of the CPU's operations are counted.
"""


# What a run must have and a plan does not read; the arguments of the user's come after these.
_UNREAD = {
    "ppo": ["data.train_files=not_read_by_a_plan", "data.val_files=not_read_by_a_plan"],
    "sft": ["data.train_files=not_read_by_a_plan"],
}


@dataclass
class Arguments:
    """The command line. kind: ppo or sft.  The others are those of USAGE."""

    kind: str
    overrides: list[str] = field(default_factory=list)
    only_summary: bool = False
    mean_response: float | None = None
    hardware: Path | None = None
    tune: bool = False
    devices: int | None = None
    calibrate: list[Path] = field(default_factory=list)


def main(argv: Sequence[str]) -> int:
    """Prints the plan; returns 0 if the run fits or the device's memory is not known, else raises ConfigError."""
    if not argv or not {"-h", "--help"}.isdisjoint(argv):
        print(USAGE)
        return 0
    asked = read_arguments(argv)
    if asked.calibrate:
        from scalerl.extras.plan.calibrate import MeasuredRun, calibrate, comparisons
        from scalerl.extras.plan.hardware import read_hardware

        runs = {directory: MeasuredRun.read(directory, asked.overrides) for directory in asked.calibrate}
        print(calibrate(runs) if asked.hardware is None else comparisons(runs, read_hardware(asked.hardware)))
        return 0
    cfg = composed(asked.kind, [*_UNREAD[asked.kind], *asked.overrides], rules=False).config
    if asked.tune:
        from scalerl.extras.plan.shapes import shapes_of
        from scalerl.extras.plan.tune import tune

        assert asked.devices is not None and isinstance(cfg, PPOConfig)
        print(tune(cfg, shapes_of(cfg), asked.devices, _hardware(cfg, asked), asked.mean_response))
        return 0
    return _plan(cfg, asked)


def _plan(cfg: PPOConfig | SFTConfig, asked: Arguments) -> int:
    from scalerl.extras.plan.check import checked_plan, known_memory
    from scalerl.extras.plan.report import fit_line, plan_table, seconds_table, summary
    from scalerl.extras.plan.shapes import shapes_of
    from scalerl.trainer.checks.models import layouts_violations

    on_cpu = cfg.trainer.device == "cpu"
    device = "cpu" if on_cpu else "cuda"
    if broken := violations_of(cfg, device=device):
        raise ConfigError(broken)
    shapes = shapes_of(cfg)
    if broken := layouts_violations(cfg, shapes):
        raise ConfigError(broken)
    plan, violations = checked_plan(cfg, shapes, known_memory(cfg.trainer, "cpu"), on_cpu=on_cpu)
    print((summary if asked.only_summary else plan_table)(plan))
    # Of a device that is not known neither the rates are, nor the KV cache.
    is_known = asked.hardware is not None if on_cpu else bool(plan.concurrency)
    if isinstance(cfg, PPOConfig) and plan.server is not None and is_known:
        from scalerl.extras.plan.seconds import lengths_of, step_seconds

        hardware = _hardware(cfg, asked)
        step = step_seconds(cfg, shapes, plan.server, hardware, lengths_of(cfg, asked.mean_response))
        print(seconds_table(step, hardware, only_total=asked.only_summary))
    print(fit_line(plan))
    if violations:
        raise ConfigError(violations)
    return 0


def _hardware(cfg: PPOConfig | SFTConfig, asked: Arguments) -> Hardware:
    from scalerl.extras.plan.hardware import hardware_of, read_hardware

    return hardware_of(cfg.trainer.device_memory) if asked.hardware is None else read_hardware(asked.hardware)


# The options that take a value -> what that is, for an error.
_VALUES = {
    "--device-memory": DEVICE_MEMORY_LIMIT,
    "--mean-response": "a number of tokens above 0, such as 800",
    "--hardware": "a file that scalerl plan --calibrate has written",
    "--devices": "a number of devices, such as 64",
    "--calibrate": "the directories of finished runs (trainer.default_local_dir)",
}


def read_arguments(argv: Sequence[str]) -> Arguments:
    """Reads the command line.  Raises UserError for options whose value is missing or none."""
    rest = list(argv)
    command = rest.pop(0) if rest[0] in ("train", "sft") else "train"
    asked = Arguments("sft" if command == "sft" else "ppo")
    while rest:
        argument = rest.pop(0)
        option, _, value = argument.partition("=")
        if argument == "--summary":
            asked.only_summary = True
        elif argument == "--tune":
            asked.tune = True
        elif option in _VALUES:
            if not value and not rest:
                raise UserError(f"{option}: needs {_VALUES[option]}")
            _take(asked, option, value or rest.pop(0))
        elif argument.endswith((".yaml", ".yml")) and "=" not in argument and not argument.startswith("-"):
            file = Path(argument)
            if not file.is_file():
                raise UserError(f"plan {argument}: there is no such file (working directory {Path.cwd()})")
            asked.overrides += ["--config-dir", str(file.absolute().parent), "--config-name", file.stem]
        else:
            asked.overrides.append(argument)
    if asked.calibrate:
        # What a run was like is in its directory; all words that set no key are further ones.
        asked.calibrate += [Path(word) for word in asked.overrides if "=" not in word]
        asked.overrides = [word for word in asked.overrides if "=" in word]
    if asked.tune != (asked.devices is not None):
        raise UserError("--tune and --devices N belong together: layouts of a run on N devices")
    if asked.calibrate and (asked.tune or asked.mean_response is not None):
        raise UserError("--calibrate: layouts and lengths are those of the runs; give no --tune and no --mean-response")
    if asked.tune and asked.kind == "sft":
        raise UserError("--tune: ranks the layouts of scalerl train; give no sft")
    return asked


def _take(asked: Arguments, option: str, value: str) -> None:
    """Sets what an option with a value asks for."""
    if option == "--device-memory":
        asked.overrides.append(f"trainer.device_memory={value}")
    elif option == "--hardware":
        asked.hardware = Path(value)
    elif option == "--calibrate":
        asked.calibrate.append(Path(value))
    else:
        try:
            number = float(value) if option == "--mean-response" else int(value)
        except ValueError:
            number = 0
        if not 0 < number < 1e9:
            raise UserError(f"{option} {value}: needs {_VALUES[option]}")
        if option == "--mean-response":
            asked.mean_response = number
        else:
            asked.devices = int(number)
