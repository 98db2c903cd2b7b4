"""The megatron-core GPTModel of this rank's pipeline stage, built from a ModelShape.

Dims: T packed tokens of this cp rank, H hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor

from scalerl.config.value_checks import show
from scalerl.errors import UserError
from scalerl.models import ModelShape, padded_vocab_size
from scalerl.parallel.attention import PackedAttention, PostNorm, RMSNorm, ZeroCentredRMSNorm
from scalerl.parallel.delta_net import GatedDeltaNet, GatedSelfAttention
from scalerl.parallel.experts import mixture_config, mixture_layer_spec
from scalerl.parallel.joint_norm import JointlyNormedAttention
from scalerl.parallel.layout import mark
from scalerl.parallel.megatron_overrides import transformer_values
from scalerl.parallel.sink_attention import sink_attention
from scalerl.parallel.te_attention import TransformerEngineAttention, require_transformer_engine

if TYPE_CHECKING:
    from scalerl.config.schema import MegatronConfig
    from scalerl.parallel.layout import Groups

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Of the random numbers that a value head begins with.
_HEAD_SEED = 0
_megatrons_init = CheckpointWithoutOutput.__init__
# On every rank they advise who calls them: docs/dependencies.md says why it is GPTModel, and DDP's own layout is right.
for _module in ("models.gpt.gpt_model", "distributed.distributed_data_parallel"):
    logging.getLogger(f"megatron.core.{_module}").setLevel(logging.ERROR)


def transformer_config(shape: ModelShape, config: MegatronConfig, groups: Groups, *, on_cpu: bool) -> TransformerConfig:
    """megatron's configuration of the model on this layout.  Raises UserError for overrides that megatron refuses."""
    layout = groups.layout
    dtype = DTYPES[config.dtype]
    latent = latent_config(shape)
    own: dict[str, Any] = dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm or bool(latent),
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        attention_output_gate=shape.attention_gate,
        rotary_interleaved=shape.rotary_interleaved,
        no_rope_freq=[int(is_nope) for is_nope in shape.nope_layers] or None,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp_size,
        pipeline_model_parallel_size=layout.pp_size,
        virtual_pipeline_model_parallel_size=layout.vpp_size if layout.vpp_size > 1 else None,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        context_parallel_size=layout.cp_size,
        cp_comm_type=config.cp_comm_type,
        hierarchical_context_parallel_sizes=list(layout.hierarchical_cp_sizes) or None,
        # A rank may have a model without experts and one with experts.
        expert_model_parallel_size=layout.ep_size if shape.num_experts else 1,
        expert_tensor_parallel_size=layout.etp_size if shape.num_experts else None,
        sequence_parallel=config.sequence_parallel and layout.tp_size > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        **recompute_arguments(config),
        # Every micro-batch has its own number of tokens, so stages tell each other the shape first.
        variable_seq_lengths=True,
        # megatron refuses its default dispatcher with variable lengths, dense models included.
        moe_token_dispatcher_type="alltoall",
        # With two stages the next is also the previous: only megatron's unbatched order keeps both directions apart.
        batch_p2p_comm=not on_cpu and layout.vpp_size == 1,
        # Waiting for the whole device after each exchange is for older versions of torch.
        batch_p2p_sync=False,
        deallocate_pipeline_outputs=True,
        # Losses arrive divided by the global token count already: megatron must neither average over micro-batches nor
        # over dp ranks, and the count it would divide by is dropped in _finalize_grads.
        calculate_per_token_loss=True,
        finalize_model_grads_func=_finalize_grads,
        perform_initialization=False,
        use_cpu_initialization=on_cpu,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        # One kernel for SwiGLU and one for the residual sum; on the CPU compiling takes longer than it saves.
        bias_activation_fusion=not on_cpu,
        bias_dropout_fusion=not on_cpu,
        apply_rope_fusion=False,
        # By its default megatron warns of its default.
        cuda_graph_modules=[],
        **mixture_config(shape, config),
        **latent,
    )
    overrides = transformer_values(config.override_transformer_config, on_cpu=on_cpu)
    try:
        made = (MLATransformerConfig if latent else TransformerConfig)(**(own | overrides))
    except (AssertionError, ImportError, ValueError) as error:
        if not overrides:
            raise
        raise UserError(f"override_transformer_config = {show(config.override_transformer_config)}: {error}") from error
    if shape.linear_bias:
        # Set now, as megatron refuses it where etp splits experts: these are scalerl's, with biases on every layout.
        made.add_bias_linear = True
    return made


