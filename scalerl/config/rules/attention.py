"""What Transformer Engine's attention asks of keys, device and installed version. Of the model: `layout.py`."""

from __future__ import annotations

import importlib.metadata
import math
import re
from collections.abc import Iterator

from scalerl.config.rules.base import divisors
from scalerl.config.schema import MegatronConfig
from scalerl.config.value_checks import show

# The first version that takes packed sequences, those of latent attention too, with each exchange: older ones raise an
# AssertionError in the first forward (attention/dot_product_attention/context_parallel.py of each).
FIRST_VERSIONS = {"p2p": (2, 9), "a2a": (2, 15), "all_gather": (2, 18), "a2a+p2p": (2, 19)}


def attention_violations(megatron: MegatronConfig, *, prefix: str) -> Iterator[str]:
    """What the keys do not allow together. prefix: key of the MegatronConfig, for the messages."""
    kind, cp_size = megatron.cp_comm_type, megatron.context_parallel_size
    sizes = megatron.hierarchical_context_parallel_sizes
    key = f"{prefix}.hierarchical_context_parallel_sizes"
    if kind != "a2a+p2p" and sizes is not None:
        yield f"{key} = {show(sizes)}: only for cp_comm_type = a2a+p2p, which is {show(kind)}; set {key}=null"
    if kind == "a2a+p2p" and (sizes is None or math.prod(sizes) != cp_size):
        pairs = [f"[{size},{cp_size // size}]" for size in divisors(cp_size) if 1 < size < cp_size]
        remedy = f"set {' or '.join(pairs)}" if pairs else f"set {prefix}.cp_comm_type=p2p, which needs none"
        yield (
            f"{key} = {show(sizes)}: {prefix}.cp_comm_type = a2a+p2p needs two sizes above 1 whose product is "
            f"{prefix}.context_parallel_size = {cp_size}; {remedy}"
        )
    if kind is not None and megatron.dtype == "float32":
        yield (
            f"{prefix}.cp_comm_type = {kind}: Transformer Engine's attention computes in 16 bits, and {prefix}.dtype = "
            f"float32; set {prefix}.dtype=bfloat16, or {prefix}.cp_comm_type=null"
        )


def transformer_engine_violations(
    cp_comm_type: str | None, cp_size: int, *, prefix: str, device: str, version: str | None
) -> Iterator[str]:
    """What the machine does not allow.

    Args:
        prefix: key of the MegatronConfig, for the messages.
        device: cuda or cpu.
        version: of transformer-engine; None where it is not installed.
    """
    if cp_comm_type is None:
        return
    # Where nothing is exchanged all four are the same.
    first = FIRST_VERSIONS[cp_comm_type if cp_size > 1 else "p2p"]
    needed = ".".join(map(str, first))
    remedy = f"or {prefix}.cp_comm_type=null (torch's attention, Ulysses)"
    what = f"{prefix}.cp_comm_type = {cp_comm_type}: Transformer Engine's attention"
    if device != "cuda":
        yield f"{what} runs on GPUs only, and the device is {device}; set trainer.device=cuda, {remedy}"
    elif version is None:
        yield f"{what} needs transformer-engine, which is not installed; install {needed} or newer, {remedy}"
    elif _major_minor(version) < first:
        yield (
            f"{what} takes packed sequences with this exchange from version {needed} on, and {version} is installed; "
            f"install a newer one, {remedy}"
        )


def transformer_engine_version() -> str | None:
    """None where it is not installed. Nothing is imported: a broken installation has a version too."""
    try:
        return importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return None


def _major_minor(version: str) -> tuple[int, int]:
    """(0, 0) where the version says neither."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)
