"""Overrides and YAML files become typed dataclasses, or one error that names everything."""

from __future__ import annotations

import os
import pickle
import re
import shlex
from importlib import resources
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from scalerl.config import ConfigError, PPOConfig, SFTConfig, compose, flatten, save_resolved
from scalerl.config.keys import KeyTable
from scalerl.config.partial_config import PartialConfig
from scalerl.config.schema import devices
from scalerl.errors import UserError

ROLLOUT = "actor_rollout_ref.rollout"
PPO = ["data.train_files=a.parquet", "data.val_files=b.parquet", "actor_rollout_ref.model.path=m"]
SFT = ["data.train_files=a.parquet", "model.path=m"]
GENERATION = ["data.path=a.parquet", "data.output_path=b.parquet", "model.path=m"]
GROUPS = ("recipe", "layout")


def violations(kind: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose(kind, list(overrides))
    return caught.value.violations


def test_ppo_is_typed_and_resolved():
    cfg = compose(
        "ppo",
        [*PPO, f"{ROLLOUT}.n=4", "actor_rollout_ref.actor.optim.betas=[0.8,0.9]", "trainer.experiment_name=e1"],
    )
    assert isinstance(cfg, PPOConfig)
    assert cfg.actor_rollout_ref.rollout.n == 4
    assert cfg.actor_rollout_ref.actor.optim.betas == [0.8, 0.9]
    assert type(cfg.actor_rollout_ref.actor.optim.betas) is list
    assert cfg.trainer.default_local_dir == "outputs/scalerl/e1"


def test_sft_is_typed():
    cfg = compose("sft", [*SFT, "data.train_files=[a.parquet,b.parquet]", "optim.lr=1e-5"])
    assert isinstance(cfg, SFTConfig)
    assert cfg.data.train_files == ["a.parquet", "b.parquet"]
    assert cfg.optim.lr == 1e-5


def test_nothing_is_written_and_hydra_is_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compose("ppo", [*PPO, "recipe=grpo"])
    violations("ppo")
    assert list(tmp_path.iterdir()) == [] and Path.cwd() == tmp_path
    assert not GlobalHydra.instance().is_initialized()


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_plus_makes_no_difference(plus):
    key = f"{ROLLOUT}.engine_kwargs.sglang.attention_backend"
    cfg = compose("ppo", [*PPO, f"{plus}{ROLLOUT}.n=4", f"{plus}{key}=fa3", f"{plus}custom_reward_function.path=f.py"])
    assert cfg.actor_rollout_ref.rollout.engine_kwargs == {"sglang": {"attention_backend": "fa3"}}
    assert cfg.custom_reward_function.path == "f.py"


@pytest.mark.parametrize("recipe", ["+recipe=[grpo,cpu]", "recipe=[grpo,cpu]"])
def test_recipes_come_before_the_keys_of_the_command_line(recipe):
    cfg = compose("ppo", [*PPO, recipe, "+layout=tp2"])
    assert cfg.trainer.device == "cpu" and cfg.actor_rollout_ref.rollout.n == 8
    assert cfg.actor_rollout_ref.actor.megatron.tensor_model_parallel_size == 2
    assert compose("ppo", [f"{ROLLOUT}.n=3", *PPO, recipe]).actor_rollout_ref.rollout.n == 3


# The YAML files that ship

FILES = sorted(
    (group, Path(str(file)).stem)
    for group in GROUPS
    for file in resources.files("scalerl.configs").joinpath(group).iterdir()
)


@pytest.mark.parametrize(("group", "name"), FILES, ids=lambda part: part)
def test_every_shipped_file_composes_and_repeats_no_default(group, name):
    kind = {"sft": "sft", "generate": "generation"}.get(name.partition("_")[0], "ppo")
    needed = {"sft": SFT, "generation": GENERATION, "ppo": [*PPO, f"++{ROLLOUT}.n=8"]}[kind]
    defaults, cfg = flatten(compose(kind, needed)), flatten(compose(kind, [*needed, f"+{group}={name}"]))
    text = resources.files("scalerl.configs").joinpath(group, f"{name}.yaml").read_text()
    written = flatten_yaml(OmegaConf.to_container(OmegaConf.create(text)))
    assert text.startswith("# @package _global_\n")
    same = [key for key, value in written.items() if defaults[key] == value and key != f"{ROLLOUT}.n"]
    assert written and not same and len(FILES) > 2
    assert cfg != defaults or set(written) == {f"{ROLLOUT}.n"}


def flatten_yaml(tree: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in tree.items():
        flat |= flatten_yaml(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


# Wrong input


def test_everything_wrong_is_named_at_once():
    messages = violations(
        "ppo",
        "data.train_file=a",
        "trainer.total_epoch=3",
        "trainer.balance_batch=false",
        "trainer.nnodes=abc",
        "trainer.save_freq=1.5",
        "data.shuffle=maybe",
        "data.seed=[1]",
        "data=3",
        "trainer.device=tpu",
        "recipe=grp",
        "trainer.experiment_name=${trainer.foo}",
        "--dry-ran",
    )
    expected = [
        "--dry-ran: not understood",
        "recipe=grp: no such option; did you mean recipe=grpo?",
        "data.train_file: no such key; did you mean data.train_files?",
        "trainer.total_epoch: no such key; did you mean trainer.total_epochs?",
        "trainer.nnodes = abc: wrong type, must be int",
        "trainer.save_freq = 1.5: wrong type, must be int",
        "data.shuffle = maybe: wrong type, must be bool",
        "data.seed = [1]: wrong type, must be int",
        "data = 3: is a section; set one of data.cache_dir, data.chat_template_kwargs, ",
        "trainer.balance_batch = false: the samples of a step are balanced",
        "data.train_files: missing",
        "data.val_files: missing",
        "actor_rollout_ref.model.path: missing",
        "trainer.experiment_name = ${trainer.foo}: cannot be resolved",
        "trainer.device = tpu: must be one of",
    ]
    assert len(messages) == len(expected)
    for text, start in zip(messages, expected, strict=True):
        assert text.startswith(start)


def test_an_option_is_guessed_only_where_one_is_near():
    (violation,) = [text for text in violations("ppo", *PPO, "recipe=zzz") if text.startswith("recipe")]
    assert violation.startswith("recipe=zzz: no such option; there are ") and "did you mean" not in violation


def test_missing_values_and_broken_rules_come_together():
    messages = violations("ppo", "data.train_batch_size=400", f"{ROLLOUT}.n=4")
    assert [text.split(" ")[0] for text in messages] == [
        "data.train_files:",
        "data.val_files:",
        "actor_rollout_ref.model.path:",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
    ]


BATCHES = ["data.train_batch_size=100", "actor_rollout_ref.actor.ppo_mini_batch_size=30"]


def test_relations_are_checked_beside_an_unknown_key_and_a_wrong_type():
    messages = violations(
        "ppo",
        *PPO,
        *BATCHES,
        f"{ROLLOUT}.n=1",
        f"{ROLLOUT}.val_kwargs.n=4",
        f"{ROLLOUT}.val_kwargs.do_sample=false",
        "trainer.nosuch=1",
        "trainer.save_freq=often",
        "trainer.balance_batch=false",
    )
    assert [re.split("[ =:]", text)[0] for text in messages] == [
        "trainer.nosuch",
        "trainer.save_freq",
        "trainer.balance_batch",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        f"{ROLLOUT}.n",
        f"{ROLLOUT}.val_kwargs.n",
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        # The value that the user meant to set may well divide.
        "actor_rollout_ref.actor.ppo_mini_batch_sze=50",
        "actor_rollout_ref.actor.ppo_mini_batch_size=many",
        "actor_rollout_ref.actor.ppo_mini_batch_size=10,20",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "~actor_rollout_ref.actor.ppo_mini_batch_size",
        "data.train_batch_size=${trainer.nnodes}",
        "actor_rollout_ref.actor=3",
        # Sets any number of keys.
        "+recipe=grp",
    ],
)
def test_a_relation_waits_for_its_own_keys(wrong):
    nodes = ["trainer.nnodes=x"] if "nnodes" in wrong else []
    (violation, *_) = given = violations("ppo", *PPO, f"{ROLLOUT}.n=4", *BATCHES[:1], *nodes, wrong)
    assert len(given) == 1 and "must divide" not in violation


def test_what_a_key_of_verl_becomes_waits_for_the_keys_that_it_counts_with():
    tokens = ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "data.max_prompt_length=1000"]
    (violation,) = violations("ppo", *PPO, f"{ROLLOUT}.n=4", *tokens, "data.max_response_length=long")
    assert violation.startswith("data.max_response_length = long: wrong type")


def test_a_recipe_of_another_command_names_those_of_this_one():
    (violation,) = violations("sft", *SFT, "+recipe=cpu")
    assert violation.startswith("recipe=cpu: no such option; ") and violation.endswith("are sft_cpu")
    (violation,) = violations("sft", *SFT, "+layout=tp2")
    assert violation.startswith("layout=tp2: no such option")
    messages = violations("generation", *GENERATION, "+recipe=[grpo,sft_cpu]")
    assert len(messages) == 2 and all(text.endswith("there are generate_cpu") for text in messages)


def test_an_interpolation_of_the_wrong_type():
    (violation,) = violations("ppo", *PPO, "trainer.nnodes=${trainer.project_name}", f"{ROLLOUT}.n=4")
    assert violation.startswith("trainer.nnodes = ${trainer.project_name}: cannot be resolved")


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("trainer.nnodes=1,2", "'trainer.nnodes=[1,2]'"),
        ("trainer.experiment_name=a=b", "'trainer.experiment_name=\"a=b\"'"),
        ("~data.seed", "cannot be deleted"),
        ("~data.sead", "did you mean data.seed"),
        ("data@x=3", "no group data"),
        ("word", "write key=value"),
        ("data={sead:3}", "did you mean data.seed"),
        (f"{ROLLOUT}.engine_kwargs.tgi.x=3", "arguments by engine"),
        ("hydra.run.dir=x", "trainer.default_local_dir"),
    ],
)
def test_overrides_that_are_not_understood(override, text):
    (violation,) = violations("ppo", *PPO, f"{ROLLOUT}.n=4", override)
    assert text in violation