def _finalize_grads(model: list, num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
    finalize_model_grads(model, None, **kwargs)


def core_attention(config: TransformerConfig, groups: Groups) -> ModuleSpec:
    """The spec of each layer's rotary embedding and attention: torch's, or Transformer Engine's with cp_comm_type."""
    rotary = {"interleaved": config.rotary_interleaved, "nope_layers": config.no_rope_freq or ()}
    if config.cp_comm_type is None:
        return ModuleSpec(module=PackedAttention, params={"cp_group": groups.cp, "rotary": rotary})
    require_transformer_engine()
    assert config.cp_comm_type != "a2a+p2p" or groups.hierarchical_cp, "megatron's groups were made without those of cp"
    return ModuleSpec(module=TransformerEngineAttention, params={"rotary": rotary})


def _block(layer_specs: list[ModuleSpec], norm: Any) -> Any:
    """The spec of all layers, in a form that GPTModel takes although its type does not say so."""
    return TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=norm)


def build_model(shape: ModelShape, config: TransformerConfig, groups: Groups) -> list[GPTModel]:
    """Builds this stage's model chunks, whose weights are not set yet."""
    if config.multi_latent_attention:
        layer = latent_layer_spec()
    else:
        layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=shape.qk_norm)
    norm = ZeroCentredRMSNorm if shape.zero_centred_norms else RMSNorm
    # megatron says only that it is an object.
    submodules: Any = layer.submodules
    submodules.input_layernorm = norm
    submodules.pre_mlp_layernorm = norm
    if shape.post_norms:
        sizes = {"config": config, "hidden_size": shape.hidden_size, "eps": config.layernorm_epsilon}
        submodules.self_attn_bda = submodules.mlp_bda = ModuleSpec(module=PostNorm, params=sizes)
    # Checkpoint keys are the parameter names of models/, not transformer-engine's fused ones.
    submodules.sharded_state_dict_keys_map = {}
    attention = submodules.self_attention.submodules
    attention.core_attention = (
        sink_attention(shape, groups) if shape.attention_sinks else core_attention(config, groups)
    )
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = norm
    if shape.attention_gate:
        submodules.self_attention.module = GatedSelfAttention
    if shape.joint_qk_norm:
        submodules.self_attention.module = JointlyNormedAttention
    layers_of_model = _layers(shape, layer, groups)
    chunks = groups.layout.layers(shape.num_layers, groups.coordinates.pp_rank)
    models = [
        GPTModel(
            config,
            _block([layers_of_model[i] for i in layers], norm),
            vocab_size=padded_vocab_size(shape.vocab_size, groups.layout.tp_size),
            max_sequence_length=shape.max_position_embeddings,
            pre_process=groups.is_first_stage and index == 0,
            post_process=groups.is_last_stage and index == len(chunks) - 1,
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tie_word_embeddings,
            # The core attention applies the rotary embedding.
            position_embedding_type="none",
            vp_stage=index if len(chunks) > 1 else None,
        )
        for index, layers in enumerate(chunks)
    ]
    if groups.is_last_stage:
        (put_value_head if shape.head == "value" else hand_out_hidden)(models[-1])
    return models


def _layers(shape: ModelShape, layer: ModuleSpec, groups: Groups) -> list[ModuleSpec]:
    """The spec of each layer of the model.  layer: a dense one, with attention."""
    layers = []
    for index in range(shape.num_layers):
        spec = layer
        if shape.linear_layers and shape.linear_layers[index]:
            delta_net = ModuleSpec(module=GatedDeltaNet, params={"shape": shape, "groups": groups})
            submodules = replace(cast("TransformerLayerSubmodules", layer.submodules), self_attention=delta_net)
            spec = replace(layer, submodules=submodules)
        layers.append(mixture_layer_spec(spec) if shape.moe_layers and shape.moe_layers[index] else spec)
    return layers


# --- activation recompute ---


def recompute_arguments(config: MegatronConfig) -> dict[str, Any]:
    """The arguments of TransformerConfig for activation recompute."""
    if config.recompute_granularity == "selective":
        CheckpointWithoutOutput.__init__ = _init
    # megatron refuses these two with anything but full.
    is_full = config.recompute_granularity == "full"
    return {
        "recompute_granularity": config.recompute_granularity,
        "recompute_method": config.recompute_method if is_full else None,
        "recompute_num_layers": config.recompute_num_layers if is_full else None,
        "recompute_modules": list(config.recompute_modules),
    }


