"""The keys of verl: what becomes of those of real scripts, and the values that they set."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

from scalerl.config import ConfigError, PPOConfig, SFTConfig, composed, translation_table
from scalerl.config.foreign_keys import Translation
from scalerl.config.keys import KeyTable
from scalerl.extras.verl.translate.report import Report, report_on
from scalerl.tracking.backend import flat_config

# Arguments of scripts of verl, of its recipes and of users, one a line; every key of ppo_megatron_trainer with its
# default (megatron); further keys of verl's vocabulary (further).
COMMANDS = Path(__file__).parents[1] / "commands"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REQUIRED = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=m", f"{ROLLOUT}.n=4"]
REQUIRED += ["trainer.n_gpus_per_node=8"]


@cache
def arguments(name: str) -> list[str]:
    return (COMMANDS / f"{name}.txt").read_text().splitlines()


def violations(given: list[str]) -> list[str]:
    try:
        composed("ppo", given)
    except ConfigError as error:
        return error.violations
    return []


def key_of(argument: str) -> str:
    return argument.partition("=")[0].lstrip("+")


def translations(*given: str) -> dict[str, Translation]:
    return {translation.key: translation for translation in composed("ppo", [*REQUIRED, *given]).translations}


# Keys of each script: taken over, renamed, already so, dropped. `further` has keys that are there to be refused.
COUNTS = {
    "cppo_qwen3_30b": (46, 6, 15, 0),
    "dapo_mimo_7b": (55, 10, 8, 2),
    "dapo_npu": (67, 19, 15, 2),
    "dapo_qwen3_30b_fp8_e2e": (68, 12, 22, 1),
    "dsv3": (64, 18, 17, 0),
    "fully_async_qwen2_5_0_5b": (51, 12, 15, 3),
    "further": (60, 40, 98, 2),
    "geo3k_qwen2_5_vl_7b": (38, 3, 8, 0),
    "gdpo_qwen2_5_1_5b": (52, 10, 27, 0),
    "gkd_qwen3_4b_npu": (40, 9, 6, 5),
    "gpg_qwen2_7b": (32, 5, 1, 0),
    "grpo8b": (32, 2, 8, 0),
    "gspo30b": (48, 6, 12, 0),
    "megatron": (132, 23, 177, 0),
    "ppo_deepseek7b_nsys": (32, 4, 13, 0),
    "sft_nemotron_super": (23, 19, 26, 3),
    "sft_qwen2_5_0_5b_muon": (23, 5, 13, 1),
    "sft_qwen3_0_6b": (22, 6, 6, 1),
    "user_grpo_qwen3_0_6b_profile": (39, 6, 12, 2),
}


@cache
def report(name: str) -> Report:
    kind = "sft" if name.startswith("sft_") else "ppo"
    return report_on(kind, kind, arguments(name))


@pytest.mark.parametrize("name", COUNTS)
def test_keys_of_a_script_have_the_fates_that_they_had(name: str):
    counts = Counter(row.fate for row in report(name).rows)
    assert tuple(counts[fate] for fate in ("taken over", "renamed", "already so", "dropped")) == COUNTS[name]
    said = " ".join(row.why for row in report(name).rows)
    assert "did you mean" not in said.lower() and "no such key" not in said
    table = KeyTable(SFTConfig if name.startswith("sft_") else PPOConfig)
    targets = [text.partition("=")[0] for row in report(name).rows if row.fate == "renamed" for text in row.becomes]
    assert all(table.kind(target) != "unknown" for target in targets)


def test_no_value_of_a_key_of_scalerl_is_taken_for_verls():
    composition = composed("ppo", REQUIRED)
    assert composition.translations == []
    # Keys that both have, with values that both take.
    both = [f"{ROLLOUT}.name=sglang", "algorithm.filter_groups.max_num_gen_batches=3", "trainer.logger=[console]"]
    both += [f"{ROLLOUT}.top_k=5", f"{ACTOR}.loss_scale_factor=7", "data.seed=3"]
    assert translations(*both) == {}


def test_samples_of_a_micro_batch_become_tokens():
    lengths = ["data.max_prompt_length=100", "data.max_response_length=150"]
    key = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    assert translations(*lengths, f"{key}=4")[key].becomes == (f"{ACTOR}.max_tokens_per_micro_batch=1000",)
    # Over two ranks a sequence takes a multiple of four tokens.
    over_ranks = translations(*lengths, f"{key}=4", f"{ACTOR}.megatron.context_parallel_size=2")
    assert over_ranks[key].becomes == (f"{ACTOR}.max_tokens_per_micro_batch=1008",)
    for said, verdict in (("max_tokens_per_micro_batch", None), ("ppo_max_token_len_per_gpu", "renamed")):
        given = translations(*lengths, f"{key}=4", f"{ACTOR}.{said}=600", f"{ACTOR}.use_dynamic_bsz=True")
        assert given[key].verdict == given[f"{ACTOR}.use_dynamic_bsz"].verdict == "already so"
        assert len(given) == 2 or given[f"{ACTOR}.{said}"].verdict == verdict


def test_tokens_of_a_device_become_those_of_all_that_share_a_micro_batch():
    keys = [f"{ACTOR}.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"]
    keys += ["actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", "reward_model.forward_max_token_len_per_gpu"]
    sections = [key.rpartition(".")[0] for key in keys]
    given = [f"{key}={5000 + number}" for number, key in enumerate(keys)]
    override = "megatron.override_transformer_config.context_parallel_size"
    ulysses = "fsdp_config.ulysses_sequence_parallel_size"
    for size, spelling in ((1, "megatron.context_parallel_size"), (4, ulysses), (2, override)):
        # The size is written after the numbers that it multiplies.
        translation_of = translations(*given, f"{ACTOR}.{spelling}={size}")
        becomes = [translation_of[key].becomes[0] for key in keys]
        assert becomes == [
            f"{section}.max_tokens_per_micro_batch={size * (5000 + number)}" for number, section in enumerate(sections)
        ]
    cfg = composed(
        "ppo",
        [*REQUIRED, f"{ACTOR}.megatron.context_parallel_size=4", "critic.megatron.context_parallel_size=2", *given],
    ).config
    assert cfg.actor_rollout_ref.actor.max_tokens_per_micro_batch == 4 * 5000
    assert cfg.critic.max_tokens_per_micro_batch == 2 * 5001
    as_actor = translations(*given[:1], keys[2] + "=${" + keys[0] + "}")
    assert as_actor[keys[2]].becomes == (
        f"{sections[2]}.max_tokens_per_micro_batch=${{{ACTOR}.max_tokens_per_micro_batch}}",
    )
    (text,) = violations([*REQUIRED, f"{keys[0]}=many"])
    assert text == f"{keys[0]} = many: is a number of tokens; set {ACTOR}.max_tokens_per_micro_batch to one"


@pytest.mark.parametrize("section", ["data", "engine"])
def test_tokens_of_a_device_in_sft(section: str):
    needed = ["data.train_files=a", "model.path=m", "megatron.context_parallel_size=2", "trainer.n_gpus_per_node=2"]
    composition = composed("sft", [*needed, f"{section}.max_token_len_per_gpu=3000"])
    assert composition.config.data.max_tokens_per_micro_batch == 6000
    assert composition.translations[0].becomes == ("data.max_tokens_per_micro_batch=6000",)


CORRECTION, POOL = "algorithm.rollout_correction", f"{ROLLOUT}.resource_pool"
FIELDS, PROFILE = f"{ACTOR}.megatron.override_transformer_config", f"{ACTOR}.profile"
SELECTIVE = f"{FIELDS}.recompute_granularity=selective"
OF_TEACHER = "distillation.distillation_loss"
TEACHER = ["distillation.teacher_models.teacher_model.model_path=t"]
DISTILLED = ["distillation.enabled=True", f"{OF_TEACHER}.use_policy_gradient=False"]
# An argument of verl, with further ones that it needs, and the arguments of scalerl that it becomes.
RENAMED = [
    ("algorithm.rollout_is=True", ["algorithm.rollout_is_threshold=2.0"], [f"{CORRECTION}.rollout_is=token"]),
    (
        "algorithm.rollout_is=True",
        ["algorithm.rollout_is_level=sequence", "algorithm.rollout_is_threshold=2.0"],
        [f"{CORRECTION}.rollout_is=sequence"],
    ),
    ("algorithm.rollout_is=False", [], [f"{CORRECTION}.rollout_is=null"]),
    ("algorithm.rollout_is_veto_threshold=1e-4", [], [f"{CORRECTION}.rollout_token_veto_threshold=0.0001"]),
    (f"{ACTOR}.fsdp_config.dtype=float16", [], [f"{ACTOR}.megatron.dtype=float16"]),
    ("critic.model.fsdp_config.mixed_precision.param_dtype=fp32", [], ["critic.megatron.dtype=float32"]),
    (f"{ACTOR}.use_gpg_loss=True", [], [f"{ACTOR}.policy_loss.loss_mode=gpg"]),
    (
        f"{ACTOR}.router_replay.mode=R3",
        [f"{ROLLOUT}.enable_rollout_routing_replay=True"],
        ["algorithm.routing_replay=rollout"],
    ),
    (
        f"{ROLLOUT}.enable_rollout_routing_replay=True",
        [f"{ACTOR}.router_replay.mode=R3"],
        ["algorithm.routing_replay=rollout"],
    ),
    (
        f"+{ROLLOUT}.enable_expert_parallel=True",
        [f"{ROLLOUT}.tensor_model_parallel_size=2"],
        [f"{ROLLOUT}.engine_kwargs.sglang.ep_size=${{{ROLLOUT}.tensor_model_parallel_size}}"],
    ),
    (
        "distillation.enabled=True",
        [
            *TEACHER,
            f"{OF_TEACHER}.loss_mode=forward_kl_topk",
            f"{OF_TEACHER}.topk=16",
            f"{OF_TEACHER}.use_policy_gradient=False",
            f"{OF_TEACHER}.distillation_loss_coef=0.5",
        ],
        ["algorithm.distillation_top_k=16", "algorithm.distillation_coef=0.5"],
    ),
    (
        "distillation.enabled=True",
        [
            *TEACHER,
            f"{OF_TEACHER}.loss_mode=k1",
            f"{OF_TEACHER}.use_task_rewards=False",
            "algorithm.adv_estimator=grpo",
        ],
        ["algorithm.adv_estimator=on_policy_distillation"],
    ),
    (
        "distillation.enabled=True",
        [*TEACHER, f"{OF_TEACHER}.use_policy_gradient=False"],
        [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=k3", f"{ACTOR}.kl_loss_coef=1.0"],
    ),
    (TEACHER[0], DISTILLED, ["actor_rollout_ref.ref.model_path=t"]),
    ("distillation.nnodes=2", [*DISTILLED, *TEACHER], ["actor_rollout_ref.ref.resource_pool.nnodes=2"]),
    ("global_profiler.steps=[2,5]", [], ["trainer.profile_steps=[2,5]"]),
    ("global_profiler.tool=nsys", ["trainer.profile_steps=[2]"], ["trainer.profile_tool=nsys"]),
    (f"{ACTOR}.profiler.all_ranks=True", ["trainer.profile_steps=[2]"], ["trainer.profile_ranks=null"]),
    (f"{ACTOR}.profile_ranks=[0,3]", ["trainer.profile_steps=[2]"], ["trainer.profile_ranks=[0,3]"]),
    (f"{PROFILE}.profile_ranks=[1]", ["trainer.profile_steps=[4]"], ["trainer.profile_ranks=[1]"]),
    ("actor_rollout_ref.model.custom_chat_template='@x/t.jinja'", [], ["data.chat_template_path=x/t.jinja"]),
    (
        "rollout.nnodes=2",
        ["rollout.n_gpus_per_node=4"],
        ["actor_rollout_ref.hybrid_engine=false", f"{POOL}.nnodes=2"],
    ),
    (
        f"{FIELDS}.recompute_modules=[core_attn,moe_act,moe]",
        [SELECTIVE],
        [f"{ACTOR}.megatron.recompute_modules=[core_attn,moe]"],
    ),
]
# Arguments of verl that are refused, with further ones, and what the message says.
REFUSED = [
    (
        "distillation.enabled=True",
        TEACHER,
        f"set {OF_TEACHER}.loss_mode=k1 and {OF_TEACHER}.use_task_rewards=false, or",
    ),
    ("distillation.enabled=True", [*DISTILLED[1:], *TEACHER, f"{OF_TEACHER}.loss_mode=jsd"], "no such loss as"),
    (
        "distillation.enabled=True",
        [*DISTILLED[1:], *TEACHER, f"{OF_TEACHER}.use_task_rewards=False"],
        "let the reward function return 0",
    ),
    (
        f"{OF_TEACHER}.loss_max_clamp=10.0",
        [*DISTILLED, *TEACHER],
        "a teacher and its KL have no such setting; leave it out",
    ),
    ("distillation.teacher_models.other.model_path=u", [*DISTILLED, *TEACHER], "leave one of them out"),
    (f"{OF_TEACHER}.jsd_beta=0.5", [*DISTILLED, *TEACHER], "have no such setting"),
    ("actor_rollout_ref.teacher.model.path=t", [], "set actor_rollout_ref.ref.model_path and"),
    ("global_profiler.tool=npu", [], "trainer.profile_tool is torch or nsys"),
    (f"{PROFILE}.use_profile=True", [], "set trainer.profile_steps"),
    ("actor_rollout_ref.model.custom_chat_template='a template'", [], "set data.chat_template_path"),
    ("rollout.nnodes=2", ["actor_rollout_ref.hybrid_engine=true"], "leave one of them out"),
    (f"{ACTOR}.use_gpg_loss=True", [f"{ACTOR}.policy_loss.loss_mode=gspo"], "leave one of them out"),
    (f"{FIELDS}.recompute_modules=[core_attn,moe_act]", [SELECTIVE], "name moe instead"),
    (f"{ROLLOUT}.n_agent=4", [], f"leave it out, and set {ROLLOUT}.n"),
    (f"{ROLLOUT}.qat.enable=True", [], "servers have the trainer's weights, unchanged; leave it out"),
    ("trainer.v1.trainer_mode=separate_async", [], "set trainer.max_staleness"),
    ("algorithm.rollout_is_mode=mask", [], "rollout_is_threshold=[lower,upper]"),
    (f"{ACTOR}.fsdp_config.dtype=int8", [], "set it to bfloat16, float16 or float32"),
]
# Arguments that ask for nothing.
SAME = [f"{ROLLOUT}.n_agent=1", f"{ROLLOUT}.qat.enable=False", "trainer.v1.trainer_mode=sync"]
SAME += [f"{ACTOR}.use_gpg_loss=False", "actor_rollout_ref.model.custom_chat_template=null"]
SAME += [*TEACHER, "distillation.enabled=False", f"{OF_TEACHER}.loss_max_clamp=10.0", "distillation.nnodes=0"]
SAME += ["rollout.nnodes=0", "trainer.profile_steps=null", f"{ROLLOUT}.multi_turn.enable=False"]


@pytest.mark.parametrize(("argument", "more", "becomes"), RENAMED)
def test_what_a_key_becomes(argument: str, more: list[str], becomes: list[str]):
    assert translations(argument, *more)[key_of(argument)].becomes == tuple(becomes)


@pytest.mark.parametrize(("argument", "more", "reason"), REFUSED)
def test_what_is_not_done_is_refused_with_the_reason(argument: str, more: list[str], reason: str):
    (violation,) = [text for text in violations([*REQUIRED, argument, *more]) if key_of(argument) in text]
    assert reason in violation


def test_values_that_ask_for_nothing_are_already_so():
    assert {translation.verdict for translation in translations(*SAME).values()} == {"already so"}


def test_keys_of_the_older_fine_tuning_are_understood():
    given = ["data.train_files=a", "model.partial_pretrain=m", "trainer.total_training_steps=50", "trainer.seed=1"]
    cfg = composed("sft", [*given, "optim.warmup_steps_ratio=0.1", "optim.lr_scheduler=cosine"]).config
    assert (cfg.optim.lr_warmup_updates, cfg.optim.lr_decay_style, cfg.data.seed) == (5, "cosine", 1)
    with pytest.raises(ConfigError, match=r"`scalerl data own --sft`$"):
        composed("sft", [*given, "+data.prompt_key=question"])


def test_keys_of_fine_tuning_are_understood():
    given = shlex.split("""
        data.train_files=a model.path=m trainer.n_gpus_per_node=8 trainer.total_training_steps=50
        data.pad_mode=no_padding data.use_dynamic_bsz=True data.ignore_input_ids_mismatch=True
        model=hf_model model.use_remove_padding=True model.enable_gradient_checkpointing=True model.lora_rank=0
        model.trust_remote_code=False optim=megatron optim.lr=1e-5 optim.lr_scheduler_type=cosine
        optim.lr_warmup_steps_ratio=0.1 optim.lr_decay_steps=40
        engine.tensor_model_parallel_size=2 engine.context_parallel_size=2 engine.use_mbridge=True
        engine.param_offload=True engine.override_transformer_config={}
        +engine.override_transformer_config.moe_permute_fusion=True
        engine.override_transformer_config.apply_rope_fusion=True +engine.override_ddp_config.bucket_size=1000
        megatron.override_transformer_config.moe_deepep_num_sms=8
        checkpoint.save_contents=[model,hf_model] trainer.max_ckpt_to_keep=3
    """)
    composition = composed("sft", given)
    cfg = composition.config
    assert (cfg.megatron.tensor_model_parallel_size, cfg.megatron.context_parallel_size) == (2, 2)
    assert cfg.megatron.param_offload and cfg.megatron.recompute_granularity == "full"
    assert cfg.megatron.override_transformer_config == {"moe_deepep_num_sms": 8, "moe_permute_fusion": True}
    assert cfg.megatron.override_ddp_config == {"bucket_size": 1000}
    assert cfg.trainer.max_actor_ckpt_to_keep == 3
    assert (cfg.optim.lr_decay_style, cfg.optim.lr_warmup_updates) == ("cosine", 5)
    table = KeyTable(SFTConfig)
    targets = [text.partition("=")[0] for name in composition.translations for text in name.becomes]
    assert targets and all(table.kind(target) in ("leaf", "free") for target in targets)
    for text, reason in (
        ("engine.override_transformer_config.num_layers=3", "the model's config.json decides; leave it out"),
        ("megatron.override_transformer_config.num_layers=3", "the model's config.json decides; leave it out"),
        (
            "trainer.test_freq=after_each_epoch",
            "set trainer.test_freq to those of an epoch, the rows of data.train_files divided by data.train_batch_size",
        ),
        ("engine.dist_checkpointing_path=here", "set model.path to that directory"),
        ("model.lora.dropout=0.1", "adapters are trained without dropout; leave it out"),
    ):
        with pytest.raises(ConfigError) as caught:
            composed("sft", [*NEEDED["sft"], text])
        (violation,) = caught.value.violations
        assert violation.startswith(text.replace("=", " = ")) and violation.endswith(reason)


def test_a_share_of_the_steps_becomes_updates():
    steps = ["trainer.total_training_steps=50", "data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=32"]
    key = f"{ACTOR}.optim.lr_warmup_steps_ratio"
    assert translations(*steps, f"{key}=0.1")[key].becomes == (f"{ACTOR}.optim.lr_warmup_updates=10",)
    (violation,) = violations([*REQUIRED, f"{key}=0.1"])
    assert violation.startswith(f"{key} = 0.1: warm-up is a number of optimizer updates")
    assert translations(f"{key}=0.0")[key].verdict == "already so"
    # Of verl's number of steps -1 is none, so that the share counts.
    for none in ("-1", "null"):
        translation = translations(*steps, f"{ACTOR}.optim.lr_warmup_steps={none}", f"{key}=0.1")[key]
        assert translation.becomes == (f"{ACTOR}.optim.lr_warmup_updates=10",)
    both = translations(*steps, f"{key}=0.1", f"{ACTOR}.optim.lr_warmup_steps=3")
    assert [both[name].verdict for name in (key, f"{ACTOR}.optim.lr_warmup_steps")] == ["already so", "renamed"]


def test_steps_of_a_schedule_become_updates():
    """The name counts steps in verl, of which each may have several optimizer updates."""
    sizes = ["data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=16", f"{ACTOR}.ppo_epochs=2"]
    sizes += ["critic.ppo_mini_batch_size=64", "critic.ppo_epochs=1"]
    optim = f"{ACTOR}.optim"
    warmup, decay, style = (f"{optim}.lr_{name}" for name in ("warmup_steps", "decay_steps", "decay_style"))
    # The sizes may be written behind the numbers that they multiply.
    cosine = [f"{style}=cosine", "critic.optim.lr_decay_style=cosine", "algorithm.adv_estimator=gae"]
    given = [f"{warmup}=3", f"{decay}=40", "critic.optim.lr_warmup_steps=3", "critic.optim.lr_decay_steps=40"]
    cfg = composed("ppo", [*REQUIRED, *given, *cosine, *sizes]).config
    actor, critic = cfg.actor_rollout_ref.actor.optim, cfg.critic.optim
    assert (actor.lr_warmup_updates, actor.lr_decay_updates) == (3 * 8, 40 * 8)
    assert (critic.lr_warmup_updates, critic.lr_decay_updates) == (3, 40)
    # A step of fine-tuning is one update.
    fine_tuning = ["optim.lr_warmup_steps=3", "optim.lr_decay_steps=40", "optim.lr_decay_style=linear"]
    optim = composed("sft", [*NEEDED["sft"], *fine_tuning]).config.optim
    assert (optim.lr_warmup_updates, optim.lr_decay_updates) == (3, 40)
    # Without a decay, and where verl's defaults are written out.
    translation_of = translations(f"{decay}=40", f"{warmup}=-1", "critic.optim.lr_decay_steps=null")
    assert {name.verdict for name in translation_of.values()} == {"already so"}
    (text,) = [
        text
        for text in violations([*REQUIRED, *sizes[1:2], f"{warmup}=3", "data.train_batch_size=100"])
        if warmup in text
    ]
    assert text.startswith(f"{warmup} = 3: counts steps") and text.endswith(f"set {ACTOR}.optim.lr_warmup_updates")


def test_two_keys_that_differ_about_the_same_are_refused():
    (violation,) = violations([*REQUIRED, f"{ACTOR}.grad_clip=2.0", f"{ACTOR}.optim.clip_grad=1.0"])
    assert violation == (
        f"{ACTOR}.grad_clip = 2.0: is {ACTOR}.optim.clip_grad here, which is 1.0; leave one of them out"
    )
    assert violations([*REQUIRED, f"{ACTOR}.grad_clip=2.0", f"{ACTOR}.optim.clip_grad=2.0"]) == []


# What scalerl always does, written with the other value.
THE_OTHER_VALUE = [
    ("ppo", "actor_rollout_ref.model.use_remove_padding=false", "sequences are always packed"),
    ("ppo", f"{ACTOR}.megatron.use_remove_padding=false", "sequences are always packed"),
    ("ppo", f"{ACTOR}.megatron.use_mbridge=false", "by one table per family"),
    ("ppo", "data.return_raw_chat=false", "prompts stay lists of messages"),
    ("ppo", "trainer.balance_batch=false", "balanced over the ranks"),
    ("ppo", f"{ACTOR}.use_dynamic_bsz=some", "packed up to a number of tokens"),
    ("sft", "model.use_remove_padding=false", "sequences are always packed"),
    ("sft", "engine.use_remove_padding=false", "sequences are always packed"),
    ("sft", "engine.use_mbridge=false", "by one table per family"),
    ("sft", "data.use_dynamic_bsz=some", "packed up to a number of tokens"),
]
# Misspelt keys of sections whose other keys ask for what is so.
MISSPELT = [
    ("sft", "engine.tensor_model_paralel_size=2", "did you mean megatron.tensor_model_parallel_size"),
    ("sft", "engine.override_transfomer_config.moe_permute_fusion=true", "leave it out"),
    ("sft", "model.fsdp_config.paramoffload=true", "leave it out"),
    ("ppo", f"{ACTOR}.fsdp_config.paramoffload=true", "leave it out"),
    ("ppo", "critic.model.fsdp_config.paramoffload=true", "leave it out"),
    ("ppo", "ray_kwargs.ray_init.num_cpu=3", "leave it out"),
    ("ppo", "ray_init.num_cpu=3", "leave it out"),
    ("ppo", "critic.kl_ctrl.kl_coeff=0.1", "leave it out"),
    ("ppo", "trainer.remove_previous_ckpt_in_save=some", "leave it out"),
]
NEEDED = {"ppo": REQUIRED, "sft": ["data.train_files=a", "model.path=m"]}


@pytest.mark.parametrize(("kind", "argument", "reason"), [*THE_OTHER_VALUE, *MISSPELT])
def test_what_is_not_so_is_refused_with_the_reason(kind: Literal["ppo", "sft"], argument: str, reason: str):
    with pytest.raises(ConfigError) as caught:
        composed(kind, [*NEEDED[kind], argument])
    (violation,) = caught.value.violations
    key = key_of(argument)
    assert key in violation and reason in violation
    if (kind, argument, reason) in THE_OTHER_VALUE:
        assert violation.startswith(argument.replace("=", " = ") + ": ") and violation.endswith("; leave it out")
        assert composed(kind, [*NEEDED[kind], f"{key}=true"]).translations[0].verdict == "already so"


def test_sections_of_a_file_are_read_key_by_key(tmp_path: Path):
    """A section is never "already so" as a whole: its keys may say something else."""
    (tmp_path / "run.yaml").write_text(
        "data: {train_files: a}\nmodel: {path: m, fsdp_config: {wrap_policy: {min_num_params: 0}}}\n"
        "engine: {use_remove_padding: true, dtype: float32, wrap_policy: {min_num_params: 0}}\n"
        "global_profiler: {steps: [2], tool: torch}\nray_kwargs: {ray_init: {num_cpus: 3, runtime_env: {}}}\n"
    )
    arguments = ["--config-dir", str(tmp_path), "--config-name", "run"]
    cfg = composed("sft", arguments).config
    assert (cfg.megatron.dtype, cfg.trainer.profile_steps) == ("float32", [2])
    with pytest.raises(ConfigError, match=r"engine.use_remove_padding = false"):
        (tmp_path / "run.yaml").write_text(
            "data: {train_files: a}\nmodel: {path: m}\nengine: {use_remove_padding: false}\n"
        )
        composed("sft", arguments)


def test_keys_of_a_file_are_translated_too(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(
        "data: {train_files: a, val_files: b}\n"
        "actor_rollout_ref:\n  model: {path: m, use_remove_padding: true}\n"
        "  actor: {grad_clip: 0.5, use_dynamic_bsz: true}\n  rollout: {n: 4, name: vllm}\n"
        "reward: {reward_manager: {source: register, name: dapo}}\n"
    )
    cfg = composed("ppo", ["--config-dir", str(tmp_path), "--config-name", "run"]).config
    assert cfg.actor_rollout_ref.actor.optim.clip_grad == 0.5
    assert cfg.actor_rollout_ref.rollout.name == "sglang" and cfg.reward_model.reward_manager == "dapo"
    assert composed("ppo", ["--config-path", str(tmp_path), "--config-name", "run"]).config == cfg


@pytest.mark.parametrize("named", ["ppo_megatron_trainer", "/ppo_trainer@_here_", "base"])
def test_verls_own_files_in_the_defaults_of_a_file_of_the_users(tmp_path: Path, named: str):
    """As the files of verl's recipes begin."""
    head = "hydra: {{searchpath: ['file://verl/trainer/config']}}\ndefaults:\n  - {}\n  - _self_\n"
    (tmp_path / "run.yaml").write_text(
        head.format(named) + "data: {train_files: a, val_files: b}\n"
        "actor_rollout_ref: {model: {path: m}, rollout: {name: vllm, n: 4}}\n"
    )
    (tmp_path / "base.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer: {nnodes: 2}\n")
    composition = composed("ppo", ["--config-dir", str(tmp_path), "--config-name", "run"])
    assert composition.config.data.train_files == "a" and composition.config.actor_rollout_ref.rollout.n == 4
    assert composition.config.trainer.nnodes == (2 if named == "base" else 1)
    (row,) = (row for row in composition.translations if row.key == "defaults")
    assert row.value in ("ppo_megatron_trainer", "ppo_trainer") and "verl's defaults" in row.why
    (tmp_path / "run.yaml").write_text("hydra: {searchpath: ['file://mine']}\n")
    (text,) = violations([*REQUIRED, "--config-dir", str(tmp_path), "--config-name", "run"])
    assert text.startswith("hydra.searchpath = [file://mine] in ") and "--config-dir DIR" in text


