"""Keys of verl's rollout."""

from __future__ import annotations

import re
from typing import Any

from scalerl.extras.verl.keys.batch_units import response_limit
from scalerl.extras.verl.keys.entry import (
    AlreadySo,
    Becomes,
    Context,
    Entry,
    Outcome,
    Refused,
    absent,
    computed,
    goes_with,
    renamed,
    same,
    written_by_user,
)
from scalerl.extras.verl.keys.vocabulary.words import NONE, OFF, POLICY, PROGRAM, ROLLOUT, SGLANG, TURNS


def _not(value: Any) -> Any:
    return not value if isinstance(value, bool) else value


def _max_model_len(_: re.Match[str], value: Any, context: Context) -> Outcome:
    sizes = [context.value(f"data.{name}") for name in ("max_prompt_length", "max_response_length")]
    if value is None or (all(isinstance(size, int) for size in sizes) and sum(sizes) <= value):
        return AlreadySo("servers have room for data.max_prompt_length + data.max_response_length")
    return Refused(
        "servers have room for data.max_prompt_length + data.max_response_length, which is more; set data."
        "max_response_length lower, and leave this out"
    )


def _own_nodes(_: re.Match[str], value: Any, __: Context) -> Outcome:
    """Reads the nodes of verl's separate servers, which share no devices with the trainer."""
    own = {f"{ROLLOUT}.resource_pool.nnodes": value}
    return Becomes(own | {f"{POLICY}.hybrid_engine": False} if value else own, "devices of the servers alone")


def _one_device_per_stage(name: str, why: str) -> Entry:
    return absent(f"{ROLLOUT}.{name}", 1, None, why=why)


