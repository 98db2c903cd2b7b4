"""ModelShape -> megatron-core GPTModel of this rank's pipeline stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from scalerl.families import ModelShape, padded_vocab_size
from scalerl.parallel.attention import PackedAttention, RMSNorm

if TYPE_CHECKING:
    from scalerl.config.schema import MegatronConfig
    from scalerl.parallel.layout import Groups

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(shape: ModelShape, config: MegatronConfig, groups: Groups, *, on_cpu: bool) -> TransformerConfig:
    layout = groups.layout
    dtype = DTYPES[config.dtype]
    return TransformerConfig(
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
        sequence_parallel=config.sequence_parallel and layout.tp_size > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Every micro-batch has its own number of tokens, so stages tell each other the shape first.
        variable_seq_lengths=True,
        # megatron refuses its default dispatcher with variable lengths, dense models included.
        moe_token_dispatcher_type="alltoall",
        batch_p2p_comm=not on_cpu,
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
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )


def _finalize_grads(model: list, num_tokens: torch.Tensor | None = None, **kwargs: object) -> None:
    finalize_model_grads(model, None, **kwargs)


# megatron-core 0.16 has these three of Llama 3's rope scaling in its code, not in its arguments.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _rope_scaling(shape: ModelShape) -> dict:
    scaling = shape.rope_scaling or {}
    wrong = [
        f"{key}={scaling[key]} (must be {value})"
        for key, value in _LLAMA3_ROPE.items()
        if scaling and scaling[key] != value
    ]
    if wrong:
        raise ValueError(f"rope_scaling of config.json: megatron-core cannot compute {', '.join(wrong)}")
    return scaling


def layers_of_stage(num_layers: int, groups: Groups) -> range:
    """Global indices of the layers that this rank's stage holds."""
    per_stage = num_layers // groups.layout.pp_size
    return range(groups.at.pp_rank * per_stage, (groups.at.pp_rank + 1) * per_stage)


def build_model(shape: ModelShape, config: TransformerConfig, groups: Groups) -> GPTModel:
    """This stage's part of the model, weights not set."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=shape.qk_norm)
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    # Checkpoint keys are the parameter names of families/, not transformer-engine's fused ones.
    layer.submodules.sharded_state_dict_keys_map = {}
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if shape.qk_norm:
        attention.q_layernorm = ModuleSpec(module=RMSNorm)
        attention.k_layernorm = ModuleSpec(module=RMSNorm)
    num_layers = len(layers_of_stage(shape.num_layers, groups))
    scaling = _rope_scaling(shape)
    return GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm),
        vocab_size=padded_vocab_size(shape.vocab_size, groups.layout.tp_size),
        max_sequence_length=shape.max_position_embeddings,
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        rope_scaling=bool(scaling),
        rope_scaling_factor=scaling.get("factor", 1.0),
    )
