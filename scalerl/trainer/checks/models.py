"""Checks of the models of a run: their files, tokenizers, layouts and and the fields of Megatron's configs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.config import (
    ModelRole,
    ModelSizes,
    PPOConfig,
    SFTConfig,
    layout_violations,
    model_roles,
    recompute_violations,
    uses_critic,
    world_size,
)
from scalerl.config.errors import ErrorCollector
from scalerl.config.layout import LONGEST_SAMPLE
from scalerl.config.names import ACTOR, FLASH_ATTENTION_IMPLS, JUDGE, ROLLOUT
from scalerl.config.partial_config import OVERRIDES
from scalerl.config.schema import JudgeConfig, MegatronConfig, ModelConfig, OptimConfig
from scalerl.data.model_source import model_directory
from scalerl.models import HFWeights, ModelShape, family_of
from scalerl.models.sizes import num_parameters
from scalerl.rollout.sampling.judge import max_model_len
from scalerl.rollout.servers.engines import ENGINES
from scalerl.rollout.servers.engines.base import check_context_length
from scalerl.trainer.checks.adapters import adapter_rate_line, served_adapter_violations, with_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from scalerl.data import PromptTable, RLHFDataset, SFTDataset
    from scalerl.data.pictures import PictureProcessor

    Dataset = RLHFDataset | PromptTable | SFTDataset

log = logging.getLogger(__name__)
# Parameters of a model, and the learning rate below which one that has fewer hardly learns.
SMALL_MODEL, LR_OF_SMALL_MODELS = 10**8, 1e-5


def policy_model(cfg: PPOConfig | SFTConfig) -> tuple[ModelConfig, str]:
    """The section of the model that is trained to write text, and the key of its path."""
    if isinstance(cfg, SFTConfig):
        return cfg.model, "model.path"
    return cfg.actor_rollout_ref.model, "actor_rollout_ref.model.path"


def trained_models(cfg: PPOConfig | SFTConfig) -> dict[str, str]:
    """The path of the model that each trained role starts from, by role."""
    models = {"actor": policy_model(cfg)[0].path}
    if isinstance(cfg, PPOConfig) and uses_critic(cfg):
        models["critic"] = str(cfg.critic.model.path)
    return models


def check_tokenizer(errors: ErrorCollector, cfg: PPOConfig | SFTConfig) -> PreTrainedTokenizerBase | None:
    """The policy's tokenizer, with the chat template of data.chat_template_path; None if it cannot be read."""
    from scalerl.data import load_tokenizer
    from scalerl.data.chat import use_chat_template

    model, key = policy_model(cfg)

    def read() -> PreTrainedTokenizerBase:
        tokenizer = load_tokenizer(model_directory(model.path, key), model.trust_remote_code)
        use_chat_template(tokenizer, cfg.data.chat_template_path)
        return tokenizer

    return errors.attempt(read)


def check_processor(errors: ErrorCollector, cfg: PPOConfig | SFTConfig) -> PictureProcessor | None:
    """The processor of the policy's pictures; None if it takes none, or its directory cannot be read."""
    from scalerl.data.pictures import load_processor

    model, key = policy_model(cfg)
    # A directory that cannot be read is in `errors`: its tokenizer was read before.
    directory = ErrorCollector().attempt(lambda: model_directory(model.path, key))
    served = _takes_pictures(cfg)
    return None if directory is None else errors.attempt(lambda: load_processor(directory, cfg.data, served=served))


