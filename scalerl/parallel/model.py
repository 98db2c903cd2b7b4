"""The megatron-core GPTModel of this rank's pipeline stage, built from a ModelShape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from scalerl.config.value_checks import show
from scalerl.errors import UserError
from scalerl.models import ModelShape, padded_vocab_size
from scalerl.parallel.attention import PackedAttention, RMSNorm
from scalerl.parallel.cpu_kernels import swiglu
from scalerl.parallel.experts import mixture_config, mixture_layer_spec
from scalerl.parallel.megatron_overrides import transformer_values
from scalerl.parallel.mla import latent_config, latent_layer_spec
from scalerl.parallel.output import hand_out_hidden
from scalerl.parallel.recompute import recompute_arguments
from scalerl.parallel.te_attention import TransformerEngineAttention, require_transformer_engine
from scalerl.parallel.values import put_value_head

if TYPE_CHECKING:
    from scalerl.config.schema import MegatronConfig
    from scalerl.parallel.layout import Groups

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
        qk_layernorm=shape.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
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
        # A model without experts may live beside one that has them.
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
        **mixture_config(shape, config),
        **latent,
    )
    overrides = transformer_values(config.override_transformer_config, on_cpu=on_cpu)
    # megatron's name for the function of MLPSubmodules, `swiglu`, unless the user has megatron's compiled one.
    in_blocks = on_cpu and dtype == torch.float32 and not overrides.get("bias_activation_fusion")
    own["use_te_activation_func"] = in_blocks
    try:
        return (MLATransformerConfig if latent else TransformerConfig)(**(own | overrides))
    except (AssertionError, ImportError, ValueError) as error:
        if not overrides:
            raise
        raise UserError(f"override_transformer_config = {show(config.override_transformer_config)}: {error}") from error


def _finalize_grads(model: list, num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
    finalize_model_grads(model, None, **kwargs)


def core_attention(config: TransformerConfig, groups: Groups) -> ModuleSpec:
    """The spec of each layer's rotary embedding and attention: torch's, or Transformer Engine's with cp_comm_type."""
    if config.cp_comm_type is None:
        return ModuleSpec(module=PackedAttention, params={"cp_group": groups.cp})
    require_transformer_engine(config, groups)
    return ModuleSpec(module=TransformerEngineAttention)


def _block(layer_specs: list[ModuleSpec]) -> Any:
    """The spec of all layers, in a form that GPTModel takes although its type does not say so."""
    norm: Any = RMSNorm
    return TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=norm)


def build_model(shape: ModelShape, config: TransformerConfig, groups: Groups) -> list[GPTModel]:
    """Builds this stage's model chunks, whose weights are not set yet."""
    if config.multi_latent_attention:
        layer = latent_layer_spec(RMSNorm, on_cpu=config.use_cpu_initialization)
    else:
        layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=shape.qk_norm)
    # megatron says only that it is an object.
    submodules: Any = layer.submodules
    submodules.input_layernorm = RMSNorm
    submodules.pre_mlp_layernorm = RMSNorm
    # Checkpoint keys are the parameter names of models/, not transformer-engine's fused ones.
    submodules.sharded_state_dict_keys_map = {}
    submodules.mlp.submodules.activation_func = swiglu
    attention = submodules.self_attention.submodules
    attention.core_attention = core_attention(config, groups)
    if shape.qk_norm:
        attention.q_layernorm = ModuleSpec(module=RMSNorm)
        attention.k_layernorm = ModuleSpec(module=RMSNorm)
    mixture_layer = mixture_layer_spec(layer) if shape.num_experts else layer
    layers_of_model = [
        mixture_layer if shape.moe_layers and shape.moe_layers[index] else layer for index in range(shape.num_layers)
    ]
    chunks = groups.layout.layers(shape.num_layers, groups.coordinates.pp_rank)
    models = [
        GPTModel(
            config,
            _block([layers_of_model[i] for i in layers]),
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