def _init(self: CheckpointWithoutOutput, fp8: Any = False) -> None:
    """Repairs megatron-core 0.19.2, which takes fp8=False (its default) for yes and then calls transformer-engine,
    there or not."""
    _megatrons_init(self, fp8 or None)  # pyright: ignore[reportArgumentType]  # megatron: bool, and None for no


# --- multi-head latent attention (DeepSeek) ---


def latent_config(shape: ModelShape) -> dict[str, Any]:
    """The arguments of MLATransformerConfig that only latent attention has; none without it."""
    if shape.kv_lora_rank is None:
        return {}
    yarn = {key: value for key, value in (shape.rope_scaling or {}).items() if key not in ("rope_type", "factor")}
    return {
        "q_lora_rank": shape.q_lora_rank,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_head_dim": shape.qk_nope_head_dim,
        "qk_pos_emb_head_dim": shape.qk_rope_head_dim,
        "v_head_dim": shape.v_head_dim,
        "rope_type": "yarn" if shape.rope_scaling else "rope",
        "rotary_base": shape.rope_theta,
        "rotary_percent": 1.0,
        "rotary_scaling_factor": (shape.rope_scaling or {}).get("factor", 1.0),
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
        **yarn,
    }


class LatentNorm(RMSNorm):
    """Norm of compressed queries, keys and values: transformers' epsilon there is 1e-6, whatever config.json says."""

    def __init__(self, config: Any, hidden_size: int, **_: Any) -> None:
        super().__init__(config, hidden_size, eps=1e-6)


def latent_layer_spec() -> ModuleSpec:
    """The spec of a layer with latent attention."""
    # Without transformer-engine megatron-core 0.19.2 does not know this class there.
    multi_latent_attention.Linear = Linear
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=True)
    # megatron says only that it is an object.
    submodules: Any = layer.submodules
    attention = submodules.self_attention.submodules
    # Whole on every tp rank, each for its part of the sequence. Split over tp, as the local spec has them, the rotary
    # part of the keys loses the gradients of other ranks' heads (megatron-core 0.19.2).
    attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
    attention.q_layernorm = attention.kv_layernorm = LatentNorm
    return layer


# --- the end of the last stage: hidden states of a language model, values of a critic or reward model ---


def hand_out_hidden(model: GPTModel) -> None:
    """Makes the model return the hidden states that its output layer, which keeps its parameter, would multiply."""

    def forward(hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return hidden, None

    layer: Any = model.output_layer
    layer.forward = forward


def output_weight(model: GPTModel) -> Tensor:
    """[V / tp, H] output weight of the last chunk: the output layer's, or the embedding's if tied on one stage."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    weight = model.output_layer.weight
    assert weight is not None
    return weight


def whole_hidden(hidden_TH: Tensor, *, sequence_parallel: bool) -> Tensor:
    """Hidden states [T, H] of all tokens on every tp rank; the gradients of the vocabulary parts are summed."""
    if sequence_parallel:
        return gather_from_sequence_parallel_region(hidden_TH, tensor_parallel_output_grad=True)
    return copy_to_tensor_model_parallel_region(hidden_TH)


class ValueHead(torch.nn.Module):
    """A linear layer H -> 1 in float32, the same on all tp ranks: its weight is not split.

    weight: [1, H], random until one is loaded: the same numbers on every rank and in every run, of standard deviation
    1 / (H + 1), so that values start near 0.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        size = config.hidden_size
        initial = torch.randn(1, size, generator=torch.Generator().manual_seed(_HEAD_SEED)) / (size + 1)
        self.weight = torch.nn.Parameter(initial.to(config.params_dtype))
        self.sequence_parallel = config.sequence_parallel
        # Each tp rank sees its tokens only: megatron sums such gradients over tp ranks.
        mark(self.weight, sequence_parallel=config.sequence_parallel)

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Computes the values: hidden [T, 1, H] -> ([T, 1, 1] float32, None).

        With sequence parallelism the tokens of `hidden` are split over tp ranks. Without it every tp rank does the same
        work on the same tokens, so no gradient is summed.
        """
        values = F.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            # All tp ranks compute the same loss of all values: each keeps the gradient of its own tokens.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def put_value_head(model: GPTModel) -> None:
    """Puts a ValueHead in the place of the output layer of a model that does not tie it to its embedding."""
    assert not model.share_embeddings_and_output_weights
    # Any layer that takes hidden states does.
    model.output_layer = ValueHead(model.config)  # pyright: ignore[reportAttributeAccessIssue]  # megatron declares one class
