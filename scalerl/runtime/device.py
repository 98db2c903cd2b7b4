"""trainer.device -> cuda or cpu."""

from __future__ import annotations

from pathlib import Path

from scalerl import nvidia
from scalerl.errors import UserError


class DeviceError(UserError):
    """What trainer.device asks for is not there, or torch does not see what is."""


def resolve_device(name: str) -> str:
    """auto: cuda when torch sees a GPU, else cpu. With cpu the GPUs of this machine are hidden from all of the run.

    Raises DeviceError where torch sees none and should.
    """
    if name == "cpu":
        nvidia.hide()
        return name
    import torch

    return device_of(
        name,
        torch_sees_one=torch.cuda.is_available(),
        torch_build=f"torch {torch.__version__}, built "
        + (f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"),
        hidden=nvidia.are_hidden(),
    )


def device_of(name: str, *, torch_sees_one: bool, torch_build: str, hidden: bool, root: Path = Path("/")) -> str:
    """name: auto | cuda.  root: of the file system that shows devices."""
    if torch_sees_one:
        return "cuda"
    found = None if hidden else nvidia.find_nvidia_device(root)
    if name == "auto" and found is None:
        return "cpu"
    if hidden:
        seen = f"{nvidia.VISIBLE_DEVICES} hides the GPUs of this process"
    elif found is None:
        seen = "nothing on this machine shows an NVIDIA device"
    else:
        driver = "of a version that the system does not tell" if found.driver is None else found.driver
        seen = f"this machine has an NVIDIA device, driver {driver} (seen: {', '.join(found.signs)})"
    raise DeviceError(
        f"trainer.device = {name}: {seen}, and {torch_build}, sees no GPU; install a torch whose CUDA this driver "
        "supports, give the process access to the device, or set trainer.device=cpu"
    )
