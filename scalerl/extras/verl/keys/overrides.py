"""verl's `override_*_config` keys: which fields of Megatron's own configs a user may set, and who sets the others.

What is not here goes to Megatron as it is (`parallel.megatron_overrides` checks name and type against its dataclass).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalerl.config.schema import MegatronConfig, OptimConfig
from scalerl.config.value_checks import show
from scalerl.extras.verl.keys.entry import AlreadySo, Becomes, Context, Entry, Outcome, Refused, computed, is_one_of

_SECTIONS = "(actor_rollout_ref.actor.|actor_rollout_ref.ref.|critic.|reward_model.|)"


@dataclass(frozen=True)
class Owned:
    """A field of Megatron's that scalerl sets.  values: those that change nothing; (): none does; None: every value."""

    values: tuple[Any, ...] | None
    why: str


_MODEL = "the model's config.json says it"
_LOOP = "the training step sets it"
_ATTENTION = "attention and rotary embedding are those of scalerl, or Transformer Engine's with cp_comm_type"
_NORM = "the norms are torch's"
_HINT = "no number depends on a fused kernel"
_LOCAL = "the layers are Megatron's local ones"
_HEAD = "log-probs are computed from the hidden states in pieces"
_ROUTING = "routers and experts give the same numbers on every layout"
_DTYPE = "megatron.dtype says it"
_GRADS = "gradients are float32 sums over all ranks, taken once after the last micro-batch"
_STATE = "main parameters, gradients and moments are float32"
_NO = (False, None)


def _owned(names: str, *values: Any, why: str) -> dict[str, Owned]:
    return {name: Owned(values, why) for name in names.split()}


def _ignored(names: str, why: str) -> dict[str, Owned]:
    return {name: Owned(None, why) for name in names.split()}


# Fields that have a key of their own in the section that holds the overrides, where it is spelled the same.
SAME_NAME = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "cp_comm_type",
    "hierarchical_context_parallel_sizes",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_bias_update_rate",
    "use_distributed_optimizer",
)
OPTIMIZER_NAMES = ("lr", "min_lr", "weight_decay", "clip_grad")
LOSS_SCALE_NAMES = ("initial_loss_scale", "min_loss_scale", "loss_scale_window")

