"""The command `scalerl plan`: the memory that a run would take on devices that are not here, and what makes it fit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from scalerl.config import ConfigError, PPOConfig, SFTConfig, composed, model_roles, violations_of
from scalerl.config.errors import ErrorCollector
from scalerl.config.value_checks import DEVICE_MEMORY_LIMIT
from scalerl.data.model_source import model_directory
from scalerl.errors import UserError
from scalerl.models import Head, ModelShape

USAGE = f"""\
usage: scalerl plan [train | sft] [FILE.yaml] key=value ... [--device-memory MEMORY] [--summary]

Memory of each device of a run, phase by phase, from its configuration and the config.json of its models: no device,
no data (data.train_files and data.val_files may be missing) and no weights are needed. A run that does not fit is
refused with the nearest settings that do (exit code 2).

  FILE.yaml        the same as --config-dir and --config-name of that file
  --device-memory  {DEVICE_MEMORY_LIMIT}; the same as trainer.device_memory
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


def main(argv: Sequence[str]) -> int:
    """Prints the plan; returns 0 if the run fits or the device's memory is not known, else raises ConfigError."""
    if not argv or not {"-h", "--help"}.isdisjoint(argv):
        print(USAGE)
        return 0
    kind, overrides, only_summary = read_arguments(argv)
    cfg = composed(kind, [*_UNREAD[kind], *overrides], rules=False).config
    from scalerl.extras.plan.check import checked_plan, known_memory
    from scalerl.extras.plan.report import fit_line, plan_table, summary
    from scalerl.trainer.checks.models import layouts_violations

    on_cpu = cfg.trainer.device == "cpu"
    device = "cpu" if on_cpu else "cuda"
    if broken := violations_of(cfg, device=device):
        raise ConfigError(broken)
    shapes = shapes_of(cfg)
    if broken := layouts_violations(cfg, shapes):
        raise ConfigError(broken)
    plan, violations = checked_plan(cfg, shapes, known_memory(cfg.trainer, "cpu"), on_cpu=on_cpu)
    print((summary if only_summary else plan_table)(plan))
    if isinstance(cfg, PPOConfig) and plan.concurrency:
        from scalerl.extras.plan.seconds import predicted_seconds

        print(f"a step on H100s: {predicted_seconds(cfg, shapes, plan):.0f} s (predicted, nothing is measured)")
    print(fit_line(plan))
    if violations:
        raise ConfigError(violations)
    return 0


def read_arguments(argv: Sequence[str]) -> tuple[str, list[str], bool]:
    """Reads the command line: (schema, overrides, whether only the summary is asked for)."""
    arguments = list(argv)
    command = arguments.pop(0) if arguments[0] in ("train", "sft") else "train"
    overrides: list[str] = []
    only_summary = False
    while arguments:
        argument = arguments.pop(0)
        if argument == "--summary":
            only_summary = True
        elif argument.startswith("--device-memory"):
            _, _, value = argument.partition("=")
            if not value and not arguments:
                raise UserError(f"--device-memory: needs {DEVICE_MEMORY_LIMIT}")
            overrides.append(f"trainer.device_memory={value or arguments.pop(0)}")
        elif argument.endswith((".yaml", ".yml")) and "=" not in argument and not argument.startswith("-"):
            file = Path(argument)
            if not file.is_file():
                raise UserError(f"plan {argument}: there is no such file (working directory {Path.cwd()})")
            overrides += ["--config-dir", str(file.absolute().parent), "--config-name", file.stem]
        else:
            overrides.append(argument)
    return ("sft" if command == "sft" else "ppo"), overrides, only_summary


def _shape(path: str, key: str) -> ModelShape:
    """The shape of a model, by the path of a config.json, or as `model_directory` finds it.  Raises ValueError."""
    file = Path(path)
    if file.suffix == ".json" and file.is_file():
        return ModelShape.from_config(json.loads(file.read_text(encoding="utf-8")))
    return ModelShape.from_hf(model_directory(path, key, config_alone=True))


def shapes_of(cfg: PPOConfig | SFTConfig) -> Mapping[str, ModelShape]:
    """The shape of each role's model, with the head of the role; config.json alone is read, no weights.

    Raises ConfigError for models that cannot be read.
    """
    paths: dict[str, tuple[str, str, Head]] = {}
    if isinstance(cfg, SFTConfig):
        paths["actor"] = (cfg.model.path, "model.path", "lm")
    else:
        paths["actor"] = (cfg.actor_rollout_ref.model.path, "actor_rollout_ref.model.path", "lm")
        for role in model_roles(cfg):
            paths[role.name] = (str(role.model_path), role.model_key, role.head)
    shapes, violations = {}, []
    for name, (path, key, head) in paths.items():
        if name != "actor" and path == paths["actor"][0] and "actor" not in shapes:
            # It has been said of the actor's.
            continue
        try:
            shapes[name] = _shape(path, key).with_head(head)
        except ValueError as error:
            violations.append(str(error) if str(error).startswith(key) else f"{key} = {path}: {error}")
    from scalerl.trainer.checks.models import trained_shape

    errors = ErrorCollector()
    shapes |= {name: trained_shape(errors, cfg, shapes[name], name) for name in ("actor", "critic") if name in shapes}
    if violations := [*dict.fromkeys(violations), *errors.violations]:
        raise ConfigError(violations)
    return shapes
