"""Every command in README and docs, pasted into a shell: it exists, its keys and options do, its files fit together.

The shell is real, the programs in it write down what they were given. Then each command runs here, or, where that takes
a GPU, a cluster or an hour, everything of it is checked that can be checked without.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalerl import cli
from scalerl.checkpoint.store import write_trainer_state
from scalerl.config import compose, save_resolved
from scalerl.data import PromptCursor
from scalerl.merge.command import build_parser
from scalerl.merge.command import main as merge
from scalerl.tracking.deliver import main as deliver
from tests.unit.merge.test_merge import joined_tensors, write_checkpoint

ROOT = Path(__file__).parents[2]
# Their commands have a test that runs them with the files they need.
OTHER_TESTS = {"docs/data.md": "tests/unit/data/test_data_page.py", "docs/extending.md": "tests/e2e/test_extending.py"}
PAGES = sorted(["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
PROGRAMS = (
    *("scalerl", "python", "python3", "pip", "make", "mlflow", "nsys"),
    *("docker", "apptainer", "sbatch", "srun", "tail"),
)
# Output, pictures and other languages are labelled (```text).
BLOCK = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = ("", "bash", "sh", "console")
# Stands in a page for what a reader has.
REST = "..."
# What the reader's rest of a command would give, unless the page gives it.
NEEDED = {
    "train": {
        "data.train_files": "train.parquet",
        "data.val_files": "val.parquet",
        "actor_rollout_ref.model.path": "MODEL",
        "actor_rollout_ref.rollout.n": "8",
        "custom_reward_function.path": "reward.py",
    },
    "sft": {"data.train_files": "chats.parquet", "model.path": "MODEL"},
    "generate": {"model.path": "MODEL", "data.path": "val.parquet", "data.output_path": "out.parquet"},
    "eval": {"data.path": "out.parquet", "custom_reward_function.path": "reward.py"},
}
# And with some settings.
NEEDED_WITH = {
    "reward_model.enable=true": {"data.train_files": "model_style.parquet"},
    "reward_model.judge.enable=true": {
        "data.train_files": "judge_style.parquet",
        "reward_model.judge.model.path": "MODEL",
        "reward_model.judge.resource_pool.nnodes": "1",
    },
}


def blocks(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [block for label, block in BLOCK.findall(text) if label in COMMANDS]


def commands(block: str, directory: Path) -> list[list[str]]:
    """The words of each command, as the programs in a shell get them that the block is pasted into."""
    programs, record = directory / "programs", directory / "record"
    programs.mkdir(exist_ok=True)
    record.write_bytes(b"")
    for name in PROGRAMS:
        program = programs / name
        program.write_text('#!/bin/sh\nprintf "%s\\0" "${0##*/}" "$@" >> "$RECORD"\nprintf "\\n" >> "$RECORD"\n')
        program.chmod(0o755)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "RECORD": str(record), "HOME": str(directory)}
    done = subprocess.run(
        ["bash", "-eu"], input=block, text=True, cwd=directory, env=environment, capture_output=True, timeout=60
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    lines = record.read_bytes().decode().split("\0\n")
    return [line.split("\0") for line in lines if line]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that the pages name."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    home = tmp_path_factory.mktemp("reader")
    for name in ("docker", "examples", "launchers", "requirements", "Makefile", "pyproject.toml"):
        (home / name).symlink_to(ROOT / name)
    # As `python3 -m venv` makes it.
    (home / ".venv-gpu/bin").mkdir(parents=True)
    (home / ".venv-gpu/bin/activate").touch()
    for script, out in (("make_data.py", "data"), ("make_model.py", "model")):
        command = [sys.executable, str(ROOT / "examples/arithmetic" / script), "--out", str(home / out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=120)
    model = home / "model"
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16384}))
    for name, source in {
        "rl_train": "rl_train",
        "rl_val": "rl_val",
        "val": "rl_val",
        "test": "rl_val",
        "chats": "sft_train",
    }.items():
        (home / f"{name}.parquet").symlink_to(home / "data" / f"{source}.parquet")
    # As many as a step of the default size takes.
    table = pq.read_table(home / "rl_train.parquet")
    pq.write_table(pa.concat_tables([table] * 3), home / "train.parquet")
    for style in ("model", "judge"):
        rewards = [{"style": style, "ground_truth": row["ground_truth"]} for row in table["reward_model"].to_pylist()]
        styled = table.set_column(table.column_names.index("reward_model"), "reward_model", pa.array(rewards))
        pq.write_table(pa.concat_tables([styled] * 3), home / f"{style}_style.parquet")
    (home / "my.csv").write_text("question,result\n" + "".join(f"{n}+1=,{n + 1}\n" for n in range(60)))
    shutil.copy(ROOT / "examples/arithmetic/reward.py", home)
    (home / "outputs/quickstart").mkdir(parents=True)
    for name in ("MODEL", "OTHER", "outputs/quickstart/sft_model"):
        (home / name).symlink_to(model)
    AutoTokenizer.from_pretrained(model).save_pretrained(home / "RM")
    config = AutoConfig.from_pretrained(model, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(home / "RM")
    write_checkpoints(home)
    run_dir = home / "outputs/PROJECT/EXPERIMENT"
    run_dir.mkdir(parents=True)
    needed = [f"{key}={value}" for key, value in NEEDED["train"].items()]
    save_resolved(compose("ppo", ["+recipe=[grpo,cpu]", *needed]), run_dir / "config.yaml")
    return home


def write_responses(path: str) -> None:
    """As `scalerl generate` does."""
    table = pq.read_table("val.parquet").slice(0, 4).drop(["data_source"])
    # One that has a rule of scalerl's own.
    table = table.append_column("data_source", [["openai/gsm8k"] * len(table)])
    pq.write_table(table.append_column("responses", [[["51", "3"]] * len(table)]), path)


def write_checkpoints(home: Path) -> None:
    (home / "run_qwen3_8b_megatron.sh").write_text("python3 -m verl.trainer.main_ppo data.train_files=a.parquet")
    actor = write_checkpoint(home / "made", home / "model", joined_tensors(home / "model"))
    cursor = PromptCursor(pq.read_metadata(home / "train.parquet").num_rows, 42, True)
    write_trainer_state(actor.parent, {"step": 7, "prompts": cursor.state_dict()})
    for name in ("RUN/global_step_N", "outputs/run/global_step_100"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(actor.parent, home / name)


def with_the_rest(command: str, words: list[str]) -> list[str]:
    """A page's words, with what its reader has in the place of the dots."""
    known = [word for word in words if not word.endswith(REST)]
    if known != words:
        keys = {word.partition("=")[0] for word in known}
        needed = NEEDED[command]
        for setting, more in NEEDED_WITH.items():
            needed = needed | (more if setting in known else {})
        known += [f"{key}={value}" for key, value in needed.items() if key not in keys]
    return known