def test_verls_own_files_and_dashes_are_understood():
    given = ["--config-path=config", "--config-name=ppo_megatron_trainer.yaml", *REQUIRED, "--trainer.nnodes=2"]
    composition = composed("ppo", [*given, "--model_engine=megatron"])
    assert composition.config.trainer.nnodes == 2
    assert [name.key for name in composition.translations] == ["--config-name", "--config-path", "model_engine"]
    (text,) = violations([*REQUIRED, "--config_name=ppo"])
    assert text.startswith("--config_name=ppo: not understood")
    (text,) = violations(["--config-path=config", "--config-name=ppo", *REQUIRED])
    assert "--config-path config: no such directory" in text and "--config-dir DIR --config-name NAME" in text


def test_fields_of_megatrons_configs_go_to_the_section_and_to_the_roles_that_have_it():
    fields = f"{ACTOR}.megatron.override_transformer_config"
    cfg = composed(
        "ppo",
        [
            *REQUIRED,
            f"+{fields}.moe_permute_fusion=True",
            f"++{fields}.recompute_granularity=selective",
            "actor_rollout_ref.ref.megatron.override_transformer_config.moe_deepep_num_sms=8",
            f"{ACTOR}.optim.override_optimizer_config.adam_eps=1e-9",
            f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True",
            f"{ACTOR}.megatron.override_ddp_config.bucket_size=1000",
        ],
    ).config
    actor, ref = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.ref
    assert actor.megatron.override_transformer_config == {"moe_permute_fusion": True}
    assert ref.megatron.override_transformer_config == {"moe_permute_fusion": True, "moe_deepep_num_sms": 8}
    assert cfg.critic.megatron.override_transformer_config == {"moe_permute_fusion": True}
    assert actor.megatron.recompute_granularity == "selective" and actor.megatron.optimizer_offload
    assert actor.optim.override_optimizer_config == {"adam_eps": 1e-9}
    assert actor.megatron.override_ddp_config == {"bucket_size": 1000}
    # As MLflow records them.
    recorded = flat_config(asdict(cfg))
    assert recorded[f"{fields}.moe_permute_fusion"] is True
    assert recorded[f"{ACTOR}.optim.override_optimizer_config.adam_eps"] == 1e-9
    assert recorded[f"{ACTOR}.megatron.override_ddp_config.bucket_size"] == 1000


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("megatron.override_transformer_config.num_layers=3", "the model's config.json decides"),
        ("megatron.override_transformer_config.calculate_per_token_loss=False", "the training step sets it"),
        ("megatron.override_ddp_config.average_in_collective=True", "taken once after the last micro-batch"),
        ("optim.override_optimizer_config.bf16=False", "megatron.dtype decides"),
    ],
)
def test_fields_that_scalerl_sets_are_refused(field: str, text: str):
    (violation,) = violations([*REQUIRED, f"+{ACTOR}.{field}"])
    assert text in violation and violation.endswith("; leave it out")


