"""Every command that README, docs, configs, examples and benchmarks show, pasted into a shell.

Each exists, its keys and options do, its files fit together. Blocks go to a real shell, whose programs write down what
they were given; commands in the text and in comments are read word by word. Then each runs here, or, where that takes a
GPU, a cluster or an hour, everything of it is checked that can be checked without (`HOW`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from scalerl import cli
from scalerl.checkpoint.store import write_trainer_state
from scalerl.commands.data import command as prepare_command
from scalerl.commands.data.hub_sets import HubSet
from scalerl.config import compose, save_resolved
from scalerl.data import PromptCursor
from scalerl.errors import UserError
from scalerl.extras.slurm.command import main as launch
from scalerl.extras.slurm.record import SubmittedJob
from scalerl.extras.verify.replay import main as replay
from scalerl.extras.verify.resume import DIRECTORY as VERIFY_RESUME
from scalerl.extras.verify.resume import main as verify_resume
from scalerl.merge.command import build_parser
from scalerl.merge.command import main as merge
from scalerl.tracking.deliver import main as deliver
from tests.documented import (
    PAGES,
    PROGRAMS,
    REST,
    ROOT,
    SHELL_WORDS,
    SOURCES,
    blocks,
    commands,
    commands_in_comments,
    commands_in_text,
    read,
    spans,
)
from tests.unit.data.test_data_page import write_originals
from tests.unit.merge.test_merge import joined_tensors, write_checkpoint

# The blocks of these pages have a test that runs them with the files they need.
OTHER_TESTS = {"docs/data.md": "tests/unit/data/test_data_page.py", "docs/extending.md": "tests/e2e/test_extending.py"}
# Packages that the project does not declare: of one page's subject each.
OTHER_PACKAGES = ("s3fs", "py-spy", "playwright", "trl", "flash-attn", "transformer-engine")
# Options of other programs, or that another program is given by ours.
OTHER_OPTIONS = {
    "Apptainer": ("--nv",),
    "Docker": ("--ipc",),
    "SGLang": ("--nnodes", "--node-rank", "--dist-init-addr", "--custom-weight-loader"),
    "Ray": ("--num-cpus", "--object-store-memory"),
    "pip": ("--no-deps", "--no-build-isolation"),
    "Slurm": (
        *("--batch", "--container-image", "--exclusive", "--export", "--gres", "--no-kill", "--output", "--overlap"),
        "--signal",
    ),
    # In a script of verl.
    "uv": ("--all-packages", "--extra", "--frozen"),
}
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


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that the pages name."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    home = tmp_path_factory.mktemp("reader")
    for name in ("benchmarks", "configs", "docker", "docs", "examples", "launchers", "requirements", "tests"):
        (home / name).symlink_to(ROOT / name)
    for name in ("Makefile", "pyproject.toml"):
        (home / name).symlink_to(ROOT / name)
    # As `python3 -m venv` makes it.
    for name in (".venv-gpu", "TRL"):
        (home / name / "bin").mkdir(parents=True)
        (home / name / "bin/activate").touch()
    for script, out in (("make_data.py", "data"), ("make_model.py", "model")):
        run_script([f"examples/arithmetic/{script}", "--out", str(home / out)])
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
    write_originals(home)
    shutil.copy(ROOT / "examples/arithmetic/reward.py", home)
    (home / "outputs/quickstart").mkdir(parents=True)
    for name in ("MODEL", "OTHER", "outputs/quickstart/sft_model"):
        (home / name).symlink_to(model)
    AutoTokenizer.from_pretrained(model).save_pretrained(home / "RM")
    config = AutoConfig.from_pretrained(model, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(home / "RM")
    write_checkpoints(home)
    write_runs(home)
    (home / "printed.txt").write_text("of a run without a link\n")
    return home


def run_script(argv: list[str]) -> None:
    """A script of the examples or docs, as Python runs it with these arguments, but in this process, where torch is.

    Nothing of it is left: modules of its folder, threads, variables.
    """
    folder, threads = (ROOT / argv[0]).parent, torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(sys, "argv", argv)
        patch.setattr(sys, "path", [str(folder), *sys.path])
        patch.setattr(os, "environ", os.environ.copy())
        try:
            runpy.run_path(str(ROOT / argv[0]), run_name="__main__")
        finally:
            torch.set_num_threads(threads)
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").parent == folder:
            del sys.modules[name]


def write_responses(path: str) -> None:
    """As `scalerl generate` does."""
    table = pq.read_table("val.parquet").slice(0, 4).drop(["data_source"])
    # One that has a rule of scalerl's own.
    table = table.append_column("data_source", [["openai/gsm8k"] * len(table)])
    pq.write_table(table.append_column("responses", [[["51", "3"]] * len(table)]), path)


def write_checkpoints(home: Path) -> None:
    for name in ("run_qwen3_8b_megatron.sh", "run.sh"):
        (home / name).write_text("python3 -m verl.trainer.main_ppo data.train_files=a.parquet")
    actor = write_checkpoint(home / "made", home / "model", joined_tensors(home / "model"))
    cursor = PromptCursor(pq.read_metadata(home / "train.parquet").num_rows, 42, True)
    write_trainer_state(actor.parent, {"step": 7, "prompts": cursor.state_dict()})
    shutil.copytree(actor, actor.parent / "critic")
    for name in ("RUN/global_step_N", "CHECKPOINT", "outputs/run/global_step_100"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(actor.parent, home / name)


def write_runs(home: Path) -> None:
    """The configuration of a run, and what a job leaves beside it."""
    given = needed_of("train")
    own = compose("ppo", ["+recipe=grpo", *given, "trainer.n_gpus_per_node=1"])
    save_resolved(own, home / "my-run.yaml")
    for name in ("outputs/PROJECT/EXPERIMENT", "RUN"):
        (home / name).mkdir(parents=True, exist_ok=True)
        keys = [*given, f"trainer.default_local_dir={name}", f"trainer.rollout_data_dir={name}/rollouts"]
        save_resolved(compose("ppo", ["+recipe=[grpo,cpu]", *keys]), home / name / "config.yaml")
    SubmittedJob("12", "now", "job.sbatch", str(home / "slurm-12.out"), str(home / "RUN/logs/12")).write(home / "RUN")


def needed_of(command: str) -> list[str]:
    return [f"{key}={value}" for key, value in NEEDED[command].items()]


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


@cache
def run_doctor(*options: str) -> None:
    """Once for all pages; 1: what a run needs is not here, as of GPUs."""
    if "--imports" in options:
        check_names(["doctor"], list(options))
    else:
        assert cli.main(["doctor", *options]) in (0, 1)


def check_run(argv: list[str]) -> None:
    """Keys, rules, files, model and reward function; no device is taken."""
    # Where a page's cluster has its data.
    # As in a job, and on machines that share a cluster.
    os.environ["RAY_ADDRESS"] = "HEAD:6379"
    run([*(word.replace("=/data/", "=") for word in with_the_rest(argv[0], argv)), "--dry-run"])


def check_generation(argv: list[str]) -> None:
    """What the servers would write is written here, for the command that follows."""
    (output,) = (word.partition("=")[2] for word in argv if word.startswith("data.output_path="))
    Path(output).unlink(missing_ok=True)
    check_run(argv)
    write_responses(output)


def compose_only(argv: list[str]) -> None:
    """Keys and their values; files and models are nobody's."""
    compose("ppo", argv[1:], rules=False)


