"""Keys of verl's actor, critic and reference that are not of their models, batches, engines or optimizers."""

from __future__ import annotations

import re
from typing import Any

from scalerl.config.verl.batch_units import critic_enable
from scalerl.config.verl.entry import (
    AlreadySo,
    Becomes,
    Context,
    Outcome,
    Refused,
    absent,
    computed,
    goes_with,
    is_one_of,
    renamed,
    same,
)
from scalerl.config.verl.vocabulary.words import ACTOR, ANY, OFF, REF, TRAINED


def _importance_cap(_: re.Match[str], value: Any, __: Context) -> Outcome:
    if is_one_of(value, (None, -1)):
        return AlreadySo("off")
    correction = "algorithm.rollout_correction"
    return Becomes(
        {f"{correction}.rollout_is": "token", f"{correction}.rollout_is_threshold": value},
        "truncated importance sampling",
    )


def _save_contents(_: re.Match[str], value: Any, __: Context) -> Outcome:
    names = set(value) if isinstance(value, list) else {value}
    if {"model", "optimizer", "extra"} <= names <= {"model", "optimizer", "extra"}:
        return AlreadySo("a checkpoint holds all that a run needs to go on")
    return Refused(
        "a checkpoint always holds model, optimizer and extra, and nothing else; leave it out, and make a Hugging Face "
        "model of one with `scalerl merge`"
    )


ACTOR_KEYS = [
    same(f"{ACTOR}.calculate_entropy", why="entropy is a metric of every step"),
    same(f"{ACTOR}.calculate_sum_pi_squared", False, why="no estimator here wants it"),
    absent(f"({ACTOR}|{REF}).router_replay.mode", "disabled", None, why="routers choose anew in every pass"),
    goes_with(f"({ACTOR}|{REF}).router_replay.*", f"{ACTOR}.router_replay.mode"),
    same(f"{ACTOR}.freeze_vision_tower", why="models are language models"),
    absent(f"{ACTOR}.(use_prefix_grouper|freeze_moe_router)", *OFF, why="every token of a sample is computed"),
    computed(
        f"{ACTOR}.tis_imp_ratio_cap",
        "`algorithm.rollout_correction.rollout_is=token` and `....rollout_is_threshold`",
        "truncated importance sampling",
        _importance_cap,
    ),
    renamed(
        f"{TRAINED}.loss_scale_factor",
        r"\1.loss_scale_factor",
        only=(None,),
        convert=lambda _: "${data.max_response_length}",
    ),
    same(
        f"{ACTOR}.use_rollout_log_probs",
        False,
        why="old log-probs are the trainer's; algorithm.rollout_correction.bypass_mode=true takes the sampler's",
    ),
    renamed(f"{ACTOR}.use_rollout_log_probs", "algorithm.rollout_correction.bypass_mode", only=(True,)),
    computed(
        f"{TRAINED}.checkpoint.(save_contents|load_contents|contents)",
        "model, optimizer, extra: already so",
        "",
        _save_contents,
    ),
    same(f"({ANY}).checkpoint.strict", why="a checkpoint of another model is refused"),
    renamed(f"{TRAINED}.checkpoint.async_save", "trainer.async_save", only=(True,), convert=lambda _: True),
    same(f"{TRAINED}.checkpoint.*", False, None, why="a checkpoint holds the whole model"),
    absent(f"{ACTOR}.qat.enable", *OFF, why="weights are trained in megatron.dtype"),
    goes_with(f"{ACTOR}.qat.**", f"{ACTOR}.qat.enable"),
    renamed(f"{REF}.model.path", f"{REF}.model_path"),
    absent(f"{REF}.enable", None, True, why="a run has a reference model where a KL is used"),
    computed("critic.enable", "already so where `algorithm.adv_estimator` has it so", "", critic_enable),
    same("critic.(ppo_epochs_*|kl_ctrl.**)", why="algorithm.kl_ctrl says it"),
]
