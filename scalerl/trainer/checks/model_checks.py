"""Checks of the models of a run and of their layouts, made before a device is held."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.config import (
    ModelRole,
    ModelSizes,
    PPOConfig,
    layout_violations,
    recompute_violations,
    world_size,
)
from scalerl.config.layout import LONGEST_SAMPLE
from scalerl.config.names import ACTOR, JUDGE, ROLLOUT
from scalerl.config.schema import JudgeConfig, MegatronConfig
from scalerl.data.model_source import model_directory
from scalerl.models import HFWeights, ModelShape, family_of
from scalerl.models.sizes import num_parameters
from scalerl.rollout.sampling.judge import max_model_len
from scalerl.rollout.servers.context_length import check_context_length
from scalerl.rollout.servers.engines import ENGINES
from scalerl.trainer.saving.checkpoints import Resumed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


log = logging.getLogger(__name__)
# Parameters of a model, and the learning rate below which one that has fewer hardly learns.
SMALL_MODEL, LR_OF_SMALL_MODELS = 10**8, 1e-5


def read_model(path: str, key: str) -> ModelShape:
    """Reads the shape of a model. key: its configuration key, for messages.

    Raises ValueError for a model that does not exist, is of no known family, or lacks weights.
    """
    path = model_directory(path, key)
    shape = ModelShape.from_hf(path)
    with HFWeights(path) as weights:
        weights.check(family_of(shape), shape)
        weights.check_head(tied=shape.tie_word_embeddings)
    return shape


def read_role(role: ModelRole) -> ModelShape:
    """Reads the shape of a role's model, with the head that the role needs.

    Raises ValueError as `read_model` does, and for a model that cannot have that head.
    """
    assert role.model_path is not None, "validated"
    shape = read_model(role.model_path, role.model_key)
    if role.name == "reward_model" and shape.head != "value":
        raise ValueError(
            f"{role.section}.model.path = {role.model_path}: is a language model, without a score head; give a reward "
            "model (architectures *ForSequenceClassification, one label)"
        )
    try:
        return shape.with_head(role.head)
    except ValueError as error:
        raise ValueError(f"{role.section}: {role.model_path}: {error}") from None


def actor_violations(cfg: PPOConfig, shape: ModelShape, *, device: str) -> Iterator[str]:
    """Yields why the actor's model does not fit the configuration. device: cuda or cpu, as `resolve_device` returns."""
    rollout, megatron = cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.actor.megatron
    yield from model_layout_violations(
        shape,
        megatron,
        world_size(cfg),
        prefix=f"{ACTOR}.megatron",
        rollout_tp=rollout.tensor_model_parallel_size,
    )
    yield from ENGINES[rollout.name].trained_model_violations(
        rollout, shape, section=ROLLOUT, device=device, verify_weights_every=rollout.verify_weights_every
    )
    yield from _too_long(cfg, shape, cfg.actor_rollout_ref.model.path)


