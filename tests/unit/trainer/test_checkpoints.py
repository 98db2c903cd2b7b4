"""When a run saves, and where it finds its way back."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scalerl import __version__
from scalerl.base.files import files_beside_weights
from scalerl.checkpoint import store
from scalerl.checkpoint.store import Best, CheckpointWriteError
from scalerl.config import PPOConfig, compose
from scalerl.config.schema import SFTTrainerConfig, TrainerConfig
from scalerl.data import load_tokenizer
from scalerl.data.chat import render
from scalerl.merge.command import build_parser
from scalerl.models import ModelShape
from scalerl.trainer.checks.resume import check_same_tokenizer
from scalerl.trainer.saving import checkpoints
from scalerl.trainer.saving.checkpoints import OWN_FILES, own_files
from scalerl.trainer.saving.saves import SavedModel, Saves
from tests import whole_saves
from tests.tiny_models import make_tiny_model


def save(
    root: Path,
    step: int,
    model: Path,
    *,
    write: Callable[[str], None] | None = None,
    critic: bool = False,
    **options: object,
) -> Path:
    def write_weights(directory: str) -> None:
        (Path(directory) / "weights").write_text(str(step))

    models = {"actor": SavedModel(write or write_weights, str(model))}
    if critic:
        models["critic"] = SavedModel(write_weights, str(model), head="value")
    arguments = {"state": {"prompts": {"position": step}}, "keep": None}
    return whole_saves.save(str(root), step, models, **(arguments | options))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_layers=1)


def find(root: Path, mode: str = "auto", path: Path | None = None) -> checkpoints.Resumed:
    return checkpoints.find_resume_point(str(root), mode, None if path is None else str(path))


@pytest.mark.parametrize(
    ("step", "every", "total", "due"),
    [
        (1, 2, 10, False),
        (2, 2, 10, True),
        (9, 2, 9, True),  # the end
        (3, 4, 9, False),
        (5, -1, 10, False),
        (10, -1, 10, False),
        (10, 100, 10, True),
        (1, 1, 10, True),
    ],
)
def test_is_due(step: int, every: int, total: int, due: bool) -> None:
    assert checkpoints.is_due(step, every, total) is due


@pytest.mark.parametrize(
    ("save_freq", "saved"),
    [(-1, [10]), (0, []), (1, list(range(1, 11))), (4, [4, 8, 10]), (5, [5, 10]), (100, [10])],
)
def test_the_last_step_is_saved_unless_none_is_wanted(save_freq: int, saved: list[int]) -> None:
    assert [step for step in range(1, 11) if checkpoints.is_save_due(step, save_freq, 10)] == saved


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "checkpoints: of the last step (10), in out; trainer.save_freq=N for one every N steps"),
        ({"save_freq": 0}, "checkpoints: none (trainer.save_freq=0), the trained weights will be lost"),
        ({"save_freq": 4}, "checkpoints: every 4 steps and of the last step (10), in out"),
        (
            {"save_freq": 4, "max_actor_ckpt_to_keep": 2},
            "checkpoints: every 4 steps and of the last step (10), in out; the newest 2 stay",
        ),
    ],
)
@pytest.mark.parametrize("section", [TrainerConfig, SFTTrainerConfig])
def test_the_start_says_when_checkpoints_come(section: type, changes: dict[str, int], expected: str) -> None:
    trainer = section(default_local_dir="out", **({"max_actor_ckpt_to_keep": None} | changes))
    assert checkpoints.announcement(trainer, 10).startswith(expected)


def test_the_end_says_how_to_merge_the_last_checkpoint(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "a directory"
    last = save(root, 9, model)
    monkeypatch.chdir(root)
    trainer = TrainerConfig(default_local_dir=".")
    text = checkpoints.closing(trainer, Path(last.name), step=9, is_done=True)
    assert "gone" not in text
    assert f"Checkpoints are in {root}, the last one is global_step_9." in text
    words = shlex.split(text.splitlines()[-1])
    arguments = build_parser().parse_args(words[words.index("merge", 1 if words[0] == "scalerl" else 3) :])
    assert Path(arguments.local_dir) == last / "actor" and not Path(arguments.target_dir).exists()
    assert "The same command goes on" in checkpoints.closing(trainer, last, step=9, is_done=False)


@pytest.mark.parametrize(
    ("save_freq", "why", "how"),
    [(0, " (trainer.save_freq=0)", "trainer.save_freq=-1 saves"), (-1, "", "scalerl.trainer.ppo.save(run)")],
    ids=["save_freq", "a loop that does not save"],
)
def test_the_end_says_that_nothing_was_saved(tmp_path: Path, model: Path, save_freq: int, why: str, how: str) -> None:
    trainer = TrainerConfig(default_local_dir=str(tmp_path), save_freq=save_freq)
    text = checkpoints.closing(trainer, None, step=12, is_done=True)
    assert text.startswith(f"No checkpoint was saved{why}: the trained weights are gone.") and how in text
    # What the run resumed from is no checkpoint of what it trained; it may be in another directory.
    before = save(tmp_path / "before", 9, model)
    text = checkpoints.closing(trainer, before, step=12, is_done=True)
    assert f"Checkpoints are in {before.parent}, the last one is global_step_9.\n" in text
    assert f"No later one was saved{why}: the weights of step 12 are gone." in text and how in text
    assert "Those of step 9 are in global_step_9." in text and "merge" in text.splitlines()[-1]
    assert "gone" not in checkpoints.closing(trainer, before, step=9, is_done=True)


def test_a_fresh_start(tmp_path: Path) -> None:
    for mode in ("auto", "disable"):
        resume_point = find(tmp_path / "nothing", mode)
        assert (resume_point.directory, resume_point.state, resume_point.step) == (None, {}, 0)


def test_auto_takes_the_newest(tmp_path: Path, model: Path) -> None:
    save(tmp_path, 9, model)
    newest = save(tmp_path, 10, model)
    resume_point = find(tmp_path)
    assert resume_point.directory == newest and resume_point.step == 10
    assert resume_point.state["prompts"] == {"position": 10}
    assert (resume_point.directory / "actor" / "weights").read_text() == "10"


def test_disable_ignores_what_is_there(tmp_path: Path, model: Path) -> None:
    save(tmp_path, 1, model)
    assert find(tmp_path, "disable").directory is None


def test_half_a_checkpoint_is_passed_over(tmp_path: Path, model: Path) -> None:
    whole = save(tmp_path, 1, model)
    half = save(tmp_path, 2, model)
    (half / "COMPLETE").unlink()
    with pytest.warns(UserWarning, match="global_step_2"):
        assert find(tmp_path).directory == whole


def test_resume_path_goes_where_it_is_told(tmp_path: Path, model: Path) -> None:
    wanted = save(tmp_path, 1, model)
    save(tmp_path, 2, model)
    resume_point = find(tmp_path, "resume_path", wanted)
    assert resume_point.directory == wanted and resume_point.step == 1


def test_a_run_that_begins_at_a_checkpoint_of_another_directory_has_an_mlflow_run_of_its_own(tmp_path: Path) -> None:
    resume_point = checkpoints.Resumed(tmp_path / "run" / "global_step_1", {"step": 1, "mlflow_run_id": "12ab"})
    assert resume_point.mlflow_run_in(tmp_path / "x" / ".." / "run") == "12ab"
    assert resume_point.mlflow_run_in(tmp_path / "branch") is None
    assert checkpoints.Resumed(None, {}).mlflow_run_in(tmp_path) is None


@pytest.mark.parametrize("what", ["missing", "half"])
def test_resume_path_must_be_whole(tmp_path: Path, model: Path, what: str) -> None:
    directory = save(tmp_path, 1, model)
    if what == "half":
        (directory / "COMPLETE").unlink()
    else:
        directory = tmp_path / "global_step_7"
    with pytest.raises(ValueError, match=r"checkpoint .*/global_step_\d cannot be loaded: no .*resume_from_path"):
        find(tmp_path, "resume_path", directory)


def test_merge_finds_the_model_files(tmp_path: Path, model: Path) -> None:
    """Configuration and tokenizer are copied, weights are not."""
    directory = save(tmp_path, 1, model) / "actor" / "huggingface"
    copied = {file.name for file in directory.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= copied
    assert not any(name.endswith((".safetensors", ".index.json")) for name in copied)
    assert copied == {str(file) for file in files_beside_weights(model)}
    assert (directory / "config.json").read_bytes() == (model / "config.json").read_bytes()


OWN_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} \u2192 {% endfor %}"


def with_templates(model: Path, copy: Path) -> Path:
    """The model with templates of every kind that transformers reads, in files that may not be written to."""
    shutil.copytree(model, copy)
    (copy / "chat_template.jinja").write_text("the file's")
    (copy / "additional_chat_templates").mkdir()
    (copy / "additional_chat_templates" / "tool_use.jinja").write_text("for tools")
    config = json.loads((copy / "tokenizer_config.json").read_text())
    entries = [{"name": name, "template": f"the entry's {name}"} for name in ("default", "rag")]
    (copy / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": entries}))
    for file in copy.iterdir():
        file.chmod(0o755 if file.is_dir() else 0o444)
    return copy


def test_the_runs_own_chat_template_is_that_of_every_model_that_it_saves(tmp_path: Path, model: Path) -> None:
    """Also for conversations with tools, and for what reads tokenizer_config.json alone. Its bytes are compared."""
    trained = with_templates(model, tmp_path / "trained")
    critic = make_tiny_model(tmp_path / "critic", num_layers=1)

    def write(directory: str) -> None:
        (Path(directory) / "weights").write_text("w")

    models = {
        "actor": SavedModel(write, str(trained)),
        "critic": SavedModel(write, str(critic), head="value"),
    }
    cfg = configured(tmp_path / "run")
    Saves(cfg.trainer, config=cfg, chat_template=OWN_TEMPLATE).save(1, models, {}, wait=True)
    saved = find(tmp_path / "run").directory
    assert saved is not None
    for role in models:
        directory = saved / role / "huggingface"
        assert {path.name for path in directory.rglob("*.jinja")} == {"chat_template.jinja"}
        tokenizer = load_tokenizer(directory)
        assert tokenizer.chat_template == OWN_TEMPLATE
        for tools in (None, [{"type": "function", "function": {"name": "add"}}]):
            messages = [{"role": "user", "content": "1+1"}]
            assert render(tokenizer, messages, add_generation_prompt=False, tools=tools) == "user: 1+1 \u2192 "
    entries = [json.loads((saved / role / "huggingface" / "tokenizer_config.json").read_text()) for role in models]
    assert entries[0]["chat_template"] == OWN_TEMPLATE
    # Nothing else of the tokenizer has changed, so that the run goes on from here.
    check_tokenizer(tmp_path / "run", trained)
    assert entries[1] == json.loads((critic / "tokenizer_config.json").read_text())
    _flip_a_bit(saved / "actor" / "huggingface" / "chat_template.jinja")
    with pytest.raises(ValueError, match=r"actor/huggingface/chat_template\.jinja is not what was saved"):
        find(tmp_path / "run", "resume_path", saved)


def test_an_actor_that_fails_to_write_leaves_no_checkpoint(tmp_path: Path, model: Path) -> None:
    def fail(directory: str) -> None:
        (Path(directory) / "weights").write_text("half")
        raise OSError("disk full")

    whole = save(tmp_path, 1, model)
    with pytest.raises(CheckpointWriteError, match="the checkpoint of step 2 was not written: disk full"):
        save(tmp_path, 2, model, write=fail)
    assert find(tmp_path).directory == whole
    # What was half written would take the room of the next.
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_1"]


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(tmp_path: Path, model: Path) -> None:
    first, second = save(tmp_path, 1, model), save(tmp_path, 2, model)
    _flip_a_bit(second / "actor" / "huggingface" / "tokenizer.json")
    named = r"global_step_2.* file actor/huggingface/tokenizer\.json is not what was saved"
    with pytest.warns(UserWarning, match=named):
        assert find(tmp_path).directory == first
    with pytest.raises(ValueError, match=named):
        find(tmp_path, "resume_path", second)


def _flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path, model: Path) -> None:
    assert find(tmp_path).directory is None
    first, second = save(tmp_path, 1, model), save(tmp_path, 2, model)
    (first / "trainer_state.json").unlink()
    _flip_a_bit(second / "actor" / "weights")
    with pytest.raises(ValueError, match=r"no checkpoint in .* can be loaded") as refused:
        find(tmp_path)
    text = str(refused.value)
    assert f"{second}: file actor/weights is not what was saved" in text
    assert f"{first}: file trainer_state.json is missing" in text
    assert "move these directories away" in text and "trainer.resume_mode=disable" in text
    assert find(tmp_path, "disable").directory is None
    for directory in (first, second):
        directory.rename(tmp_path / f"away_{directory.name}")
    with pytest.warns(UserWarning, match="names step 2, whose directory is not there"):
        assert find(tmp_path).directory is None


def test_a_dry_run_looks_at_files_and_sizes(tmp_path: Path, model: Path) -> None:
    whole, damaged = save(tmp_path, 1, model), save(tmp_path, 2, model)
    _flip_a_bit(damaged / "actor" / "weights")
    looked_at = checkpoints.find_resume_point(str(tmp_path), "auto", None, digests=False)
    assert looked_at.directory == damaged
    assert f"The files of {damaged} exist and have the saved sizes" in checkpoints.dry_run_text(looked_at)
    (damaged / "actor" / "weights").write_text("longer")
    with pytest.warns(UserWarning, match="was saved with 1"):
        assert checkpoints.find_resume_point(str(tmp_path), "auto", None, digests=False).directory == whole
    assert "files" not in checkpoints.dry_run_text(checkpoints.Resumed(None, {}))


def test_old_checkpoints_go(tmp_path: Path, model: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, model, keep=2)
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == ["global_step_2", "global_step_3"]


def test_an_older_checkpoint_that_cannot_be_read_fails_no_save(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules: dict[str, Any] = {"keep": 1, "best": Best(1, "score")}

    def saved(step: int, score: float) -> Path:
        return save(tmp_path, step, model, state={"metrics": {"score": score}}, **rules)

    first = saved(1, 0.9)
    saved(2, 0.1)
    state = first / "trainer_state.json"
    state.write_bytes(state.read_bytes().replace(b"{", b"\xfb", 1))
    with pytest.warns(
        UserWarning, match="global_step_1 stays, as it cannot be read: .*trainer_state.json is not valid"
    ):
        saved(3, 0.5)
    # What may be the best stays, and the others are still rotated.
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == ["global_step_1", "global_step_3"]
    monkeypatch.setattr(store, "checkpoint_steps", _no_permission)
    with pytest.warns(UserWarning, match="old checkpoints in .* were not removed: .*Permission denied"):
        assert saved(4, 0.2) == tmp_path / "global_step_4"


def _no_permission(*_: object) -> list[int]:
    raise PermissionError(13, "Permission denied")


def test_the_same_model_goes_on(tmp_path: Path, model: Path) -> None:
    save(tmp_path, 1, model)
    checkpoints.check_same_model(find(tmp_path), ModelShape.from_hf(model), str(model))
    checkpoints.check_same_model(find(tmp_path / "fresh"), ModelShape.from_hf(model), str(model))


def test_another_model_is_refused(tmp_path: Path, model: Path) -> None:
    save(tmp_path, 1, model)
    other = make_tiny_model(tmp_path / "other", num_layers=1, ffn_size=64, vocab_size=300)
    with pytest.raises(ValueError, match="ffn_hidden_size 128 there, 64 here; vocab_size 512 there, 300 here"):
        checkpoints.check_same_model(find(tmp_path), ModelShape.from_hf(other), str(other))


def saved_with(root: Path, cfg: PPOConfig, model: Path) -> checkpoints.Resumed:
    kept = Saves(cfg.trainer, config=cfg)
    models = {"actor": SavedModel(lambda d: (Path(d) / "weights").write_text("w"), str(model))}
    kept.save(1, models, {}, wait=True)
    return find(root)


def configured(root: Path, *keys: str) -> PPOConfig:
    needed = ["data.train_files=t", "data.val_files=v", "actor_rollout_ref.model.path=m"]
    return compose("ppo", [*needed, f"trainer.default_local_dir={root}", *keys], rules=False)


def test_a_run_says_what_changed_since_its_checkpoint(tmp_path: Path, model: Path) -> None:
    secret = "trainer.mlflow_tracking_uri=https://me:{}@mlflow.example"
    keys = ["actor_rollout_ref.actor.optim.lr=1e-5", "trainer.total_training_steps=4", secret.format("old")]
    resumed = saved_with(tmp_path, configured(tmp_path, *keys), model)
    assert checkpoints.resumed_lines(resumed, configured(tmp_path, *keys)) == [f"resumed from {tmp_path}/global_step_1"]
    keys = ["actor_rollout_ref.actor.optim.lr=2e-5", "trainer.logger=[console]", secret.format("new")]
    _, changed = checkpoints.resumed_lines(resumed, configured(tmp_path, *keys))
    assert changed == (
        "changed since that checkpoint: actor_rollout_ref.actor.optim.lr 1e-05 -> 2e-05, "
        "trainer.logger [console,mlflow,file] -> [console], trainer.total_training_steps 4 -> null"
    )


@pytest.mark.parametrize(("ranks", "said"), [(8, []), (0, []), (2, ["2 ranks are not used: this run trains on 8"])])
def test_a_run_says_that_random_states_are_not_those_of_its_ranks(
    tmp_path: Path, model: Path, ranks: int, said: list[str]
) -> None:
    """Of 8 devices. A checkpoint of Megatron's own has none at all."""
    cfg = configured(tmp_path, "trainer.n_gpus_per_node=8")
    resumed = saved_with(tmp_path, cfg, model)
    assert resumed.directory is not None
    (resumed.directory / "actor" / "rng").mkdir()
    for rank in range(ranks):
        (resumed.directory / "actor" / "rng" / f"rank_{rank}.safetensors").touch()
    _, *more = checkpoints.resumed_lines(resumed, cfg)
    assert [line.removeprefix("random states of that checkpoint's ") for line in more] == said