def run_data(argv: list[str]) -> None:
    """What an earlier page made is made again; of a data set on the hub the options are read."""
    if "--local" in argv and HubSet.parse(argv[argv.index("--local") + 1]) is not None:
        prepare_command.build_parser().parse_args(argv[1:])
        return
    shutil.rmtree(argv[argv.index("--out") + 1], ignore_errors=True)
    run(argv)


def merge_or_parse(argv: list[str]) -> None:
    """What a run would leave is put there, and what an earlier page made is made again."""
    if "--local_dir" in argv and not (checkpoint := Path(argv[argv.index("--local_dir") + 1]).parent).exists():
        shutil.copytree("RUN/global_step_N", checkpoint)
    if "fsdp" in argv:
        build_parser().parse_args(argv)
        return
    if "--target_dir" in argv:
        shutil.rmtree(argv[argv.index("--target_dir") + 1], ignore_errors=True)
    run(argv)


def parse_server(argv: list[str]) -> None:
    from scalerl.commands import chat, serve

    {"chat": chat, "serve": serve}[argv[0]].build_parser().parse_args(argv[1:])


def check_verify_resume(argv: list[str]) -> None:
    """It looks for an earlier verification once it has read its arguments."""
    Path("verified", VERIFY_RESUME).mkdir(parents=True, exist_ok=True)
    keys = [*needed_of("sft" if argv[1] == "sft" else "train"), "trainer.default_local_dir=verified"]
    with pytest.raises(UserError, match="is there already, of an earlier verification"):
        verify_resume([more for word in argv[1:] for more in (keys if word == "KEYS" else [word])])


