"""Keys of verl's actor, critic and reference that are not of their models, batches, engines or optimizers."""

from __future__ import annotations

import re
from typing import Any

from scalerl.extras.verl.keys.batch_units import critic_enable
from scalerl.extras.verl.keys.entry import (
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
from scalerl.extras.verl.keys.vocabulary.words import ACTOR, ANY, OFF, REF, ROLLOUT, TRAINED


def _importance_cap(_: re.Match[str], value: Any, __: Context) -> Outcome:
    if is_one_of(value, (None, -1)):
        return AlreadySo("off")
    correction = "algorithm.rollout_correction"
    return Becomes(
        {f"{correction}.rollout_is": "token", f"{correction}.rollout_is_threshold": value},
        "truncated importance sampling",
    )


def save_contents(match: re.Match[str], value: Any, __: Context) -> Outcome:
    """Reads what verl writes into a checkpoint, or reads of one; here it is always all."""
    names = set(value) if isinstance(value, list) else {value}
    whole = {"model", "optimizer", "extra"}
    if names == whole or (names <= whole | {"hf_model"} and match[match.lastindex or 0] != "load_contents"):
        merged = ", and `scalerl merge` makes a Hugging Face model of one" if "hf_model" in names else ""
        return AlreadySo(f"a checkpoint holds all that a run needs to go on{merged}")
    return Refused(
        "a checkpoint always holds model, optimizer and extra, and a run goes on with all of it; leave it out, and "
        "make a Hugging Face model of one with `scalerl merge`"
    )


ACTOR_KEYS = [
    same(f"{ACTOR}.calculate_entropy", why="entropy is a metric of every step"),
    same(f"{ACTOR}.calculate_sum_pi_squared", False, why="no estimator here wants it"),
    renamed(f"{ACTOR}.use_gpg_loss", f"{ACTOR}.policy_loss.loss_mode", only=(True,), convert=lambda _: "gpg"),
    same(f"{ACTOR}.use_gpg_loss", *OFF, why=f"{ACTOR}.policy_loss.loss_mode says the loss"),
    goes_with(f"{ACTOR}.policy_loss.cppo.*", f"{ACTOR}.policy_loss.loss_mode=cppo"),
    absent(
        f"({ACTOR}|{REF})(.megatron|).router_replay.mode",
        "disabled",
        None,
        why="routers choose anew in every pass",
    ),
    goes_with(f"({ACTOR}|{REF})(.megatron|).router_replay.*", f"{ACTOR}.router_replay.mode"),
    absent(
        "resource_pool_specs",
        [],
        {},
        None,
        why="a model or the servers with devices of their own say so in their section",
        instead="leave it out, and set `resource_pool.nnodes` and `resource_pool.n_gpus_per_node` there",
    ),
    goes_with(f"({ANY}|{ROLLOUT}).resource_pool_id", "resource_pool_specs"),
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
        "some of model, optimizer, extra, hf_model: already so; load_contents: all of it",
        "",
        save_contents,
    ),
    same(f"({ANY}).checkpoint.strict", why="a checkpoint of another model is refused"),
    renamed(f"{TRAINED}.checkpoint.async_save", "trainer.async_save", only=(True,), convert=lambda _: True),
    same(f"{TRAINED}.checkpoint.*", False, None, why="a checkpoint holds the whole model"),
    absent(f"{ACTOR}.qat.enable", *OFF, why="weights are trained in megatron.dtype"),
    goes_with(f"{ACTOR}.qat.**", f"{ACTOR}.qat.enable"),
    renamed(f"{REF}.model.path", f"{REF}.model_path"),
    absent(f"{REF}.enable", None, True, why="a run has a reference model where a KL is used"),
    computed("critic.enable", "already so where `algorithm.adv_estimator` has it so", "", critic_enable),
    same("critic.kl_ctrl.(type|kl_coef|horizon|target_kl)", why="algorithm.kl_ctrl says it"),
]
