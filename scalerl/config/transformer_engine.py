"""The device and the installed version that Transformer Engine's attention and experts need."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator

# The first version that takes packed sequences, those of latent attention too, with each exchange: older ones raise an
# AssertionError in the first forward (attention/dot_product_attention/context_parallel.py of each).
FIRST_VERSIONS = {"p2p": (2, 9), "a2a": (2, 15), "all_gather": (2, 18), "a2a+p2p": (2, 19)}
# The oldest whose experts megatron-core drives.
FIRST_VERSION_OF_EXPERTS = (2, 9)


def transformer_engine_violations(
    cp_comm_type: str | None, cp_size: int, *, prefix: str, device: str, version: str | None
) -> Iterator[str]:
    """Yields why the machine cannot run Transformer Engine's attention; nothing where it can or cp_comm_type is null.

    Args:
        prefix: key of the MegatronConfig, for the messages.
        device: cuda or cpu.
        version: the installed version of transformer-engine; None where it is not installed.
    """
    if cp_comm_type is not None:
        # Where nothing is exchanged all four are the same.
        first = FIRST_VERSIONS[cp_comm_type if cp_size > 1 else "p2p"]
        setting = f"{prefix}.cp_comm_type = {cp_comm_type}"
        remedy = f"{prefix}.cp_comm_type=null (torch's attention, Ulysses)"
        yield from _lacks(setting, first, remedy, device, version)


def expert_violations(impl: str, *, prefix: str, device: str, version: str | None) -> Iterator[str]:
    """Yields why the machine cannot run the experts of moe_experts_impl; arguments as of the attention's."""
    if impl == "transformer_engine":
        setting = f"{prefix}.moe_experts_impl = {impl}"
        remedy = f"{prefix}.moe_experts_impl=torch (torch's grouped matrix products)"
        yield from _lacks(setting, FIRST_VERSION_OF_EXPERTS, remedy, device, version)


def _lacks(setting: str, first: tuple[int, int], remedy: str, device: str, version: str | None) -> Iterator[str]:
    """Yields what the machine lacks for a setting that needs Transformer Engine from the version `first` on."""
    needed = ".".join(map(str, first))
    if device != "cuda":
        yield (
            f"{setting}: Transformer Engine runs on GPUs only, and the device is {device}; set trainer.device=cuda, or "
            f"{remedy}"
        )
    elif version is None:
        yield f"{setting}: transformer-engine is not installed; install {needed} or newer, or set {remedy}"
    elif _major_minor(version) < first:
        yield (
            f"{setting}: needs transformer-engine {needed} or newer, and {version} is installed; install a newer one, "
            f"or set {remedy}"
        )


def transformer_engine_version() -> str | None:
    """The installed version of transformer-engine; None where it is not installed.

    Nothing is imported: a broken installation has a version too.
    """
    try:
        return importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return None


def _major_minor(version: str) -> tuple[int, int]:
    """The first two numbers of a version; (0, 0) where it does not start with them."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)
