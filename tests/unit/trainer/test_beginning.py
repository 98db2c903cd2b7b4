"""A finished run is seen by its files alone; an interrupted one says what stands and how to go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

from scalerl import cli
from scalerl.base.stop import EXIT_TERMINATED
from scalerl.checkpoint.store import begin_save, commit, write_trainer_state
from scalerl.config import composed
from scalerl.config.schema import PPOConfig, SFTConfig, TrainerConfig
from scalerl.errors import EXIT_INTERRUPTED, UserError
from scalerl.trainer.console_texts import (
    StartPhases,
    command_line,
    finished_at,
    finished_text,
    interrupted_text,
    length_of_epochs,
    printing_how_to_continue,
)
from scalerl.trainer.saving.saves import SavedModel
from tests import whole_saves
from tests.tiny_models import make_tiny_model


def saved(root: Path, step: int, state: dict | None = None) -> Path:
    tmp = begin_save(str(root), step)
    write_trainer_state(tmp, {"step": step} | (state or {}))
    return Path(commit(tmp, str(root), step))


def trainer(root: Path, steps: int | None, **more) -> TrainerConfig:
    return TrainerConfig(default_local_dir=str(root), total_training_steps=steps, **more)


def config(kind: Literal["ppo", "sft"], root: Path, *more: str) -> PPOConfig | SFTConfig:
    model = "model.path=m" if kind == "sft" else "actor_rollout_ref.model.path=m"
    files = [f"data.train_files={root / 'train.parquet'}", f"data.val_files={root / 'val.parquet'}"]
    own = [model, *files, f"trainer.default_local_dir={root / 'run'}"]
    return composed(kind, [*own, *more], rules=False).config


def test_a_run_is_finished_when_its_last_step_is_saved(tmp_path: Path) -> None:
    def finished(*more: str) -> Path | None:
        return finished_at(config("ppo", tmp_path, *more))

    steps = "trainer.total_training_steps"
    assert finished(f"{steps}=4") is None
    saved(tmp_path / "run", 2)
    assert finished(f"{steps}=4") is None
    last = saved(tmp_path / "run", 4)
    assert finished(f"{steps}=4") == last and finished(f"{steps}=3") == last
    assert finished(f"{steps}=5") is None
    # How many steps it has is not known from files, or it begins anew.
    assert finished() is None
    assert finished(f"{steps}=4", "trainer.resume_mode=disable") is None


@pytest.mark.parametrize("kind", ["ppo", "sft"])
def test_a_run_of_epochs_is_finished_while_nothing_that_gives_its_steps_has_changed(
    tmp_path: Path, kind: Literal["ppo", "sft"]
) -> None:
    train = tmp_path / "train.parquet"
    train.write_bytes(b"rows")
    began = config(kind, tmp_path)
    saved(tmp_path / "run", 2, length_of_epochs(began, 4))
    assert finished_at(began) is None
    last = saved(tmp_path / "run", 4, length_of_epochs(began, 4))
    assert finished_at(began) == last
    text = finished_text(last, began.trainer, "model.path", "m")
    assert f"{last} is of step 4, the last one" in text and "More trainer.total_epochs continue from it" in text
    for changed in (
        "trainer.total_epochs=2",
        "data.train_batch_size=64",
        "model.path=n" if kind == "sft" else "actor_rollout_ref.model.path=n",
        f"data.train_files=[{train},{train}]",
        f"data.chat_template_path={train}",
    ):
        assert finished_at(config(kind, tmp_path, changed)) is None, changed
    # Steps that the user gives need no record, and have none.
    assert finished_at(config(kind, tmp_path, "trainer.total_training_steps=4")) == last
    assert length_of_epochs(config(kind, tmp_path, "trainer.total_training_steps=4"), 4) == {}
    train.write_bytes(b"more rows")
    assert finished_at(began) is None


def test_a_finished_run_that_is_asked_for_another_model_names_it(tmp_path: Path) -> None:
    run, key = tmp_path / "run", "actor_rollout_ref.model.path"
    trained, narrower = make_tiny_model(tmp_path / "trained"), make_tiny_model(tmp_path / "narrower", ffn_size=64)
    models = {"actor": SavedModel(lambda directory: None, str(trained))}
    last = whole_saves.save(str(run), 4, models, state={}, keep=None)
    (run / "config.yaml").write_text(f"actor_rollout_ref:\n  model:\n    path: {trained}\n")

    same = finished_text(last, trainer(run, 4), key, str(trained))
    assert f"{last} is of step 4" in same and key not in same
    # The same architecture elsewhere: another model, or this one, moved.
    elsewhere = trained.rename(tmp_path / "elsewhere")
    other = finished_text(last, trainer(run, 4), key, str(elsewhere))
    assert f"It was started with {key}={trained}, not {elsewhere}" in other
    with pytest.raises(UserError, match=f"{key}: the run in {run} is finished, .* ffn_hidden_size 128 there, 64 here"):
        finished_text(last, trainer(run, 4), key, str(narrower))


def test_what_an_interrupted_run_says(tmp_path: Path) -> None:
    arguments = ["a.b=[1, 2]", "--config-name", "train"]
    assert f"no checkpoint in {tmp_path} yet" in interrupted_text(str(tmp_path), "train", arguments)
    # Before the configuration is read nobody knows where the run's checkpoints are.
    assert interrupted_text(None, "train", ["a=1"], "config").splitlines() == [
        "Stopped while the configuration was read and the programs of the run were loaded: nothing was started, and "
        "nothing saved. To go on:",
        f"  {command_line('train', ['a=1'])}",
    ]
    text = interrupted_text(str(tmp_path), "train", ["a=1"], "servers")
    assert text.startswith("Stopped in the start (servers): what had been started was ended, and nothing was saved.")
    last = saved(tmp_path, 4)
    text = interrupted_text(str(tmp_path), "train", arguments)
    assert f"The checkpoint {last} stands." in text and text.endswith("train 'a.b=[1, 2]' --config-name train")


@pytest.mark.parametrize(("command", "check"), [("train", "check_ppo"), ("sft", "check_sft")])
def test_an_interrupt_while_data_is_read_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, check: str
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"scalerl.trainer.checks.preflight.{check}", interrupted)
    model = "model.path=m" if command == "sft" else "actor_rollout_ref.model.path=m"
    keys = ["data.train_files=t.parquet", "data.val_files=v.parquet", model, f"trainer.default_local_dir={tmp_path}"]
    assert cli.main([command, *keys]) == EXIT_INTERRUPTED
    said = capsys.readouterr().err
    assert said.startswith("Stopped while data, models, rewards and your own code were checked: nothing was started")
    assert f"There is no checkpoint in {tmp_path} yet. To go on (from the start):" in said
    assert f"{command} data.train_files=t.parquet" in said and said.endswith("Interrupted.\n")


@pytest.mark.parametrize(("command", "module"), [("train", "main_ppo"), ("sft", "main_sft")])
def test_an_interrupt_while_the_configuration_is_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, module: str
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"scalerl.trainer.{module}.composed_run", interrupted)
    assert cli.main([command, "a=1"]) == EXIT_INTERRUPTED
    said = interrupted_text(None, command, ["a=1"], "config")
    assert capsys.readouterr().err == f"{said}\nInterrupted.\n"


def test_a_terminated_run_says_the_same_as_an_interrupted_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which checkpoint stands, and the command that goes on from it, after what SIGTERM itself is said of."""
    last = saved(tmp_path, 4)

    def end(code: int) -> str:
        with pytest.raises(SystemExit) as error, printing_how_to_continue("sft", ["a=1"], StartPhases()) as run:
            run.root = str(tmp_path)
            raise SystemExit(code)
        assert error.value.code == code
        return capsys.readouterr().err

    said = end(EXIT_TERMINATED)
    assert f"The checkpoint {last} stands. To go on:\n" in said
    assert said == interrupted_text(str(tmp_path), "sft", ["a=1"]) + "\n"
    # Another exit is nobody's interrupt.
    assert end(1) == ""


