"""Every command that README, docs, configs, examples and benchmarks show is there, and takes its options and keys.

Nothing runs: a program parses its arguments and stops, and keys are composed, with the rules between them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from scalerl import cli
from scalerl.config import compose
from scalerl.config.flags import jobs_of
from scalerl.extras.plan.command import read_arguments
from tests.documented import (
    PAGES,
    REST,
    ROOT,
    SOURCES,
    blocks,
    commands,
    commands_in_comments,
    commands_in_text,
    read,
    spans,
)

# Its blocks run, with the files that they need, in tests/e2e/test_extending.py.
RUNS_ELSEWHERE = "docs/extending.md"
# Options of Apptainer, Docker, SGLang, Ray, pip, Slurm and uv, which pages name.
OTHER_OPTIONS = {
    *("--nv", "--ipc", "--nnodes", "--node-rank", "--dist-init-addr", "--custom-weight-loader", "--num-cpus"),
    *("--object-store-memory", "--no-deps", "--no-build-isolation", "--batch", "--container-image", "--exclusive"),
    *("--export", "--gres", "--no-kill", "--output", "--overlap", "--signal", "--all-packages", "--extra", "--frozen"),
    "--ignore-requires-python",
}
# What the reader's rest of a command would give, unless the page gives it; with a judge also JUDGE.
NEEDED = {
    "train": [
        *("data.train_files=t", "data.val_files=v", "actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.n=8"),
        "trainer.n_gpus_per_node=8",
    ],
    "sft": ["data.train_files=t", "model.path=m"],
    "generate": ["model.path=m", "data.path=v", "data.output_path=out.parquet"],
    "eval": ["data.path=out.parquet", "custom_reward_function.path=reward.py"],
}
JUDGE = ["reward_model.judge.model.path=m", "reward_model.judge.resource_pool.nnodes=1"]
# What stands for a number or a file of the reader's.
PLACEHOLDERS = {"N": "3", "NAME": "qwen3-8b-grpo-8", "my-run.yaml": "examples/arithmetic/grpo.yaml"}
KEY = re.compile(r"[-+~]*(\w+)(\.\w+)+=")
STARTS_ANOTHER = ("nsys", "docker", "apptainer", "sbatch", "srun")


class Parsed(BaseException):
    """The arguments are parsed."""


def parse(program: Callable[[], object]) -> None:
    """Runs a program until it has parsed its arguments; those that its parser leaves are keys."""
    parse_known_args = argparse.ArgumentParser.parse_known_args

    def stop(parser: argparse.ArgumentParser, *arguments: Any) -> None:
        raise Parsed(parse_known_args(parser, *arguments)[1])

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Parsed) as parsed:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        program()
    left = parsed.value.args[0]
    assert all("=" in word or word in ("KEYS", "sft") for word in left), left


# --- commands of scalerl ---


def check_scalerl(argv: list[str]) -> None:
    command, *rest = argv
    assert command in cli.COMMANDS
    if "--help" in rest or all(re.fullmatch(r"[a-z][a-z-]*", word) for word in rest):
        check_help(argv)
    elif command in cli.SCHEMA_OF:
        check_keys(command, rest)
    elif command == "plan":
        asked = read_arguments(rest)
        check_keys("sft" if asked.kind == "sft" else "train", [*asked.overrides, REST])
    elif argv[:2] == ["launch", "slurm"]:
        own = [word for word in rest if word.startswith("slurm.")]
        compose("launch", own)
        run = [word for word in rest[1:] if word not in own and word not in ("--dry-run", "sft")]
        check_keys("sft" if "sft" in rest else "train", [*run, REST])
    else:
        parse(lambda: cli.main(argv))


def check_help(argv: list[str]) -> None:
    """A command that is named alone has a help."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            code = cli.main([word for word in argv if word != "--help"] + ["--help"])
        except SystemExit as ended:  # argparse's own
            code = ended.code
    assert code in (0, None), argv


def check_keys(command: str, words: list[str]) -> None:
    """Keys, their values and the rules between them. Files and models are the reader's."""
    given = [word for word in words if not word.endswith(REST) and word != "--dry-run"]
    is_whole = given == words
    if "--config-dir" in given and not Path(given[given.index("--config-dir") + 1]).is_dir():
        # What an earlier command of the page has made.
        given = [word for word in given if "=" in word]
        is_whole = False
    if not is_whole:
        keys = {word.partition("=")[0] for word in given}
        judge = JUDGE if "reward_model.judge.enable=true" in given else []
        given += [word for word in [*NEEDED[command], *judge] if word.partition("=")[0] not in keys]
    for job in jobs_of(given) or [given]:
        # Those of configs/ are for GPUs: tests/unit/test_configs.py has their rules.
        compose(cli.SCHEMA_OF[command], job, rules="configs" not in job)


# --- other programs ---


