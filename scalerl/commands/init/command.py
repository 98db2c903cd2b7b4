"""`scalerl init DIR`: writes a configuration, a reward function and data to edit, which train as they are here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scalerl.commands.init.files import Machine, make_files, sample_prompts
from scalerl.errors import CommandParser, UserError

QUICKSTART_MODEL = Path("outputs/quickstart/sft_model")


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the files and prints the next steps; returns 0.

    Raises UserError for a model that cannot be trained, and for files that exist already.
    """
    arguments = _parser().parse_args(argv)
    directory = arguments.directory.expanduser().resolve()
    if directory.is_file():
        raise UserError(f"{directory} is a file; give a directory, which is made if it is not there")
    model = _model(arguments.model)

    from scalerl.cluster.device import resolve_device
    from scalerl.data import load_tokenizer
    from scalerl.data.unknown_text import unknown_in_messages
    from scalerl.models import ModelShape

    try:
        shape = ModelShape.from_hf(model)
    except (ValueError, OSError) as error:
        raise UserError(f"--model {model}: {error}") from None
    machine = Machine.here(resolve_device(arguments.device))
    unknown = unknown_in_messages(load_tokenizer(model), sample_prompts())
    _write(directory, make_files(directory, model, shape.hidden_size, machine))
    print(_next_steps(directory, machine))
    if unknown.rows:
        print(f"but the tokenizer of {model} cannot write their prompts: {unknown}; put prompts of your own there")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="scalerl init", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="made if it is not there; no file is replaced")
    parser.add_argument(
        "--model",
        metavar="DIR",
        help=f"Hugging Face model directory, or its name on the hub; asked for if not given ({QUICKSTART_MODEL}?)",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs where there are some"
    )
    return parser


def _model(path: str | None) -> Path:
    """The model's directory, asked for if it is not given; absolute, since the run may be started from elsewhere.

    Raises ModelSourceError for a model that is no directory and cannot be fetched.
    """
    proposed = QUICKSTART_MODEL if QUICKSTART_MODEL.is_dir() else None
    if path is None and sys.stdin.isatty():
        path = input(f"Model directory{f' [{proposed}]' if proposed else ''}: ").strip() or str(proposed or "")
    if not path:
        hint = f"; here is the quickstart's: --model {proposed}" if proposed else ""
        raise UserError(
            f"no model: give --model DIR, a Hugging Face model directory, or a name on its hub (Qwen/Qwen3-0.6B){hint}"
        )

    from scalerl.data.model_source import model_directory

    return Path(model_directory(path, "--model")).resolve()


def _write(directory: Path, files: dict[str, str]) -> None:
    existing = [name for name in files if (directory / name).exists()]
    if existing:
        raise UserError(f"{directory} has {', '.join(existing)} already; give another directory, or remove them")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{directory}: cannot be written ({error}); give another directory") from None


def _next_steps(directory: Path, machine: Machine) -> str:
    kind = "GPUs" if machine.device == "cuda" else "processes on the CPU"
    return f"""\
{directory}: for {machine.num_devices} {kind}
  train.yaml               the run: sizes, steps, learning rate
  reward.py                what an answer is worth
  train.jsonl, val.jsonl   prompts with what the reward needs to know
They train as they are; edit them, then:
  scalerl train --config-dir {directory} --config-name train"""