def test_a_section_may_be_given_as_a_dict():
    cfg = compose("ppo", [*PPO, "+recipe=grpo", "data={seed: 3, shuffle: false}"])
    assert (cfg.data.seed, cfg.data.shuffle, cfg.data.train_files) == (3, False, "a.parquet")


def test_every_key_can_be_set():
    """A text: either the type refuses it, or it arrives."""
    partial, keys = PartialConfig(PPOConfig), sorted(KeyTable(PPOConfig).leaves)
    for key in keys:
        partial.put(key, "zzz")
    _, cfg = partial.finish()
    refused = {text.partition(" = ")[0]: text for text in partial.violations}
    assert refused and all(text.startswith(f"{key} = zzz: wrong type, must be") for key, text in refused.items())
    values = flatten(cfg)
    assert len(keys) > 300 and [key for key in keys if key not in refused and values[key] != "zzz"] == []


# A user's own files


def write(directory: Path, name: str, text: str) -> None:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


OWN = "data: {train_files: a, val_files: b}\nactor_rollout_ref: {model: {path: m}, rollout: {n: 5}}\n"


@pytest.mark.parametrize("head", ["", "defaults:\n  - ppo\n  - recipe: grpo\n  - _self_\n"])
def test_a_file_of_ones_own(tmp_path, head):
    write(tmp_path, "my.yaml", head + OWN)
    cfg = compose("ppo", ["--config-dir", str(tmp_path), "--config-name", "my", "trainer.nnodes=2"])
    assert cfg.actor_rollout_ref.rollout.n == 5 and cfg.trainer.nnodes == 2
    assert cfg.actor_rollout_ref.actor.use_kl_loss == bool(head)