def check_python(argv: list[str]) -> None:
    if argv[0] == "-m" and argv[1] == "pip":
        check_pip(argv[2:])
    elif argv[0] == "-m" and argv[1] in ("venv", "pytest"):
        assert argv[1] == "venv" or Path(argv[2]).exists()
    elif argv[0] == "-m":
        assert importlib.util.find_spec(argv[1]) is not None
        if argv[2:]:
            run_parsed(argv[1:], runpy.run_module)
    elif "argparse" in read(argv[0]):
        run_parsed(argv, runpy.run_path)
    if keys := [word for word in argv if KEY.match(word)]:
        compose("ppo", [*keys, *NEEDED["train"]], rules=False)


def run_parsed(argv: list[str], run: Callable[..., object]) -> None:
    """A script or a module parses its arguments in this process. Modules of its folder do not stay."""
    folder = Path(argv[0]).resolve().parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", argv)
        patch.setattr(sys, "path", [str(folder), *sys.path])
        patch.setattr(os, "environ", os.environ.copy())
        parse(lambda: run(argv[0], run_name="__main__"))
    for name, module in list(sys.modules.items()):
        if argv[0].endswith(".py") and Path(getattr(module, "__file__", None) or "/").parent == folder:
            del sys.modules[name]


def check_pip(argv: list[str]) -> None:
    """Files are there, and extras are those of pyproject.toml."""
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    for option, word in itertools.pairwise(argv):
        assert option not in ("-r", "-c", "-e") or Path(word).exists(), word
        extra = re.fullmatch(r"scalerl\[(.+)\]", word)
        assert extra is None or extra[1] in extras, word


def check_make(argv: list[str]) -> None:
    """Targets are there, and variables are read."""
    for name in (word.partition("=")[0] for word in argv if "=" in word):
        assert re.search(rf"\b{name}\b", read("Makefile")), name
    subprocess.run(["make", "-n", *argv], check=True, stdout=subprocess.DEVNULL, timeout=60)


def check_mlflow(argv: list[str]) -> None:
    import click
    from mlflow.cli import cli as mlflow

    command = mlflow.get_command(click.Context(mlflow), argv[0])
    assert command is not None
    assert command.make_context(argv[0], argv[1:]).params["backend_store_uri"].startswith("sqlite:///")


def check_outer(argv: list[str]) -> None:
    """A program that starts another: the files of this repository are there, and the command of scalerl is one."""
    for word in argv:
        assert not word.startswith(("docker/", "launchers/")) or Path(word).is_file(), word
    if "scalerl" in argv[1:] and argv[0] != "build":
        check_scalerl(argv[len(argv) - argv[::-1].index("scalerl") :])


HOW: dict[str, Callable[[list[str]], None]] = {
    "scalerl": check_scalerl,
    "python": check_python,
    "python3": check_python,
    "quickstart.py": lambda argv: check_python(["examples/arithmetic/quickstart.py", *argv]),
    "pip": check_pip,
    "make": check_make,
    "mlflow": check_mlflow,
    **dict.fromkeys(STARTS_ANOTHER, check_outer),
}


def check(words: list[str]) -> None:
    """Commands of a cluster and of the system have no check of their own."""
    print("$", *words)
    program, *argv = (PLACEHOLDERS.get(word, word) for word in words)
    if program in HOW:
        HOW[program](argv)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(ROOT)
    yield


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page(page: str) -> None:
    in_blocks = [words for block in blocks(page) for words in commands(block)] if page != RUNS_ELSEWHERE else []
    for words in [*in_blocks, *commands_in_text(page)]:
        check(words)


@pytest.mark.parametrize("source", [source for source in SOURCES if commands_in_comments(source)])
def test_the_commands_in_the_comments_of_a_file(source: str) -> None:
    for words in commands_in_comments(source):
        check(words)
        if source.startswith("configs/dataset/"):
            # What the command writes is what the file names.
            files = re.findall(r"^  (?:train|val)_files: (.+)/(?:train|val)\.parquet$", read(source), re.MULTILINE)
            assert files == [words[words.index("--out") + 1]] * 2


@pytest.mark.parametrize("page", PAGES)
def test_the_options_in_the_text_of_a_page(page: str) -> None:
    """Each is one of a command of ours, or of a program that the page names."""
    named = {word.strip("[],").partition("=")[0] for span in spans(read(page)) for word in span.split()}
    assert {word for word in named if re.match(r"--\w", word)} - own_options() - OTHER_OPTIONS == set()


@cache
def own_options() -> frozenset[str]:
    """Options that code of the repository reads."""
    folders = ("scalerl", "benchmarks", "examples", "docs")
    texts = [path.read_text("utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py")]
    sizes = {"--tp", "--pp", "--ep", "--etp"}
    return frozenset(sizes.union(*(re.findall(r'"(--[a-z][\w-]*)[="]', text) for text in texts)))


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_or_names_is_there(page: str) -> None:
    for name in re.findall(r"`scalerl ([\w-]+)[^`\n]*`", read(page)):
        assert name in cli.COMMANDS, f"scalerl {name}"
    for path in re.findall(r"`((?:scalerl|docs|tests|examples|benchmarks|launchers)/[\w./-]+)`", read(page)):
        assert (ROOT / path).exists() or re.search("[A-Z]{4}", path), path
