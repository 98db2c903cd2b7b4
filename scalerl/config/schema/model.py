"""A model's files, its optimizer, and how Megatron spreads and computes it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import MISSING

from scalerl.config.schema.fields import Place, check, key, same_as
from scalerl.config.suggestions import divisors
from scalerl.config.transformer_engine import (
    expert_violations,
    transformer_engine_version,
    transformer_engine_violations,
)
from scalerl.config.value_checks import (
    BETAS,
    DTYPE,
    TARGETS,
    TEXT,
    TEXTS,
    TWO_SIZES,
    above,
    at_least,
    list_of,
    one_of,
    or_null,
    show,
)

# Modules that selective recompute knows. megatron's moe_act is not among them: it needs megatron's own grouped experts.
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp", "moe", "shared_experts", "mla_up_proj")


@dataclass
class ModelCodeConfig:
    """The key that every section with a model directory has."""

    # Run Python code that the model directory brings along.
    trust_remote_code: bool = False


@dataclass
class ModelConfig(ModelCodeConfig):
    """The files of a language model."""

    # Directory with config.json, *.safetensors and tokenizer files; or a name on the Hugging Face hub
    # (ORGANISATION/NAME, ORGANISATION/NAME@REVISION), or a URL of such a directory.
    path: str = key(MISSING, TEXT)


@dataclass
class AdapterKeys:
    """Low-rank adapters (LoRA) that are trained in the place of a model's weights."""

    # Rank of the adapters; 0: none, all weights are trained.
    lora_rank: int = key(0, at_least(0))
    # What adapters add to a layer's output is multiplied with lora_alpha / lora_rank.
    lora_alpha: float = key(16.0, above(0))
    # The projections that have an adapter: all-linear, or names such as [q_proj,v_proj].
    target_modules: Any = key("all-linear", TARGETS)
    # Projections that have none although target_modules names them.
    exclude_modules: list[str] = key([], TEXTS)
    # Directory of peft with the adapter that training begins with, of the rank, alpha and projections above.
    lora_adapter_path: str | None = key(None, or_null(TEXT))

    @check("lora_rank", "lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path")
    def keys_of_an_adapter(self, at: Place) -> Iterator[str]:
        default = AdapterKeys()
        given = [
            f"{at(field.name)} = {show(getattr(self, field.name))}"
            for field in fields(AdapterKeys)
            if getattr(self, field.name) != getattr(default, field.name)
        ]
        if self.lora_rank == 0 and given:
            rank = at("lora_rank")
            yield f"{' and '.join(given)}: of no effect without an adapter, {rank} = 0; set {rank}=32"


@dataclass
class TrainedPartsConfig(AdapterKeys):
    """What is trained of a model: all of it, all but its vision tower, or an adapter."""

    # Leave the tower that sees pictures as it is, and train the language model alone.
    freeze_vision_tower: bool = False


@dataclass
class TrainedModelConfig(TrainedPartsConfig, ModelConfig):
    """The files of a language model that is trained, whole or by an adapter."""


@dataclass
class LoraConfig:
    """How the servers get the policy's adapter."""

    # True: servers get weights with the adapter added, rounded to the servers' dtype. False: SGLang's servers get the
    # adapter alone and read the model from its files; embedded servers always get the sum, in the trainer's dtype.
    merge: bool = False


@dataclass
class PolicyModelConfig(TrainedModelConfig):
    """The files of the policy's model, and its adapter."""

    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class OptimConfig:
    """The optimizer, Adam with decoupled weight decay, and its learning rate."""

    lr: float = key(1e-6, at_least(0))
    # Optimizer updates over which lr rises from 0.
    lr_warmup_updates: int = key(0, at_least(0))
    # How lr falls after the warm-up.
    lr_decay_style: str = key("constant", one_of("constant", "linear", "cosine"))
    # Optimizer updates over which lr decays to min_lr; null: all of the run.
    lr_decay_updates: int | None = key(None, or_null(at_least(1)), only_with="lr_decay_style=linear|cosine")
    min_lr: float = key(0.0, at_least(0))
    weight_decay: float = key(0.01, at_least(0))
    betas: list[float] = key([0.9, 0.999], BETAS)
    # Largest global gradient norm; 0 switches clipping off.
    clip_grad: float = key(1.0, at_least(0))
    # Fields of Megatron's OptimizerConfig that have no key here, e.g. override_optimizer_config.adam_eps=1e-9.
    override_optimizer_config: dict[str, Any] = field(default_factory=dict)

    @check("lr_decay_updates", "lr_warmup_updates")
    def warm_up_before_decay(self, at: Place) -> Iterator[str]:
        decay, warm_up = self.lr_decay_updates, self.lr_warmup_updates
        if decay is not None and warm_up >= decay:
            yield (
                f"{at('lr_warmup_updates')} = {warm_up}: must be below {at('lr_decay_updates')} = {decay}; set at most "
                f"{at('lr_warmup_updates')}={decay - 1}"
            )

    @check("lr", "min_lr")
    def floor_below_peak(self, at: Place) -> Iterator[str]:
        if self.min_lr > self.lr:
            yield (
                f"{at('min_lr')} = {self.min_lr}: must be at most {at('lr')} = {self.lr}; set {at('min_lr')}={self.lr} "
                "or less"
            )


