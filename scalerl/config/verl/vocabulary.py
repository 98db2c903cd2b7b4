r"""The keys of verl that scalerl does not have by that name, or not with that value: what becomes of each, and why.

The first entry whose pattern fits a key, and whose value it reads, counts. Keys that both have are not here.
docs/from-verl.md prints this table.
"""

from __future__ import annotations

import re
from typing import Any

from scalerl.config.verl.batch_units import (
    critic_enable,
    critic_kept,
    lr_warmup_ratio,
    pass_micro_batch,
    response_limit,
    tokens_of_a_device,
    update_micro_batch,
)
from scalerl.config.verl.entry import (
    AlreadySo,
    Becomes,
    Context,
    Entry,
    Outcome,
    Refused,
    absent,
    computed,
    goes_with,
    is_one_of,
    renamed,
    same,
)
from scalerl.config.verl.overrides import OVERRIDE_ENTRIES

_POLICY = "actor_rollout_ref"
_ACTOR, _REF, _ROLLOUT, _MODEL = f"{_POLICY}.actor", f"{_POLICY}.ref", f"{_POLICY}.rollout", f"{_POLICY}.model"
# Sections that have a model, as groups of a pattern.
_TRAINED = f"({_ACTOR}|critic)"
_ANY = f"({_ACTOR}|{_REF}|critic|reward_model|reward.reward_model)"
_SGLANG = f"{_ROLLOUT}.engine_kwargs.sglang"
_PACKED = "sequences are always packed, padding is never computed"
_PACKING = "micro-batches are packed up to a number of tokens; no number depends on it"
_MAX_TOKENS = "max_tokens_per_micro_batch"
_ALL_DEVICES = "tokens of a micro-batch over all devices that share it, not of one of them"
_MEGATRON = "every model is trained by Megatron"
_OFF = (None, False)
_NONE = (None, "null", "none", "", False, 0)


