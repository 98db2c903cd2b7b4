"""`scalerl translate`: the command that it prints does what the script asked for, and every key has a row."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from scalerl.cli import main
from scalerl.config import ConfigError, compose
from scalerl.errors import UserError
from scalerl.extras.verl.translate.command import translated
from scalerl.extras.verl.translate.report import Report, report_on

ACTOR = "actor_rollout_ref.actor"
REQUIRED = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=m"]
SCRIPT = """\
set -x
MODEL=${MODEL:-qwen}
python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \\
    algorithm.adv_estimator=grpo \\
    data.train_files="['a.parquet','b c.parquet']" data.val_files=v.parquet \\
    data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.model.path=$MODEL actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.actor.grad_clip=0.5 \\
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \\
    actor_rollout_ref.model.use_remove_padding=True trainer.balance_batch=False \\
    trainer.default_local_dir=$OUT/run \\
    --custom_reward_function.path=./f.py \\
    trainer.logger='["console","wandb"]' $@
"""


def report() -> Report:
    lines = [line.strip(" \\") for line in SCRIPT.splitlines()]
    return report_on("train", "ppo", shlex.split(" ".join(lines[2:]).replace("$MODEL", "qwen").replace("$@", ""))[3:])


def test_the_command_composes_to_what_the_script_asked_for():
    text = translated(SCRIPT)
    command = text.partition("\n\n")[0]
    assert command.startswith("scalerl train \\\n") and '"trainer.default_local_dir=$OUT/run"' in command
    words = shlex.split(command.replace("\\\n", " ").replace("$OUT", "out"))
    cfg = compose("ppo", words[2:])
    assert cfg.data.train_files == ["a.parquet", "b c.parquet"]
    assert cfg.actor_rollout_ref.actor.optim.clip_grad == 0.5
    # verl counts steps, each of four updates.
    assert cfg.actor_rollout_ref.actor.optim.lr_warmup_updates == 40
    assert cfg.custom_reward_function.path == "./f.py" and cfg.trainer.logger == ["console", "wandb"]
    # Of verl, where the script says nothing.
    assert cfg.trainer.total_epochs == 30 and cfg.actor_rollout_ref.rollout.tensor_model_parallel_size == 2
    assert cfg.trainer.default_local_dir == "out/run"


@pytest.mark.parametrize(
    ("script", "key", "value"),
    [
        ('EXP="grpo-$(printf "%s" 20240101)"', 'trainer.experiment_name="$EXP"', "grpo-20240101"),
        ("", 'trainer.project_name="$(basename "$PWD")"', "a b"),
        ("", "actor_rollout_ref.actor.optim.lr=$(printf '%s' \"2e-06\")", "2e-06"),
        ("", 'data.prompt_key=`printf "%s" "a b"`', "a b"),
        ("", 'data.prompt_key="`basename "$PWD"`"', "a b"),
        ("", "data.prompt_key=$(printf '%s' \")\" '(' \\()", ")(("),
        # The shell of the translated command has no variables of the script.
        ("N=3\nD=/x/y", 'data.prompt_key="$N-$(basename "$D")-${N}"', "3-y-3"),
        ("", 'trainer.default_local_dir="a\\"b$(echo 1)"', 'a"b1'),
        ("", "trainer.default_local_dir='${trainer.project_name}'/$(echo 1)", "${trainer.project_name}/1"),
        # Of verl: translated, with the command still in its value.
        ("", "actor_rollout_ref.actor.grad_clip=$(printf '%s' \"0.5\")", "0.5"),
    ],
)
def test_translate_quotes_inside_a_command_substitution_belong_to_its_command(
    tmp_path: Path, script: str, key: str, value: str
):
    command = translated(f"{script}\npython3 -m verl.trainer.main_ppo {key} data.val_files=b").partition("\n\n")[0]
    run = ["bash", "-ec", command.replace("scalerl train", "printf '%s\\n'", 1)]
    (tmp_path / "a b").mkdir()
    printed = subprocess.run(run, check=True, capture_output=True, text=True, cwd=tmp_path / "a b").stdout.splitlines()
    name = key.partition("=")[0].replace("actor.grad_clip", "actor.optim.clip_grad")
    assert f"{name}={value}" in printed


def test_a_variable_that_a_command_substitution_needs_of_the_script_is_named():
    text = translated('V="a b"\npython3 -m verl.trainer.main_ppo data.prompt_key="$(echo "$V")"')
    assert 'line 2: `$V` in `$(echo "$V")` is set by the script; set it in your shell, too' in text


def test_every_argument_has_one_row():
    rows = {row.written.partition("=")[0]: row.fate for row in report().rows}
    assert rows["data.train_batch_size"] == rows["trainer.default_local_dir"] == "taken over"
    assert rows["actor_rollout_ref.actor.grad_clip"] == rows["actor_rollout_ref.rollout.name"] == "renamed"
    assert rows["actor_rollout_ref.model.use_remove_padding"] == rows["--config-name"] == "already so"
    assert rows["trainer.balance_batch"] == "dropped" and rows["trainer.total_epochs"] == "verl's default"
    assert len(report().rows) == len(rows) == 19


def test_what_the_script_leaves_open_is_said():
    text = translated(SCRIPT)
    assert "line 2: $MODEL is not set in the script: its default 'qwen' is taken" in text
    assert "$OUT is not set in the script" in text
    assert "trainer.balance_batch=false: the samples of a step are balanced" in text


@pytest.mark.parametrize(
    ("program", "start"),
    [
        ("verl.trainer.fsdp_sft_trainer", "scalerl sft"),
        ("verl.trainer.main_generation", "scalerl generate"),
        ("verl.trainer.main_eval", "scalerl eval"),
        ("recipe.dapo.main_dapo", "scalerl train"),
    ],
)
def test_other_programs(program: str, start: str):
    assert translated(f"torchrun -m {program} trainer.nnodes=1").startswith(start)


def test_the_merger_takes_its_arguments():
    given = "merge --backend megatron --tie-word-embedding --hf_model_path m --local_dir out --target_dir $HF"
    command, _, rest = translated(f"python3 -m verl.model_merger {given}").partition("\n\n")
    assert command == 'scalerl merge --backend megatron --local_dir out --target_dir "$HF"'
    assert rest.startswith("already so (2):\n  --tie-word-embedding: ") and "\n  --hf_model_path m: " in rest
    tested = translated("python -m verl.model_merger test --backend fsdp --local_dir a --test_hf_dir b")
    assert tested == "scalerl merge test --backend fsdp --local_dir a --test_hf_dir b"


def test_what_a_run_would_refuse_of_the_command_is_said():
    sizes = f"{ACTOR}.megatron.tensor_model_parallel_size=3 trainer.n_gpus_per_node=8"
    files = "data.train_files=a data.val_files=b actor_rollout_ref.model.path=m actor_rollout_ref.rollout.n=4"
    main = f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {files} "
    text = translated(f"{main}{sizes} {ACTOR}.policy_loss.loss_mode=dppo_tv trainer.test_freq=0")
    _, refused = text.split("\na run will refuse:\n")
    assert "8: must be a multiple of" in refused and "loss_mode='dppo_tv': no such policy loss" in refused
    assert "trainer.test_freq = 0: must be -1 (off) or at least 1" in refused
    assert "will refuse" not in translated(f"{main}trainer.n_gpus_per_node=8 trainer.nnodes=$NODES")
    # What the shell decides is not judged, nor by what.
    assert "will refuse" not in translated(f"{main}{sizes}".replace("size=3", "size=$TP"))
    assert "a run will refuse:\n  data.train_files: missing" in translated("python3 -m verl.trainer.main_ppo")


def test_an_agent_script_does_not_become_a_run_of_single_answers():
    given = [*REQUIRED, "algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=1", "trainer.total_epochs=1"]
    asked = [
        "actor_rollout_ref.rollout.multi_turn.enable=True",
        "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
        "data.tool_config_path=tools.yaml",
    ]
    program = "actor_rollout_ref.rollout.program.path"
    for argument in asked:
        report = report_on("train", "ppo", [*given, argument])
        (row,) = (row for row in report.rows if row.fate == "dropped")
        assert program in row.why and "docs/extending.md" in row.why
        # The command is refused until the user has written the program.
        with pytest.raises(ConfigError, match=re.escape(program)):
            compose("ppo", shlex.split(report.shell().replace("\\\n", " "))[2:])
        with pytest.raises(ConfigError, match=re.escape(program)):
            compose("ppo", [*given, argument])
    # With tools it is a run that has them.
    turns = [f"actor_rollout_ref.rollout.multi_turn.{text}" for text in ("tool_config_path=t.yaml", "format=hermes")]
    with_tools = [*given, *asked, *turns, "actor_rollout_ref.rollout.multi_turn.max_user_turns=2"]
    assert not [row for row in report_on("train", "ppo", with_tools).rows if row.fate == "dropped"]
    made = compose("ppo", with_tools).actor_rollout_ref.rollout.program
    assert (made.tool_config_path, made.tool_call_parser, made.max_user_turns) == ("t.yaml", "hermes", 2)
    with_program = [*given, *asked, f"{program}=p.py"]
    assert not [row for row in report_on("train", "ppo", with_program).rows if row.fate == "dropped"]
    assert compose("ppo", with_program).actor_rollout_ref.rollout.program.path == "p.py"


def test_fields_of_megatron_are_checked_by_name_and_type():
    fields = f"+{ACTOR}.megatron.override_transformer_config"
    given = [*REQUIRED, f"{fields}.moe_permute_fusoin=True", f"{fields}.moe_deepep_num_sms=many", "trainer.nnodes=1"]
    refused = report_on("train", "ppo", given).refused
    names = sorted(text.partition(" ")[0].rpartition(".")[2] for text in refused)
    assert names == ["moe_deepep_num_sms", "moe_permute_fusoin"]
    fine = [f"{fields}.moe_permute_fusion=True", f"{fields}.moe_deepep_num_sms=$SMS"]
    assert report_on("train", "ppo", [*REQUIRED, *fine, "trainer.nnodes=1"]).refused == []


@pytest.mark.parametrize("name", ["grpo8b", "gspo30b", "dsv3", "dapo_npu"])
def test_a_run_takes_the_translation_of_a_whole_script(name: str):
    given = (Path(__file__).parents[1] / "commands" / f"{name}.txt").read_text()
    assert "a run will refuse" not in translated(given)


def test_devices_of_a_launcher_are_those_of_the_run():
    text = translated("N=4\ntorchrun --nnodes $N --nproc-per-node=8 -m verl.trainer.sft_trainer trainer.save_freq=1")
    assert "trainer.nnodes=4" in text and "--nproc-per-node=8 -> trainer.n_gpus_per_node=8" in text
    # The program's own arguments count.
    text = translated("torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer trainer.n_gpus_per_node=2")
    assert "trainer.n_gpus_per_node=2" in text and "=8" not in text


def test_a_placeholder_of_a_script_is_said():
    text = translated(
        "python3 -m verl.trainer.main_ppo 'actor_rollout_ref.model.path=<your path>' 'data.val_files=‹f›'"
    )
    assert "<your path> stands for a value of yours; write it there" in text and "‹f› stands for" in text
    assert "Lexer" not in text


def test_a_program_in_a_loop_or_a_function_is_named():
    main = "python3 -m verl.trainer.main_ppo a=1"
    with pytest.raises(UserError) as caught:
        translated(f"for i in 1 2; do\n  {main}\ndone\nrun() {{\n  {main}\n}}\nfunction go {{\n{main}\n}}\n")
    text = str(caught.value)
    assert "line 2: verl.trainer.main_ppo is in `for ... done`, and not translated" in text
    assert "line 5: verl.trainer.main_ppo is in the function run" in text
    assert "line 8: verl.trainer.main_ppo is in the function go" in text


@pytest.mark.parametrize("head", ["run() {", "function run {", "run() { cd x &&", "run()\n{", "run() {\n"])
def test_a_function_ends_at_its_brace_and_its_program_is_named(head: str):
    main = "python3 -m verl.trainer.main_ppo"
    with pytest.raises(UserError, match="main_ppo is in the function run, and not translated"):
        translated(f"{head} {main} a=1; }}\nrun\n")
    # What follows it is read.
    assert "trainer.nnodes=2" in translated(f"{head} {main} a=1; }}\n{main} trainer.nnodes=2\n").partition("\n\n")[0]


def test_a_script_without_a_program_of_verl_is_refused(tmp_path: Path, capsys):
    with pytest.raises(UserError, match="runs no program of verl"):
        translated("echo hello\n")
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    assert main(["translate", str(script)]) == 0
    assert capsys.readouterr().out.startswith("scalerl train")
    assert main(["translate", str(tmp_path / "none.sh")]) == 2


def test_steps_of_a_schedule_are_multiplied_by_the_shell_or_not_guessed():
    key = f"{ACTOR}.optim.lr_warmup_"
    rows = report_on("train", "ppo", [f"{ACTOR}.ppo_mini_batch_size=256", f"{key}steps=$W"]).rows
    assert [row.becomes for row in rows if row.fate == "renamed"] == [(f"{key}updates=$(($W * 4))",)]
    (row,) = [
        row
        for row in report_on("train", "ppo", ["data.train_batch_size=$B", f"{key}steps=3"]).rows
        if row.why[:6] == "counts"
    ]
    assert row.fate == "dropped" and row.why.endswith(f"set {key}updates")


def test_what_only_the_shell_knows_is_renamed_and_multiplied_there():
    sizes = [f"{ACTOR}.megatron.context_parallel_size=2", f"{ACTOR}.grad_clip=$CLIP"]
    rows = report_on("train", "ppo", [*sizes, f"{ACTOR}.ppo_max_token_len_per_gpu=$TOKENS"]).rows
    becomes = {row.written: row.becomes for row in rows if row.fate == "renamed"}
    assert becomes == {
        f"{ACTOR}.grad_clip=$CLIP": (f"{ACTOR}.optim.clip_grad=$CLIP",),
        f"{ACTOR}.ppo_max_token_len_per_gpu=$TOKENS": (f"{ACTOR}.max_tokens_per_micro_batch=$(($TOKENS * 2))",),
    }
    assert not [row for row in rows if row.fate == "dropped"]


@pytest.mark.parametrize(
    "spelling",
    [
        "megatron.context_parallel_size",
        "megatron.override_transformer_config.context_parallel_size",
        "fsdp_config.ulysses_sequence_parallel_size",
    ],
)
def test_tokens_are_multiplied_by_a_size_that_only_the_shell_knows(spelling: str):
    """Actor and reference by the actor's size, the critic by its own."""
    script = (
        f"python3 -m verl.trainer.main_ppo {ACTOR}.ppo_max_token_len_per_gpu=16384 {ACTOR}.{spelling}=$CP "
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=$TOKENS "
        "critic.ppo_max_token_len_per_gpu=8192 critic.megatron.context_parallel_size=2"
    )
    command = translated(script).partition("\n\n")[0]
    environment = {"CP": "4", "TOKENS": "3000", "PATH": "/usr/bin:/bin"}
    printed = subprocess.run(
        ["bash", "-c", command.replace("scalerl train", "printf '%s\\n'", 1)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    cfg = compose("ppo", [*REQUIRED, *printed.stdout.split()], rules=False)
    policy = cfg.actor_rollout_ref
    assert policy.actor.megatron.context_parallel_size == policy.ref.megatron.context_parallel_size == 4
    assert policy.actor.max_tokens_per_micro_batch == 4 * 16384
    assert policy.ref.max_tokens_per_micro_batch == 4 * 3000
    assert cfg.critic.max_tokens_per_micro_batch == 2 * 8192


@pytest.mark.parametrize(
    ("written", "depends_on"),
    [
        (f"{ACTOR}.megatron.context_parallel_size=$CP", f"{ACTOR}.megatron.context_parallel_size=$CP"),
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=$CP", f"{ACTOR}.megatron.context_parallel_size=$CP"),
        (f"{ACTOR}.megatron.tensor_model_parallel_size=$TP", f"{ACTOR}.megatron.tensor_model_parallel_size=$TP"),
        ("data.max_prompt_length=$LENGTH", "data.max_prompt_length=$LENGTH"),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu=$SAMPLES", "$SAMPLES"),
    ],
)
def test_tokens_of_samples_are_not_guessed_where_only_the_shell_knows_their_size(written: str, depends_on: str):
    samples = f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"
    report = report_on("train", "ppo", ["data.max_response_length=10", samples, written])
    (row,) = [row for row in report.rows if row.written.startswith(f"{ACTOR}.ppo_micro_batch_size_per_gpu=")]
    assert row.fate == "dropped" and f"depend on {depends_on}, which only the shell knows" in row.why
    assert f"set {ACTOR}.max_tokens_per_micro_batch" in row.why
    assert "max_tokens_per_micro_batch" not in report.shell()


def test_tokens_of_samples_are_computed_from_what_the_script_sets():
    """A sample of 22 tokens is padded to a multiple of 8 by a context parallel size of 4."""
    command = translated(
        "CP=4\npython3 -m verl.trainer.main_ppo data.max_prompt_length=12 data.max_response_length=10 "
        f"{ACTOR}.megatron.context_parallel_size=$CP {ACTOR}.ppo_micro_batch_size_per_gpu=2"
    )
    assert f"{ACTOR}.max_tokens_per_micro_batch=48" in command


def test_a_config_file_that_is_not_read_does_not_end_the_translation(tmp_path: Path):
    program = "python3 -m recipe.fully_async_policy.fully_async_main"
    for flags in (
        "--config-path=config --config-name=fully_async_ppo_megatron_trainer",
        "--config-path=$X --config-name=a",
    ):
        text = translated(f"{program} {flags} {' '.join(REQUIRED)} algorithm.adv_estimator=grpo")
        assert "scalerl train" in text and "algorithm.adv_estimator=grpo" in text.partition("\n\n")[0]
        assert "not read here" in text and "--config" not in text.partition("\n\n")[0]