def test_a_relative_config_dir_is_the_callers(tmp_path, monkeypatch):
    write(tmp_path, "conf/my.yaml", OWN)
    monkeypatch.chdir(tmp_path)
    assert compose("ppo", ["--config-dir=conf", "--config-name=my.yaml"]).data.train_files == "a"


def test_a_recipe_in_a_file_is_replaced_on_the_command_line(tmp_path):
    write(tmp_path, "my.yaml", "defaults: [ppo, recipe: grpo, _self_]\n" + OWN)
    cfg = compose("ppo", ["--config-dir", str(tmp_path), "--config-name", "my", "recipe=cpu"])
    assert cfg.trainer.device == "cpu" and not cfg.actor_rollout_ref.actor.use_kl_loss


@pytest.mark.parametrize("group", ["lab=big", "recipe=grpo"])
@pytest.mark.parametrize("primary", [False, True])
def test_groups_of_ones_own_go_before_the_shipped_ones(tmp_path, group, primary):
    write(tmp_path, f"{group.replace('=', '/')}.yaml", "# @package _global_\ntrainer: {nnodes: 4}\n")
    write(tmp_path, "my.yaml", f"defaults: [ppo, {group.replace('=', ': ')}, _self_]\n" + OWN)
    given = ["--config-name", "my"] if primary else [*PPO, f"{ROLLOUT}.n=4", group]
    cfg = compose("ppo", ["--config-dir", str(tmp_path), *given])
    assert cfg.trainer.nnodes == 4 and not cfg.actor_rollout_ref.actor.use_kl_loss