ROLLOUT_KEYS = [
    renamed(
        f"{ROLLOUT}.name",
        f"{ROLLOUT}.name",
        only=("vllm", "trtllm", "hf", "vllm_spmd"),
        convert=lambda _: "sglang",
        why="samples are SGLang's",
    ),
    same(f"{ROLLOUT}.mode", "async", why="the rollout is a server, asked for each sample"),
    same(f"{ROLLOUT}.calculate_log_probs", why="the sampler's log-probs are kept and compared in every step"),
    same(f"{ROLLOUT}.logprobs_mode", "processed_logprobs", why="log-probs are those that were sampled from"),
    same(f"{ROLLOUT}.do_sample", True, why="training samples; greedy is for validations (val_kwargs.do_sample)"),
    renamed(f"{ROLLOUT}.enforce_eager", f"{SGLANG}.disable_cuda_graph", neutral=(False, None)),
    renamed(f"{ROLLOUT}.cudagraph_capture_sizes", f"{SGLANG}.cuda_graph_bs", neutral=(None,)),
    renamed(
        f"{ROLLOUT}.max_num_batched_tokens",
        f"{SGLANG}.max_prefill_tokens",
        neutral=(None,),
        why="tokens of prompts in one batch",
    ),
    renamed(
        f"{ROLLOUT}.enable_chunked_prefill",
        f"{SGLANG}.chunked_prefill_size",
        neutral=(True, None),
        convert=lambda _: -1,
        why="no prompt is cut",
    ),
    renamed(f"{ROLLOUT}.enable_prefix_caching", f"{SGLANG}.disable_radix_cache", neutral=(True, None), convert=_not),
    computed(f"{ROLLOUT}.max_model_len", "already so where it is no less", "", _max_model_len),
    computed(
        f"{ROLLOUT}.(prompt|response)_length",
        "already so where it is `data.max_prompt_length`, `data.max_response_length`",
        "a sample has one limit",
        response_limit,
    ),
    same(
        f"{ROLLOUT}.load_format",
        why="servers start from the model's files and get the trainer's weights before a sample",
    ),
    _one_device_per_stage("pipeline_model_parallel_size", "a replica's layers are not split into stages"),
    renamed(f"{ROLLOUT}.expert_parallel_size", f"{SGLANG}.ep_size", neutral=(1, None)),
    renamed(
        f"{ROLLOUT}.enable_expert_parallel",
        f"{SGLANG}.ep_size",
        only=(True,),
        convert=lambda _: f"${{{ROLLOUT}.tensor_model_parallel_size}}",
        why="the devices of a replica share its experts",
    ),
    same(f"{ROLLOUT}.enable_expert_parallel", *OFF, why="off"),
    same(f"{ROLLOUT}.rollout_world_size", why=f"{ROLLOUT}.num_replicas follows from the devices"),
    absent(
        f"{ROLLOUT}.(data_parallel_size|dp_model_parallel_size)",
        1,
        None,
        why="replicas are independent servers",
        instead=f"leave it out; {ROLLOUT}.num_replicas says how many there are",
    ),
    renamed(
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", f"{ROLLOUT}.update_weights_bucket_megabytes"
    ),
    renamed(
        f"{ROLLOUT}.checkpoint_engine.backend",
        f"{ROLLOUT}.weight_transport",
        only=("naive",),
        convert=lambda _: "auto",
    ),
    renamed(
        f"{ROLLOUT}.checkpoint_engine.backend",
        f"{ROLLOUT}.weight_transport",
        only=("nccl",),
        convert=lambda _: "broadcast",
    ),
    absent(f"{ROLLOUT}.checkpoint_engine.backend", why=f"weights take the ways of {ROLLOUT}.weight_transport"),
    goes_with(f"{ROLLOUT}.checkpoint_engine.**", f"{ROLLOUT}.checkpoint_engine.backend"),
    same(f"{ROLLOUT}.(disable_log_stats|skip_tokenizer_init|layered_summon)", why="no number depends on it"),
    same(f"{ROLLOUT}.scheduling_policy", "fcfs", why="requests are served as they come"),
    same(f"{ROLLOUT}.multi_stage_wake_up", why="servers get weights first and their KV cache after it"),
    absent(f"{ROLLOUT}.over_sample_rate", 0, None, why="data.gen_batch_size says how many prompts a step begins"),
    absent(f"{ROLLOUT}.quantization", *NONE, why="servers have the trainer's weights, unchanged"),
    goes_with(f"{ROLLOUT}.quantization_config_file", f"{ROLLOUT}.quantization"),
    absent(f"{ROLLOUT}.full_determinism", *OFF, why="each sample has a seed; batches of a server vary"),
    written_by_user(f"{ROLLOUT}.(multi_turn|agent_loop).enable", *OFF, key=PROGRAM, what="program", why=TURNS),
    goes_with(f"{ROLLOUT}.multi_turn.**", f"{ROLLOUT}.multi_turn.enable"),
    written_by_user(
        f"{ROLLOUT}.agent.default_agent_loop", "single_turn_agent", None, key=PROGRAM, what="program", why=TURNS
    ),
    same(f"{ROLLOUT}.agent.num_workers", why="samples are asked for and scored as they come"),
    written_by_user(
        f"{ROLLOUT}.agent.(agent_loop_config_path|agent_loop_manager_class|custom_async_server.path|custom_async_server.name)",
        *NONE,
        key=PROGRAM,
        what="program",
        why=TURNS,
    ),
    absent(f"{ROLLOUT}.trace.backend", *NONE, why="trainer.rollout_data_dir keeps the samples of a step"),
    goes_with(f"{ROLLOUT}.trace.*", f"{ROLLOUT}.trace.backend"),
    absent(f"{ROLLOUT}.prometheus.enable", *OFF, why="metrics of servers are logged with the step's"),
    goes_with(f"{ROLLOUT}.prometheus.*", f"{ROLLOUT}.prometheus.enable"),
    absent(f"{ROLLOUT}.mtp.enable", *OFF, why="servers decode without a draft"),
    goes_with(f"{ROLLOUT}.mtp.**", f"{ROLLOUT}.mtp.enable"),
    absent(f"{ROLLOUT}.qat.enable", *OFF, why="servers have the trainer's weights, unchanged"),
    goes_with(f"{ROLLOUT}.qat.**", f"{ROLLOUT}.qat.enable"),
    absent(f"{ROLLOUT}.disaggregation.enabled", *OFF, why="a replica computes prompts and answers"),
    goes_with(f"{ROLLOUT}.disaggregation.**", f"{ROLLOUT}.disaggregation.enabled"),
    absent(f"{ROLLOUT}.enable_rollout_routing_replay", *OFF, why="the trainer's routers choose by themselves"),
    absent(f"{ROLLOUT}.moe_load_balance_metrics_interval", 0, None, why="servers do not count their experts"),
    absent(f"{ROLLOUT}.limit_images", None, why="prompts are text"),
    absent(f"{ROLLOUT}.(val_kwargs.|)repetition_penalty", 1, None, why="the policy is the model alone"),
    same(f"{ROLLOUT}.swap_space", why="what does not fit the KV cache is computed again, nothing is swapped"),
    absent(f"{ROLLOUT}.use_fire_sampling", *OFF, why="a sample's first token is drawn as its others are"),
    absent(f"{ROLLOUT}.(presence_penalty|frequency_penalty|min_p)", 0, None, why="the policy is the model alone"),
    absent(
        f"{ROLLOUT}.n_agent",
        1,
        None,
        why=f"a prompt has {ROLLOUT}.n samples",
        instead=f"leave it out, and set {ROLLOUT}.n",
    ),
    same(f"{ROLLOUT}.(micro_batch_size|dtype_*|tokens_per_second)", why="servers batch requests by themselves"),
    goes_with(f"{ROLLOUT}.engine_kwargs.(vllm|trtllm)(.**|)", f"{ROLLOUT}.name=vllm or trtllm"),
    renamed(
        f"{ROLLOUT}.val_kwargs.temperature",
        f"{ROLLOUT}.val_kwargs.do_sample",
        only=(0,),
        convert=lambda _: False,
        why="greedy",
    ),
    renamed(f"({ROLLOUT}|{ROLLOUT}.val_kwargs).top_k", r"\1.top_k", only=(0, None), convert=lambda _: -1),
    computed(
        "rollout.nnodes",
        f"`{ROLLOUT}.resource_pool.nnodes`, `{POLICY}.hybrid_engine=false`",
        "devices of the servers alone",
        _own_nodes,
    ),
    renamed("rollout.n_gpus_per_node", f"{ROLLOUT}.resource_pool.n_gpus_per_node", why="devices of the servers alone"),
    renamed(f"{ROLLOUT}.(nnodes|n_gpus_per_node)", rf"{ROLLOUT}.resource_pool.\1", why="devices of the servers alone"),
]