def test_a_run_says_which_of_the_users_files_changed(tmp_path: Path, model: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("before")
    cfg = configured(tmp_path, f"custom_reward_function.path={reward}")
    resumed = saved_with(tmp_path, cfg, model)
    resumed.state[OWN_FILES] = own_files(cfg)
    assert len(checkpoints.resumed_lines(resumed, cfg)) == 1
    reward.write_text("after")
    _, line = checkpoints.resumed_lines(resumed, cfg)
    assert line == (
        f"files with another text than the run of that checkpoint began with: custom_reward_function.path ({reward})"
    )


def test_a_run_says_that_its_code_changed(tmp_path: Path, model: Path) -> None:
    cfg = configured(tmp_path)
    resumed = saved_with(tmp_path, cfg, model)
    assert resumed.state["code"]["version"] == __version__
    resumed.state["code"] = {"version": "0.0.9", "commit": "abc"}
    _, line = checkpoints.resumed_lines(resumed, cfg)
    assert line.startswith(f"that checkpoint was saved by scalerl 0.0.9 (commit abc); this is {__version__}")


def test_a_run_says_that_its_attention_changed(tmp_path: Path, model: Path) -> None:
    cfg = configured(tmp_path)
    resumed = saved_with(tmp_path, cfg, model)
    # Of a version that did not save it.
    assert len(checkpoints.resumed_lines(resumed, cfg, "FA4")) == 1
    resumed.state[checkpoints.FLASH_ATTENTION] = None
    assert len(checkpoints.resumed_lines(resumed, cfg, None)) == 1
    _, line = checkpoints.resumed_lines(resumed, cfg, "FA4")
    assert line == "attention was torch's own until that checkpoint and is FA4 now, which rounds otherwise"
    resumed.state[checkpoints.FLASH_ATTENTION] = "FA3"
    _, line = checkpoints.resumed_lines(resumed, cfg, None)
    assert line.startswith("attention was FA3 until that checkpoint and is torch's own now")


def test_a_checkpoint_from_before_there_was_a_configuration_in_it_says_nothing(tmp_path: Path, model: Path) -> None:
    save(tmp_path, 1, model)
    resumed = find(tmp_path)
    del resumed.state["code"]
    assert len(checkpoints.resumed_lines(resumed, configured(tmp_path))) == 1


def other_tokenizer(model: Path, directory: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the model whose tokenizer.json was changed."""
    shutil.copytree(model, directory)
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return directory


def swap_two_tokens(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["!"], vocabulary["#"] = vocabulary["#"], vocabulary["!"]


def lower_all(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "Lowercase"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swap_two_tokens, r"2 tokens have another id \('!' \d+ there, \d+ here, '#' \d+ there, \d+ here\)\. Give"),
        (lower_all, r"other normalizer\. Give the model"),
    ],
    ids=["vocabulary", "rules"],
)
def test_another_tokenizer_is_refused(
    tmp_path: Path, model: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    save(tmp_path / "run", 1, model)
    other = other_tokenizer(model, tmp_path / "other", change)
    with pytest.raises(ValueError, match=f"global_step_1/actor has another tokenizer than {other}: {said}"):
        check_tokenizer(tmp_path / "run", other)


def test_a_tokenizer_that_makes_the_same_tokens_goes_on(tmp_path: Path, model: Path) -> None:
    """Written in another way, with another chat template."""
    save(tmp_path / "run", 1, model)
    other = other_tokenizer(model, tmp_path / "other", lambda content: None)
    (other / "chat_template.jinja").write_text("{{ messages }}")
    for path in (model, other):
        check_tokenizer(tmp_path / "run", path)


def check_tokenizer(root: Path, model: Path) -> None:
    check_same_tokenizer(find(root), load_tokenizer(model), str(model), trust_remote_code=False)
