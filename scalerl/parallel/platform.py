"""Makes megatron-core's "cuda" mean the CPU where there is no GPU, or where none is to be used.

megatron-core names the device `cuda` in its buffers, its random-state tracker and its pipeline schedule. Each
replacement below is there because megatron-core 0.19 calls the original on a path that scalerl uses; nothing else in
scalerl depends on them. With gloo as the backend the rest of megatron-core runs as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

from scalerl.base import nvidia

CPU = torch.device("cpu")

# Factories that megatron-core calls with device="cuda" or device=torch.cuda.current_device().
_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like", "ones_like")

_installed = False


def device_type() -> str:
    """`cuda` with a GPU, else `cpu`: what scalerl itself passes to torch, whatever the shim says."""
    return "cpu" if _installed or not torch.cuda.is_available() else "cuda"


def backend() -> str:
    """torch.distributed backend of this machine's device."""
    return "nccl" if device_type() == "cuda" else "gloo"


def install(device: str) -> None:
    """Prepares this process for a device: `cuda` (nothing happens), or `cpu`, which also hides the machine's GPUs.

    Call it once per process, before megatron is imported. Raises ValueError if the process has used a GPU already.
    """
    global _installed
    if device == "cuda" or _installed:
        return
    nvidia.hide()
    if torch.cuda.is_available():
        raise ValueError(
            "trainer.device=cpu on a machine with a GPU that this process has used: start it with CUDA_VISIBLE_DEVICES="
        )
    _installed = True
    # torch caches, at its first use, which functions a `with torch.device(...)` is for: the ones that these replace.
    # Without it transformers' from_pretrained leaves what it computes itself, rotary frequencies, as it finds memory.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # An all-to-all between experts allocates what it receives so.
    torch.Tensor.new_empty = _on_cpu(torch.Tensor.new_empty)
    # DDP buffers, batch moves and the optimizer's scalars.
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.to = _to_on_cpu(torch.Tensor.to)
    # The optimizer sorts parameters by type name, and knows torch.cuda.*Tensor names only.
    torch.Tensor.type = _type_as_cuda(torch.Tensor.type)
    cuda = torch.cuda
    # An index, as on a GPU; the factories above read it as the CPU.
    cuda.current_device = lambda: 0
    cuda.set_device = lambda *args: None
    # The schedule and the gradient buffers synchronise and order streams; CPU work is in order already.
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.empty_cache = lambda: None
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = cuda.stream = lambda *args, **kwargs: _Stream()
    cuda.is_current_stream_capturing = lambda: False
    # The random-state tracker of tensor parallelism keeps one named state per kind of parallel region.
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.default_generators = (torch.default_generator,)
    # _set_cuda_rng_state goes through torch.cuda's lazy initialisation, which must not look for a driver.
    cuda.is_initialized = lambda: True
    # Ranks that share an expert exchange as many tokens as each happens to have; gloo wants equal parts.
    torch.distributed.all_gather = _all_gather_uneven(torch.distributed.all_gather)
    torch.distributed.reduce_scatter = _reduce_scatter_uneven(torch.distributed.reduce_scatter)
    _import_megatron_without_compiler()


def _import_megatron_without_compiler() -> None:
    """Imports megatron-core without torch.compile, by which it fuses small functions: on a CPU they run as written.

    The import of torch.compile alone is half of megatron's, and its first use would call a C++ compiler.
    """
    compile, torch.compile = torch.compile, lambda function: function
    try:
        from megatron.core import jit

        # Of the modules that are imported later.
        jit.disable_jit_fuser()
    finally:
        torch.compile = compile


class _Stream:
    """Stands for a CUDA stream or event: every method does nothing and returns the object."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        return lambda *args, **kwargs: self

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, int) and not isinstance(device, bool)
    )


def _on_cpu(factory: Callable) -> Callable:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        # Host memory that no device copies from.
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapped


def _to_on_cpu(original: Callable) -> Callable:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return original(self, *args, **kwargs)

    return to


def _type_as_cuda(original: Callable) -> Callable:
    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.")

    return type_


def _all_gather_uneven(original: Callable) -> Callable:
    @functools.wraps(original)
    def all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({output.shape for output in outputs}) == 1:
            return original(outputs, tensor, group=group, async_op=async_op)
        mine = torch.distributed.get_rank(group)
        for rank, output in enumerate(outputs):
            if rank == mine:
                output.copy_(tensor)
            if output.numel():
                torch.distributed.broadcast(output, group=group, group_src=rank)
        return None

    return all_gather


def _reduce_scatter_uneven(original: Callable) -> Callable:
    @functools.wraps(original)
    def reduce_scatter(output: torch.Tensor, inputs: list[torch.Tensor], *args: Any, group: Any = None) -> Any:
        if len({tensor.shape for tensor in inputs}) == 1:
            return original(output, inputs, *args, group=group)
        whole = torch.cat(inputs)
        if whole.numel():
            torch.distributed.all_reduce(whole, *args, group=group)
        output.copy_(whole.split([len(tensor) for tensor in inputs])[torch.distributed.get_rank(group)])
        return None

    return reduce_scatter
