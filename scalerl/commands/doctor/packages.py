"""Packages that a run uses: whether they are installed, fit scalerl's own requirements, and can be imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scalerl.base.extras import extra
from scalerl.cluster.probes.finding import Finding, run_interpreter


@dataclass(frozen=True)
class Package:
    """A package to check.

    module: top-level module.  imports: what a run imports of it.  without: the consequence of its absence.
    is_light: imported in a fraction of a second.  needs_stand_ins: without a GPU it is imported as the server on a CPU
    does.
    """

    name: str
    module: str
    imports: str
    without: str
    is_light: bool = False
    needed: bool = True
    needs_stand_ins: bool = False


# Packages without which the main job cannot run.
REQUIRED = (
    Package("torch", "torch", "torch", "nothing runs"),
    Package("numpy", "numpy", "numpy", "nothing runs", is_light=True),
    Package("pyarrow", "pyarrow", "pyarrow.parquet", "no data can be read", is_light=True),
    Package("transformers", "transformers", "transformers.models.auto", "no tokenizer can be loaded"),
    Package("safetensors", "safetensors", "safetensors", "no model can be loaded", is_light=True),
    Package("hydra-core", "hydra", "hydra, omegaconf", "no configuration can be read", is_light=True),
    Package("mlflow", "mlflow", "mlflow", "no run can be recorded"),
    Package("ray", "ray", "ray", "no controller"),
    Package(
        "megatron-core", "megatron", "megatron.core.parallel_state, megatron.core.dist_checkpointing", "no training"
    ),
    Package(
        "sglang", "sglang", "sglang.srt.entrypoints.engine",
        "only actor_rollout_ref.rollout.name=embedded (small models)", needs_stand_ins=True,
    ),
)  # fmt: skip

# Packages that are used if they are installed.
OPTIONAL = (
    Package(
        "transformer-engine", "transformer_engine", "transformer_engine.pytorch",
        "megatron.cp_comm_type and moe_experts_impl cannot be set (attention and experts are torch's, context "
        "parallelism scalerl's own); apex's or torch's Adam", needed=False,
    ),
    Package("apex", "apex", "apex.multi_tensor_apply, amp_C", "torch's Adam and gradient clipping: slower updates",
            needed=False),
    Package("flash-attn", "flash_attn", "flash_attn", "transformer-engine's attention has the kernels of cuDNN only",
            needed=False),
    Package(
        "torch_memory_saver", "torch_memory_saver", "torch_memory_saver",
        "the rollout server cannot give its memory back while the trainer computes: set a lower "
        "actor_rollout_ref.rollout.gpu_memory_utilization and free_cache_engine=False", needed=False,
    ),
    Package("sglang-kernel", "sgl_kernel", "sgl_kernel", "SGLang's native torch operators: slower", needed=False),
)  # fmt: skip


@cache
def declared_requirements() -> Mapping[str, Requirement]:
    """scalerl's own requirements, extras too, by normalised name; empty where scalerl is not installed."""
    try:
        texts = importlib.metadata.requires("scalerl") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {canonicalize_name(requirement.name): requirement for requirement in map(Requirement, texts)}


def check_installed(package: Package) -> Finding:
    """Checks a package by its metadata and by looking for its module; imports nothing."""
    version = _version(package)
    if version is None:
        return Finding(package.name, False, "missing", f"without it: {package.without}", package.needed)
    declared = declared_requirements().get(canonicalize_name(package.name))
    error = None
    if importlib.util.find_spec(package.module) is None:
        error = f"FAILS: its metadata is there, the module {package.module} is not"
    elif declared is not None and not declared.specifier.contains(version, prereleases=True):
        error = f"FAILS: scalerl needs {declared.name}{declared.specifier}"
    if error is None:
        return Finding(package.name, True, f"{version:<14} installed", "")
    return _broken(package, version, error)


def check_import(package: Package, on_gpu: bool = False) -> Finding:
    """Checks a package by importing it in a separate interpreter.

    on_gpu: the rollout server will be on a GPU; else sglang is imported as its server on a CPU does.
    """
    without_gpu = extra("sglang_cpu_imports") if package.needs_stand_ins and not on_gpu else None
    env = {} if without_gpu is None else without_gpu()
    _, error = run_interpreter(["-c", f"import {package.imports}"], env=env)
    version = _version(package)
    if error is None:
        return Finding(package.name, True, f"{version or '-':<14} ok", "")
    if version is None and not package.needed:
        return Finding(package.name, False, "missing", f"without it: {package.without}")
    return _broken(package, version, f"FAILS: {error}")


def _broken(package: Package, version: str | None, error: str) -> Finding:
    # A broken package is another problem than a missing one.
    return Finding(package.name, False, f"{version or '-':<14} {error}", f"without it: {package.without}",
                   package.needed)  # fmt: skip


def _version(package: Package) -> str | None:
    try:
        return importlib.metadata.version(package.name)
    except importlib.metadata.PackageNotFoundError:
        return None