@dataclass
class MegatronConfig:
    """How Megatron spreads a model over devices, and how it computes."""

    # Devices that share each layer.
    tensor_model_parallel_size: int = key(1, at_least(1))
    # Stages that share the layers.
    pipeline_model_parallel_size: int = key(1, at_least(1))
    # Model chunks of each stage (interleaved pipeline); null: one chunk.
    virtual_pipeline_model_parallel_size: int | None = key(None, or_null(at_least(1)))
    # Layers of the first stage, where it holds the embedding and should have fewer; null: as the others.
    num_layers_in_first_pipeline_stage: int | None = key(None, or_null(at_least(1)))
    # Layers of the last stage, where it holds the vocabulary and should have fewer; null: as the others.
    num_layers_in_last_pipeline_stage: int | None = key(None, or_null(at_least(1)))
    # Devices that share each sequence.
    context_parallel_size: int = key(1, at_least(1))
    # null: torch's attention; ranks that share a sequence swap tokens for heads (Ulysses). Each other value:
    # Transformer Engine's attention (needs GPUs), whose ranks exchange keys and values in that way; with
    # context_parallel_size 1 it exchanges nothing, whichever of them is set.
    cp_comm_type: str | None = key(None, or_null(one_of("p2p", "a2a", "all_gather", "a2a+p2p")))
    # Only with a2a+p2p: [ranks next to each other that swap tokens for heads, groups of those that pass keys and values
    # on].
    hierarchical_context_parallel_sizes: list[int] | None = key(None, or_null(TWO_SIZES))
    # Devices that share the experts of each layer.
    expert_model_parallel_size: int = key(1, at_least(1))
    # Devices that share each expert; null: tensor_model_parallel_size.
    expert_tensor_parallel_size: int | None = key(None, or_null(at_least(1)))
    # Ignored (off) when tensor_model_parallel_size is 1. A mixture of experts needs it.
    sequence_parallel: bool = True
    # Of a mixture: torch: a rank's experts are two grouped matrix products of torch's (on GPUs, in bfloat16);
    # transformer_engine: they are Transformer Engine's grouped linear layers (needs GPUs).
    moe_experts_impl: str = key("torch", one_of("torch", "transformer_engine"))
    # Weight in the loss of each sequence's imbalance between the experts (arXiv 2412.19437, eq. 17), mean over tokens.
    moe_aux_loss_coeff: float = key(0.0, at_least(0))
    # Weight in the loss of the squared log-sum-exp of the router's logits, mean over tokens.
    moe_z_loss_coeff: float = key(0.0, at_least(0))
    # Change per update of a router's balancing bias (DeepSeek-V3), against the load of each expert; 0: it stays.
    moe_router_bias_update_rate: float = key(0.0, at_least(0))
    # Optimizer state is split over the data-parallel ranks.
    use_distributed_optimizer: bool = True
    # Type of arithmetic and parameters. Main gradients, main parameters and optimizer state are float32 in any case.
    dtype: str = key("bfloat16", DTYPE)
    seed: int = key(42, at_least(0))
    # What a layer keeps for backward: null: everything; selective: all but what recompute_modules compute again; full:
    # whole layers are computed again from their input.
    recompute_granularity: str | None = key(None, or_null(one_of("selective", "full")))
    # Only with full. uniform: recompute_num_layers layers at a time, from the input of the first; block: the first
    # recompute_num_layers layers of each model chunk, the others keep everything.
    recompute_method: str = key("uniform", one_of("uniform", "block"), only_with="recompute_granularity=full")
    # Only with full. With uniform 1 keeps the least.
    recompute_num_layers: int = key(1, at_least(1), only_with="recompute_granularity=full")
    # Only with selective. mlp: of dense layers.
    recompute_modules: list[str] = key(
        ["core_attn"], list_of(*RECOMPUTE_MODULES), only_with="recompute_granularity=selective"
    )
    # Keep parameters in host memory while this model does not compute.
    param_offload: bool = False
    # Release the gradient buffers while this model does not compute; they come back as zeros, as an update starts.
    grad_offload: bool = False
    # Keep Adam's moments and the float32 main parameters in host memory except during updates and checkpoints.
    optimizer_offload: bool = False
    # An update whose gradient is not finite is skipped on all ranks; this many in a row end the run.
    max_consecutive_skipped_updates: int = key(10, at_least(1))
    # float16 only: the loss is multiplied by a scale that halves on overflow (such an update is skipped, and counts
    # for max_consecutive_skipped_updates only at min_loss_scale) and doubles after loss_scale_window updates without.
    initial_loss_scale: float = key(65536.0, at_least(1))
    # The scale is never halved below this; an overflow at it counts as a gradient that is not finite.
    min_loss_scale: float = key(1.0, above(0))
    # Updates without overflow after which the scale doubles.
    loss_scale_window: int = key(1000, at_least(1))
    # Fields of Megatron's TransformerConfig that have no key here: override_transformer_config.batch_p2p_sync=false.
    # docs/from-verl.md has those that scalerl sets itself.
    override_transformer_config: dict[str, Any] = field(default_factory=dict)
    # Fields of Megatron's DistributedDataParallelConfig that have no key here, for models that are trained.
    override_ddp_config: dict[str, Any] = field(default_factory=dict)

    @check("recompute_granularity", "recompute_modules")
    def recomputes_something(self, at: Place) -> Iterator[str]:
        if self.recompute_granularity == "selective" and not self.recompute_modules:
            yield (
                f"{at('recompute_modules')} = []: {at('recompute_granularity')} = selective needs one at least; set "
                f"for example {at('recompute_modules')}=[core_attn]"
            )

    @check("initial_loss_scale", "min_loss_scale")
    def loss_scale_above_the_lowest(self, at: Place) -> Iterator[str]:
        initial, lowest = self.initial_loss_scale, self.min_loss_scale
        if lowest > initial:
            yield (
                f"{at('min_loss_scale')} = {lowest:g}: must be at most {at('initial_loss_scale')} = {initial:g}; set "
                f"{at('min_loss_scale')}={initial:g} or less"
            )

    @check("cp_comm_type", "hierarchical_context_parallel_sizes", "context_parallel_size")
    def hierarchy_of_context_ranks(self, at: Place) -> Iterator[str]:
        kind, sizes, cp_size = self.cp_comm_type, self.hierarchical_context_parallel_sizes, self.context_parallel_size
        key = at("hierarchical_context_parallel_sizes")
        if kind != "a2a+p2p" and sizes is not None:
            yield (
                f"{key} = {show(sizes)}: only for cp_comm_type = a2a+p2p, which is {show(kind)}; set "
                f"{at('cp_comm_type')}=a2a+p2p and {at('context_parallel_size')}={math.prod(sizes)}, or {key}=null"
            )
        if kind == "a2a+p2p" and (sizes is None or math.prod(sizes) != cp_size):
            pairs = [f"[{size},{cp_size // size}]" for size in divisors(cp_size) if 1 < size < cp_size]
            remedy = f"set {key}={' or '.join(pairs or ['[2,2]'])}"
            if not pairs:
                remedy += f" and {at('context_parallel_size')}=4"
            yield (
                f"{key} = {show(sizes)}: {at('cp_comm_type')} = a2a+p2p needs two sizes above 1 whose product is "
                f"{at('context_parallel_size')} = {cp_size}; {remedy}, or {at('cp_comm_type')}=p2p, which needs none"
            )

    @check("cp_comm_type", "dtype")
    def attention_in_16_bits(self, at: Place) -> Iterator[str]:
        if self.cp_comm_type is not None and self.dtype == "float32":
            yield (
                f"{at('cp_comm_type')} = {self.cp_comm_type}: Transformer Engine's attention computes in 16 bits, and "
                f"{at('dtype')} = float32; set {at('dtype')}=bfloat16, or {at('cp_comm_type')}=null"
            )

    @check("override_ddp_config", "use_distributed_optimizer")
    def late_gather_of_a_distributed_optimizer(self, at: Place) -> Iterator[str]:
        if self.override_ddp_config.get("overlap_param_gather") and not self.use_distributed_optimizer:
            yield (
                f"{at('override_ddp_config')}.overlap_param_gather = true: only with "
                f"{at('use_distributed_optimizer')} = true, whose ranks gather parameters; set "
                f"{at('use_distributed_optimizer')}=true, or leave it out"
            )

    @check("cp_comm_type", "context_parallel_size", "trainer.device")
    def attention_of_the_machine(self, at: Place) -> Iterator[str]:
        if at.device is not None and (at.is_here or at.device == "cpu"):
            kind, prefix, version = self.cp_comm_type, at.prefix.rstrip("."), transformer_engine_version()
            yield from transformer_engine_violations(
                kind, self.context_parallel_size, prefix=prefix, device=at.device, version=version
            )

    @check("moe_experts_impl", "trainer.device")
    def experts_of_the_machine(self, at: Place) -> Iterator[str]:
        if at.device is not None and (at.is_here or at.device == "cpu"):
            prefix, version = at.prefix.rstrip("."), transformer_engine_version()
            yield from expert_violations(self.moe_experts_impl, prefix=prefix, device=at.device, version=version)


@dataclass
class MicroBatchConfig:
    """The size of the micro-batches of a model other than the actor, which is the actor's by default."""

    # Tokens of a packed micro-batch, over all devices that share its samples.
    max_tokens_per_micro_batch: int = key(same_as("actor_rollout_ref.actor.max_tokens_per_micro_batch"), at_least(1))


def as_actor() -> MegatronConfig:
    """A section whose keys all default to the actor's.

    A role in the actor's processes must have the actor's sizes, and often wants the rest.
    """
    section = "actor_rollout_ref.actor.megatron"
    return MegatronConfig(**{field.name: same_as(f"{section}.{field.name}") for field in fields(MegatronConfig)})