# --- what is done with each command ---


def run(argv: list[str]) -> None:
    assert cli.main(argv) == 0


def check_run(argv: list[str]) -> None:
    """Keys, rules, files, model and reward function; no device is taken."""
    # Where a page's cluster has its data.
    run([*(word.replace("=/data/", "=") for word in with_the_rest(argv[0], argv)), "--dry-run"])


def check_generation(argv: list[str]) -> None:
    """tests/e2e/test_generation.py has servers; what they would write is written here, for the command that follows."""
    (output,) = (word.partition("=")[2] for word in argv if word.startswith("data.output_path="))
    Path(output).unlink(missing_ok=True)
    check_run(argv)
    write_responses(output)


def compose_only(argv: list[str]) -> None:
    """Keys and their values; the page's files and models are nobody's."""
    compose("ppo", argv[1:], rules=False)


def merge_or_parse(argv: list[str]) -> None:
    """FSDP's shards take ranks to write: tests/dist/test_fsdp_merge.py. What a run would leave is put there."""
    if "--local_dir" in argv and not (checkpoint := Path(argv[argv.index("--local_dir") + 1]).parent).exists():
        shutil.copytree("RUN/global_step_N", checkpoint)
    if "fsdp" in argv:
        build_parser().parse_args(argv)
    else:
        run(argv)


def parse_server(argv: list[str]) -> None:
    """A server takes a minute; tests/sglang/test_serve.py has one."""
    from scalerl.inference import chat, serve

    {"chat": chat, "serve": serve}[argv[0]].build_parser().parse_args(argv[1:])


def explain_itself(argv: list[str]) -> None:
    """They train: tests/e2e/test_verify.py."""
    try:
        code = cli.main([argv[0], "--help"])
    except SystemExit as ended:  # argparse's own
        code = ended.code
    assert not code


def check_launch(argv: list[str]) -> None:
    """Its keys, and the run's; tests/slurm/test_launch.py has a Slurm."""
    if argv[1] == "slurm":
        words = [word for word in argv[2:] if word != "--dry-run"]
        compose("launch", [word for word in words if word.startswith("slurm.")])
        of_run = [word for word in words if not word.startswith("slurm.")]
        command = of_run.pop(0) if of_run[0] in NEEDED else "train"
        check_run([command, *of_run])
    else:
        from scalerl.launch.command import COMMANDS

        assert argv[1] in COMMANDS


def dry_make(argv: list[str]) -> None:
    """Takes minutes to hours; the target is there."""
    subprocess.run(["make", "-n", *argv], check=True, stdout=subprocess.DEVNULL, timeout=60)


