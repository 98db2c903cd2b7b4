"""Converts verl's counts of samples, steps and copies to the units of scalerl's keys."""

from __future__ import annotations

import re
from typing import Any

from scalerl.config.layout import LayoutSizes
from scalerl.config.schema import MegatronConfig
from scalerl.config.value_checks import show
from scalerl.extras.verl.keys.entry import AlreadySo, Becomes, Context, Outcome, Refused

_ACTOR, _REF, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"


def update_micro_batch(match: re.Match[str], value: Any, context: Context) -> Outcome:
    """Converts an update's samples per micro-batch to tokens: as many as so many of the longest samples have."""
    return _tokens(match[1], f"{match[1]}.ppo_max_token_len_per_gpu", value, context)


def pass_micro_batch(_: re.Match[str], value: Any, context: Context) -> Outcome:
    """Converts the samples per micro-batch of the reference's pass to tokens, as `update_micro_batch` does."""
    return _tokens(_REF, f"{_REF}.log_prob_max_token_len_per_gpu", value, context)


def _tokens(section: str, of_verl: str, value: Any, context: Context) -> Outcome:
    key = f"{section}.max_tokens_per_micro_batch"
    lengths = ("data.max_prompt_length", "data.max_response_length")
    tp_key, cp_key = (f"{section}.megatron.{name}_parallel_size" for name in ("tensor_model", "context"))
    if any(said is not None for said in (context.left_open(key), context.foreign(of_verl))) or context.is_set(key):
        return AlreadySo(f"{key} says how many tokens a micro-batch has")
    unknown = [value] if isinstance(value, str) and "$" in value else []
    unknown += [f"{name}={text}" for name in (*lengths, tp_key, cp_key) if (text := context.left_open(name))]
    if unknown and value is not None:
        return Refused(
            f"counts samples, here a micro-batch has tokens; those of samples of the greatest length depend on "
            f"{', '.join(unknown)}, which only the shell knows; set {key} to their number"
        )
    sizes = [context.value(name) for name in lengths]
    if value is None or not all(type(size) is int and size > 0 for size in (value, *sizes)):
        return AlreadySo(f"{key} says how many tokens a micro-batch has")
    megatron = MegatronConfig(
        tensor_model_parallel_size=_size(context, tp_key), context_parallel_size=_size(context, cp_key)
    )
    layout = LayoutSizes.of(megatron)
    tokens = value * layout.padded_tokens(sum(sizes), sequence_parallel=megatron.sequence_parallel)
    return Becomes({key: tokens}, f"the tokens of {value} samples of the greatest length; no number depends on it")


def tokens_of_a_device(match: re.Match[str], value: Any, context: Context) -> Outcome:
    """Converts the tokens of a micro-batch on one device to those on all devices that share it."""
    section = match[match.lastindex or 1].replace("engine", "data")
    key = f"{section}.max_tokens_per_micro_batch"
    if isinstance(value, str) and f"{_ACTOR}.ppo_max_token_len_per_gpu" in value:
        return Becomes({key: f"${{{_ACTOR}.max_tokens_per_micro_batch}}"})
    megatron = "megatron" if section == "data" else f"{section}.megatron"
    cp_key = f"{megatron}.context_parallel_size"
    # What a script leaves open, its shell multiplies.
    cp_size = context.left_open(cp_key) or _size(context, cp_key)
    why = f"times context_parallel_size {cp_size}" if cp_size != 1 else ""
    if type(value) is int and isinstance(cp_size, int):
        return Becomes({key: value * cp_size}, why)
    if type(value) is int or (isinstance(value, str) and "$" in value):
        return Becomes({key: f"$(({value} * {cp_size}))" if cp_size != 1 else value}, why)
    return Refused(f"is a number of tokens; set {key} to one")


def _size(context: Context, key: str) -> int:
    value = context.value(key)
    return value if type(value) is int and value > 0 else 1


def response_limit(match: re.Match[str], value: Any, context: Context) -> Outcome:
    """Reads a second limit of prompt or response tokens, which may not differ from the one in `data`."""
    key = f"data.max_{match[1]}_length"
    if value is None or value == context.value(key):
        return AlreadySo(f"{key} says it")
    if not context.is_set(key):
        return Becomes({key: value})
    return Refused(f"a sample has one limit, {key} = {show(context.value(key))}; leave it out, or make it the same")


