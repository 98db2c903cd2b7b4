"""Outcomes of verl's keys that are computed: from the value, or from other keys. `table.yaml` names the functions.

The first sentence of a docstring is what the documentation says of the keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from scalerl.config.foreign_keys import ConfigView
from scalerl.config.keys import key_table
from scalerl.config.layout import LayoutSizes
from scalerl.config.schema import MegatronConfig, SFTConfig
from scalerl.config.value_checks import KL_KIND, show

POLICY = "actor_rollout_ref"
ACTOR, REF, MODEL = f"{POLICY}.actor", f"{POLICY}.ref", f"{POLICY}.model"
PROGRAM = f"{POLICY}.rollout.program.path"
# Each of them makes samples of several turns; and verl's names of the last two.
PROGRAMS = tuple(
    f"{POLICY}.rollout.program.{name}" for name in ("path", "command", "tool_config_path", "interaction_config_path")
)
TOOL_FILES = tuple(f"{POLICY}.rollout.multi_turn.{name}" for name in ("tool_config_path", "interaction_config_path"))
# Either switches on turns.
_TURNS = ("multi_turn.enable", "agent.default_agent_loop")
# SGLang's names of verl's formats, where they differ.
_PARSERS = {"glm": "glm45", "kimi": "kimi_k2", "minimax": "minimax-m2"}
# Values that ask for nothing.
NONE = (None, "null", "none", "", False, 0)


class Outcome(NamedTuple):
    """What becomes of one value of a key of verl.

    why: the reason; completes "KEY = VALUE: " of a refused value.  values: those of scalerl's keys to set.
    to_write: `key=<...>` of scalerl's keys that only the user can write, of a refused value.
    overrules: the values replace those that the user set, which have been taken into account.
    """

    why: str
    values: Mapping[str, Any] = {}
    is_refused: bool = False
    to_write: tuple[str, ...] = ()
    overrules: bool = False


def refused(why: str, to_write: tuple[str, ...] = ()) -> Outcome:
    return Outcome(why, is_refused=True, to_write=to_write)


@dataclass(frozen=True)
class Context:
    """The rest of the configuration.  foreign: key of verl -> the value that the user wrote, or None."""

    config: ConfigView
    foreign: Callable[[str], Any]

    def value(self, key: str) -> Any:
        return self.config.value(key)

    def is_set(self, key: str) -> bool:
        return self.config.is_set(key)

    def left_open(self, key: str) -> str | None:
        return self.config.left_open(key)


def is_one_of(value: Any, options: tuple[Any, ...]) -> bool:
    """Whether the options contain a value, where 0 is not false and texts are compared without regard to case."""
    folded = _folded(value)
    return any(isinstance(option, bool) == isinstance(value, bool) and _folded(option) == folded for option in options)


def _folded(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


# Tokens of a micro-batch


def samples_to_tokens(match: re.Match[str], value: Any, context: Context) -> Outcome:
    """`max_tokens_per_micro_batch`, unless it is set: the tokens of so many samples of the greatest length."""
    section, name = match[1] or REF, "ppo_max_token_len_per_gpu" if match[1] else "log_prob_max_token_len_per_gpu"
    key, of_verl = f"{section}.max_tokens_per_micro_batch", f"{section}.{name}"
    lengths = ("data.max_prompt_length", "data.max_response_length")
    tp_key, cp_key = (f"{section}.megatron.{name}_parallel_size" for name in ("tensor_model", "context"))
    if any(said is not None for said in (context.left_open(key), context.foreign(of_verl))) or context.is_set(key):
        return Outcome(f"{key} says how many tokens a micro-batch has")
    unknown = [value] if isinstance(value, str) and "$" in value else []
    unknown += [f"{name}={text}" for name in (*lengths, tp_key, cp_key) if (text := context.left_open(name))]
    if unknown and value is not None:
        return refused(
            f"counts samples, here a micro-batch has tokens; those of samples of the greatest length depend on "
            f"{', '.join(unknown)}, which only the shell knows; set {key} to their number"
        )
    sizes = [context.value(name) for name in lengths]
    if value is None or not all(type(size) is int and size > 0 for size in (value, *sizes)):
        return Outcome(f"{key} says how many tokens a micro-batch has")
    megatron = MegatronConfig(
        tensor_model_parallel_size=_size(context, tp_key), context_parallel_size=_size(context, cp_key)
    )
    padded = LayoutSizes.of(megatron).padded_tokens(sum(sizes), sequence_parallel=megatron.sequence_parallel)
    return Outcome(
        f"the tokens of {value} samples of the greatest length; no number depends on it", {key: value * padded}
    )


def _size(context: Context, key: str) -> int:
    value = context.value(key)
    return value if type(value) is int and value > 0 else 1


def device_tokens(match: re.Match[str], value: Any, context: Context) -> Outcome:
    """`max_tokens_per_micro_batch`, times `context_parallel_size`: tokens over all devices that share a micro-batch."""
    section = next(group for group in match.groups() if group).replace("engine", "data")
    key = f"{section}.max_tokens_per_micro_batch"
    if isinstance(value, str) and f"{ACTOR}.ppo_max_token_len_per_gpu" in value:
        return Outcome("", {key: f"${{{ACTOR}.max_tokens_per_micro_batch}}"})
    cp_key = f"{'' if section == 'data' else section + '.'}megatron.context_parallel_size"
    cp_size = context.left_open(cp_key) or context.value(cp_key)
    why = f"times context_parallel_size {cp_size}" if cp_size != 1 else ""
    return _times(key, value, cp_size, why) or refused(f"is a number of tokens; set {key} to one")


def _times(key: str, value: Any, factor: Any, why: str) -> Outcome | None:
    """The product of both numbers, which the shell computes where it alone knows one; None where value is none."""
    if type(value) is int and isinstance(factor, int):
        return Outcome(why, {key: value * factor})
    if type(value) is int or (isinstance(value, str) and "$" in value):
        return Outcome(why, {key: f"$(({value} * {factor}))" if factor != 1 else value})
    return None


# Optimizer updates


def _updates_per_step(context: Context, section: str) -> int | None:
    """The number of optimizer updates of one step; None where the keys do not determine it.

    section: what the keys of the model begin with, its dot included; "": a step of fine-tuning, which is one update.
    """
    keys = _sizes_of_a_step(section) if section else ()
    if any(context.left_open(key) for key in keys):
        return None
    prompts, mini, epochs = map(context.value, keys) if keys else (1, 1, 1)
    if not all(type(number) is int and number > 0 for number in (prompts, mini, epochs)) or prompts % mini:
        return None
    return prompts // mini * epochs


def _sizes_of_a_step(section: str) -> tuple[str, str, str]:
    return "data.train_batch_size", f"{section}ppo_mini_batch_size", f"{section}ppo_epochs"


def steps_to_updates(match: re.Match[str], value: Any, context: Context) -> Outcome:
    """`lr_warmup_updates`, `lr_decay_updates`: the steps times the optimizer updates of a step."""
    section, name = match[1], match[2]
    key, style = f"{section}optim.lr_{name}_updates", f"{section}optim.lr_decay_style"
    if value in (None, -1):
        return Outcome("no warm-up by it" if name == "warmup" else "the decay takes the whole run")
    if name == "decay" and context.value(style) == "constant":
        return Outcome(f"counts only with {style}=linear or cosine")
    per_step = _updates_per_step(context, section)
    if per_step is None:
        sizes = ", ".join(_sizes_of_a_step(section))
        return refused(f"counts steps, and it is not known how many optimizer updates one has ({sizes}); set {key}")
    why = (
        f"counted in steps by verl, here in optimizer updates, of which a step has {per_step}" if per_step != 1 else ""
    )
    return _times(key, value, per_step, why) or refused(f"is a number of steps; set {key} to one of optimizer updates")


def share_to_updates(match: re.Match[str], value: Any, context: Context) -> Outcome:
    """`lr_warmup_updates`, where `trainer.total_training_steps` is set: the updates of that share of the steps."""
    section = match[1]
    key, steps_key = (f"{section}optim.lr_warmup_{unit}" for unit in ("updates", "steps"))
    if not value:
        return Outcome("no warm-up by it")
    if context.is_set(key) or context.foreign(steps_key) not in (None, -1):
        return Outcome(f"{key if context.is_set(key) else steps_key} decides")
    steps, per_step = context.value("trainer.total_training_steps"), _updates_per_step(context, section)
    if type(steps) is int and per_step is not None and isinstance(value, float):
        return Outcome("optimizer updates of that share of the steps", {key: int(value * steps) * per_step})
    return refused(
        "warm-up is a number of optimizer updates, and trainer.total_training_steps does not say of how many; set "
        f"{key}"
    )


# Models


def recompute_all(match: re.Match[str], value: Any, context: Context) -> Outcome:
    """`recompute_granularity=full`, `recompute_method=uniform`, `recompute_num_layers=1`: memory against time alone."""
    megatron = {MODEL: f"{ACTOR}.megatron", "critic.model": "critic.megatron", "model": "megatron"}[match[1]]
    if value is False or context.is_set(f"{megatron}.recompute_granularity"):
        return Outcome(f"{megatron}.recompute_granularity says what is computed again")
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return Outcome("memory against time alone", {f"{megatron}.{name}": setting for name, setting in full.items()})


def recompute_modules(match: re.Match[str], value: Any, _: Context) -> Outcome:
    """`megatron.recompute_modules`, in which moe computes moe_act again, too."""
    key, names = f"{match[1]}megatron.recompute_modules", value if isinstance(value, list) else []
    if "moe_act" not in names:
        return Outcome("", {key: value})
    if "moe" not in names:
        return refused("moe_act is computed again with all of a layer's experts; name moe instead")
    return Outcome("moe computes moe_act again, too", {key: [name for name in names if name != "moe_act"]})


def tokenizer_path(match: re.Match[str], value: Any, context: Context) -> Outcome:
    """The directory of the model: already so; else refused, as the tokenizer is the policy's."""
    policy = "model" if match[1] == "model" else MODEL
    if value is None or value in map(context.value, (f"{policy}.path", f"{match[1]}.path")) or "${" in str(value):
        return Outcome("the tokenizer is the policy's")
    return refused(f"the tokenizer is that of {policy}.path; leave it out")


