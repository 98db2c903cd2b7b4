"""The command finds its programs, explains every key, and stays light until it has to work."""

from __future__ import annotations

import importlib
import re
import signal
import subprocess
import sys
import types

import pytest

import scalerl
from scalerl import cli
from scalerl.config.help import key_docs
from scalerl.config.keys import leaves
from scalerl.config.schema import EvalConfig, GenerationConfig, PPOConfig, SFTConfig
from scalerl.errors import UserError


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_command_hands_its_arguments_on_and_returns_the_exit_code(monkeypatch, command):
    module, _, name = cli.COMMANDS[command].partition(":")
    seen = []
    monkeypatch.setattr(importlib.import_module(module), name, lambda argv: seen.append(argv) or 7)
    assert cli.main([command, "--dry-run", "a=b"]) == 7
    assert seen == [["--dry-run", "a=b"]]


def test_a_users_error_is_one_message(monkeypatch, capsys):
    monkeypatch.delenv("SCALERL_TRACEBACK", raising=False)

    def main(argv: list[str]) -> int:
        raise UserError("bad row")

    monkeypatch.setitem(sys.modules, "scalerl.trainer.main_ppo", types.SimpleNamespace(main=main))
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == "error: bad row\n"


# Of each command what its user may get wrong: an option, a value, a path.
MISTAKES = {
    "train": [
        "+trainer.nnode=1",
        "trainer.nnodes=x",
        "trainer.nnodes",
        "--config-name",
        "data.train_files=none.parquet",
    ],
    "sft": ["model.path=none", "--nonsense"],
    "generate": ["model.path=none", "rollout.n=2"],
    "eval": ["data.path=none.parquet"],
    "init": ["", "here --model none", "here --nonsense"],
    "serve": ["", "none", "none --port x"],
    "chat": ["--nonsense", "--url http://127.0.0.1:1 hi"],
    "data": ["", "nonsense", "own --local none.csv --out out", "gsm8k --local none --out out"],
    "translate": ["", "none.sh"],
    "launch": ["nonsense", "status none", "slurm slurm.tim=1", "logs none --lines x"],
    "merge": ["", "--backend megatron --local_dir none --target_dir out", "--backend x"],
    "inspect": ["", "none"],
    "plan": ["--nonsense", "none.yaml", "--device-memory", "trainer.nnode=1"],
    "verify-resume": ["--steps x", "--nonsense", "--steps 4 --at 4", "trainer.nnode=1", "sft trainer.nnode=1"],
    "replay": ["", "none", "none x", "none 1", "none 1 --nonsense"],
    "report": ["", "none", "none --nonsense", "none --compare none"],
    "doctor": ["--nonsense", "nonsense"],
}


def test_mistakes_of_every_command_are_tried():
    assert MISTAKES.keys() == cli.COMMANDS.keys()