OWNED: dict[str, dict[str, Owned]] = {
    "transformer": {
        **_owned(
            "num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels "
            "layernorm_epsilon layernorm_zero_centered_gamma add_bias_linear add_qkv_bias gated_linear_unit "
            "activation_func qk_layernorm qk_l2_norm multi_latent_attention num_moe_experts "
            "moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate "
            "moe_router_topk moe_router_pre_softmax moe_router_score_function moe_router_enable_expert_bias "
            "moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor q_lora_rank kv_lora_rank "
            "qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_base rotary_percent rotary_scaling_factor "
            "original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim softmax_scale softmax_type "
            "rotary_interleaved window_size",
            why=_MODEL,
        ),
        **_owned("normalization", "RMSNorm", why=_MODEL),
        **_owned("position_embedding_type", "rope", why=_MODEL),
        **_ignored(
            "mtp_num_layers mtp_loss_scaling_factor mtp_use_repeated_layer keep_mtp_spec_in_bf16",
            why="counts only with model.mtp.enable; prediction layers are not trained",
        ),
        **_owned("hidden_dropout attention_dropout", 0, why="the policy that learns is the one that sampled"),
        **_ignored(
            "apply_rope_fusion fused_single_qkv_rope masked_softmax_fusion use_fused_rotary_pos_emb "
            "use_fused_ring_attention_update",
            why=f"{_ATTENTION}; {_HINT}",
        ),
        **_ignored("use_flash_attn", why="trainer.flash_attention_impl says which kernels attention has"),
        **_owned("attention_softmax_in_fp32", True, why=_ATTENTION),
        **_owned("apply_query_key_layer_scaling qk_clip flash_decode", *_NO, why=_ATTENTION),
        **_ignored("persist_layer_norm memory_efficient_layer_norm use_fused_rmsnorm", why=f"{_NORM}; {_HINT}"),
        **_ignored("use_fused_swiglu", why=f"bias_activation_fusion says it; {_HINT}"),
        **_owned("transformer_impl", "local", why=_LOCAL),
        **_owned(
            "tp_comm_overlap delay_wgrad_compute fp8 fp4 fp8_param fp4_param enable_cuda_graph "
            "external_cuda_graph use_kitchen use_te_activation_func overlap_moe_expert_parallel_comm",
            *_NO,
            why=f"{_LOCAL}, which have no such thing",
        ),
        **_owned("cuda_graph_impl", "none", why=f"{_LOCAL}, which have no such thing"),
        **_ignored("cuda_graph_scope", why="counts only with cuda_graph_impl"),
        **_ignored("use_te_rng_tracker", why="nothing is dropped, so that a layer draws no random number"),
        **_ignored("cross_entropy_loss_fusion", why=_HEAD),
        **_owned("cross_entropy_fusion_impl defer_embedding_wgrad_compute", "native", False, why=_HEAD),
        **_owned("moe_router_dtype", "fp32", why=_ROUTING),
        **_ignored(
            "moe_grouped_gemm moe_use_legacy_grouped_gemm", why="experts are computed by torch's grouped product"
        ),
        **_owned("moe_router_load_balancing_type", "none", why=f"{_ROUTING}; moe_aux_loss_coeff weighs their loss"),
        **_owned("moe_router_fusion moe_enable_routing_replay moe_apply_probs_on_input", *_NO, why=_ROUTING),
        **_owned(
            "moe_token_dropping moe_pad_expert_input_to_capacity moe_router_force_load_balancing", *_NO, why=_ROUTING
        ),
        **_owned("moe_expert_capacity_factor moe_input_jitter_eps", None, 0, -1, why=_ROUTING),
        **_owned("moe_layer_recompute", *_NO, why="megatron.recompute_modules says it"),
        **_owned("pipeline_model_parallel_layout", None, why="the layers of a stage follow from its sizes"),
        **_owned("calculate_per_token_loss variable_seq_lengths deallocate_pipeline_outputs", True, why=_LOOP),
        **_owned("perform_initialization", False, why="weights come from the model's directory"),
        **_owned("use_cpu_initialization init_model_with_meta_device", *_NO, why="the device of a run says it"),
        **_owned(
            "finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func timers",
            None,
            why=_LOOP,
        ),
        **_owned("params_dtype pipeline_dtype bf16 fp16 enable_autocast autocast_dtype", why=_DTYPE),
        **_owned("cpu_offloading", *_NO, why="megatron.param_offload and optimizer_offload say what leaves the device"),
        **_owned("fine_grained_activation_offloading", *_NO, why="activations stay on the device"),
        **_owned("hybrid_context_parallel", *_NO, why="context_parallel_size is the same for all sequences"),
    },
    "ddp": {
        **_owned("grad_reduce_in_fp32", True, why=_GRADS),
        **_owned(
            "align_param_gather average_in_collective delay_wgrad_compute",
            *_NO,
            why=_GRADS,
        ),
        **_owned("check_for_nan_in_grad", *_NO, why="a gradient that is not finite skips the update on all ranks"),
        **_owned("num_distributed_optimizer_instances", 1, why="one optimizer is split over the data-parallel ranks"),
        **_owned(
            "use_megatron_fsdp use_custom_fsdp fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag nccl_ub",
            *_NO,
            why="gradients are reduced by Megatron's own data parallelism",
        ),
    },
    "optimizer": {
        **_owned("optimizer", "adam", why="the optimizer is Adam with decoupled weight decay"),
        **_owned("adam_beta1 adam_beta2", why="optim.betas says it"),
        **_owned("params_dtype bf16 fp16", why=_DTYPE),
        **_owned("loss_scale", None, why="megatron.initial_loss_scale says where it starts"),
        **_owned(
            "use_precision_aware_optimizer store_param_remainders",
            True,
            False,
            why=_STATE,
        ),
        **_owned(
            "main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype",
            "fp32",
            "float32",
            "torch.float32",
            why=_STATE,
        ),
        **_ignored("overlap_param_gather", why="megatron.override_ddp_config.overlap_param_gather says it"),
        **_owned("overlap_param_gather_with_optimizer_step", *_NO, why=_GRADS),
        **_ignored(
            "optimizer_offload_fraction", why="megatron.optimizer_offload moves all of it; no number depends on it"
        ),
        **_owned(
            "overlap_cpu_optimizer_d2h_h2d use_torch_optimizer_for_cpu_offload pin_cpu_grads pin_cpu_params",
            True,
            False,
            why="megatron.optimizer_offload copies from and to pinned memory",
        ),
        **_owned("log_num_zeros_in_grad barrier_with_L1_time timers", *_NO, why=_LOOP),
    },
}


def _same_section(match: re.Match[str], value: Any, _: Context) -> Outcome:
    if value is None and match[2] in ("recompute_method", "recompute_num_layers"):
        return AlreadySo("counts only with megatron.recompute_granularity=full")
    if match[2] == "recompute_modules" and isinstance(value, list) and "moe_act" in value:
        if "moe" not in value:
            return Refused("moe_act is computed again with all of a layer's experts; name moe instead")
        rest = [name for name in value if name != "moe_act"]
        return Becomes({f"{match[1]}megatron.recompute_modules": rest}, "moe computes moe_act again, too")
    return Becomes({f"{match[1]}megatron.{match[2]}": value})


_EMBEDDING, _LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