def _seconds(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _not(value: Any) -> Any:
    return not value if isinstance(value, bool) else value


def _recompute(match: re.Match[str], value: Any, context: Context) -> Outcome:
    megatron = f"{_ACTOR if match[1] == _MODEL else 'critic'}.megatron"
    if value is False or context.is_set(f"{megatron}.recompute_granularity"):
        return AlreadySo(f"{megatron}.recompute_granularity says what is computed again")
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return Becomes({f"{megatron}.{name}": setting for name, setting in full.items()}, "memory against time alone")


def _warmup_style(match: re.Match[str], value: Any, _: Context) -> Outcome:
    if value in ("constant", "cosine", "linear"):
        return Becomes({f"{match[1]}.optim.lr_decay_style": value}, "the shape of the learning rate after its warm-up")
    return Refused("must be constant, linear or cosine, as optim.lr_decay_style")


def _max_model_len(_: re.Match[str], value: Any, context: Context) -> Outcome:
    sizes = [context.value(f"data.{name}") for name in ("max_prompt_length", "max_response_length")]
    if value is None or (all(isinstance(size, int) for size in sizes) and sum(sizes) <= value):
        return AlreadySo("servers have room for data.max_prompt_length + data.max_response_length")
    return Refused(
        "servers have room for data.max_prompt_length + data.max_response_length, which is more; set data."
        "max_response_length lower, and leave this out"
    )


def _reward_manager(_: re.Match[str], value: Any, __: Context) -> Outcome | None:
    if isinstance(value, dict):
        return None
    if isinstance(value, str) and "/" in value:
        return Refused("names a file; register the manager in a file of trainer.import_files (docs/extending.md)")
    return Becomes({"reward_model.reward_manager": value})


def _tokenizer_path(match: re.Match[str], value: Any, context: Context) -> Outcome:
    paths = [context.value(key) for key in (f"{_MODEL}.path", f"{match[1]}.path")]
    if value is None or value in paths or "${" in str(value):
        return AlreadySo("the tokenizer is the policy's")
    return Refused(f"has no counterpart because the tokenizer is that of {_MODEL}.path; leave it out")


def _importance_cap(_: re.Match[str], value: Any, __: Context) -> Outcome:
    if is_one_of(value, (None, -1)):
        return AlreadySo("off")
    correction = "algorithm.rollout_correction"
    return Becomes(
        {f"{correction}.rollout_is": "token", f"{correction}.rollout_is_threshold": value},
        "truncated importance sampling",
    )


def _save_contents(_: re.Match[str], value: Any, __: Context) -> Outcome:
    names = set(value) if isinstance(value, list) else {value}
    if {"model", "optimizer", "extra"} <= names <= {"model", "optimizer", "extra"}:
        return AlreadySo("a checkpoint holds all that a run needs to go on")
    return Refused(
        "a checkpoint always holds model, optimizer and extra, and nothing else; leave it out, and make a Hugging Face "
        "model of one with `scalerl merge`"
    )


def _one_device_per_stage(name: str, why: str) -> Entry:
    return absent(f"{_ROLLOUT}.{name}", 1, None, why=why)


_DATA = [
    renamed(
        "data.trust_remote_code",
        f"{_MODEL}.trust_remote_code",
        neutral=(False, None),
        why="the tokenizer is the model's",
    ),
    same("data.return_raw_chat", True, why="prompts stay lists of messages until they are tokenized, once"),
    same("data.return_(raw_input_ids|full_prompt)", False, why="a sample has its token ids and its messages"),
    same("data.return_multi_modal_inputs", why="prompts are text"),
    same("data.dataloader_num_workers", why="prompts are read and tokenized before the first step"),
    same("data.val_batch_size", why="all prompts of a validation go to the servers at once"),
    same("data.validation_shuffle", False, why="a validation is scored whole; its order changes nothing"),
    absent("data.tokenizer", *_NONE, why="the tokenizer is the one in the model's directory"),
    absent("data.use_shm", *_OFF, why="files are read from where they are, once"),
    renamed("data.seed", "data.seed", only=(None,), convert=lambda _: 42, why="the default"),
    renamed("data.gen_batch_size", "data.gen_batch_size", only=(None,), convert=lambda _: "${data.train_batch_size}"),
    same("data.(video_key|audio_key|image_patch_size)", why="prompts are text; one with images is refused by its row"),
    renamed("data.apply_chat_template_kwargs(.**|)", r"data.chat_template_kwargs\1"),
    absent("data.mm_processor_kwargs", {}, None, why="prompts are text"),
    absent("data.mm_processor_kwargs.**", why="prompts are text"),
    absent(
        "data.sampler.(class_path|class_name)",
        None,
        why="prompts come in the order of data.shuffle and data.seed",
        instead="leave it out, or give a dataset of your own in data.custom_cls",
    ),
    absent("data.datagen.(path|name)", None, why="data is prepared before a run (scalerl data)"),
    absent("data.tool_config_path", None, why="samples are one answer of the model, without tools"),
    renamed("data.hf_dataset_path", "data.train_files"),
]

_MODEL_KEYS = [
    same(
        rf"({_MODEL}|critic.model|reward_model.model).use_remove_padding|{_ANY}.megatron.use_remove_padding",
        True,
        why=_PACKED,
    ),
    same(
        f"({_MODEL}|critic.model|{_ACTOR}|reward_model.model).use_fused_kernels",
        why="log-probs and entropy are computed from the hidden states in pieces; no number depends on it",
    ),
    same(
        f"({_MODEL}|critic.model|reward_model.model).fused_kernel_options.**",
        why="log-probs are computed from the hidden states in pieces",
    ),
    same(f"({_MODEL}|critic.model).use_liger", why="kernels are those of Megatron and torch; no number depends on it"),
    computed(
        f"({_MODEL}|critic.model).enable_gradient_checkpointing",
        "`...megatron.recompute_granularity=full`, `recompute_method=uniform`, `recompute_num_layers=1`",
        "memory against time alone",
        _recompute,
    ),
    same(f"({_MODEL}|critic.model).gradient_checkpointing_kwargs.**", why="recompute_* of the megatron section say it"),
    absent(
        f"({_MODEL}|critic.model).enable_activation_offload",
        *_OFF,
        why="activations stay on the device",
        instead="leave it out, and set recompute_* of the megatron section where memory is short",
    ),
    absent(
        f"({_MODEL}|critic.model).(lora_rank|lora.rank|lora_adapter_path|lora.adapter_path)",
        *_NONE,
        why="all weights of a model are trained, without adapters",
    ),
    goes_with(
        f"({_MODEL}|critic.model).(lora_alpha|target_modules|exclude_modules|lora.**|target_parameters)",
        f"{_MODEL}.lora_rank",
    ),
    absent(
        f"({_MODEL}|critic.model|reward_model.model).external_lib",
        *_NONE,
        why="no module is imported for a model",
        instead="leave it out, and name files of your own in trainer.import_files",
    ),
    absent(
        f"({_MODEL}|critic.model).(custom_chat_template|hf_config_path)",
        *_NONE,
        why="config.json and the chat template are those in the model's directory",
        instead="leave it out, and change the files there",
    ),
    absent(
        f"({_MODEL}|critic.model|reward_model.model).use_shm",
        *_NONE,
        why="model and tokenizer are read from the model's directory",
    ),
    computed(
        f"({_MODEL}|critic.model|reward_model.model).(tokenizer_path|input_tokenizer)",
        "already so where it is the model's directory",
        "the tokenizer is the policy's",
        _tokenizer_path,
    ),
    same(
        f"({_MODEL}|critic.model).override_config.attn_implementation",
        why="attention is torch's or, with megatron.cp_comm_type, Transformer Engine's",
    ),
    absent(
        f"({_MODEL}|critic.model).override_config.model_config.**|({_MODEL}|critic.model).override_config.moe_config.**",
        False,
        None,
        why="a model is what its config.json says",
        instead="leave it out, and change config.json",
    ),
    absent(
        f"({_MODEL}|critic.model).override_config|({_MODEL}|critic.model).override_config.(model_config|moe_config)",
        {},
        None,
        why="a model is what its config.json says",
        instead="leave it out, and change config.json",
    ),
    absent(
        f"({_MODEL}|critic.model).override_config.**",
        why="a model is what its config.json says",
        instead="leave it out, and change config.json",
    ),
    absent(f"{_MODEL}.mtp.(enable|enable_train|enable_rollout)", *_OFF, why="prediction layers are not trained"),
    goes_with(f"{_MODEL}.mtp.**", f"{_MODEL}.mtp.enable"),
    same(f"{_MODEL}.(load_tokenizer|tiled_mlp.**)", why="models and tokenizers are read from the model's directory"),
]

_BATCHES = [
    same(
        f"{_ANY}.(use_dynamic_bsz|log_prob_use_dynamic_bsz|forward_use_dynamic_bsz)|{_ROLLOUT}.log_prob_use_dynamic_bsz",
        why=_PACKING,
    ),
    computed(
        f"{_TRAINED}.ppo_max_token_len_per_gpu|({_REF}).log_prob_max_token_len_per_gpu|"
        "(reward_model).forward_max_token_len_per_gpu",
        f"`....{_MAX_TOKENS}`, times `context_parallel_size`",
        _ALL_DEVICES,
        tokens_of_a_device,
        asks_others=True,
    ),
    computed(
        f"{_TRAINED}.ppo_micro_batch_size_per_gpu",
        "`....max_tokens_per_micro_batch`, unless that is set: so many of the longest samples",
        _PACKING,
        update_micro_batch,
        asks_others=True,
    ),
    computed(
        f"{_REF}.log_prob_micro_batch_size_per_gpu",
        f"`{_REF}.max_tokens_per_micro_batch`, unless that is set: so many of the longest samples",
        _PACKING,
        pass_micro_batch,
        asks_others=True,
    ),
    same(f"{_TRAINED}.ppo_micro_batch_size", why=f"counts over all devices; {_PACKING}"),
    same(f"{_REF}.log_prob_micro_batch_size", why=f"counts over all devices; {_PACKING}"),
    same(
        f"{_ROLLOUT}.log_prob_(micro_batch_size|micro_batch_size_per_gpu|max_token_len_per_gpu)",
        why=f"this pass has the micro-batches of {_ACTOR}.max_tokens_per_micro_batch; no number depends on it",
    ),
    same(
        f"{_ACTOR}.ppo_infer_(micro_batch_size_per_gpu|max_token_len_per_gpu)",
        why=f"this pass has the micro-batches of {_ACTOR}.max_tokens_per_micro_batch; no number depends on it",
    ),
    same(
        "critic.(forward_micro_batch_size|forward_micro_batch_size_per_gpu|forward_max_token_len_per_gpu|"
        "ppo_infer_micro_batch_size_per_gpu|ppo_infer_max_token_len_per_gpu)",
        why="this pass has the micro-batches of critic.max_tokens_per_micro_batch; no number depends on it",
    ),
    same("reward_model.(micro_batch_size|micro_batch_size_per_gpu|max_length)", why=_PACKING),
    same(f"{_TRAINED}.shuffle", False, why="mini-batches are the step's samples in the order of their prompts"),
    same(f"{_TRAINED}.data_loader_seed", why="mini-batches are not shuffled"),
    same("critic.rollout_n", why=f"{_ROLLOUT}.n says it"),
]

_MEGATRON_KEYS = [
    *OVERRIDE_ENTRIES,
    same(f"{_ANY}.megatron.use_mbridge", True, why="weights go from and to Hugging Face names by one table per family"),
    same(f"{_ANY}.megatron.vanilla_mbridge", why="weights go from and to Hugging Face names by one table per family"),
    same(
        f"{_ANY}.megatron.use_dist_checkpointing",
        why="a rank reads its part of the model's directory; a checkpoint goes on with trainer.resume_mode",
    ),
    absent(
        f"{_ANY}.megatron.dist_checkpointing_path",
        *_NONE,
        why="a model starts from a Hugging Face directory, of which each rank reads its part",
        instead="leave it out, and set the model's path to that directory",
    ),
    same(f"{_ANY}.megatron.dist_checkpointing_prefix", why="checkpoints have names of their own"),
    same(
        f"{_ANY}.megatron.(dist_ckpt_optim_fully_reshardable|distrib_optim_fully_reshardable_mem_efficient)",
        why="a checkpoint loads on every layout",
    ),
    absent(
        f"{_ANY}.megatron.dynamic_context_parallel",
        *_OFF,
        why="context_parallel_size is the same for all sequences",
    ),
    goes_with(f"{_ANY}.megatron.max_seqlen_per_dp_cp_rank", "dynamic_context_parallel"),
    same(f"{_ANY}.megatron.(pad_bshd_to_minibatch_max|pad_to_length|pad_to_length_*)", why=_PACKED),
    absent(f"{_ANY}.megatron.use_megatron_fsdp", *_OFF, why="gradients are reduced by Megatron's own data parallelism"),
    same(f"{_ANY}.megatron.(forward_only|load_weight)|{_ANY}.load_weight", why="what a role does says it"),
    same(
        f"({_ACTOR}|{_REF}).(megatron.|)entropy_(from_logits_with_chunking|from_logits_chunk_size|checkpointing)|"
        f"({_ACTOR}|{_REF}).(megatron.|)(entropy_chunk_size|use_entropy_chunking|chunked_entropy*)",
        why="log-probs and entropy are computed in pieces; no number depends on it",
    ),
    renamed(
        f"({_POLICY}|{_ANY}.megatron|{_ANY}).nccl_timeout",
        "trainer.timeout_s",
        why="seconds of every collective and worker call",
        convert=_seconds,
    ),
    absent(
        f"{_ANY}.megatron.nccl_communicator_config_path",
        None,
        why="NCCL is configured by its environment variables",
        instead="leave it out, and export them before the command",
    ),
    absent(f"{_ANY}.megatron.extra", {}, None, why=_MEGATRON),
    absent(f"{_ANY}.megatron.enable", True, why=_MEGATRON),
    same(f"({_ANY}|trainer).strategy|model_engine", "megatron", "fsdp", "fsdp2", "dp", why=_MEGATRON),
    renamed(f"{_ANY}(.model|).fsdp_config.(param_offload|optimizer_offload)", r"\1.megatron.\3", why=_MEGATRON),
    renamed(
        f"({_ACTOR}|{_REF}|critic).(fsdp_config.|)ulysses_sequence_parallel_size",
        r"\1.megatron.context_parallel_size",
        why="devices that share a sequence, by Ulysses",
    ),
    same(
        f"{_ANY}(.model|).(fsdp_config|fsdp).**",
        why=f"{_MEGATRON}, whose optimizer state is split over data-parallel ranks",
    ),
    same(f"{_ANY}.(engine|model).strategy", why=_MEGATRON),
    same(f"{_ANY}.(use_torch_compile|torch_compile)", why="Megatron's layers; no number depends on it"),
]

_OPTIMIZER = [
    renamed(f"{_TRAINED}.grad_clip", r"\1.optim.clip_grad"),
    same(f"{_TRAINED}.optim.optimizer", "adam", "adamw", why="the optimizer is Adam with decoupled weight decay"),
    same(f"{_TRAINED}.optim.optimizer_impl", "torch.optim", why="the optimizer is Megatron's Adam"),
    renamed(f"{_TRAINED}.optim.lr_warmup_steps", r"\1.optim.lr_warmup_steps", only=(-1, None), convert=lambda _: 0),
    computed(
        f"{_TRAINED}.optim.lr_warmup_steps_ratio",
        "0: already so; else `....optim.lr_warmup_steps`, where trainer.total_training_steps is set",
        "a number of optimizer updates",
        lr_warmup_ratio,
        asks_others=True,
    ),
    same(f"{_TRAINED}.optim.total_training_steps", why="lr_decay_steps says where the learning rate ends"),
    computed(f"{_TRAINED}.optim.(warmup_style|lr_scheduler_type)", "`....optim.lr_decay_style`", "", _warmup_style),
    absent(f"{_TRAINED}.optim.lr_warmup_init", 0, None, why="warm-up starts from 0"),
    absent(
        f"{_TRAINED}.optim.min_lr_ratio",
        0,
        None,
        why="the floor of the learning rate is a number",
        instead="set optim.min_lr",
    ),
    absent(f"{_TRAINED}.optim.num_cycles", 0.5, None, why="a cosine goes down once"),
    same(f"{_TRAINED}.optim.weight_decay_incr_style", "constant", why="weight decay stays as it is"),
    goes_with(f"{_TRAINED}.optim.lr_wsd_*", "lr_decay_style=WSD"),
    goes_with(f"{_TRAINED}.optim.muon_*", "optimizer=muon"),
    same(
        f"{_TRAINED}.optim.use_checkpoint_opt_param_scheduler",
        why="a resumed run goes on with the schedule that it would have had",
    ),
    same(
        f"{_TRAINED}.optim.(use_precision_aware_optimizer|main_grads_dtype|main_params_dtype|exp_avg_dtype|exp_avg_sq_dtype)",
        False,
        "fp32",
        "float32",
        why="main parameters, gradients and moments are float32",
    ),
    same(f"{_TRAINED}.optim.zero_indexed_step", why="no update has a learning rate of 0 while it warms up"),
]

_ACTOR_KEYS = [
    same(f"{_ACTOR}.calculate_entropy", why="entropy is a metric of every step"),
    same(f"{_ACTOR}.calculate_sum_pi_squared", False, why="no estimator here wants it"),
    absent(f"({_ACTOR}|{_REF}).router_replay.mode", "disabled", None, why="routers choose anew in every pass"),
    goes_with(f"({_ACTOR}|{_REF}).router_replay.*", f"{_ACTOR}.router_replay.mode"),
    same(f"{_ACTOR}.freeze_vision_tower", why="models are language models"),
    absent(f"{_ACTOR}.(use_prefix_grouper|freeze_moe_router)", *_OFF, why="every token of a sample is computed"),
    computed(
        f"{_ACTOR}.tis_imp_ratio_cap",
        "`algorithm.rollout_correction.rollout_is=token` and `....rollout_is_threshold`",
        "truncated importance sampling",
        _importance_cap,
    ),
    renamed(
        f"{_TRAINED}.loss_scale_factor",
        r"\1.loss_scale_factor",
        only=(None,),
        convert=lambda _: "${data.max_response_length}",
    ),
    same(
        f"{_ACTOR}.use_rollout_log_probs",
        False,
        why="old log-probs are the trainer's; algorithm.rollout_correction.bypass_mode=true takes the sampler's",
    ),
    renamed(f"{_ACTOR}.use_rollout_log_probs", "algorithm.rollout_correction.bypass_mode", only=(True,)),
    computed(
        f"{_TRAINED}.checkpoint.(save_contents|load_contents|contents)",
        "model, optimizer, extra: already so",
        "",
        _save_contents,
    ),
    same(f"({_ANY}).checkpoint.strict", why="a checkpoint of another model is refused"),
    renamed(f"{_TRAINED}.checkpoint.async_save", "trainer.async_save", only=(True,), convert=lambda _: True),
    same(f"{_TRAINED}.checkpoint.*", False, None, why="a checkpoint holds the whole model"),
    absent(f"{_ACTOR}.qat.enable", *_OFF, why="weights are trained in megatron.dtype"),
    goes_with(f"{_ACTOR}.qat.**", f"{_ACTOR}.qat.enable"),
    renamed(f"{_REF}.model.path", f"{_REF}.model_path"),
    absent(f"{_REF}.enable", None, True, why="a run has a reference model where a KL is used"),
    computed("critic.enable", "already so where `algorithm.adv_estimator` has it so", "", critic_enable),
    same("critic.(ppo_epochs_*|kl_ctrl.**)", why="algorithm.kl_ctrl says it"),
]

_ROLLOUT_KEYS = [
    renamed(
        f"{_ROLLOUT}.name",
        f"{_ROLLOUT}.name",
        only=("vllm", "trtllm", "hf", "vllm_spmd"),
        convert=lambda _: "sglang",
        why="samples are SGLang's",
    ),
    same(f"{_ROLLOUT}.mode", "async", why="the rollout is a server, asked for each sample"),
    same(f"{_ROLLOUT}.calculate_log_probs", why="the sampler's log-probs are kept and compared in every step"),
    same(f"{_ROLLOUT}.logprobs_mode", "processed_logprobs", why="log-probs are those that were sampled from"),
    same(f"{_ROLLOUT}.do_sample", True, why="training samples; greedy is for validations (val_kwargs.do_sample)"),
    renamed(f"{_ROLLOUT}.enforce_eager", f"{_SGLANG}.disable_cuda_graph", neutral=(False, None)),
    renamed(f"{_ROLLOUT}.cudagraph_capture_sizes", f"{_SGLANG}.cuda_graph_bs", neutral=(None,)),
    renamed(
        f"{_ROLLOUT}.max_num_batched_tokens",
        f"{_SGLANG}.max_prefill_tokens",
        neutral=(None,),
        why="tokens of prompts in one batch",
    ),
    renamed(
        f"{_ROLLOUT}.enable_chunked_prefill",
        f"{_SGLANG}.chunked_prefill_size",
        neutral=(True, None),
        convert=lambda _: -1,
        why="no prompt is cut",
    ),
    renamed(f"{_ROLLOUT}.enable_prefix_caching", f"{_SGLANG}.disable_radix_cache", neutral=(True, None), convert=_not),
    computed(f"{_ROLLOUT}.max_model_len", "already so where it is no less", "", _max_model_len),
    computed(
        f"{_ROLLOUT}.(prompt|response)_length",
        "already so where it is `data.max_prompt_length`, `data.max_response_length`",
        "a sample has one limit",
        response_limit,
    ),
    same(
        f"{_ROLLOUT}.load_format",
        why="servers start from the model's files and get the trainer's weights before a sample",
    ),
    _one_device_per_stage("pipeline_model_parallel_size", "a replica's layers are not split into stages"),
    renamed(f"{_ROLLOUT}.expert_parallel_size", f"{_SGLANG}.ep_size", neutral=(1, None)),
    absent(
        f"{_ROLLOUT}.data_parallel_size",
        1,
        None,
        why="replicas are independent servers",
        instead=f"leave it out; {_ROLLOUT}.num_replicas says how many there are",
    ),
    renamed(
        f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", f"{_ROLLOUT}.update_weights_bucket_megabytes"
    ),
    renamed(
        f"{_ROLLOUT}.checkpoint_engine.backend",
        f"{_ROLLOUT}.weight_transport",
        only=("naive",),
        convert=lambda _: "auto",
    ),
    renamed(
        f"{_ROLLOUT}.checkpoint_engine.backend",
        f"{_ROLLOUT}.weight_transport",
        only=("nccl",),
        convert=lambda _: "broadcast",
    ),
    absent(f"{_ROLLOUT}.checkpoint_engine.backend", why=f"weights take the ways of {_ROLLOUT}.weight_transport"),
    goes_with(f"{_ROLLOUT}.checkpoint_engine.**", f"{_ROLLOUT}.checkpoint_engine.backend"),
    same(f"{_ROLLOUT}.(disable_log_stats|skip_tokenizer_init|layered_summon)", why="no number depends on it"),
    same(f"{_ROLLOUT}.scheduling_policy", "fcfs", why="requests are served as they come"),
    same(f"{_ROLLOUT}.multi_stage_wake_up", why="servers get weights first and their KV cache after it"),
    absent(f"{_ROLLOUT}.over_sample_rate", 0, None, why="data.gen_batch_size says how many prompts a step begins"),
    absent(f"{_ROLLOUT}.quantization", *_NONE, why="servers have the trainer's weights, unchanged"),
    goes_with(f"{_ROLLOUT}.quantization_config_file", f"{_ROLLOUT}.quantization"),
    absent(f"{_ROLLOUT}.full_determinism", *_OFF, why="each sample has a seed; batches of a server vary"),
    absent(f"{_ROLLOUT}.(multi_turn|agent_loop).enable", *_OFF, why="a sample is one answer, without tools or turns"),
    goes_with(f"{_ROLLOUT}.multi_turn.**", f"{_ROLLOUT}.multi_turn.enable"),
    same(f"{_ROLLOUT}.agent.default_agent_loop", "single_turn_agent", None, why="a sample is one answer"),
    same(f"{_ROLLOUT}.agent.num_workers", why="samples are asked for and scored as they come"),
    absent(
        f"{_ROLLOUT}.agent.(agent_loop_config_path|agent_loop_manager_class|custom_async_server.path|custom_async_server.name)",
        *_NONE,
        why="a sample is one answer of the model",
    ),
    absent(f"{_ROLLOUT}.trace.backend", *_NONE, why="trainer.rollout_data_dir keeps the samples of a step"),
    goes_with(f"{_ROLLOUT}.trace.*", f"{_ROLLOUT}.trace.backend"),
    absent(f"{_ROLLOUT}.prometheus.enable", *_OFF, why="metrics of servers are logged with the step's"),
    goes_with(f"{_ROLLOUT}.prometheus.*", f"{_ROLLOUT}.prometheus.enable"),
    absent(f"{_ROLLOUT}.mtp.enable", *_OFF, why="servers decode without a draft"),
    goes_with(f"{_ROLLOUT}.(mtp|qat).**", f"{_ROLLOUT}.mtp.enable"),
    absent(f"{_ROLLOUT}.disaggregation.enabled", *_OFF, why="a replica computes prompts and answers"),
    goes_with(f"{_ROLLOUT}.disaggregation.**", f"{_ROLLOUT}.disaggregation.enabled"),
    absent(f"{_ROLLOUT}.enable_rollout_routing_replay", *_OFF, why="the trainer's routers choose by themselves"),
    absent(f"{_ROLLOUT}.moe_load_balance_metrics_interval", 0, None, why="servers do not count their experts"),
    absent(f"{_ROLLOUT}.limit_images", None, why="prompts are text"),
    absent(f"{_ROLLOUT}.(val_kwargs.|)repetition_penalty", 1, None, why="the policy is the model alone"),
    absent(f"{_ROLLOUT}.(presence_penalty|frequency_penalty|min_p)", 0, None, why="the policy is the model alone"),
    same(
        f"{_ROLLOUT}.(n_agent|micro_batch_size|dtype_*|tokens_per_second)", why="servers batch requests by themselves"
    ),
    goes_with(f"{_ROLLOUT}.engine_kwargs.(vllm|trtllm)(.**|)", f"{_ROLLOUT}.name=vllm or trtllm"),
    renamed(
        f"{_ROLLOUT}.val_kwargs.temperature",
        f"{_ROLLOUT}.val_kwargs.do_sample",
        only=(0,),
        convert=lambda _: False,
        why="greedy",
    ),
    renamed(f"({_ROLLOUT}|{_ROLLOUT}.val_kwargs).top_k", r"\1.top_k", only=(0, None), convert=lambda _: -1),
    renamed("rollout.(nnodes|n_gpus_per_node)", rf"{_ROLLOUT}.resource_pool.\1", why="devices of the servers alone"),
    renamed(
        f"{_ROLLOUT}.(nnodes|n_gpus_per_node)", rf"{_ROLLOUT}.resource_pool.\1", why="devices of the servers alone"
    ),
]

_ALGORITHM = [
    renamed(
        "algorithm.adv_estimator",
        "algorithm.adv_estimator",
        only=("grpo_vectorized",),
        convert=lambda _: "grpo",
        why="the same estimator",
    ),
    renamed(
        "algorithm.adv_estimator",
        "algorithm.adv_estimator",
        only=("rloo_vectorized",),
        convert=lambda _: "rloo",
        why="the same estimator",
    ),
    renamed(
        "algorithm.filter_groups.metric", "algorithm.filter_groups.metric", only=(None,), convert=lambda _: "score"
    ),
    renamed(
        "algorithm.filter_groups.max_num_gen_batches",
        "algorithm.filter_groups.max_num_gen_batches",
        only=(0, -1, None),
        convert=lambda _: 1_000_000,
        why="no limit",
    ),
    same("algorithm.filter_groups.max_inflight_gen_batches", why="rounds follow each other"),
    absent(
        "algorithm.rollout_correction.rollout_rs_threshold_lower",
        None,
        why="a threshold has both bounds",
        instead="set algorithm.rollout_correction.rollout_rs_threshold=[lower,upper]",
    ),
    absent(
        "algorithm.rollout_correction.use_policy_gradient",
        *_OFF,
        why="actor.policy_loss.loss_mode says the loss",
        instead="set it to gpg",
    ),
    absent("algorithm.use_pf_ppo", *_OFF, why="samples are not drawn again by their scores"),
    goes_with("algorithm.pf_ppo.*", "algorithm.use_pf_ppo"),
    goes_with("algorithm.gdpo_*", "algorithm.adv_estimator=gdpo"),
    same("algorithm.rollout_correction.loss_type", "ppo_clip", why="actor.policy_loss.loss_mode says the loss"),
    renamed(
        "algorithm.(rollout_is|rollout_is_threshold|rollout_rs|rollout_rs_threshold|rollout_token_veto_threshold)",
        r"algorithm.rollout_correction.\1",
    ),
    absent(
        "algorithm.(rollout_is_threshold_lower|rollout_is_level|rollout_is_mode)",
        None,
        why="a threshold has both bounds",
        instead="set algorithm.rollout_correction.rollout_is_threshold=[lower,upper]",
    ),
    absent("algorithm.(f_norm|alpha)", 1, None, why="gpg has it at 1"),
]

_REWARD = [
    computed("reward.reward_manager(.name|)", "`reward_model.reward_manager`", "", _reward_manager),
    same(
        "reward.reward_manager.source|reward_model.reward_manager_source",
        "register",
        None,
        why="managers are registered",
    ),
    absent(
        "reward.reward_manager.module.**",
        None,
        why="managers are registered",
        instead="register yours in a file of trainer.import_files (docs/extending.md)",
    ),
    goes_with("reward_model.reward_loop_*", "reward_model.reward_manager"),
    renamed("reward.custom_reward_function.(path|name)", r"custom_reward_function.\1"),
    renamed("reward.custom_reward_function.reward_kwargs", "custom_reward_function.reward_kwargs"),
    renamed("reward.custom_reward_function.reward_kwargs.(**)", r"custom_reward_function.reward_kwargs.\1"),
    renamed(
        "(reward|reward_model).reward_kwargs.overlong_buffer_cfg.(enable|len|penalty_factor|log)",
        r"reward_model.overlong_buffer.\2",
    ),
    renamed("(reward|reward_model).reward_kwargs.max_resp_len", "reward_model.overlong_buffer.max_resp_len"),
    renamed("reward.overlong_buffer.(*)", r"reward_model.overlong_buffer.\1"),
    absent(
        "(reward|reward_model).reward_kwargs.**",
        why="managers take no arguments of one's own",
        instead="give them to your function with custom_reward_function.reward_kwargs",
    ),
    same("(reward|reward_model).num_workers", why="samples are scored as they come"),
    same(
        "(reward|reward_model).(launch_reward_fn_async|use_reward_loop|launch_reward_fn_sub_thread)",
        why="samples are scored as they come",
    ),
    absent(
        "(reward|reward_model).sandbox_fusion.url",
        *_NONE,
        why="programs run in a sandbox on the rollout's node",
    ),
    goes_with("(reward|reward_model).sandbox_fusion.*", "sandbox_fusion.url"),
    renamed("reward.reward_model.enable", "reward_model.enable"),
    renamed("reward.reward_model.(model_path|model.path)|reward_model.model_path", "reward_model.model.path"),
    renamed(
        "(reward.reward_model|reward_model).(nnodes|n_gpus_per_node)",
        r"reward_model.resource_pool.\2",
        neutral=(0, None),
        why="devices of its own",
    ),
    same(
        "(reward.reward_model|reward_model).enable_resource_pool",
        why="reward_model.resource_pool.nnodes above 0 says it",
    ),
    same(
        "(reward.reward_model|reward_model).rollout.**",
        why="a model with a score head is computed by Megatron; a judge that writes has reward_model.judge.*",
    ),
    renamed("reward.reward_model.(*)", r"reward_model.\1"),
]

_TRAINER = [
    same("(**.|)_target_", why="a key says by its name what it configures"),
    absent(f"{_ROLLOUT}.skip_rollout", *_OFF, why="a step generates its samples"),
    goes_with(f"{_ROLLOUT}.(skip_dump_dir|skip.**)", f"{_ROLLOUT}.skip_rollout"),
    goes_with(f"{_ROLLOUT}.(use_block_quant_rollout|layer_name_map.**)", f"{_ROLLOUT}.quantization"),
    absent(f"{_ANY}.megatron.override_mcore_model_config", {}, None, why="a model is what its config.json says"),
    absent(f"{_ANY}.megatron.override_mcore_model_config.**", None, why="a model is what its config.json says"),
    same("trainer.balance_batch", True, why="the samples of a step are balanced over the ranks by their tokens"),
    renamed(
        "trainer.logger",
        "trainer.logger",
        only=("console", "mlflow", "file", "tensorboard", "wandb", "swanlab"),
        convert=_as_list,
    ),
    renamed("trainer.resume_from_path", "trainer.resume_from_path", only=(False,), convert=lambda _: None),
    renamed(
        "trainer.remove_previous_ckpt_in_save", "trainer.max_actor_ckpt_to_keep", only=(True,), convert=lambda _: 1
    ),
    same("trainer.remove_previous_ckpt_in_save", why="off"),
    computed(
        "trainer.max_critic_ckpt_to_keep",
        "`trainer.max_actor_ckpt_to_keep`, the larger of both",
        "a checkpoint holds actor and critic and goes as a whole",
        critic_kept,
    ),
    same("trainer.del_local_ckpt_after_load", False, why="checkpoints stay until newer ones take their place"),
    absent(
        "trainer.(default_hdfs_dir|hdfs_dir)",
        *_NONE,
        why="checkpoints are written to trainer.default_local_dir",
        instead="leave it out, and copy them from there",
    ),
    absent(
        "trainer.validation_data_dir",
        *_NONE,
        why="trainer.log_val_generations shows the samples of a validation",
    ),
    same("trainer.ray_wait_register_center_timeout", why="trainer.timeout_s limits every call of a worker"),
    same("trainer.(use_legacy_worker_impl|use_v1|v1.**|sync.**)", why="there is one trainer"),
    absent("trainer.esi_redundant_time", 0, None, why="a run that is asked to stop saves first (SIGUSR1)"),
    renamed("trainer.profile_steps", "trainer.profile_steps", only=_NONE, neutral=_NONE, convert=lambda _: []),
    renamed("global_profiler.steps", "trainer.profile_steps", neutral=(*_NONE, [])),
    renamed("global_profiler.tool", "trainer.profile_tool", only=("nsys",), convert=lambda tool: tool),
    renamed("global_profiler.tool", "trainer.profile_tool", only=("torch", "torch_memory"), convert=lambda _: "torch"),
    absent("global_profiler.tool", *_NONE, why="trainer.profile_tool is torch or nsys"),
    renamed(f"{_ACTOR}.profiler.ranks", "trainer.profile_ranks", neutral=(None, [])),
    renamed(f"{_ACTOR}.profiler.all_ranks", "trainer.profile_ranks", only=(True,), convert=lambda _: None),
    same("global_profiler.save_path", why="a profile is written to trainer.default_local_dir"),
    same(
        "(global_profiler|trainer).profile_continuous_steps",
        *_OFF,
        True,
        why="each step of trainer.profile_steps has a profile of its own",
    ),
    absent("trainer.npu_profile.options.steps", *_NONE, why="a run has no Ascend devices"),
    goes_with(
        "global_profiler.**|global_profiler|trainer.(npu_profile.**|controller_nsight_options.**|worker_nsight_options.**)|"
        f"({_POLICY}|{_ANY}|{_ROLLOUT}).profiler.**|data.profiler.**",
        "trainer.profile_steps",
    ),
    same("trainer.(rollout_data_freq_*|ref_*)", why="there is one trainer"),
    same("trainer.(task_runner.**|tensorboard_dir)", why="there is one driver"),
    same("trainer.nnodes_*", why="trainer.nnodes says it"),
    same(
        "(ray_kwargs.|)ray_init.runtime_env.(py_executable|working_dir)",
        why="workers run in the Python of this command",
    ),
    absent(
        "(ray_kwargs.|)ray_init.runtime_env.env_vars.**",
        why="workers have the environment of this command",
        instead="leave it out, and export it before the command",
    ),
    same(
        "(ray_kwargs.|)ray_init.(num_cpus|num_gpus|address|dashboard_*|include_dashboard|ignore_reinit_error|runtime_env.**|**)",
        why="scalerl starts or joins Ray by itself (docs/slurm.md)",
    ),
    same("ray_kwargs.timeline_json_file", *_NONE, why="Ray writes no timeline"),
    same("(ray_kwargs.|)ray_init.timeline_json_file", *_NONE, why="Ray writes no timeline"),
    absent("transfer_queue.enable", *_OFF, why="tokens go from worker to worker through Ray's object store"),
    goes_with("transfer_queue.**", "transfer_queue.enable"),
    absent("distillation.(enable|enabled)", *_OFF, why="a policy learns from rewards"),
    goes_with("distillation.**", "distillation.enabled"),
    absent("skip.(**.|)(enable|enabled)", *_OFF, why="a step generates its samples"),
    goes_with("skip.**", "skip.enable"),
    absent(
        "async_training.**",
        why="a run is asynchronous by trainer.max_staleness",
        instead=f"leave it out; set trainer.max_staleness, {_POLICY}.hybrid_engine=false, {_ROLLOUT}.resource_pool",
    ),
    absent(
        "hydra(.**|/**|)",
        why="scalerl makes no Hydra run directory",
        instead="leave it out; trainer.default_local_dir is where a run writes",
    ),
]
# verl's SFT trainers.
_SFT = [
    computed(
        "(data|engine).max_token_len_per_gpu",
        f"`data.{_MAX_TOKENS}`, times `megatron.context_parallel_size`",
        _ALL_DEVICES,
        tokens_of_a_device,
        asks_others=True,
    ),
    same("data.(micro_batch_size|micro_batch_size_per_gpu|use_dynamic_bsz)", why=_PACKING),
    renamed("(model|trainer).partial_pretrain", "model.path"),
    same("data.(chat_template|multiturn.enable)", None, False, True, why="a row has its messages"),
    renamed("data.multiturn.messages_key", "data.messages_key"),
    renamed("data.multiturn.tools_key", "data.tools_key"),
    same(
        "model.(use_remove_padding|enable_gradient_checkpointing|strategy)",
        True,
        "megatron",
        "fsdp",
        "fsdp2",
        why=_PACKED,
    ),
    same("(use_remove_padding|ulysses_sequence_parallel_size)", True, 1, why=_PACKED),
    same("(model.fsdp_config|engine).**|engine", why=_MEGATRON),
    renamed("optim.clip_gradient|optim.grad_clip", "optim.clip_grad"),
]

ENTRIES: dict[str, list[Entry]] = {
    "ppo": [
        *_DATA,
        *_MODEL_KEYS,
        *_BATCHES,
        *_MEGATRON_KEYS,
        *_OPTIMIZER,
        *_ACTOR_KEYS,
        *_ROLLOUT_KEYS,
        *_ALGORITHM,
        *_REWARD,
        *_TRAINER,
    ],
    "sft": [*_SFT, *_DATA, *_TRAINER],
    "generation": _TRAINER,
    "eval": _TRAINER,
}
