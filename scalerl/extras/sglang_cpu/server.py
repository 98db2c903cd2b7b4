"""How a server of SGLang starts without a GPU, and the environment in which sglang is imported then."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from scalerl.errors import UserError
from scalerl.extras.sglang_cpu.plugin import ATTENTION_BACKEND, PLUGIN
from scalerl.models import Family, family_named, read_config
from scalerl.models.shape import max_positions, rope_entries
from scalerl.models.vision import vision_config
from scalerl.rollout.servers.engines import Launch

# Where the stand-in of torchvision looks for its wheel.
TORCHVISION = Path(sys.prefix, "optional", "torchvision")
STAND_INS = str(Path(__file__).resolve().parent / "stand_ins")
# Share of the machine's memory for weights and KV cache, an upper bound; max_total_tokens limits the cache in practice.
MEM_FRACTION_STATIC = 0.5


def import_environment() -> dict[str, str]:
    """The environment variables that a process without a GPU needs, before it starts, to import sglang.

    The scheduler processes that SGLang spawns inherit them.
    """
    paths = [STAND_INS, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def on_cpu(launch: Launch, context_length: int) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """The arguments of a server, its environment variables, and changes of the model's config.json."""
    config = launch.config
    if vision_config(_config_and_family(launch.model_path)[0]) is not None and not TORCHVISION.is_dir():
        raise UserError(
            f"{launch.model_path} takes images, for which SGLang on a CPU needs torchvision in {TORCHVISION}: "
            f"make setup, or pip install --no-deps --target {TORCHVISION} -r requirements/cpu-torchvision.txt"
        )
    tp_size = config.tensor_model_parallel_size
    arguments = {
        "device": "cpu",
        "attention_backend": ATTENTION_BACKEND,
        "sampling_backend": "pytorch",
        # Overlap hides host work behind the device's, but here both use the same cores.
        "disable_overlap_schedule": True,
        # Otherwise an idle scheduler polls without pause, which takes half a core from the trainer. With several ranks
        # the others would still poll.
        "sleep_on_idle": tp_size == 1,
        "mem_fraction_static": MEM_FRACTION_STATIC,
        "max_total_tokens": config.max_num_seqs * context_length,
    }
    if launch.adapter is not None:
        # The others are kernels of a GPU.
        arguments["lora_backend"] = "torch_native"
    if _has_sliding_layers(launch.model_path):
        # Its backend has one cache for all layers.
        arguments["disable_hybrid_swa_memory"] = True
    # The machine may have a GPU that is not to be used.
    env = {"CUDA_VISIBLE_DEVICES": ""} | import_environment()
    if allowed := os.environ.get("SGLANG_PLUGINS"):
        # The user's list of plugins that SGLang may load; it needs the attention backend's too.
        env["SGLANG_PLUGINS"] = f"{allowed},{PLUGIN}"
    if tp_size > 1:
        # One core per rank; otherwise SGLang needs a NUMA node for each.
        cores = sorted(os.sched_getaffinity(0))
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(tp_size))
    # SGLang would keep the tokens that convolutions of gated delta nets still see in bfloat16.
    env["SGLANG_MAMBA_CONV_DTYPE"] = config.dtype
    return arguments, env, _rope_changes(launch.model_path)


def _config_and_family(model_path: str) -> tuple[dict[str, Any], Family | None]:
    try:
        config = read_config(model_path)
    except ValueError:
        # The server will report what is wrong with the directory.
        return {}, None
    return config, family_named(config.get("model_type"))


def _has_sliding_layers(model_path: str) -> bool:
    family = _config_and_family(model_path)[1]
    return family is not None and family.sliding_layers


def _rope_changes(model_path: str) -> dict[str, Any]:
    """Yarn with the factor 1 in place of a plain rotary embedding, which latent attention does not have on a CPU."""
    config, family = _config_and_family(model_path)
    if family is None or not family.latent:
        return {}
    rope = rope_entries(config)
    if (rope.get("rope_type") or rope.get("type") or "default") != "default":
        return {}
    return {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": rope.get("rope_theta") or config.get("rope_theta") or 10_000.0,
            "factor": 1.0,
            "original_max_position_embeddings": max_positions(config),
        }
    }
