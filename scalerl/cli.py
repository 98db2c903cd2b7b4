"""The `scalerl` command: finds the program of a subcommand and runs it.

Imports next to nothing before `main` runs: until then Ctrl-C would end in Python's own traceback.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING

import scalerl
from scalerl.errors import EXIT_USER_ERROR, run_main

if TYPE_CHECKING:
    from scalerl.config.schema import Kind

USAGE = """\
usage: scalerl COMMAND ...

commands:
  init      a configuration, a reward function and data to edit, which train as they are
  train     reinforcement learning: parquet in, checkpoints out
  sft       supervised fine-tuning on conversations
  generate  responses of a model to the prompts of a file
  eval      scores of such responses: mean, best of n, majority, pass@k
  serve     a model directory behind an OpenAI-compatible server, on this machine
  chat      talk with it, or one question and its answer
  data      your own files, a known data set, or a generated task -> parquet for train and sft
  translate a launch script of verl, not run -> the scalerl command, and what became of each key
  plan      memory of each device of a run, on a cluster that is not here
  launch    a run as a Slurm job: checked, submitted, watched, ended
  merge     a checkpoint -> a Hugging Face model directory
  inspect   what is in a checkpoint, and whether it is what was saved
  verify-resume  whether a run (of train or sft) that stops goes on to the same numbers, with your configuration
  report    one HTML page that explains a run: learning, time, who waited for whom, faults, samples
  replay    a step again from its dump and the checkpoint before it: loss, gradient norm, weights
  doctor    versions, devices, what is missing and what that changes

`scalerl COMMAND --help` explains a command; `scalerl --version` prints the version.
SCALERL_TRACEBACK=1 shows the stack behind an error message."""

KEYS_USAGE = """\
usage: scalerl {command} key=value ... [--dry-run] [--config-dir DIR] [--config-name NAME]{groups}
                [--cfg job] [--multirun]

  --dry-run       check everything that can be checked without a device, print the plan and stop
  --cfg job       print the composed configuration and stop
  --multirun, -m  one run after the other for each value of key=a,b
  --config-dir    directory with YAML files of your own; --config-name NAME takes DIR/NAME.yaml
"""
RECIPE_USAGE = "  +recipe=NAME    settings that go together, from scalerl/configs/recipe; {example}\n"
LAYOUT_USAGE = "  +layout=NAME    how a model is spread over devices, from scalerl/configs/layout\n"
# Command -> how it takes settings that scalerl brings; `eval` has none.
RECIPES = {
    "train": "several: +recipe=[grpo,cpu]",
    "sft": "on a CPU: +recipe=sft_cpu",
    "generate": "on a CPU: +recipe=generate_cpu",
}


def _print(text: str) -> None:
    """Prints the text; a reader that stops early (`| head`) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # What Python would flush at exit must not meet the closed pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# Command -> module:function of its program, which takes the arguments and returns the exit code. An extra's is missing
# where `scalerl.extras` is not installed.
COMMANDS = {
    "init": "scalerl.commands.init.command:main",
    "train": "scalerl.trainer.main_ppo:main",
    "sft": "scalerl.trainer.main_sft:main",
    "generate": "scalerl.commands.main_generation:main",
    "eval": "scalerl.commands.main_eval:main",
    "serve": "scalerl.commands.serve:main",
    "chat": "scalerl.commands.chat:main",
    "data": "scalerl.commands.data.command:main",
    "plan": "scalerl.extras.plan.command:main",
    "launch": "scalerl.extras.slurm.command:main",
    "translate": "scalerl.extras.verl.translate.command:main",
    "merge": "scalerl.merge.command:merge_main",
    "inspect": "scalerl.merge.inspect:main",
    "verify-resume": "scalerl.extras.verify.resume:main",
    "report": "scalerl.extras.report.command:main",
    "replay": "scalerl.extras.verify.replay:main",
    "doctor": "scalerl.commands.doctor.command:main",
}
# Commands that take the keys of a config schema.
SCHEMA_OF: dict[str, Kind] = {"train": "ppo", "sft": "sft", "generate": "generation", "eval": "eval"}


def keys_usage(command: str) -> str:
    """The usage of a command that takes keys."""
    groups, lines = "", ""
    if command in RECIPES:
        groups, lines = " [+recipe=NAME]", RECIPE_USAGE.format(example=RECIPES[command])
    if command == "train":
        groups, lines = f"{groups} [+layout=NAME]", lines + LAYOUT_USAGE
    return KEYS_USAGE.format(command=command, groups=groups) + lines


def main(argv: list[str] | None = None) -> int:
    """Runs the subcommand that `argv` names; returns its exit code, 2 for an error that the user can correct."""
    return run_main(_run, sys.argv[1:] if argv is None else argv)


def _run(argv: list[str]) -> int | None:
    if not argv:
        print(USAGE, file=sys.stderr)
        return EXIT_USER_ERROR
    command, *rest = argv
    if command in ("-h", "--help", "help"):
        _print(USAGE)
        return 0
    if command in ("-V", "--version"):
        _print(f"scalerl {scalerl.__version__}")
        return 0
    if command not in COMMANDS:
        import difflib

        nearest = difflib.get_close_matches(command, COMMANDS, n=1)
        # The message is what a terminal shows last.
        guess = f"did you mean scalerl {nearest[0]}?" if nearest else f"the commands are {', '.join(COMMANDS)}"
        print(f"error: there is no command {command}; {guess}", file=sys.stderr)
        return EXIT_USER_ERROR
    if command in SCHEMA_OF and not {"-h", "--help"}.isdisjoint(rest):
        from scalerl.config import help_text

        _print(f"{keys_usage(command)}\n{help_text(SCHEMA_OF[command])}")
        return 0
    module, _, program = COMMANDS[command].partition(":")
    if module.startswith("scalerl.extras") and importlib.util.find_spec("scalerl.extras") is None:
        print(f"error: scalerl {command} needs scalerl.extras, which is not installed", file=sys.stderr)
        return EXIT_USER_ERROR
    return getattr(importlib.import_module(module), program)(rest)


if __name__ == "__main__":
    sys.exit(main())