@pytest.mark.parametrize("command", MISTAKES)
def test_every_mistake_is_an_error_in_one_form(command, monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("SCALERL_TRACEBACK", raising=False)
    monkeypatch.chdir(tmp_path)
    for mistake in MISTAKES[command]:
        try:
            code = cli.main([command, *mistake.split()])
        except SystemExit as ended:
            code = ended.code
        said = capsys.readouterr().err
        assert code == 2, mistake
        assert said.startswith("error: ") and "Traceback" not in said, f"{mistake}: {said}"
    assert not list(tmp_path.iterdir())


def test_usage(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^  {name} ", out, re.MULTILINE) for name in cli.COMMANDS)
    assert cli.main([]) == 2
    assert "usage: scalerl" in capsys.readouterr().err


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"scalerl {scalerl.__version__}\n"


SAME = ("actor_rollout_ref.ref.megatron.", "critic.megatron.", "reward_model.megatron.")


@pytest.mark.parametrize(
    ("command", "schema"),
    [("train", PPOConfig), ("sft", SFTConfig), ("generate", GenerationConfig), ("eval", EvalConfig)],
)
def test_help_lists_every_key_with_its_default(capsys, command, schema):
    assert cli.main([command, "trainer.nnodes=2", "--help"]) == 0
    text = capsys.readouterr().out
    listed = re.findall(r"^  (\S+) \(.+\) = .+$", text, re.MULTILINE)
    # A section that is another's, key by key, has one line.
    same = tuple(re.findall(r"^  (\S+\.)\*: the keys of ", text, re.MULTILINE))
    assert same == (SAME if command == "train" else ())
    assert listed == [leaf.key for leaf in leaves(schema) if not leaf.key.startswith(same)]


def test_help_takes_texts_from_the_comments_and_defaults_from_the_fields():
    docs = {doc.key: doc for doc in key_docs("ppo")}
    assert docs["data.train_batch_size"].comment == "Prompts per step."
    assert docs["data.train_files"].default == "required"
    assert docs["trainer.total_training_steps"].comment == "null: total_epochs of the data."
    # Of two lines.
    assert docs["trainer.save_freq"].comment.startswith("Steps between checkpoints; the last step has one, too. -1:")
    assert docs["trainer.logger"].default == "[console,mlflow,file]"
    assert docs["trainer.nnodes"].comment == ""
    sft = {doc.key: doc for doc in key_docs("sft")}
    # Written once, in the class that SFTTrainerConfig is like.
    assert sft["trainer.save_freq"].comment == docs["trainer.save_freq"].comment
    assert sft["trainer.timeout_s"].comment == docs["trainer.timeout_s"].comment


# Keys whose name says it all.
OBVIOUS = {
    "lr", "min_lr", "weight_decay", "betas", "temperature", "top_p", "seed", "shuffle", "nnodes", "total_epochs",
    "project_name", "experiment_name", "dtype", "name", "kl_loss_coef", "do_sample", "resume_from_path",
    "request_timeout_s", "update_weights_bucket_megabytes", "val_files", "loss_agg_mode",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["ppo", "sft", "generation", "eval", "launch"])
def test_every_key_is_explained_or_obvious(kind):
    assert {doc.key for doc in key_docs(kind) if not doc.comment and doc.key.rsplit(".", 1)[-1] not in OBVIOUS} == set()


HEAVY = {"torch", "megatron", "sglang", "ray", "mlflow", "transformers", "pyarrow", "pandas", "numpy"}


@pytest.mark.parametrize("arguments", ["--help", "train --help", "launch slurm --help", "--version"])
def test_help_imports_nothing_heavy(arguments: str):
    code = (
        "import sys; from scalerl.cli import main; code = main(sys.argv[1:]); "
        "print('IMPORTED', *{name.split('.')[0] for name in sys.modules}); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments.split()], capture_output=True, text=True, timeout=120, check=True
    )
    imported = set(done.stdout.splitlines()[-1].split()[1:])
    assert "scalerl" in imported and not imported & HEAVY


# Sends itself Ctrl-C where the first module is imported that is neither Python's own nor of `AT_ONCE`.
INTERRUPTED_IMPORT = """
import os, signal, sys

AT_ONCE = {"scalerl", "scalerl.cli", "scalerl.errors"}

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] not in sys.stdlib_module_names and name not in AT_ONCE:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from scalerl.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("arguments", ["train data.train_files=none", "train --help", "launch slurm", "doctor"])
def test_an_interrupt_while_programs_are_imported_is_no_traceback(arguments: str):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, *arguments.split()],
        capture_output=True, text=True, timeout=120, check=False,
        # As from a terminal: a suite in the background of a shell ignores SIGINT, and its children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    # Python may pass the interrupt on to its own process, which a shell also reports as 130.
    assert done.returncode in (130, -signal.SIGINT)
    assert done.stdout == "" and done.stderr == "Interrupted.\n"


def test_a_reader_may_stop_early():
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} -m scalerl.cli train --help | head -1"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == ""


def test_a_misspelt_command_is_the_last_thing_said(capsys):
    """The list of commands would push it off the screen."""
    assert cli.main(["trian"]) == cli.main(["zzz"]) == 2
    near, far = capsys.readouterr().err.splitlines()
    assert near == "error: there is no command trian; did you mean scalerl train?"
    # Guessed only where one is near.
    assert far.startswith("error: there is no command zzz; ") and all(name in far for name in cli.COMMANDS)


def test_a_command_offers_only_the_recipes_that_it_takes(capsys):
    for command, offered in (
        ("train", {"recipe", "layout"}),
        ("sft", {"recipe"}),
        ("generate", {"recipe"}),
        ("eval", set()),
    ):
        assert cli.main([command, "--help"]) == 0
        usage = capsys.readouterr().out.partition("Keys:")[0]
        assert {name for name in ("recipe", "layout") if f"+{name}=" in usage} == offered