def test_the_table_says_from_what_to_what():
    translated_keys = list(translations(f"{ACTOR}.grad_clip=2.0", f"{ACTOR}.calculate_entropy=True").values())
    assert translation_table(translated_keys).splitlines() == [
        "keys of verl, and what they are here:",
        f"  {ACTOR}.grad_clip=2.0  -> {ACTOR}.optim.clip_grad=2.0",
        "keys of verl with nothing to set, already so here:",
        f"  {ACTOR}.calculate_entropy=true  entropy is a metric of every step",
    ]
    assert translation_table([]) == ""


def test_stages_that_count_embedding_and_loss_get_their_layers(tmp_path: Path):
    fields = f"+{ACTOR}.megatron.override_transformer_config.account_for_"
    loss, embedding = f"{fields}loss_in_pipeline_split=True", f"{fields}embedding_in_pipeline_split=True"
    stages = f"{ACTOR}.megatron.pipeline_model_parallel_size=8"
    devices = ["trainer.nnodes=1", "trainer.n_gpus_per_node=8"]
    first, last = (f"{ACTOR}.megatron.num_layers_in_{name}_pipeline_stage" for name in ("first", "last"))

    def sizes(num_layers: int, *more: str) -> tuple[int | None, int | None]:
        (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": num_layers}))
        given = [*REQUIRED, f"actor_rollout_ref.model.path={tmp_path}", *devices, *more]
        megatron = composed("ppo", given).config.actor_rollout_ref.ref.megatron
        return megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage

    # Qwen3-235B-A22B has 94.
    assert sizes(94, loss, embedding, stages) == sizes(94, stages, embedding, loss) == (11, 11)
    assert sizes(95, stages, embedding) == (11, None) and sizes(95, stages, loss) == (None, 11)
    assert sizes(94, loss, embedding, stages, f"{first}=10", f"{last}=12") == (10, 12)
    assert sizes(94, loss, embedding) == (None, None)
    # The same of fine-tuning, where the section has another name.
    fields = "+engine.override_transformer_config.account_for"
    given = ["data.train_files=a", f"model.path={tmp_path}", *devices, f"{fields}_loss_in_pipeline_split=True"]
    given += [f"{fields}_embedding_in_pipeline_split=True", "engine.pipeline_model_parallel_size=8"]
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 94}))
    megatron = composed("sft", given).config.megatron
    assert (megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage) == (11, 11)
    # Without the model at hand, and where the layers cannot be divided.
    (violation, _) = violations([*REQUIRED, *devices, stages, loss, embedding])
    assert violation.endswith(f"; leave it out, and set {first} and {last} to (the model's layers + 2) / 8 - 1")
    with pytest.raises(ConfigError, match="95 layers and 2 are no multiple of"):
        sizes(95, loss, embedding, stages)


