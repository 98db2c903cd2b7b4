"""Describes a run in words, for people who look for it among other runs in a tracker."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from scalerl import __version__
from scalerl.config import PPOConfig, SFTConfig, num_devices, world_size


@dataclass(frozen=True)
class RunDescription:
    """The description of a run.  text: in Markdown.

    tags: the same in short; each is a column in a list of runs.  datasets: files by use, training and validation.
    """

    text: str
    tags: dict[str, str]
    datasets: dict[str, list[str]] = field(default_factory=dict)


def describe(cfg: PPOConfig | SFTConfig, device: str) -> RunDescription:
    """Describes a run. device: cuda or cpu, as trainer.device was resolved."""
    data = {"training": _paths(cfg.data.train_files), "validation": _paths(cfg.data.val_files)}
    if isinstance(cfg, PPOConfig):
        model, engine = cfg.actor_rollout_ref.model.path, cfg.actor_rollout_ref.actor.megatron
        algorithm = _algorithm(cfg)
        rollout = cfg.actor_rollout_ref.rollout
        batch = f"{cfg.data.train_batch_size} prompts x {rollout.n} samples per step"
        sampler = {"sampler": rollout.name}
        number = num_devices(cfg)
    else:
        model, engine, algorithm = cfg.model.path, cfg.megatron, "sft"
        batch, sampler = f"{cfg.data.train_batch_size} conversations per step", {}
        number = world_size(cfg)
    devices = f"{number} x {'GPU' if device == 'cuda' else 'CPU process'}"
    sizes = {
        "tp": engine.tensor_model_parallel_size,
        "pp": engine.pipeline_model_parallel_size,
        "cp": engine.context_parallel_size,
        "ep": engine.expert_model_parallel_size,
    }
    layout = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
    tags = {
        "algorithm": algorithm,
        "model": PurePath(model).name or model,
        "data": ", ".join(_in_short(path) for path in data["training"]),
        "devices": f"{devices}, {layout}" if layout else devices,
        **sampler,
        "scalerl": __version__,
    }
    rows = [
        ("model", f"`{model}`"),
        ("data", ", ".join(f"`{path}`" for path in data["training"])),
        ("validation", ", ".join(f"`{path}`" for path in data["validation"])),
        ("algorithm", f"{algorithm}, {batch}"),
        ("devices", tags["devices"]),
    ]
    text = "\n".join(f"- **{name}**: {value}" for name, value in rows if value)
    return RunDescription(text, tags, data)


def _algorithm(cfg: PPOConfig) -> str:
    """The advantage estimator, and the policy loss if it is not the default."""
    estimator, mode = cfg.algorithm.adv_estimator, cfg.actor_rollout_ref.actor.policy_loss.loss_mode
    return str(estimator) if mode == "vanilla" else f"{estimator}, loss {mode}"


def _in_short(path: str) -> str:
    """A file's name with its directory, because most files are called train.parquet."""
    return "/".join(PurePath(path).parts[-2:])


def _paths(files: Any) -> list[str]:
    """The paths in a value that is one path, a list of paths, or None."""
    if files is None:
        return []
    return [str(files)] if isinstance(files, str) else [str(path) for path in files]