def parse_mlflow(argv: list[str]) -> None:
    """Serves until it is stopped; tests/e2e/test_mlflow_server.py has one."""
    import click
    from mlflow.cli import cli as mlflow

    command = mlflow.get_command(click.Context(mlflow), argv[0])
    assert command is not None
    context = command.make_context(argv[0], argv[1:])
    assert context.params["backend_store_uri"].startswith("sqlite:///outputs/")


def check_script_and_command(argv: list[str]) -> None:
    """Needs a cluster: the script is there, and so is what it is to run."""
    (at,) = (index for index, word in enumerate(argv) if word.endswith(".sbatch"))
    assert Path(argv[at]).is_file() and argv[at + 1] == "scalerl"
    check_run(argv[at + 2 :])


def run_module(argv: list[str]) -> None:
    modules: dict[str, Callable[[list[str]], int]] = {"scalerl.merge": merge, "scalerl.tracking.deliver": deliver}
    assert argv[0] == "-m"
    if argv[1] == "pytest":
        # Tests of their own: those on a GPU.
        assert (ROOT / argv[2]).exists()
    else:
        assert modules[argv[1]](argv[2:]) == 0


def check_container(argv: list[str]) -> None:
    """Takes an hour and a registry (tests/unit/test_container.py reads the recipes): the recipe and the command."""
    if argv[0] == "build":
        assert any(Path(word).is_file() for word in argv[1:])
    else:
        perform_inner(argv)


def perform_inner(argv: list[str]) -> None:
    """The command of scalerl that another program starts."""
    at = len(argv) - 1 - argv[::-1].index("scalerl")
    perform("", argv[at:])


def check_packages(argv: list[str]) -> None:
    """Asks a package index: the files are there, and the packages are those of pyproject.toml."""
    known = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert argv.pop(0) == "install"
    while argv:
        word = argv.pop(0)
        if word in ("-r", "-c"):
            assert Path(argv.pop(0)).is_file()
        elif word == "-e":
            assert (Path(argv.pop(0)) / "pyproject.toml").is_file()
        else:
            assert word in ("--no-deps", "--no-build-isolation") or f'"{word}' in known, word


def check_environment(argv: list[str]) -> None:
    """Makes what the next command of its line enters."""
    assert argv[:2] == ["-m", "venv"] and (Path(argv[2]) / "bin/activate").is_file()


def explain(argv: list[str]) -> None:
    """Looks at the whole machine for seconds; tests/unit/test_doctor.py does."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*argv, "--help"])
    assert ended.value.code == 0


def not_run(argv: list[str]) -> None:
    """Looks at a job of a cluster."""


HOW: dict[str, Callable[[list[str]], None]] = {
    "scalerl init": run,
    "scalerl train": check_run,
    "scalerl sft": check_run,
    "scalerl generate": check_generation,
    "scalerl eval": run,
    "scalerl serve": parse_server,
    "scalerl chat": parse_server,
    "scalerl data": run,
    "scalerl translate": run,
    "scalerl launch": check_launch,
    "scalerl merge": merge_or_parse,
    "scalerl inspect": run,
    "scalerl verify-resume": explain_itself,
    "scalerl replay": explain_itself,
    "scalerl doctor": explain,
    "python": run_module,
    "python3": check_environment,
    "pip": check_packages,
    "nsys": perform_inner,
    "docker": check_container,
    "apptainer": check_container,
    "make": dry_make,
    "mlflow": parse_mlflow,
    "sbatch": check_script_and_command,
    "srun": not_run,
    "tail": not_run,
}


def perform(page: str, words: list[str]) -> None:
    program, *argv = words
    name = f"scalerl {argv[0]}" if program == "scalerl" else program
    if page == "docs/from-verl.md" and name == "scalerl train":
        compose_only(argv)
    else:
        HOW[name](argv)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in OTHER_TESTS and blocks(page)])
def test_the_commands_of_a_page(page: str, reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(reader)
    for block in blocks(page):
        for words in commands(block, reader):
            print("$", *words)
            perform(page, words)


def test_what_no_program_reads_is_labelled() -> None:
    """A block without a label is of commands, so that no command is taken for output."""
    for page in PAGES:
        for block in blocks(page):
            first = block.split(maxsplit=1)[0]
            assert first in PROGRAMS, f"{page}: a block begins with {first!r}: label it ```text, or give it a program"


def test_a_page_names_no_command_that_there_is_not() -> None:
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for name in re.findall(r"`scalerl ([\w-]+)[^`\n]*`", text):
            assert name in cli.COMMANDS, f"{page}: scalerl {name}"
        for path in re.findall(r"`((?:scalerl|docs|tests|examples|benchmarks|launchers)/[\w./-]+)`", text):
            assert (ROOT / path).exists() or re.search("[A-Z]{4}", path), f"{page}: {path}"