def test_parts_of_a_start_are_timed_and_shown() -> None:
    lines: list[str] = []
    shown: list[str] = []
    times = iter([0.0, 1.5, 2.0, 4.25])
    phases = StartPhases(lines.append, clock=lambda: next(times))
    phases.show = shown.append
    phases.begin("config")
    phases.begin("data")
    phases.end()
    phases.end()
    assert lines == ["start: config 1.5 s", "start: data 2.2 s"]
    assert shown == ["start: config", "start: data"]


def test_the_panel_shows_the_part_of_the_start_that_runs() -> None:
    from scalerl.trainer.build import start_phases

    shown: list[str] = []
    lines: list[str] = []
    phases = StartPhases(lines.append)
    start_phases(phases, SimpleNamespace(phase=shown.append, message=lines.append))  # pyright: ignore[reportArgumentType]
    phases.begin("model")
    assert shown == ["start: processes", "start: model"]
    assert len(lines) == 1 and lines[0].startswith("start: processes ")


def test_a_finished_run_ends_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    last = saved(tmp_path, 4)
    code = (
        "import sys; from scalerl.trainer.main_ppo import main; code = main(sys.argv[1:]); "
        "print('IMPORTED', *{name.split('.')[0] for name in sys.modules}); sys.exit(code)"
    )
    keys = ["data.train_files=t.parquet", "data.val_files=v.parquet", "actor_rollout_ref.model.path=m"]
    run = ["trainer.total_training_steps=4", f"trainer.default_local_dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-c", code, *keys, *run], capture_output=True, text=True, timeout=120, check=True
    )
    assert f"This run is finished: {last}" in done.stdout
    assert not {"numpy", "torch", "ray", "sglang", "transformers"} & set(done.stdout.splitlines()[-1].split())