def test_data_parallel_overlap_reaches_megatrons_config():
    ddp = f"+{ACTOR}.megatron.override_ddp_config"
    cfg = composed("ppo", [*REQUIRED, f"{ddp}.overlap_grad_reduce=True", f"{ddp}.overlap_param_gather=true"]).config
    overlaps = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    assert cfg.actor_rollout_ref.actor.megatron.override_ddp_config == overlaps
    section = f"{ACTOR}.megatron"
    (violation,) = violations(
        [*REQUIRED, f"{ddp}.overlap_param_gather=true", f"{section}.use_distributed_optimizer=false"]
    )
    assert violation == (
        f"{section}.override_ddp_config.overlap_param_gather = true: only with {section}.use_distributed_optimizer = "
        f"true, whose ranks gather parameters; set {section}.use_distributed_optimizer=true, or leave it out"
    )


def test_a_state_that_leaves_the_device_by_either_of_verls_keys():
    cpu = f"+{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload"
    key = f"{ACTOR}.megatron.optimizer_offload"
    for given, expected in (
        ([f"{cpu}=False", f"{key}=True"], True),
        ([f"{key}=False", f"{cpu}=True"], True),
        ([f"{cpu}=False"], False),
    ):
        assert (
            composed("ppo", [*REQUIRED, *given]).config.actor_rollout_ref.actor.megatron.optimizer_offload == expected
        )


def test_converted_weights_are_refused_once_where_they_are_used():
    paths = [f"actor_rollout_ref.{role}.megatron.dist_checkpointing_path=/mcore" for role in ("actor", "ref")]
    assert violations([*REQUIRED, *paths]) == []
    used = [f"actor_rollout_ref.{role}.megatron.use_dist_checkpointing=True" for role in ("actor", "ref")]
    (violation,) = violations([*REQUIRED, *paths, *used])
    assert violation.startswith(f"{ACTOR}.megatron.dist_checkpointing_path = /mcore: ")
    assert violations([*REQUIRED, *paths[1:], *used]) == []
    other = "actor_rollout_ref.ref.megatron.dist_checkpointing_path=/other"
    assert len(violations([*REQUIRED, paths[0], other, *used])) == 2


def test_what_is_refused_of_verl_hides_no_broken_rule():
    messages = violations([*REQUIRED, f"{ACTOR}.router_replay.mode=R2", f"{ACTOR}.policy_loss.loss_mode=cppo"])
    assert len(messages) == 2 and "no such policy loss" in messages[1] and "Did you mean" not in messages[1]
