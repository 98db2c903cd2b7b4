"""The command line of an SGLang server, from the rollout configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, Literal

from scalerl.config.schema import RolloutConfig
from scalerl.rollout.context_length import check_context_length
from scalerl.rollout.cpu_shim import shim_environment
from scalerl.rollout.sglang_plugin import ATTENTION_BACKEND, PLUGIN

# Of the machine's memory, an upper bound for weights and KV cache; in practice max_total_tokens limits the cache.
CPU_MEM_FRACTION_STATIC = 0.5
# SGLang keeps the last tokens of a context for itself: 6 of the prompt, 2 of the response (tp_worker.py, scheduler.py).
CONTEXT_SLACK = 8
# Reads buckets out of memory that the trainer's ranks write.
MAPPED_LOADER = "scalerl.rollout.mapped.load"


def sglang_command(
    *,
    model_path: str,
    rollout: RolloutConfig,
    port: int,
    max_model_len: int,
    device: Literal["cpu", "cuda"],
    host: str = "127.0.0.1",
    gpu_ids: Sequence[int | str] | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
    log_level: str = "warning",
) -> tuple[list[str], dict[str, str]]:
    """-> (command, environment variables to add).

    max_model_len: tokens of prompt + response.  gpu_ids: devices of this replica; None leaves CUDA_VISIBLE_DEVICES.
    `rollout.engine_kwargs["sglang"]` has the last word: a value replaces ours, true is a bare flag, null or false drops
    the argument, a list gives several values.  ValueError when max_model_len exceeds the model's positions.
    """
    check_context_length(model_path, max_model_len)
    arguments: dict[str, Any] = {
        "model_path": model_path,
        "host": host,
        "port": port,
        "tp_size": rollout.tensor_model_parallel_size,
        "dtype": rollout.dtype,
        "context_length": max_model_len + CONTEXT_SLACK,
        "max_running_requests": rollout.max_num_seqs,
        "random_seed": seed,
        # Numeric from the start, so that every sample's version parses; `RolloutClient.set_policy_version` changes it.
        "weight_version": "0",
        "log_level": log_level,
        "skip_server_warmup": True,
        # A model's generation_config.json may ask for a repetition penalty; the policy is the model alone.
        "sampling_defaults": "openai",
        "trust_remote_code": trust_remote_code,
        # Answers are streams, so that each sample comes when it is finished; of its tokens only the first comes before.
        "stream_interval": 2**30,
    }
    # /health without a generated token: a probe must not wait behind a full batch.
    env = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
    # The model is a directory.
    env["HF_HUB_OFFLINE"] = "1"
    # The slack may lie beyond the model's positions: no token ever gets there.
    env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if device == "cpu":
        arguments |= _cpu_arguments(rollout, max_model_len)
        env |= _cpu_environment(rollout.tensor_model_parallel_size)
    else:
        arguments |= _gpu_arguments(rollout)
        if gpu_ids is not None:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in gpu_ids)
    arguments |= {key.replace("-", "_"): value for key, value in (rollout.engine_kwargs.get("sglang") or {}).items()}
    if device == "cpu":
        # Ours as well as the user's.
        arguments["custom_weight_loader"] = [*(arguments.get("custom_weight_loader") or []), MAPPED_LOADER]
    return [sys.executable, "-m", "scalerl.rollout.sglang_launch", *_flags(arguments)], env


def _cpu_arguments(rollout: RolloutConfig, max_model_len: int) -> dict[str, Any]:
    return {
        "device": "cpu",
        "attention_backend": ATTENTION_BACKEND,
        "sampling_backend": "pytorch",
        # Overlap hides host work behind the device; here both are the same cores.
        "disable_overlap_schedule": True,
        # An idle scheduler polls without pause otherwise: half a core that the trainer needs. Where there are
        # more ranks the others would still poll.
        "sleep_on_idle": rollout.tensor_model_parallel_size == 1,
        "mem_fraction_static": CPU_MEM_FRACTION_STATIC,
        "max_total_tokens": rollout.max_num_seqs * (max_model_len + CONTEXT_SLACK),
    }


def _cpu_environment(tp_size: int) -> dict[str, str]:
    # A machine may have a GPU and be told not to use it.
    env = {"CUDA_VISIBLE_DEVICES": ""} | shim_environment()
    if allowed := os.environ.get("SGLANG_PLUGINS"):
        # The user's list of plugins that SGLang may load, which has the attention backend then too.
        env["SGLANG_PLUGINS"] = f"{allowed},{PLUGIN}"
    if tp_size > 1:
        # One core per rank; without it SGLang wants a NUMA node for each.
        cores = sorted(os.sched_getaffinity(0))
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(tp_size))
    return env


def _gpu_arguments(rollout: RolloutConfig) -> dict[str, Any]:
    return {
        "mem_fraction_static": rollout.gpu_memory_utilization,
        "enable_memory_saver": rollout.free_cache_engine,
    }


def _flags(arguments: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            flags += [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
    return flags
