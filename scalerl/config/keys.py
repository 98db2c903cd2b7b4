"""Which dotted keys exist, what type each has, and which known key a wrong one was meant to be."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import typing
from collections.abc import Iterator
from typing import Any, Literal

from omegaconf import OmegaConf

KeyKind = Literal["leaf", "section", "free", "unknown"]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One key that holds a value. `owner` is the dataclass that declares `name`."""

    key: str
    owner: type
    name: str
    annotation: Any

    @property
    def is_free_dict(self) -> bool:
        """Keys below this one are the user's own."""
        return typing.get_origin(self.annotation) is dict

    @property
    def type_text(self) -> str:
        text = self.annotation.__name__ if isinstance(self.annotation, type) else str(self.annotation)
        if self.is_free_dict:
            return "dict"
        if typing.get_origin(self.annotation) is list:
            return f"list[{typing.get_args(self.annotation)[0].__name__}]"
        return text.replace("typing.", "").replace("None", "null").replace("Any", "any")


def leaves(schema: type, prefix: str = "") -> Iterator[Leaf]:
    """Every key of a dataclass that holds a value, in the order of the source."""
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        annotation = hints[field.name]
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            yield from leaves(annotation, f"{prefix}{field.name}.")
        else:
            yield Leaf(prefix + field.name, schema, field.name, annotation)


@functools.cache
def inherited_keys(schema: type) -> dict[str, str]:
    """Keys whose default is the value of another one, and that one."""
    raw: Any = OmegaConf.to_container(OmegaConf.structured(schema), resolve=False)
    found = {}
    for leaf in leaves(schema):
        value = functools.reduce(lambda node, part: node[part], leaf.key.split("."), raw)
        if isinstance(value, str) and (match := re.fullmatch(r"\$\{([\w.]+)\}", value)):
            found[leaf.key] = match[1]
    return found


class KeyTable:
    """The keys of one schema."""

    def __init__(self, schema: type) -> None:
        self.leaves = {leaf.key: leaf for leaf in leaves(schema)}
        self.inherited = inherited_keys(schema)
        self.sections = {key.rsplit(".", depth)[0] for key in self.leaves for depth in range(1, key.count(".") + 1)}

    def kind(self, key: str) -> KeyKind:
        if key in self.leaves:
            return "leaf"
        if key in self.sections:
            return "section"
        parts = key.split(".")
        parents = (".".join(parts[:end]) for end in range(1, len(parts)))
        if any(parent in self.leaves and self.leaves[parent].is_free_dict for parent in parents):
            return "free"
        return "unknown"

    def children(self, section: str) -> list[str]:
        names = (key.removeprefix(section + ".").split(".")[0] for key in self.leaves if key.startswith(section + "."))
        return list(dict.fromkeys(names))

    def nearest(self, key: str) -> str:
        """The known key most like `key`: the whole path counts, its last part again, and a section that is right.

        A path may lack its start. Of two that are alike, the one that the other takes its default from.
        """
        section, _, last = key.rpartition(".")

        def likeness(known: str) -> float:
            path = 1.0 if known.endswith("." + key) else _ratio(known, key)
            known_section, _, known_last = known.rpartition(".")
            source = 0.05 if known not in self.inherited else 0.0
            return path + _ratio(known_last, last) + source + (0.2 if section == known_section else 0.0)

        return max([*self.leaves, *sorted(self.sections)], key=likeness)

    def unknown(self, key: str, origin: str = "") -> str:
        """What to tell a user who wrote `key`."""
        advice = _verl_advice(key) or f"did you mean {self.nearest(key)}?"
        return f"{key}: no such key{origin}; {advice}"


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()


def _verl_advice(key: str) -> str | None:
    for pattern, advice in VERL_KEYS:
        if re.search(pattern, key):
            return advice
    return None


_BUDGET = "micro-batches are packed up to a number of tokens: set "
# (pattern, advice) for keys that users bring from verl and that have another name or no meaning here.
# The first match counts.
VERL_KEYS: list[tuple[str, str]] = [
    (r"^data\.(micro_batch_size(_per_gpu)?|use_dynamic_bsz)$", _BUDGET + "data.max_token_len_per_gpu"),
    (r"\.ref\.log_prob_micro_batch_size(_per_gpu)?$", _BUDGET + "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"),
    (r"^critic\..*(micro_batch_size(_per_gpu)?|use_dynamic_bsz)$", _BUDGET + "critic.ppo_max_token_len_per_gpu"),
    (
        r"(ppo|log_prob|forward)_micro_batch_size(_per_gpu)?$|rollout\.log_prob_max_token_len_per_gpu$|use_dynamic_bsz$",
        _BUDGET + "actor_rollout_ref.actor.ppo_max_token_len_per_gpu; it holds for every pass",
    ),
    (r"\.strategy$|model_engine$", "training is always Megatron; remove it"),
    (r"\.fsdp_config\b", "training is always Megatron: set actor_rollout_ref.actor.megatron.*"),
    (r"use_remove_padding$", "sequences are always packed, padding is never computed; remove it"),
    (r"balance_batch$", "batches are always balanced; remove it"),
    (r"\.grad_clip$", "set actor_rollout_ref.actor.optim.clip_grad"),
    (r"optim\.lr_warmup_steps_ratio$", "set optim.lr_warmup_steps, in optimizer updates"),
    (r"optim\.total_training_steps$", "set optim.lr_decay_steps, in optimizer updates"),
    (r"rollout\.(prompt_length|response_length)$", "set data.max_prompt_length and data.max_response_length"),
    (
        r"rollout\.(enforce_eager|max_num_batched_tokens|max_model_len|enable_chunked_prefill|load_format)$",
        "server arguments go to actor_rollout_ref.rollout.engine_kwargs.sglang.<argument>",
    ),
    (r"rollout\.mode$", "the rollout is always a server; remove it"),
    (
        r"(enable_gradient_checkpointing|override_transformer_config\.recompute_\w+)$",
        "set recompute_granularity, recompute_method, recompute_num_layers, recompute_modules of the megatron section",
    ),
    (r"^reward\.reward_manager(\.name)?$", "set reward_model.reward_manager"),
    (r"^reward\.custom_reward_function\b", "set custom_reward_function.path and custom_reward_function.name"),
    (r"^data\.val_batch_size$", "all validation prompts go to the servers at once; remove it"),
    (r"partial_pretrain$", "set model.path"),
    (r"remove_previous_ckpt", "set trainer.max_actor_ckpt_to_keep"),
    (
        r"^critic\.enable$",
        "a critic is there with an estimator that needs values, as algorithm.adv_estimator=gae; remove it",
    ),
    (r"^reward_model\.enable_resource_pool$", "set reward_model.resource_pool.nnodes"),
    (r"^reward_model\.(nnodes|n_gpus_per_node)$", "set reward_model.resource_pool.nnodes and n_gpus_per_node of it"),
    (r"^hydra(\.|/|$)", "scalerl makes no Hydra run directory; set trainer.default_local_dir"),
]