def updates_per_step(context: Context, section: str) -> int | None:
    """The number of optimizer updates of one step; None where the keys do not determine it.

    section: what the keys of the model begin with, its dot included; "": a step of fine-tuning, which is one update.
    """
    if not section:
        return 1
    keys = _sizes_of_a_step(section)
    if any(context.left_open(key) for key in keys):
        return None
    prompts, mini, epochs = map(context.value, keys)
    if not all(type(number) is int and number > 0 for number in (prompts, mini, epochs)) or prompts % mini:
        return None
    return prompts // mini * epochs


def _sizes_of_a_step(section: str) -> tuple[str, str, str]:
    return "data.train_batch_size", f"{section}ppo_mini_batch_size", f"{section}ppo_epochs"


def lr_steps(match: re.Match[str], value: Any, context: Context) -> Outcome:
    """Converts a warm-up or a decay that counts steps, of which each may have several updates, to optimizer updates."""
    section, name = match[1], match[2]
    key, style = f"{section}optim.lr_{name}_updates", f"{section}optim.lr_decay_style"
    if value in (None, -1):
        return AlreadySo("no warm-up by it" if name == "warmup" else "the decay takes the whole run")
    if name == "decay" and context.value(style) == "constant":
        return AlreadySo(f"counts only with {style}=linear or cosine")
    per_step = updates_per_step(context, section)
    if per_step is None:
        sizes = ", ".join(_sizes_of_a_step(section))
        return Refused(f"counts steps, and it is not known how many optimizer updates one has ({sizes}); set {key}")
    why = (
        f"counted in steps by verl, here in optimizer updates, of which a step has {per_step}" if per_step != 1 else ""
    )
    if type(value) is int:
        return Becomes({key: value * per_step}, why)
    if isinstance(value, str) and "$" in value:
        return Becomes({key: f"$(({value} * {per_step}))" if per_step != 1 else value}, why)
    return Refused(f"is a number of steps; set {key} to one of optimizer updates")


def lr_warmup_ratio(match: re.Match[str], value: Any, context: Context) -> Outcome:
    """Converts a warm-up as a share of all steps to optimizer updates."""
    section = match[1]
    key, steps_key = (f"{section}optim.lr_warmup_{unit}" for unit in ("updates", "steps"))
    if not value:
        return AlreadySo("no warm-up by it")
    if context.is_set(key) or context.foreign(steps_key) not in (None, -1):
        return AlreadySo(f"{key if context.is_set(key) else steps_key} says it")
    steps, per_step = context.value("trainer.total_training_steps"), updates_per_step(context, section)
    if type(steps) is int and per_step is not None and isinstance(value, float):
        return Becomes({key: int(value * steps) * per_step}, "optimizer updates of that share of the steps")
    return Refused(
        "warm-up is a number of optimizer updates, and trainer.total_training_steps does not say of how many; set "
        f"{key}"
    )


def critic_kept(_: re.Match[str], value: Any, context: Context) -> Outcome | None:
    """Gives actor and critic the larger of their numbers of checkpoints to keep; None: the value is read as it is."""
    key = "trainer.max_actor_ckpt_to_keep"
    actor = context.value(key)
    if value == actor or not (value is None or type(value) is int):
        return None
    both = None if value is None or (actor is None and context.is_set(key)) else max(value, actor or 0)
    why = "a checkpoint holds actor and critic and goes as a whole: as many as either asks for"
    return Becomes({key: both, "trainer.max_critic_ckpt_to_keep": both}, why, overrules=True)


def critic_enable(_: re.Match[str], value: Any, context: Context) -> Outcome:
    """Reads verl's switch of the critic, which must agree with algorithm.adv_estimator."""
    estimator = context.value("algorithm.adv_estimator")
    if value is None or value is (estimator == "gae"):
        return AlreadySo("algorithm.adv_estimator says whether there is a critic")
    return Refused(
        f"a critic is there with an estimator that needs values, and algorithm.adv_estimator = {estimator}; leave it "
        "out, or set algorithm.adv_estimator=gae"
    )