def check_models(
    errors: ErrorCollector,
    cfg: PPOConfig | SFTConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    device: str | None,
) -> dict[str, ModelShape]:
    """Reads the shape of each role's model, with the head of the role; models that cannot be read are left out.

    device: cuda or cpu; None: sizes in the configuration contradict each other, and no model is compared with them.
    """
    policy, key = policy_model(cfg)
    shapes = {"actor": errors.attempt(lambda: read_model(policy.path, key))}
    if (shape := shapes["actor"]) is not None:
        shapes["actor"] = shape = trained_shape(errors, cfg, seeing_shape(cfg, shape))
        if device is not None:
            errors.violations.extend(
                actor_violations(cfg, shape, device=device)
                if isinstance(cfg, PPOConfig)
                else model_layout_violations(shape, cfg.megatron, world_size(cfg), prefix="megatron", rollout_tp=None)
            )
        if shape.attention_sinks and (impl := cfg.trainer.flash_attention_impl) in FLASH_ATTENTION_IMPLS:
            errors.violations.append(
                f"trainer.flash_attention_impl = {impl}: is not known to compute the attention sinks of {policy.path}; "
                "set trainer.flash_attention_impl=null (torch's own FlashAttention 2)"
            )
        if tokenizer is not None:
            options = cfg.data.chat_template_kwargs
            errors.violations.extend(tokenizer_violations(key, policy.path, shape, tokenizer, options))
    for role in model_roles(cfg) if isinstance(cfg, PPOConfig) else ():
        # The policy's model has been read already; if that failed, the error is not repeated.
        is_said = shapes["actor"] is None and role.model_path == policy.path
        if role.model_path is None or is_said:
            continue
        shape = errors.attempt(lambda role=role: seeing_shape(cfg, read_role(role)))
        if shape is not None and role.name == "critic":
            shape = trained_shape(errors, cfg, shape, role="critic")
        shapes[role.name] = shape
        if shape is not None and device is not None:
            assert isinstance(cfg, PPOConfig)
            errors.violations.extend(role_violations(cfg, role, shape, tokenizer))
    return {name: shape for name, shape in shapes.items() if shape is not None}


def trained_shape(
    errors: ErrorCollector, cfg: PPOConfig | SFTConfig, shape: ModelShape, role: str = "actor"
) -> ModelShape:
    """The shape of a trained model with the adapter that its keys describe, and a vision tower that they freeze."""
    if isinstance(cfg, SFTConfig):
        model, path, megatron = cfg.model, cfg.model.path, cfg.megatron
        sections = {"section": "model", "megatron_section": "megatron"}
    elif role == "critic":
        model, path, megatron = cfg.critic.model, cfg.critic.model.path, cfg.critic.megatron
        sections = {"section": "critic.model", "megatron_section": "critic.megatron"}
    else:
        policy = cfg.actor_rollout_ref
        model, path, megatron = policy.model, policy.model.path, policy.actor.megatron
        sections = {"section": "actor_rollout_ref.model", "megatron_section": f"{ACTOR}.megatron"}
    if model.freeze_vision_tower and shape.vision is None:
        key = f"{sections['section']}.freeze_vision_tower"
        errors.violations.append(
            f"{key} = true: {path} is a {shape.model_type} model, of which no vision tower is trained; set {key}=false"
        )
    elif model.freeze_vision_tower:
        shape = replace(shape, frozen_tower=True)
    return with_adapter(errors, shape, model, megatron, **sections)


def seeing_shape(cfg: PPOConfig | SFTConfig, shape: ModelShape) -> ModelShape:
    """The shape as the run has it: without an optional vision tower where its servers take no pictures."""
    is_blind = shape.vision is not None and shape.vision.is_optional and not _takes_pictures(cfg)
    return shape.without_tower() if is_blind else shape


def _takes_pictures(cfg: PPOConfig | SFTConfig) -> bool:
    """Whether the servers of a run, if it has any, take pictures."""
    return isinstance(cfg, SFTConfig) or ENGINES[cfg.actor_rollout_ref.rollout.name].takes_pictures


def check_judge(errors: ErrorCollector, judge: JudgeConfig) -> None:
    """Checks the question, the model and the tokenizer of a judge, if the run has one."""
    from scalerl.data import load_tokenizer
    from scalerl.data.chat import require_chat_template
    from scalerl.rewards.judge import load_question

    if not judge.enable:
        return
    errors.attempt(lambda: load_question(judge.prompt_path))
    path = judge.model.path
    if path is not None:
        errors.violations.extend(_judge_violations(judge))
        tokenizer = errors.attempt(lambda: load_tokenizer(path, judge.model.trust_remote_code))
        if tokenizer is not None:
            errors.attempt(lambda: require_chat_template(tokenizer))