def chat_template(_: re.Match[str], value: Any, __: Context) -> Outcome:
    """`@FILE`: `data.chat_template_path`; a template itself is refused, as it is read from a file."""
    if is_one_of(value, NONE):
        return Outcome("the chat template is that in the model's directory")
    if str(value).startswith("@"):
        return Outcome("", {"data.chat_template_path": str(value)[1:]})
    return refused("a template is read from a file; write it to one, leave this out, and set data.chat_template_path")


def converted_weights(match: re.Match[str], value: Any, context: Context) -> Outcome:
    """Refused where `use_dist_checkpointing` is true, once for actor and reference: they may be other weights."""
    if is_one_of(value, NONE) or context.foreign(f"{match[1]}.megatron.use_dist_checkpointing") is not True:
        return Outcome("use_dist_checkpointing is off")
    if match[1] == REF and context.foreign(f"{ACTOR}.megatron.dist_checkpointing_path") in (None, value):
        return Outcome("the reference starts from the weights that the actor starts from")
    return refused(
        "a model starts from a Hugging Face directory, of which each rank reads its part; leave it out, and set the "
        "model's path to that directory"
    )


def saved_contents(match: re.Match[str], value: Any, __: Context) -> Outcome:
    """Some of model, optimizer, extra, hf_model: already so, as a checkpoint holds all; load_contents: only all."""
    names = set(value) if isinstance(value, list) else {value}
    whole = {"model", "optimizer", "extra"}
    if names == whole or (names <= whole | {"hf_model"} and not match[0].endswith("load_contents")):
        merged = ", and `scalerl merge` makes a Hugging Face model of one" if "hf_model" in names else ""
        return Outcome(f"a checkpoint holds all that a run needs to continue{merged}")
    return refused(
        "a checkpoint always holds model, optimizer and extra, and a run continues with all of them; leave it out, and "
        "make a Hugging Face model of one with `scalerl merge`"
    )


