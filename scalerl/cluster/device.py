"""Resolution of trainer.device to cuda or cpu."""

from __future__ import annotations

import os
from pathlib import Path

from scalerl.base import nvidia
from scalerl.base.process import gpu_environment_violations
from scalerl.config.schema import SFTTrainerConfig, TrainerConfig
from scalerl.errors import UserError


class DeviceError(UserError):
    """Raised when the device that trainer.device asks for is missing, or torch does not see it."""


def resolve_device(name: str) -> str:
    """Resolves trainer.device (auto, cuda or cpu) to cuda or cpu.

    auto: cuda if torch sees a GPU, else cpu. cpu hides the GPUs of this machine from all processes of the run.
    Raises DeviceError if torch should see a GPU and does not, or if the environment breaks every run on GPUs.
    """
    if name == "cpu":
        nvidia.hide()
        return name
    import torch

    device = device_of(
        name,
        torch_sees_one=torch.cuda.is_available(),
        torch_build=f"torch {torch.__version__}, built "
        + (f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"),
        hidden=nvidia.are_hidden(),
    )
    if device == "cuda" and (broken := list(gpu_environment_violations(os.environ))):
        raise DeviceError("; ".join(broken))
    return device


def devices_line(trainer: TrainerConfig | SFTTrainerConfig, device: str, attention: str | None = None) -> str:
    """The line about its devices that a run shows at its start.

    device: trainer.device, resolved to cuda or cpu.  attention: what they attend with; None where that is not said.
    """
    number = trainer.n_gpus_per_node
    what = "GPU" if device == "cuda" else "process" if number == 1 else "processe"
    each = f"{number} {what}{'' if number == 1 else 's'}{' on the CPU' if device == 'cpu' else ''}"
    nodes = "" if trainer.nnodes == 1 else f"{trainer.nnodes} nodes x "
    line = f"devices: {nodes}{each} (trainer.n_gpus_per_node, trainer.device={trainer.device})"
    return line if attention is None else f"{line}; attention: {attention}"


def device_of(name: str, *, torch_sees_one: bool, torch_build: str, hidden: bool, root: Path = Path("/")) -> str:
    """Resolves trainer.device (auto or cuda), given whether torch sees a GPU.

    root: root of the file system in which devices are looked for.  Raises DeviceError as `resolve_device`.
    """
    if torch_sees_one:
        return "cuda"
    nvidia_device = None if hidden else nvidia.find_nvidia_device(root)
    if name == "auto" and nvidia_device is None:
        return "cpu"
    if hidden:
        seen = f"{nvidia.VISIBLE_DEVICES} hides the GPUs of this process"
    elif nvidia_device is None:
        seen = "nothing on this machine shows an NVIDIA device"
    else:
        driver = "of a version that the system does not tell" if nvidia_device.driver is None else nvidia_device.driver
        seen = f"this machine has an NVIDIA device, driver {driver} (seen: {', '.join(nvidia_device.signs)})"
    raise DeviceError(
        f"trainer.device = {name}: {seen}, and {torch_build}, sees no GPU; install a torch whose CUDA this driver "
        "supports, give the process access to the device, or set trainer.device=cpu"
    )