def test_a_group_may_be_a_node_of_hydras_store():
    ConfigStore.instance().store(group="lab", name="big", package="_global_", node={"trainer": {"nnodes": 4}})
    assert compose("ppo", [*PPO, "recipe=grpo", "lab=big"]).trainer.nnodes == 4


@pytest.mark.parametrize("name", ["with space", "it's", "a,b", "x=[y]", "pro$cent%"])
def test_directories_with_odd_names(tmp_path, name):
    write(tmp_path / name, "lab/big.yaml", "# @package _global_\ntrainer: {nnodes: 4}\n")
    write(tmp_path / name, "my.yaml", OWN)
    at = ["--config-dir", str(tmp_path / name), "lab=big"]
    assert compose("ppo", [*at, *PPO, "recipe=grpo"]).trainer.nnodes == 4
    assert compose("ppo", [*at, "--config-name", "my"]).trainer.nnodes == 4


def test_a_group_file_without_a_package_says_what_is_missing(tmp_path):
    write(tmp_path, "lab/big.yaml", "trainer: {nnodes: 4}\n")
    (violation,) = violations("ppo", "--config-dir", str(tmp_path), *PPO, f"{ROLLOUT}.n=4", "lab=big")
    assert "# @package _global_" in violation and "big.yaml" in violation


def test_all_wrong_keys_of_a_file_and_of_the_command_line_are_named_with_the_file(tmp_path):
    bad = "data: {train_file: a, seed: [1], val_files: b}\ncriticism: {x: 1}\nactor_rollout_ref: {model: {path: m}}\n"
    write(tmp_path, "bad.yaml", bad)
    messages = violations("ppo", "--config-dir", str(tmp_path), "--config-name", "bad", "trainer.node=2")
    path = os.fspath(tmp_path / "bad.yaml")
    starts = [
        f"data.train_file: no such key in {path}; did you mean data.train_files?",
        f"data.seed = [1]: wrong type in {path}, must be int",
        f"criticism: no such key in {path}; did you mean critic?",
        "trainer.node: no such key; did you mean trainer.nnodes?",
        "data.train_files: missing",
    ]
    assert len(messages) == len(starts)
    assert all(text.startswith(start) for text, start in zip(messages, starts, strict=True))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("data: [\n", "cannot be read"),
        ("data: {}\ndata: {}\n", "duplicate key"),
        ("- 3\n", "must be a DictConfig"),
        ("defaults: [ppo, recipe: nope]\n", "Could not find 'recipe/nope'"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, content, text):
    write(tmp_path, "bad.yaml", content)
    (violation,) = violations("ppo", "--config-dir", str(tmp_path), "--config-name", "bad", *PPO)
    assert text in violation


def test_a_flag_without_a_file_says_which_there_are():
    (violation,) = violations("ppo", "--config-name", "my")
    assert "--config-name my: no such file; there are eval, generation, launch, ppo, sft" in violation
    assert "--config-dir DIR" in violations("ppo", "--config-name")[0]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--config-path", "{tmp}/no", "--config-name", "my"], "no such directory"),
        (["--config-path", "{tmp}", "--config-name", "my"], "--config-name my: no such file"),
        (["--config-dir", "{tmp}/no", "--config-name", "my"], "no such directory"),
        (["--config-dir", "{tmp}", "--config-name", "my"], "--config-name my: no such file"),
        (["--config-name", "my"], "--config-name my: no such file"),
        (["--config-dir", "{tmp}", "--config-name", "bad"], "cannot be read"),
        (["--config-dir", "{tmp}", "--config-name", "bad", "lab=big"], "cannot be read"),
    ],
)
def test_a_file_that_is_not_there_hides_no_other_problem(tmp_path, flags, named):
    write(tmp_path, "bad.yaml", "data: [\n")
    write(tmp_path, "lab/big.yaml", "# @package _global_\ntrainer: {nnodes: 4}\n")
    given = [flag.format(tmp=tmp_path) for flag in flags]
    first, *others = violations("ppo", *given, "trainer.node=2", f"{ROLLOUT}.n=many", "recipe=nope")
    assert named in first
    starts = ["recipe=nope: no such option", "trainer.node: no such key", f"{ROLLOUT}.n = many: wrong type"]
    # Keys that the file may set are not said to be missing, nor are rules broken by their defaults.
    assert sorted(text.split(";")[0].split(",")[0].replace("'", "") for text in others) == sorted(starts)