def critic_switch(_: re.Match[str], value: Any, context: Context) -> Outcome:
    """Already so where `algorithm.adv_estimator` has it so; else refused."""
    estimator = context.value("algorithm.adv_estimator")
    if value is None or value is (estimator == "gae"):
        return Outcome("algorithm.adv_estimator says whether there is a critic")
    return refused(
        f"a critic is there with an estimator that needs values, and algorithm.adv_estimator = {estimator}; leave it "
        "out, or set algorithm.adv_estimator=gae"
    )


def kept_checkpoints(_: re.Match[str], value: Any, context: Context) -> Outcome | None:
    """`trainer.max_actor_ckpt_to_keep`, the larger of both: a checkpoint holds actor and critic and goes as a whole."""
    key = "trainer.max_actor_ckpt_to_keep"
    actor = context.value(key)
    if value == actor or not (value is None or type(value) is int):
        return None
    both = None if value is None or (actor is None and context.is_set(key)) else max(value, actor or 0)
    why = "a checkpoint holds actor and critic and goes as a whole: as many as either asks for"
    return Outcome(why, {key: both, "trainer.max_critic_ckpt_to_keep": both}, overrules=True)


# Fields of Megatron's own configs

_EMBEDDING, _LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


def stage_sizes(match: re.Match[str], value: Any, context: Context) -> Outcome:
    """`num_layers_in_first_pipeline_stage`, `num_layers_in_last_pipeline_stage`, where config.json is at hand.

    Megatron's other way to give the first and the last stage fewer layers counts what else they hold.
    """
    section = f"{match[1]}megatron."
    first, last = (f"{section}num_layers_in_{name}_pipeline_stage" for name in ("first", "last"))
    stages_key = f"{section}pipeline_model_parallel_size"
    num_stages = context.left_open(stages_key) or context.value(stages_key)
    if not value or num_stages == 1:
        return Outcome("there is one stage" if value else "off")
    if context.is_set(first) or context.is_set(last):
        return Outcome(f"{first} and {last} say it")
    fields = f"{section}override_transformer_config"
    counted = [key for key, name in ((first, _EMBEDDING), (last, _LOSS)) if context.foreign(f"{fields}.{name}") is True]
    num_layers = _num_layers(context, match[1])
    if num_layers is None or type(num_stages) is not int:
        layers = "the model's layers" if num_layers is None else str(num_layers)
        return refused(
            f"the layers of a stage are numbers here; leave it out, and set {' and '.join(counted)} to "
            f"({layers} + {len(counted)}) / {num_stages} - 1"
        )
    size, rest = divmod(num_layers + len(counted), num_stages)
    if rest:
        return refused(
            f"{num_layers} layers and {len(counted)} are no multiple of {stages_key} = {num_stages}; leave it out, and "
            f"set {first} and {last}"
        )
    return Outcome(f"of the model's {num_layers} layers", dict.fromkeys(counted, size - 1))