def role_violations(
    cfg: PPOConfig, role: ModelRole, shape: ModelShape, tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[str]:
    """Yields why the model of a role other than the actor does not fit the configuration. tokenizer: the policy's."""
    megatron = role.megatron
    if not role.has_own_pool and not shape.num_experts:
        # The actor's processes have groups for its experts; a model without experts does not use them.
        megatron = replace(megatron, expert_model_parallel_size=1, expert_tensor_parallel_size=None)
    yield from model_layout_violations(
        shape, megatron, role.layout(cfg).world_size, prefix=f"{role.section}.megatron", rollout_tp=None
    )
    assert role.model_path is not None, "it has a shape"
    yield from _too_long(cfg, shape, role.model_path)
    # `tokenizer_violations` has checked the policy's own model.
    if tokenizer is not None and role.model_path != cfg.actor_rollout_ref.model.path:
        yield from _other_vocabulary(role, shape, tokenizer)


def learning_rate_line(key: str, lr: float, shape: ModelShape) -> str | None:
    """A line about a learning rate, in `key`, that is one of large models, while the model is small; else None."""
    size = num_parameters(shape)
    if size >= SMALL_MODEL or not 0 < lr < LR_OF_SMALL_MODELS:
        return None
    return (
        f"{key} = {lr:g}: is for models of billions of parameters; this one has {size / 1e6:.3g} million, and hardly "
        "changes by it; such models take 1e-4 to 1e-3"
    )


def judge_violations(judge: JudgeConfig) -> Iterator[str]:
    """Yields what is wrong with the judge's files. The model may be of any family that the server knows."""
    assert judge.model.path is not None
    path = Path(judge.model.path)
    if not (path / "config.json").is_file():
        yield f"{JUDGE}.model.path = {path}: has no config.json; give the directory of a language model"
        return
    if not any(path.glob("*.safetensors")):
        yield f"{JUDGE}.model.path = {path}: has no *.safetensors file; give the directory of a language model"
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    heads = [name for name in config.get("architectures") or [] if name.endswith("ForSequenceClassification")]
    if heads:
        yield (
            f"{JUDGE}.model.path = {path}: is a {heads[0]}, which writes no text; give a language model, or set "
            "reward_model.enable=true and reward_model.model.path to it"
        )
    yield from ENGINES[judge.name].served_model_violations(
        path, f"{JUDGE}.tensor_model_parallel_size", judge.tensor_model_parallel_size
    )
    try:
        check_context_length(path, max_model_len(judge), f"{JUDGE}.max_prompt_length + {JUDGE}.max_response_length")
    except ValueError as error:
        yield str(error)


def _too_long(cfg: PPOConfig, shape: ModelShape, path: str) -> Iterator[str]:
    """The same text for every role with this model, which is then said once."""
    prompt, response, positions = (
        cfg.data.max_prompt_length,
        cfg.data.max_response_length,
        shape.max_position_embeddings,
    )
    if prompt + response > positions:
        fits = f"data.max_response_length={positions - prompt} or less" if positions > prompt else "both lower"
        yield (
            f"{LONGEST_SAMPLE} = {prompt} + {response} = {prompt + response}: {path} has {positions} positions "
            f"(max_position_embeddings in its config.json); set {fits}"
        )


def _other_vocabulary(role: ModelRole, shape: ModelShape, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    from scalerl.data import load_tokenizer

    word, token = _last_word(tokenizer)
    if token >= shape.vocab_size:
        yield (
            f"{role.section}: {role.model_path} has a vocabulary of {shape.vocab_size} tokens (vocab_size in "
            f"config.json), and the policy's tokenizer, whose tokens it reads, goes up to token {token} ({word!r}); "
            f"give a model with a vocabulary of at least {token + 1} tokens"
        )
        return
    assert role.model_path is not None
    try:
        own = load_tokenizer(role.model_path, role.trust_remote_code)
    except (ValueError, OSError):
        # A model directory without a tokenizer: the size of its vocabulary is all that can be compared.
        return
    ours, theirs = tokenizer.get_vocab(), own.get_vocab()
    word = next((word for word, token in theirs.items() if ours.get(word) != token), None)
    if word is not None:
        yield (
            f"{role.section}: {role.model_path} has another tokenizer than the policy: {word!r} is token "
            f"{theirs[word]} there and {ours.get(word, 'unknown')} here; give a model with the policy's tokenizer"
        )


def _last_word(tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
    """The word with the highest token id, and that id. The vocabulary's size would not do: ids may have gaps."""
    return max(tokenizer.get_vocab().items(), key=lambda pair: pair[1])


def tokenizer_violations(
    key: str,
    path: str,
    shape: ModelShape,
    tokenizer: PreTrainedTokenizerBase,
    template_options: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    """Yields why a model does not fit its own tokenizer: its embeddings, and the tokens that end a response.

    key: the model's, for messages.  Warns of a chat template that ends an answer with a token that ends no response,
    and of template_options that it does not have.
    """
    from scalerl.data.chat import ordinary_ends, template_without_end, unknown_options

    yield from (f"{key} = {path}: {problem}" for problem in ordinary_ends(tokenizer, shape.eos_token_ids))
    if line := template_without_end(tokenizer, shape.eos_token_ids, template_options):
        log.warning("%s = %s: %s", key, path, line)
    if line := unknown_options(tokenizer, template_options or {}):
        log.warning("%s = %s: %s", key, path, line)
    word, token = _last_word(tokenizer)
    vocab_size = shape.vocab_size
    if token >= vocab_size:
        yield (
            f"{key} = {path}: its tokenizer goes up to token {token} ({word!r}), and the model has a vocabulary "
            f"of {vocab_size} tokens (vocab_size in config.json), so it has no embedding for the last "
            f"{token + 1 - vocab_size}; take the added tokens out of the tokenizer, or give the model rows for "
            "them (transformers' resize_token_embeddings)"
        )


def model_layout_violations(
    shape: ModelShape, megatron: MegatronConfig, world: int, *, prefix: str, rollout_tp: int | None
) -> list[str]:
    """Why the model does not fit this parallel layout or recomputation; empty if it does. world: number of devices."""
    sizes = ModelSizes(
        num_attention_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_kv_heads,
        num_layers=shape.num_layers,
        ffn_hidden_size=0 if shape.moe_layers and all(shape.moe_layers) else shape.ffn_hidden_size,
        num_experts=shape.num_experts,
        moe_ffn_hidden_size=shape.moe_ffn_hidden_size,
        shared_expert_ffn_hidden_size=shape.shared_expert_ffn_hidden_size,
        latent_attention=shape.kv_lora_rank is not None,
    )
    violations = layout_violations(sizes, megatron=megatron, world_size=world, rollout_tp=rollout_tp, prefix=prefix)
    return violations or recompute_violations(sizes, megatron, prefix=prefix)


def check_same_tokenizer(
    resumed: Resumed, tokenizer: PreTrainedTokenizerBase, model_path: str, *, trust_remote_code: bool
) -> None:
    """Raises ValueError, with the differences, if the checkpoint's tokenizer makes other tokens than the run's.

    Its chat template may differ. A checkpoint without a tokenizer is not compared.
    """
    from scalerl.data import load_tokenizer

    assert resumed.directory is not None
    saved = resumed.directory / "actor" / "huggingface"
    if not (saved / "tokenizer_config.json").is_file() or _same_files(saved, Path(model_path)):
        return
    stored = load_tokenizer(saved, trust_remote_code)
    if different := list(_tokenizer_differences(stored, tokenizer)):
        raise ValueError(
            f"checkpoint {saved.parent} has another tokenizer than {model_path}: {'; '.join(different)}. Give the "
            "model that the run began with, another trainer.default_local_dir, or trainer.resume_mode=disable"
        )


def _same_files(saved: Path, model: Path) -> bool:
    """Whether the model has every file beside weights as it was saved, so that nothing has to be loaded."""
    files = [file for file in saved.iterdir() if file.name not in ("config.json", "generation_config.json")]
    return all(
        (model / file.name).is_file() and (model / file.name).read_bytes() == file.read_bytes() for file in files
    )


def _tokenizer_differences(there: PreTrainedTokenizerBase, here: PreTrainedTokenizerBase) -> Iterator[str]:
    vocabularies = there.get_vocab(), here.get_vocab()
    changed = [
        (token, *(vocabulary.get(token, "none") for vocabulary in vocabularies))
        for token in vocabularies[0].keys() | vocabularies[1].keys()
        if vocabularies[0].get(token) != vocabularies[1].get(token)
    ]
    if changed:
        shown = ", ".join(
            f"{token!r} {id_there} there, {id_here} here" for token, id_there, id_here in sorted(changed)[:3]
        )
        yield f"{len(changed)} tokens have another id ({shown})"
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(there, name) != getattr(here, name):
            yield f"{name} {getattr(there, name)} there, {getattr(here, name)} here"
    rules = [_tokenizer_rules(tokenizer) for tokenizer in (there, here)]
    if different := [name for name in rules[0].keys() | rules[1].keys() if rules[0].get(name) != rules[1].get(name)]:
        yield f"other {', '.join(sorted(different))}"


def _tokenizer_rules(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The parts of a fast tokenizer that decide how text is split, beside its vocabulary; {} for any other."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {}
    content = json.loads(backend.to_str())
    model = content["model"]
    return {name: content.get(name) for name in ("normalizer", "pre_tokenizer")} | {"merges": model.get("merges")}