# The resolved config


@pytest.mark.parametrize("kind", ["ppo", "sft"])
def test_what_is_saved_reads_back_equal(tmp_path, kind):
    extra = ["+recipe=[grpo,cpu]", "custom_reward_function.reward_kwargs.a.b=[1,x,null]"] if kind == "ppo" else []
    cfg = compose(kind, [*(PPO if kind == "ppo" else SFT), *extra, "data.train_files=[a,'b c']"])
    save_resolved(cfg, tmp_path / "run" / "config.yaml")
    assert compose(kind, ["--config-dir", str(tmp_path / "run"), "--config-name", "config"]) == cfg
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    cfg = compose("sft", SFT)
    save_resolved(cfg, path)
    before = path.read_text()
    cfg.data.seed = 7

    def fail(*_: object) -> None:
        raise OSError("disk")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk"):
        save_resolved(cfg, path)
    assert path.read_text() == before and list(tmp_path.iterdir()) == [path]


def test_flatten_gives_scalars_for_every_key():
    flat = flatten(compose("ppo", [*PPO, "recipe=grpo", f"{ROLLOUT}.engine_kwargs.sglang.tp=2"]))
    assert flat["actor_rollout_ref.actor.optim.betas"] == "[0.9, 0.999]"
    assert flat[f"{ROLLOUT}.engine_kwargs.sglang.tp"] == 2
    assert flat["custom_reward_function.reward_kwargs"] == "{}"
    assert flat["trainer.max_actor_ckpt_to_keep"] is None
    assert all(value is None or isinstance(value, str | int | float | bool) for value in flat.values())
    # Arguments by engine: each has a key of its own.
    assert set(KeyTable(PPOConfig).leaves) - set(flat) == {
        f"{ROLLOUT}.engine_kwargs",
        "reward_model.judge.engine_kwargs",
    }


# The error


def test_the_error_numbers_its_violations_and_survives_pickling():
    error = ConfigError(["a = 1: wrong", "b = 2: wrong\nsecond line"])
    assert str(error) == ("The configuration has 2 problems:\n  1. a = 1: wrong\n  2. b = 2: wrong\n     second line")
    copy = pickle.loads(pickle.dumps(error))
    assert copy.violations == error.violations and str(copy) == str(error)
    assert isinstance(error, UserError) and isinstance(error, ValueError)


def test_a_key_without_default_that_cannot_be_resolved_is_named():
    (violation,) = violations("ppo", *PPO, "data.val_files='${oc.env:NO_SUCH_VARIABLE}/b.parquet'")
    assert violation.startswith("data.val_files = ${oc.env:NO_SUCH_VARIABLE}/b.parquet: cannot be resolved")


@pytest.mark.parametrize("text", ["a=b", "it's", 'a"b', "~x", "{a}", "$(date)", "a;b"])
def test_text_with_a_special_character_is_shown_as_a_shell_takes_it(text):
    (violation,) = violations("ppo", *PPO, f"trainer.experiment_name={text}")
    (written,) = shlex.split(violation.partition("special characters: ")[2])
    assert compose("ppo", [*PPO, written], rules=False).trainer.experiment_name == text


def test_devices_are_the_machines_own_unless_given(monkeypatch):
    monkeypatch.setattr(devices, "devices_here", lambda device: {"auto": 6, "cpu": 3}[device])
    on_auto, on_cpu = compose("sft", SFT), compose("sft", [*SFT, "trainer.device=cpu"])
    given = compose("generation", [*GENERATION, "trainer.n_gpus_per_node=5"])
    assert [cfg.trainer.n_gpus_per_node for cfg in (on_auto, on_cpu, given)] == [6, 3, 5]
    ppo = compose("ppo", PPO, rules=False)
    assert ppo.trainer.n_gpus_per_node == ppo.critic.resource_pool.n_gpus_per_node == 6


