"""The FlashAttention behind torch's varlen_attn: torch's own, or an installed one (`trainer.flash_attention_impl`)."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import attention
from torch.nn.attention._fa4 import register_flash_attention_fa4

from scalerl.errors import UserError

KEY = "trainer.flash_attention_impl"


@dataclass(frozen=True)
class FlashAttention:
    """An implementation that torch can call instead of its own, FlashAttention 2.

    module: what torch imports.  package: where the module is from.  majors: first numbers of the compute capabilities
    on which torch calls it (torch/nn/attention/_fa3.py and _fa4.py; on others each call raises).  head_sizes: multiples
    of 8 that it has kernels for, forward and backward, on all of these.
    """

    module: str
    package: str
    majors: tuple[int, ...]
    head_sizes: Collection[int]


IMPLS = {
    "FA3": FlashAttention(
        "flash_attn_interface", "FlashAttention 3 from the folder `hopper` of its sources", (9,), range(8, 257, 8)
    ),
    # Of Hopper it takes those between 128 and 256 too, of Blackwell not (_validate_head_dims in its interface.py).
    "FA4": FlashAttention("flash_attn.cute.interface", "flash-attn-4", (9, 10), (*range(8, 129, 8), 256)),
}


@dataclass(frozen=True)
class Refusal:
    """Why an implementation cannot be had.

    reason: a clause.  remedy: what else to do than to take torch's own.  by_gpu: it is for other GPUs.
    """

    reason: str
    remedy: str | None = None
    by_gpu: bool = False

    def error(self, impl: str) -> str:
        """The error of a run that asks for the implementation by its name."""
        remedy = "" if self.remedy is None else f"{self.remedy}, or "
        return f"{KEY} = {impl}: {self.reason}; {remedy}set {KEY}=null (torch's own FlashAttention 2)"


def use_flash_attention(impl: str | None) -> None:
    """Makes varlen_attn of this process call that implementation from now on, forward and backward.

    impl: a key of IMPLS; None: torch's own. Raises UserError if it cannot be imported.
    """
    if impl is not None and (refusal := take_up(impl)) is not None:
        raise UserError(refusal.error(impl))
    if impl is None and attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()


def take_up(impl: str, capabilities: Collection[tuple[int, int]] = ()) -> Refusal | None:
    """Makes varlen_attn call that implementation, as `use_flash_attention`, or returns why it cannot be had.

    capabilities: compute capabilities of the GPUs that it shall run on.
    """
    if (refusal := gpu_refusal(impl, capabilities) or torch_refusal(impl)) is not None:
        return refusal
    if impl == "FA4":
        # In torch 2.13 this is written for versions of flash-attn-4 that return less.
        register = partial(register_flash_attention_fa4, module_path="scalerl.parallel.flash_attention_4")
        attention.register_flash_attention_impl("FA4", register_fn=register)
    try:
        attention.activate_flash_attention_impl(impl)
    # Whatever ends the import of compiled parts, or of what they need in another version: torch's own is there.
    except Exception as error:
        return import_refusal(impl, error)
    return None


def visible_capabilities() -> list[tuple[int, int]]:
    """The compute capabilities of the GPUs that this process sees, each once; [] without a GPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return sorted({torch.cuda.get_device_capability(i) for i in range(count)})


def import_refusal(impl: str, error: object) -> Refusal:
    return Refusal(f"{IMPLS[impl].module} cannot be imported ({error})", f"install {IMPLS[impl].package}")


def torch_refusal(impl: str) -> Refusal | None:
    """Why the installed torch cannot call an implementation with the same numbers for every packing; None if it can."""
    from torch.nn.attention.varlen import varlen_attn

    if "num_splits" in inspect.signature(varlen_attn).parameters:
        return None
    return Refusal(f"torch {torch.__version__} cannot fix how {impl} splits a sequence's keys", "install torch 2.13")


def gpu_refusal(impl: str, capabilities: Collection[tuple[int, int]]) -> Refusal | None:
    """Why devices of these compute capabilities cannot run that implementation; None where all can."""
    majors = IMPLS[impl].majors
    wrong = sorted({capability for capability in capabilities if capability[0] not in majors})
    if not wrong:
        return None
    wanted = " or ".join(f"{major}.x" for major in majors)
    here = ", ".join(f"{major}.{minor}" for major, minor in wrong)
    return Refusal(f"torch runs it on GPUs of compute capability {wanted}, and here is {here}", by_gpu=True)


def head_size_refusal(impl: str, head_size: int, model_path: str) -> Refusal | None:
    """Why that implementation has no kernel for a model; None where it has.  head_size: of queries and keys."""
    if head_size in IMPLS[impl].head_sizes:
        return None
    others = [other for other in IMPLS if head_size in IMPLS[other].head_sizes]
    return Refusal(
        f"the heads of {model_path} have size {head_size}, which it does not take on every GPU that it is for",
        f"set {KEY}={others[0]}" if others else None,
    )