def _stage_sizes(match: re.Match[str], value: Any, context: Context) -> Outcome:
    """Reads Megatron's other way to give the first and the last stage fewer layers: it counts what else they hold."""
    if not value:
        return AlreadySo("off")
    section = f"{match[1]}megatron."
    first, last = (f"{section}num_layers_in_{name}_pipeline_stage" for name in ("first", "last"))
    if context.is_set(first) or context.is_set(last):
        return AlreadySo(f"{first} and {last} say it")
    num_stages = context.left_open(f"{section}pipeline_model_parallel_size") or context.value(
        f"{section}pipeline_model_parallel_size"
    )
    if num_stages == 1:
        return AlreadySo("there is one stage")
    counted = [
        (key, name)
        for key, name in ((first, _EMBEDDING), (last, _LOSS))
        if context.foreign(f"{section}override_transformer_config.{name}") is True
    ]
    num_layers = _num_layers(context, match[1])
    if num_layers is None or type(num_stages) is not int:
        layers = "the model's layers" if num_layers is None else str(num_layers)
        sizes = " and ".join(key for key, _ in counted)
        return Refused(
            f"the layers of a stage are numbers here; leave it out, and set {sizes} to ({layers} + {len(counted)}) / "
            f"{num_stages} - 1"
        )
    if (num_layers + len(counted)) % num_stages:
        return Refused(
            f"{num_layers} layers and {len(counted)} are no multiple of {section}pipeline_model_parallel_size = "
            f"{num_stages}; leave it out, and set {first} and {last}"
        )
    size = (num_layers + len(counted)) // num_stages - 1
    return Becomes(dict.fromkeys((key for key, _ in counted), size), f"of the model's {num_layers} layers")


def _num_layers(context: Context, section: str) -> int | None:
    """The layers of a section's model; None where its config.json is not at hand (a hub id, a path elsewhere)."""
    key = "actor_rollout_ref.model.path" if section.startswith("actor_rollout_ref") else f"{section}model.path"
    try:
        config = json.loads((Path(str(context.value(key))) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    layers = config.get("num_hidden_layers") if isinstance(config, dict) else None
    return layers if type(layers) is int else None


def _overlap(_: re.Match[str], value: Any, __: Context) -> Outcome | None:
    return AlreadySo("off") if value is None else None


def _optim(match: re.Match[str], value: Any, _: Context) -> Outcome:
    return Becomes({f"{match[1]}optim.{match[2]}": value})


def _cpu_offload(match: re.Match[str], value: Any, context: Context) -> Outcome:
    key = f"{match[1]}megatron.optimizer_offload"
    if value is None or (value is False and context.value(key) is not None):
        return AlreadySo(f"{key} says where the optimizer's state is")
    why = "moments and main parameters are in host memory, except during updates"
    # Of two keys of verl for what is one here, either may ask for it.
    return Becomes({key: value}, why, overrules=value is True)


def _judge(kind: str) -> Any:
    def read(match: re.Match[str], value: Any, _: Context) -> Outcome:
        owned = OWNED[kind][match[2]]
        if owned.values is None or is_one_of(value, owned.values):
            return AlreadySo(owned.why)
        limit = f"{owned.why}, so it can only be {' or '.join(map(show, owned.values))}" if owned.values else owned.why
        return Refused(f"{limit}; leave it out")

    return read


def _said(owned: Owned) -> str:
    if owned.values is None:
        return "already so"
    return f"{', '.join(f'`{show(value)}`' for value in owned.values)}: already so" if owned.values else "refused"


def _entries() -> list[Entry]:
    fields = set(MegatronConfig.__dataclass_fields__)
    assert fields.issuperset(SAME_NAME) and set(OptimConfig.__dataclass_fields__).issuperset(OPTIMIZER_NAMES)
    transformer, ddp = (f"{_SECTIONS}megatron.override_{kind}_config" for kind in ("transformer", "ddp"))
    optimizer = f"{_SECTIONS}optim.override_optimizer_config"
    entries = [
        computed(f"{transformer}.({'|'.join(SAME_NAME)})", "the key of that name in the section", "", _same_section),
        computed(f"{ddp}.(use_distributed_optimizer)", "`megatron.use_distributed_optimizer`", "", _same_section),
        computed(
            f"{optimizer}.(use_distributed_optimizer|{'|'.join(LOSS_SCALE_NAMES)})",
            "the key of that name in the section `megatron`",
            "",
            _same_section,
        ),
        computed(
            f"{optimizer}.({'|'.join(OPTIMIZER_NAMES)})", "the key of that name in the section `optim`", "", _optim
        ),
        computed(
            f"{optimizer}.(optimizer_cpu_offload)",
            "`megatron.optimizer_offload`",
            "moments and main parameters are in host memory, except during updates",
            _cpu_offload,
        ),
        computed(
            f"{transformer}.({_EMBEDDING}|{_LOSS})",
            "`megatron.num_layers_in_first_pipeline_stage`, `num_layers_in_last_pipeline_stage`, where the model's "
            "config.json is at hand",
            "false: already so",
            _stage_sizes,
            asks_others=True,
        ),
        computed(f"{ddp}.(overlap_grad_reduce|overlap_param_gather)", "Megatron's, `null`: off", "", _overlap),
    ]
    for kind, prefix in (("transformer", transformer), ("ddp", ddp), ("optimizer", optimizer)):
        by_answer: dict[Owned, list[str]] = {}
        for name, owned in OWNED[kind].items():
            by_answer.setdefault(owned, []).append(name)
        entries += [
            computed(f"{prefix}.({'|'.join(names)})", _said(owned), owned.why, _judge(kind))
            for owned, names in by_answer.items()
        ]
    return entries


OVERRIDE_ENTRIES = _entries()
