"""`scalerl translate SCRIPT`: prints the scalerl command of a launch script of verl, without running the script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scalerl.errors import CommandParser, UserError
from scalerl.extras.verl.translate.report import command_of, merge_command, report_on
from scalerl.extras.verl.translate.script import Command, LaunchScript, read_script


def main(argv: Sequence[str]) -> int:
    """Prints the translation of a script; returns 0."""
    parser = CommandParser(prog="scalerl translate", description=__doc__)
    parser.add_argument("script", help="a shell script that runs a program of verl, or a file with one argument a line")
    text = Path(parser.parse_args(argv).script).read_text(encoding="utf-8")
    print(translated(text))
    return 0


def translated(text: str) -> str:
    """The text that the command prints for a script. Raises UserError where the script runs no program of verl."""
    script = read_script(text)
    if not script.commands:
        script = _arguments_by_line(text, script.notes)
    blocks = []
    for command in script.commands:
        if "model_merger" in command.program:
            blocks.append(merge_command(command.arguments))
            continue
        known = command_of(command.program)
        if known is None:
            blocks.append(
                f"# line {command.line}: {command.program}: there is no such program in scalerl; see `scalerl --help`"
            )
            continue
        report = report_on(*known, command.arguments, command.launched)
        blocks.append(f"{report.shell()}\n\n{report.table()}")
    if script.notes:
        blocks.append("\n".join(["not known without running the script:", *(f"  {note}" for note in script.notes)]))
    return "\n\n".join(blocks)


def _arguments_by_line(text: str, notes: Sequence[str]) -> LaunchScript:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or not all("=" in line.split(" ")[0] for line in lines):
        raise UserError(
            "\n".join(
                [
                    "the script runs no program of verl (python3 -m verl.trainer.main_ppo ...) where it can be read "
                    "without running it; give one that does, or a file with one argument of it a line",
                    *(f"  {note}" for note in notes),
                ]
            )
        )
    return LaunchScript([Command("verl.trainer.main_ppo", lines, 1)])