def _num_layers(context: Context, section: str) -> int | None:
    """The layers of a section's model; None where its config.json is not at hand (a hub id, a path elsewhere)."""
    key = f"{MODEL}.path" if section.startswith(POLICY) else f"{section}model.path"
    try:
        config = json.loads((Path(str(context.value(key))) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    layers = config.get("num_hidden_layers") if isinstance(config, dict) else None
    return layers if type(layers) is int else None


def cpu_offload(match: re.Match[str], value: Any, context: Context) -> Outcome:
    """`megatron.optimizer_offload`: moments and main parameters are in host memory, except during updates."""
    key = f"{match[1]}megatron.optimizer_offload"
    if value is None or (value is False and context.value(key) is not None):
        return Outcome(f"{key} says where the optimizer's state is")
    why = "moments and main parameters are in host memory, except during updates"
    # Either of two keys of verl may ask for what is one key here.
    return Outcome(why, {key: value}, overrules=value is True)


def engine_field(match: re.Match[str], value: Any, _: Context) -> Outcome | None:
    """No engine of verl has the key: refused, with the nearest key of the section `megatron`."""
    if isinstance(value, dict) and value:
        return None
    return refused(key_table(SFTConfig).unknown(f"megatron.{match[1]}").partition(": ")[2])


# Rollout, rewards, run


def own_program(_: re.Match[str], value: Any, context: Context) -> Outcome:
    """Already so with tools or a program in `rollout.program`; else refused, as nothing makes the turns."""
    why = "turns are made with the tools or the program of actor_rollout_ref.rollout.program"
    made = any(context.value(key) or context.left_open(key) for key in PROGRAMS)
    made = made or not all(is_one_of(context.foreign(key), NONE) for key in TOOL_FILES)
    if is_one_of(value, (*NONE, "single_turn_agent")) or made:
        return Outcome(why)
    return refused(
        f"{why}, and there are none; set {PROGRAMS[2]} (docs/agents.md), or write a program (docs/extending.md) and "
        f"set {PROGRAM}",
        (f"{PROGRAM}=<your program>",),
    )


def key_of_turns(match: re.Match[str], value: Any, context: Context) -> Outcome:
    """The key of the same name in `rollout.program` (`format`: `tool_call_parser`), if the run has several turns."""
    enabled, loop = (context.foreign(f"{POLICY}.rollout.{key}") for key in _TURNS)
    if is_one_of(enabled, NONE) and is_one_of(loop, (*NONE, "single_turn_agent")):
        return Outcome("a sample is one answer")
    if match[1] != "format":
        return Outcome("", {f"{POLICY}.rollout.program.{match[1]}": value})
    return Outcome(
        "tool calls are read by SGLang's parsers",
        {f"{POLICY}.rollout.program.tool_call_parser": _PARSERS.get(value, value)},
    )


def room_of_servers(_: re.Match[str], value: Any, context: Context) -> Outcome:
    """Already so where `data.max_prompt_length` + `data.max_response_length` fit; else refused."""
    sizes = [context.value(f"data.{name}") for name in ("max_prompt_length", "max_response_length")]
    if value is None or (all(isinstance(size, int) for size in sizes) and sum(sizes) <= value):
        return Outcome("servers have room for data.max_prompt_length + data.max_response_length")
    return refused(
        "servers have room for data.max_prompt_length + data.max_response_length, which is more; set data."
        "max_response_length lower, and leave this out"
    )


def length_limit(match: re.Match[str], value: Any, context: Context) -> Outcome:
    """`data.max_prompt_length`, `data.max_response_length`, where they are not set to something else."""
    key = f"data.max_{match[1]}_length"
    if value is None or value == context.value(key):
        return Outcome(f"{key} decides")
    if not context.is_set(key):
        return Outcome("", {key: value})
    return refused(f"a sample has one limit, {key} = {show(context.value(key))}; leave it out, or make it the same")


def importance_weights(_: re.Match[str], value: Any, context: Context) -> Outcome:
    """`algorithm.rollout_correction.rollout_is`; true: at the level of `algorithm.rollout_is_level`."""
    if value is True:
        value = context.foreign("algorithm.rollout_is_level") or "token"
    return Outcome("the level at which ratios are taken", {"algorithm.rollout_correction.rollout_is": value or None})


def reward_manager(_: re.Match[str], value: Any, __: Context) -> Outcome | None:
    """`reward_model.reward_manager`; a file is refused, as managers are registered."""
    if isinstance(value, dict):
        return None
    if isinstance(value, str) and "/" in value:
        return refused("names a file; register the manager in a file of trainer.import_files (docs/extending.md)")
    return Outcome("", {"reward_model.reward_manager": value})


_LOSS_OF_TEACHER = "distillation.distillation_loss"
# Keys of verl's loss with their defaults.
_TEACHER_LOSS = {
    "loss_mode": "k3",
    "topk": 32,
    "distillation_loss_coef": 1.0,
    "use_policy_gradient": True,
    "use_task_rewards": True,
}
# What other keys become.
_TEACHERS = {
    r"(teacher_model|teacher_models\.[^.]+)\.model_path": f"{REF}.model_path",
    r"nnodes|teacher_model\.nnodes": f"{REF}.resource_pool.nnodes",
    r"n_gpus_per_node|teacher_model\.n_gpus_per_node": f"{REF}.resource_pool.n_gpus_per_node",
}


def teacher_switch(_: re.Match[str], value: Any, context: Context) -> Outcome:
    """`algorithm.distillation_top_k` and `_coef`, `adv_estimator=on_policy_distillation` or `use_kl_loss`, by the loss.

    The loss is that of `distillation.distillation_loss`.
    """
    if is_one_of(value, NONE):
        return Outcome("without it no policy learns from a teacher")
    given = {name: context.foreign(f"{_LOSS_OF_TEACHER}.{name}") for name in _TEACHER_LOSS}
    mode, top_k, coef, by_gradient, has_rewards = (
        default if given[name] is None else given[name] for name, default in _TEACHER_LOSS.items()
    )
    start = f"{_LOSS_OF_TEACHER}."
    if mode == "k1" and by_gradient and not has_rewards:
        return Outcome(
            "minus the reverse KL is the advantage",
            {"algorithm.adv_estimator": "on_policy_distillation"},
            overrules=True,
        )
    if by_gradient:
        return refused(
            f"an advantage is the KL of loss_mode=k1 alone, without rewards; set {start}loss_mode=k1 and "
            f"{start}use_task_rewards=false, or {start}use_policy_gradient=false"
        )
    if not has_rewards:
        return refused(
            f"a policy learns from rewards too, and from equal ones nothing; set {start}use_task_rewards=true, and let "
            "the reward function return 0"
        )
    if mode == "forward_kl_topk":
        return Outcome(
            "a term of the loss", {"algorithm.distillation_top_k": top_k, "algorithm.distillation_coef": coef}
        )
    if KL_KIND.allows(mode):
        kl_loss = {"use_kl_loss": True, "kl_loss_type": mode, "kl_loss_coef": coef}
        return Outcome(
            "the KL to the teacher, a term of the loss", {f"{ACTOR}.{name}": v for name, v in kl_loss.items()}
        )
    return refused(f"there is no such loss as {start}loss_mode={mode}; set it to forward_kl_topk, or a kl_loss_type")


def of_teacher(match: re.Match[str], value: Any, context: Context) -> Outcome | None:
    """`actor_rollout_ref.ref.model_path` and `.resource_pool`, as the teacher is the reference model."""
    if isinstance(value, dict) and value:
        return None
    if all(is_one_of(context.foreign(f"distillation.{name}"), NONE) for name in ("enabled", "enable")):
        return Outcome("counts only with distillation.enabled")
    for pattern, key in _TEACHERS.items():
        if re.fullmatch(pattern, match[1]):
            return Outcome("the reference model is the teacher", {key: value})
    if is_one_of(value, NONE):
        return Outcome("asks for nothing")
    return refused("a teacher and its KL have no such setting; leave it out")


def profiled_ranks(match: re.Match[str], value: Any, context: Context) -> Outcome:
    """`trainer.profile_ranks`, unless all ranks are profiled."""
    all_ranks = {"profiler.ranks": "profiler.all_ranks", "profile_ranks": "profile_ranks_all"}.get(match[1])
    if value in (None, []) or (all_ranks and context.foreign(f"{ACTOR}.{all_ranks}") is True):
        return Outcome(f"{ACTOR}.{all_ranks} decides" if value else "asks for nothing")
    return Outcome("", {"trainer.profile_ranks": value})


def profiled_role(_: re.Match[str], value: Any, context: Context) -> Outcome:
    """Already so with `trainer.profile_steps`; else refused, as the steps of the whole run are profiled."""
    why = "the steps of trainer.profile_steps are profiled"
    if value in (None, False) or context.is_set("trainer.profile_steps"):
        return Outcome(why)
    return refused(f"{why}; leave it out, and set trainer.profile_steps")


def after_each_epoch(match: re.Match[str], value: Any, _: Context) -> Outcome | None:
    """`after_each_epoch`: refused, as it is a number of steps."""
    if value != "after_each_epoch":
        return None
    return refused(
        f"is a number of steps; set trainer.{match[1]} to those of an epoch, the rows of data.train_files divided by "
        "data.train_batch_size"
    )


def search_path(_: re.Match[str], value: Any, __: Context) -> Outcome:
    """Directories of verl's: already so; others are refused, as your group files are in --config-dir DIR."""
    directories = [value] if isinstance(value, str) else value or []
    if all(re.search(r"\bverl\b", str(directory)) for directory in directories):
        return Outcome("verl's files stand for its defaults")
    return refused("group files are in --config-dir DIR, at DIR/GROUP/NAME.yaml; leave it out, and put yours there")