def check_reference_server(errors: ErrorCollector, cfg: PPOConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Asks the server of the reference model, if the run has one, whether it can be the policy's."""
    from scalerl.rollout.servers.reference import KEY, ReferenceServer

    if any(violation.startswith(f"{KEY}.") for violation in errors.violations):
        return
    server = errors.attempt(lambda: ReferenceServer.of(cfg.actor_rollout_ref.ref))
    if server is not None and tokenizer is not None:
        errors.violations.extend(server.violations(tokenizer, cfg.algorithm.distillation_top_k))


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
    rollout = cfg.actor_rollout_ref.rollout
    yield from _actor_layout_violations(cfg, shape)
    if shape.vision is not None and not ENGINES[rollout.name].takes_pictures:
        yield (
            f"{ROLLOUT}.name = {rollout.name}: computes no vision tower, and {cfg.actor_rollout_ref.model.path} is a "
            f"{shape.model_type} model; set {ROLLOUT}.name=sglang"
        )
    yield from ENGINES[rollout.name].trained_model_violations(
        rollout, shape, section=ROLLOUT, device=device, verify_weights_every=rollout.verify_weights_every
    )
    if cfg.algorithm.routing_replay is not None:
        if not shape.num_experts:
            yield (
                f"algorithm.routing_replay = {cfg.algorithm.routing_replay}: {cfg.actor_rollout_ref.model.path} is a "
                f"{shape.model_type} model without experts, whose tokens take no routes; set it to null"
            )
        yield from ENGINES[rollout.name].routing_violations(rollout, section=ROLLOUT)
    if shape.adapter is not None:
        yield from served_adapter_violations(cfg, shape, device=device)
    yield from _too_long(cfg, shape, cfg.actor_rollout_ref.model.path)


def role_violations(
    cfg: PPOConfig, role: ModelRole, shape: ModelShape, tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[str]:
    """Yields why the model of a role other than the actor does not fit the configuration. tokenizer: the policy's."""
    yield from _role_layout_violations(cfg, role, shape)
    assert role.model_path is not None, "it has a shape"
    yield from _too_long(cfg, shape, role.model_path)
    if role.name == "ref" and (top_k := cfg.algorithm.distillation_top_k) > shape.vocab_size:
        yield (
            f"algorithm.distillation_top_k = {top_k}: {role.model_path} has {shape.vocab_size} words; set "
            f"algorithm.distillation_top_k={shape.vocab_size} or less"
        )
    # `tokenizer_violations` has checked the policy's own model.
    if tokenizer is not None and role.model_path != cfg.actor_rollout_ref.model.path:
        yield from _other_vocabulary(role, shape, tokenizer)


def learning_rate_line(key: str, lr: float, shape: ModelShape) -> str | None:
    """A line about a learning rate, in `key`, that is one of large models, while the model is small; else None."""
    if shape.adapter is not None and (line := adapter_rate_line(key, lr)) is not None:
        return line
    size = num_parameters(shape)
    if size >= SMALL_MODEL or not 0 < lr < LR_OF_SMALL_MODELS:
        return None
    return (
        f"{key} = {lr:g}: is for models of billions of parameters; this one has {size / 1e6:.3g} million, and hardly "
        "changes by it; such models take 1e-4 to 1e-3"
    )


def _judge_violations(judge: JudgeConfig) -> Iterator[str]:
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


def ends_of_answers_violations(
    setting: str,
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: Sequence[int],
    template_options: Mapping[str, Any] | None,
) -> Iterator[str]:
    """Yields what is wrong with the tokens that end a response; warns of a chat template that ends it by another token.

    setting: `key = path` of the model, for messages.  template_options: warned of, where the template lacks them.
    """
    from scalerl.data.chat import ordinary_ends, template_without_end, unknown_options

    yield from (f"{setting}: {problem}" for problem in ordinary_ends(tokenizer, eos_token_ids))
    if line := template_without_end(tokenizer, eos_token_ids, template_options):
        log.warning("%s: %s", setting, line)
    if line := unknown_options(tokenizer, template_options or {}):
        log.warning("%s: %s", setting, line)


def tokenizer_violations(
    key: str,
    path: str,
    shape: ModelShape,
    tokenizer: PreTrainedTokenizerBase,
    template_options: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    """Yields why a model does not fit its own tokenizer: its embeddings, and the tokens that end a response.

    key: the model's, for messages.  template_options: as `ends_of_answers_violations`.
    """
    yield from ends_of_answers_violations(f"{key} = {path}", tokenizer, shape.eos_token_ids, template_options)
    word, token = _last_word(tokenizer)
    vocab_size = shape.vocab_size
    if token >= vocab_size:
        yield (
            f"{key} = {path}: its tokenizer goes up to token {token} ({word!r}), and the model has a vocabulary "
            f"of {vocab_size} tokens (vocab_size in config.json), so it has no embedding for the last "
            f"{token + 1 - vocab_size}; take the added tokens out of the tokenizer, or give the model rows for "
            "them (transformers' resize_token_embeddings)"
        )


def warn_of_idle_towers(cfg: PPOConfig | SFTConfig, shapes: Mapping[str, ModelShape], rows: Dataset) -> None:
    """Warns of each vision tower that would be trained although no row has images.  shapes: of each role's model."""
    sections = {"actor": "model" if isinstance(cfg, SFTConfig) else "actor_rollout_ref.model", "critic": "critic.model"}
    trained = [(section, shapes[role]) for role, section in sections.items() if role in shapes]
    towers = [section for section, shape in trained if shape.vision and not (shape.frozen_tower or shape.adapter)]
    if not towers or any(rows[row].images for row in range(len(rows))):
        return
    for section in towers:
        key = f"{section}.freeze_vision_tower"
        log.warning(
            "%s = false: no row of data.train_files has images, so the vision tower gets no gradient, and weight "
            "decay alone changes it; set %s=true", key, key,
        )  # fmt: skip


def layouts_violations(cfg: PPOConfig | SFTConfig, shapes: Mapping[str, ModelShape]) -> list[str]:
    """Why models do not fit their parallel layouts.  shapes: of each role's model."""
    if isinstance(cfg, SFTConfig):
        return model_layout_violations(
            shapes["actor"], cfg.megatron, world_size(cfg), prefix="megatron", rollout_tp=None
        )
    of_roles = (_role_layout_violations(cfg, role, shapes[role.name]) for role in model_roles(cfg))
    return [*_actor_layout_violations(cfg, shapes["actor"]), *(violation for found in of_roles for violation in found)]


def _actor_layout_violations(cfg: PPOConfig, shape: ModelShape) -> list[str]:
    policy = cfg.actor_rollout_ref
    megatron, rollout_tp = policy.actor.megatron, policy.rollout.tensor_model_parallel_size
    return model_layout_violations(shape, megatron, world_size(cfg), prefix=f"{ACTOR}.megatron", rollout_tp=rollout_tp)


def _role_layout_violations(cfg: PPOConfig, role: ModelRole, shape: ModelShape) -> list[str]:
    megatron = role.megatron
    if not role.has_own_pool and not shape.num_experts:
        # The actor's processes have groups for its experts; a model without experts does not use them.
        megatron = replace(megatron, expert_model_parallel_size=1, expert_tensor_parallel_size=None)
    world = role.layout(cfg).world_size
    return model_layout_violations(shape, megatron, world, prefix=f"{role.section}.megatron", rollout_tp=None)


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
        linear_num_key_heads=shape.linear_num_key_heads if any(shape.linear_layers) else 0,
        attention_sinks=shape.attention_sinks,
        biased_experts=shape.linear_bias,
        deepstack_layers=len(shape.vision.deepstack_blocks) if shape.vision else 0,
    )
    violations = layout_violations(sizes, megatron=megatron, world_size=world, rollout_tp=rollout_tp, prefix=prefix)
    return violations or recompute_violations(sizes, megatron, prefix=prefix)


def check_megatron_fields(errors: ErrorCollector, cfg: PPOConfig | SFTConfig, device: str | None = None) -> None:
    """Checks the fields of Megatron's configs that the user set.

    device: whose kernels are asked for; None: the run is on other machines.
    """
    for section, config in _sections_of_megatron(cfg).items():
        if not any(getattr(config, name, None) for name in OVERRIDES):
            continue
        # Imported here: megatron takes seconds to import.
        from scalerl.parallel import megatron_overrides

        errors.violations.extend(megatron_overrides.override_violations(section, config))
        if (line := megatron_overrides.dispatcher_line(section, config)) is not None:
            log.warning(line)
        if device is not None:
            errors.violations.extend(megatron_overrides.kernel_violations(section, config, device=device))
            for line in megatron_overrides.unfused(section, config, on_cpu=device == "cpu"):
                log.warning(line)


def _sections_of_megatron(cfg: PPOConfig | SFTConfig) -> dict[str, MegatronConfig | OptimConfig]:
    """The megatron and optim sections of the run's models, by key; sections equal to the actor's are left out."""
    if isinstance(cfg, SFTConfig):
        return {"megatron": cfg.megatron, "optim": cfg.optim}
    actor = cfg.actor_rollout_ref.actor
    others: dict[str, MegatronConfig | OptimConfig] = {
        f"{role.section}.megatron": role.megatron for role in model_roles(cfg) if role.megatron != actor.megatron
    }
    if uses_critic(cfg):
        others["critic.optim"] = cfg.critic.optim
    return {f"{ACTOR}.megatron": actor.megatron, f"{ACTOR}.optim": actor.optim} | others
