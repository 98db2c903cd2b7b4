"""The FlashAttention behind torch's varlen_attn: torch's own, or an installed one (`trainer.flash_attention_impl`)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

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


def use_flash_attention(impl: str | None) -> None:
    """Makes varlen_attn of this process call that implementation from now on, forward and backward.

    impl: a key of IMPLS; None: torch's own. Raises UserError if it cannot be imported.
    """
    if impl is None:
        if attention.current_flash_attention_impl() is not None:
            attention.restore_flash_attention_impl()
        return
    if impl == "FA4":
        # In torch 2.13 this is written for versions of flash-attn-4 that return less.
        register = partial(register_flash_attention_fa4, module_path="scalerl.parallel.flash_attention_4")
        attention.register_flash_attention_impl("FA4", register_fn=register)
    try:
        attention.activate_flash_attention_impl(impl)
    # An import of compiled parts may also end in an OSError, and torch says RuntimeError when they lack a kernel.
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise UserError(_refused(impl, f"{IMPLS[impl].module} cannot be imported ({error})")) from error


def flash_attention_violation(impl: str, capabilities: Collection[tuple[int, int]]) -> str | None:
    """Why devices of these compute capabilities cannot run that implementation; None where all can."""
    majors = IMPLS[impl].majors
    wrong = sorted({capability for capability in capabilities if capability[0] not in majors})
    if not wrong:
        return None
    wanted = " or ".join(f"{major}.x" for major in majors)
    here = ", ".join(f"{major}.{minor}" for major, minor in wrong)
    return _refused(impl, f"torch runs it on GPUs of compute capability {wanted}, and here is {here}", installs=False)


def head_size_violation(impl: str, head_size: int, model_path: str) -> str | None:
    """Why that implementation has no kernel for a model; None where it has.  head_size: of queries and keys."""
    if head_size in IMPLS[impl].head_sizes:
        return None
    others = [other for other in IMPLS if head_size in IMPLS[other].head_sizes]
    remedy = f"{KEY}={others[0]}, or " if others else ""
    return (
        f"{KEY} = {impl}: the heads of {model_path} have size {head_size}, which it does not take on every GPU that it "
        f"is for; set {remedy}{KEY}=null (torch's own FlashAttention 2)"
    )


def _refused(impl: str, reason: str, *, installs: bool = True) -> str:
    remedy = f"install {IMPLS[impl].package}, or " if installs else ""
    return f"{KEY} = {impl}: {reason}; {remedy}set {KEY}=null (torch's own FlashAttention 2)"
