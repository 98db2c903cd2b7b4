"""What `scalerl init` writes is a run without a mistake, on a CPU and on GPUs; nothing of the user's is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scalerl.commands.init import command, files
from scalerl.commands.init.files import Machine, make_files
from scalerl.config import compose
from scalerl.config.schema.devices import MAX_CPU_DEVICES, devices_here
from scalerl.errors import UserError
from scalerl.trainer.checks.preflight import check_ppo
from tests.tiny_models import make_tiny_model


def config_of(directory: Path, *overrides: str):
    return compose("ppo", ["--config-dir", str(directory), "--config-name", "train", *overrides])


def test_its_files_pass_every_check_of_a_run(tmp_path: Path, capsys) -> None:
    model = make_tiny_model(tmp_path / "model", hidden_size=64)
    # A path that YAML could take for something else.
    directory = tmp_path / "my: run #1"
    assert command.main([str(directory), "--model", str(model), "--device", "cpu"]) == 0
    assert "--config-name train" in capsys.readouterr().out
    inputs = check_ppo(config_of(directory))
    assert (len(inputs.train), len(inputs.val)) == (files.NUM_TRAIN, files.NUM_VAL)
    cfg = config_of(directory)
    assert cfg.trainer.n_gpus_per_node == devices_here("cpu")
    assert cfg.trainer.default_local_dir == str(directory / "run")
    assert cfg.actor_rollout_ref.model.path == str(model)


@pytest.mark.parametrize("machine", [Machine("cuda", 8), Machine("cuda", 3), Machine("cpu", 5), Machine("cpu", 1)])
def test_the_sizes_fit_the_machine(tmp_path: Path, machine: Machine) -> None:
    text = make_files(tmp_path, tmp_path / "model", 4096, machine)["train.yaml"]
    (tmp_path / "train.yaml").write_text(text)
    cfg = config_of(tmp_path)
    assert (f"one for each core, at most {MAX_CPU_DEVICES}" in text) is (machine.device == "cpu")
    assert (cfg.trainer.device, cfg.trainer.n_gpus_per_node) == (machine.device, machine.num_devices)
    assert cfg.actor_rollout_ref.actor.megatron.dtype == ("float32" if machine.device == "cpu" else "bfloat16")
    assert cfg.actor_rollout_ref.actor.optim.lr == 1e-6
    assert all(line.count("#") <= 1 for line in text.splitlines())


def test_the_reward(tmp_path: Path) -> None:
    space: dict = {}
    exec(make_files(tmp_path, tmp_path, 64, Machine("cpu", 1))["reward.py"], space)
    score = space["compute_score"]
    assert [score("s", text, "17") for text in ("17", "12+5=17.", "17 or 18", "", "117")] == [1, 1, 0, 0, 0]


def test_files_that_are_there_stay(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    (tmp_path / "reward.py").write_text("mine")
    with pytest.raises(UserError, match=r"reward\.py already"):
        command.main([str(tmp_path), "--model", str(model)])
    assert (tmp_path / "reward.py").read_text() == "mine" and not (tmp_path / "train.yaml").exists()


def test_the_model_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no model: give --model"):
        command.main(["run"])
    make_tiny_model(tmp_path / command.QUICKSTART_MODEL)
    with pytest.raises(UserError, match=r"--model outputs/quickstart/sft_model"):
        command.main(["run"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: "")
    assert command.main(["run", "--device", "cpu"]) == 0
    assert config_of(tmp_path / "run").actor_rollout_ref.model.path == str(tmp_path / command.QUICKSTART_MODEL)


def test_a_model_may_be_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked for as that of a run is; this hub does not answer."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"--model = me/other: there is no such directory.*hf download me/other"):
        command.main(["run", "--model", "me/other"])
    assert not (tmp_path / "run").exists()


def test_a_file_is_no_directory_for_the_run(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="run is a file; give a directory"):
        command.main([str(tmp_path / "run"), "--model", str(tmp_path)])


def test_a_directory_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--model {tmp_path}"):
        command.main([str(tmp_path / "run"), "--model", str(tmp_path)])
    assert not (tmp_path / "run").exists()


def test_unknown_text_of_its_prompts_is_said(tmp_path: Path, capsys) -> None:
    model = make_tiny_model(tmp_path / "model", hidden_size=64)
    letters = Tokenizer(models.WordLevel({"<unk>": 0, **{c: i for i, c in enumerate("0123456789=", 1)}}, "<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="<unk>").save_pretrained(model)
    assert command.main([str(tmp_path / "run"), "--model", str(model), "--device", "cpu"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert "160 unknown tokens" in said and 'for "+"' in said