# Text that Hydra or YAML reads as a number or a boolean.
LIKE_NUMBERS = ["20240101_1530", "1_11", "1.50", "1e3", "+1", "007", "1:30:00", "true", "on", "0x10", "nan", "-0"]


@pytest.mark.parametrize("text", LIKE_NUMBERS)
def test_text_that_looks_like_a_number_keeps_its_characters(tmp_path, text):
    lines = {
        "config.yaml": f"""
            data: {{train_files: [{text}, a.parquet], val_files: {text}}}
            trainer: {{experiment_name: {text}, logger: [console, {text}]}}
            custom_reward_function: {{reward_kwargs: {{a: 1_1}}}}
        """,
        "verl.yaml": f"model: {{partial_pretrain: {text}}}",
        "launch.yaml": f"slurm: {{account: {text}, env: {{A: {text}}}, options: {{begin: {text}}}, nodes: 1_0}}",
    }
    for name, content in lines.items():
        (tmp_path / name).write_text(content)
    files = ["--config-dir", str(tmp_path), "--config-name"]

    typed = compose("ppo", [*PPO, f"trainer.experiment_name={text}", f"data.train_files=[{text},a]"], rules=False)
    section = compose("ppo", [*PPO, f"trainer={{experiment_name:{text},nnodes:1_0}}"], rules=False)
    in_file = compose("ppo", [*PPO[2:], *files, "config"], rules=False)
    for cfg in (typed, section, in_file):
        assert cfg.trainer.experiment_name == text
        assert cfg.trainer.default_local_dir == f"outputs/scalerl/{text}"
    assert typed.data.train_files == [text, "a"] and section.trainer.nnodes == 10
    assert (in_file.data.train_files, in_file.data.val_files) == ([text, "a.parquet"], text)
    assert in_file.trainer.logger == ["console", text]
    # What the user's own function gets has the types of YAML.
    assert in_file.custom_reward_function.reward_kwargs == {"a": 11}

    of_verl = ["data.train_files=a.parquet", f"model.partial_pretrain={text}"]
    assert compose("sft", of_verl, rules=False).model.path == text
    assert compose("sft", [*SFT[:1], *files, "verl"], rules=False).model.path == text

    of_job = [f"slurm.account={text}", f"slurm.env={{A:{text}}}", f"slurm.options.begin={text}", "slurm.nodes=1_0"]
    for slurm in (compose("launch", of_job).slurm, compose("launch", [*files, "launch"]).slurm):
        assert (slurm.account, slurm.env, slurm.options, slurm.nodes) == (text, {"A": text}, {"begin": text}, 10)

    save_resolved(in_file, tmp_path / "saved.yaml")
    assert compose("ppo", [*files, "saved"], rules=False) == in_file


def test_numbers_that_yaml_reads_in_another_base_are_refused(tmp_path):
    """0123 is 83 and 12:30 is 750 in YAML 1.1; a command line reads 0123 as 123."""
    kwargs = "{a: [1, {b: 12:30}], c: '010', d: 0x10, e: 1_0, f: 007, g: a:b}"
    (tmp_path / "octal.yaml").write_text(f"data: {{seed: 0123}}\ncustom_reward_function: {{reward_kwargs: {kwargs}}}\n")
    seed, kwarg = violations("ppo", *PPO, "--config-dir", str(tmp_path), "--config-name", "octal")
    assert seed.startswith("data.seed = 0123: is 83 in YAML") and "octal.yaml" in seed
    assert kwarg.startswith("custom_reward_function.reward_kwargs = 12:30: is 750 in YAML")
    assert compose("ppo", [*PPO, "data.seed=0123"], rules=False).data.seed == 123


def test_null_is_no_text():
    cfg = compose("ppo", [*PPO, "trainer.mlflow_tracking_uri=null", "trainer.resume_from_path=NULL"])
    assert (cfg.trainer.mlflow_tracking_uri, cfg.trainer.resume_from_path) == (None, None)
    assert compose("ppo", [*PPO, "trainer.experiment_name='null'"]).trainer.experiment_name == "null"
    [violation] = violations("ppo", *PPO, "trainer.experiment_name=null")
    assert violation.startswith("trainer.experiment_name = null: ")