def check_replay(argv: list[str]) -> None:
    """It looks for the dump once it has composed the configuration of the run."""
    with pytest.raises(UserError, match=r"step_17\.parquet is not there"):
        replay(argv[1:])


def check_launch(argv: list[str]) -> None:
    """Where Slurm's commands are not installed: nothing else is wrong."""
    _, command, *rest = argv
    if command == "slurm":
        # Where a page's cluster has its data; and the devices of its nodes, which a reader knows.
        rest = [word.replace("=/data/", "=") for word in with_the_rest("train", rest)]
        if not any(word.startswith("trainer.n_gpus_per_node=") for word in rest):
            rest.append("trainer.n_gpus_per_node=8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "/nothing")
        if command == "status":
            assert launch([command, *rest]) == 0
            return
        with pytest.raises(UserError, match="not on PATH") as raised:
            launch([command, *rest])
    assert len(getattr(raised.value, "violations", [""])) == 1, raised.value


def dry_make(argv: list[str]) -> None:
    """Targets are there, and variables are read."""
    makefile = read("Makefile")
    for name in (word.partition("=")[0] for word in argv if "=" in word):
        assert re.search(rf"\b{name}\b", makefile), name
    subprocess.run(["make", "-n", *argv], check=True, stdout=subprocess.DEVNULL, timeout=60)


def parse_mlflow(argv: list[str]) -> None:
    import click
    from mlflow.cli import cli as mlflow

    command = mlflow.get_command(click.Context(mlflow), argv[0])
    assert command is not None
    context = command.make_context(argv[0], argv[1:])
    assert context.params["backend_store_uri"].startswith("sqlite:///")


def check_script_and_command(argv: list[str]) -> None:
    """The script is there, and so is what it is to run; that of a run is written when the run is launched."""
    scripts = [index for index, word in enumerate(argv) if word.endswith(".sbatch") and not word.startswith("RUN/")]
    for at in scripts:
        assert Path(argv[at]).is_file() and argv[at + 1] == "scalerl"
        check_run(argv[at + 2 :])


def run_python(argv: list[str]) -> None:
    if argv[0] == "-m":
        check_module(argv[1:])
    elif argv[0].startswith("benchmarks/"):
        check_benchmark(argv)
    elif argv[0] == "examples/arithmetic/quickstart.py":
        check_quickstart(argv)
    elif argv[0] == "docs/make_screenshot.py":
        with pytest.raises(SystemExit, match="no line `charts"):
            run_script(argv)
    elif argv[0] == "requirements/lock.py":
        assert Path(argv[0]).is_file() and len(argv) == 1
    else:
        run_script(argv)


def check_module(argv: list[str]) -> None:
    name, *options = argv
    modules: dict[str, Callable[[list[str]], int]] = {"scalerl.merge": merge, "scalerl.tracking.deliver": deliver}
    if name in modules:
        assert modules[name](options) == 0
    elif name == "pytest":
        assert Path(options[0]).exists() and options[1:] in ([], ["-q"])
    elif name == "venv":
        assert (Path(*options) / "bin/activate").is_file()
    elif name == "pip":
        check_packages(options)
    else:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None, name
        text = Path(spec.origin).read_text(encoding="utf-8")
        assert "__main__" in text and all(f'"{option}"' in text for option in options), argv


@cache
def module_of(script: str) -> ModuleType:
    """A script's functions."""
    spec = importlib.util.spec_from_file_location(f"documented_{Path(script).stem}", ROOT / script)
    assert spec is not None and spec.loader is not None, script
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        # What dataclasses ask for.
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


def check_benchmark(argv: list[str]) -> None:
    parse = module_of(argv[0]).parse
    options = parse(argv[1:], *(["cpu"] * (len(inspect.signature(parse).parameters) - 1)))
    if overrides := getattr(options, "overrides", None):
        compose("ppo", with_the_rest("train", [*overrides, REST]), rules=False)


def check_quickstart(argv: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", argv)
        _, overrides = module_of(argv[0]).parse()
    # An option that it does not know would go to scalerl train.
    assert overrides in ([], ["KEY=VALUE"])


def check_container(argv: list[str]) -> None:
    if argv[0] == "build":
        assert any(Path(word).is_file() for word in argv[1:])
    elif "scalerl" in argv:
        perform_inner(argv)
    else:
        assert argv[0] in ("stop", "exec")


def perform_inner(argv: list[str]) -> None:
    """The command of scalerl that another program starts."""
    at = len(argv) - 1 - argv[::-1].index("scalerl")
    perform("", argv[at:])


def check_packages(argv: list[str]) -> None:
    """Files are there, packages and extras are those of pyproject.toml, and versions those that are locked."""
    known, locked = read("pyproject.toml"), read("requirements/gpu.txt").splitlines()
    action, *words = argv
    if action != "install":
        assert argv == ["freeze", "--all"]
        return
    while words:
        word = words.pop(0)
        if word in ("-r", "-c"):
            assert Path(words.pop(0)).is_file()
        elif word == "-e":
            assert (Path(words.pop(0)) / "pyproject.toml").is_file()
        elif extra := re.fullmatch(r"scalerl\[(.+)\]", word):
            assert extra[1] in tomllib.loads(known)["project"]["optional-dependencies"]
        else:
            name = re.split(r"[\[=]", word)[0]
            is_known = f'"{word}' in known or word in locked or name in OTHER_PACKAGES
            assert is_known or word in OTHER_OPTIONS["pip"], word


def not_run(argv: list[str]) -> None:
    """Of a cluster, or of a run that is not here."""


HOW: dict[str, Callable[[list[str]], None]] = {
    "scalerl init": run,
    "scalerl train": check_run,
    "scalerl sft": check_run,
    "scalerl generate": check_generation,
    "scalerl eval": run,
    "scalerl serve": parse_server,
    "scalerl chat": parse_server,
    "scalerl data": run_data,
    "scalerl plan": run,
    "scalerl translate": run,
    "scalerl launch": check_launch,
    "scalerl merge": merge_or_parse,
    "scalerl inspect": run,
    "scalerl verify-resume": check_verify_resume,
    "scalerl replay": check_replay,
    "scalerl doctor": lambda argv: run_doctor(*argv[1:]),
    "python": run_python,
    "python3": run_python,
    "quickstart.py": lambda argv: run_python(["examples/arithmetic/quickstart.py", *argv]),
    "pip": check_packages,
    "nsys": perform_inner,
    "docker": check_container,
    "apptainer": check_container,
    "make": dry_make,
    "mlflow": parse_mlflow,
    "sbatch": check_script_and_command,
    **dict.fromkeys(("srun", "tail", "scancel", "scontrol", "sinfo", "ray", "kill"), not_run),
}
# Models and files of their commands are nobody's.
OF_OTHER_MODELS = re.compile(r"docs/models\.md|configs/.*")


def perform(place: str, words: list[str]) -> None:
    """Runs or checks a command.  place: the page or file that shows it."""
    print("$", *words)
    program, *argv = words
    name = f"scalerl {argv[0]}" if program == "scalerl" else program
    if name == "scalerl train" and OF_OTHER_MODELS.fullmatch(place):
        compose_only(argv)
    else:
        HOW[name](argv)


# --- commands in the text ---


# What stands for a number or a name of the reader's.
PLACEHOLDERS = {
    "README.md": {"N": "3"},
    "docs/models.md": {"NAME": "qwen3-8b-grpo-8"},
    "docs/slurm.md": {"N": "3"},
    "examples/arithmetic/quickstart.py": {"N": "3"},
    **{f"examples/arithmetic/{name}.py": {"DIR": f"{name}_out"} for name in ("make_data", "make_model")},
}


def perform_named(place: str, words: list[str]) -> None:
    """A command in the text: run or checked as those of blocks, or, where it has no values, by its help."""
    known = PLACEHOLDERS.get(place, {})
    words = [known.get(word, word) for word in words]
    names = re.fullmatch(r"scalerl((?: [a-z][\w-]*)+)((?: --[a-z][\w-]*)*)(?: \.\.\.)?", " ".join(words))
    if names and words[1] != "doctor":
        check_names(names[1].split(), names[2].split())
    else:
        perform(place, words)


def check_names(parts: list[str], options: list[str]) -> None:
    """A command of scalerl has these parts and options, as its help says."""
    has_help = {"data": 2, "launch": 2, "merge": 2}.get(parts[0], 1)
    said = help_of(tuple(parts[:has_help]))
    for word in [*parts[has_help:], *options]:
        is_named = word == "--help" or re.search(rf"(?<![\w-]){word}(?![\w-])", said)
        assert is_named, f"scalerl {' '.join([*parts, *options])}: no {word}"


@cache
def help_of(command: tuple[str, ...]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            code = cli.main([*command, "--help"])
        except SystemExit as ended:  # argparse's own
            code = ended.code
    assert code in (0, None), command
    return out.getvalue()


# --- tests ---


@pytest.mark.parametrize("page", [page for page in PAGES if page not in OTHER_TESTS and blocks(page)])
def test_the_commands_of_a_page(page: str, reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(reader)
    for block in blocks(page):
        for words in commands(block, reader):
            perform(page, words)


@pytest.mark.parametrize("page", [page for page in PAGES if commands_in_text(page)])
def test_the_commands_in_the_text_of_a_page(page: str, reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(reader)
    for words in commands_in_text(page):
        perform_named(page, words)


@pytest.mark.parametrize("source", [source for source in SOURCES if commands_in_comments(source)])
def test_the_commands_in_the_comments_of_a_file(source: str, reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(reader)
    for words in commands_in_comments(source):
        perform_named(source, words)
    if source.startswith("configs/dataset/"):
        # What its own command has just written.
        files = re.findall(r"^  (?:train|val)_files: (.+)$", read(source), re.MULTILINE)
        assert len(files) == 2 and all(Path(file).is_file() for file in files), files


@pytest.mark.parametrize("page", PAGES)
def test_the_options_in_the_text_of_a_page(page: str) -> None:
    """Each is one of a command of ours, or of a program that the page names."""
    known = own_options() | {option for options in OTHER_OPTIONS.values() for option in options}
    named = {word.strip("[],").partition("=")[0] for span in spans(read(page)) for word in span.split()}
    assert {word for word in named if re.match(r"--\w", word)} - known == set()


@cache
def own_options() -> frozenset[str]:
    """Options that code of the repository reads."""
    sources = [
        path for folder in ("scalerl", "benchmarks", "examples", "docs") for path in (ROOT / folder).rglob("*.py")
    ]
    options = {option for path in sources for option in re.findall(r'"(--[a-z][\w-]*)[="]', path.read_text("utf-8"))}
    return frozenset(options | set(re.findall(r"--\w+", help_of(("merge", "split")))))


def test_what_no_program_reads_is_labelled() -> None:
    """A block without a label is of commands, so that no command is taken for output."""
    for page in PAGES:
        for block in blocks(page):
            first = block.split(maxsplit=1)[0]
            known = first in (*PROGRAMS, *SHELL_WORDS)
            assert known, f"{page}: a block begins with {first!r}: label it ```text, or give it a program"


def test_a_page_names_no_command_that_there_is_not() -> None:
    for page in PAGES:
        text = read(page)
        for name in re.findall(r"`scalerl ([\w-]+)[^`\n]*`", text):
            assert name in cli.COMMANDS, f"{page}: scalerl {name}"
        for path in re.findall(r"`((?:scalerl|docs|tests|examples|benchmarks|launchers)/[\w./-]+)`", text):
            assert (ROOT / path).exists() or re.search("[A-Z]{4}", path), f"{page}: {path}"
