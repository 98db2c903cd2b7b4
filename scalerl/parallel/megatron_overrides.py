"""Fields of Megatron's own configs that the user sets: `override_transformer_config` and its like."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe import fused_a2a, moe_utils
from megatron.core.transformer.transformer_config import MLATransformerConfig

from scalerl.config.value_checks import show

if TYPE_CHECKING:
    from scalerl.config.schema import MegatronConfig, OptimConfig

# Keys -> the dataclass whose fields they name. MLATransformerConfig has the fields of every transformer.
CLASSES: dict[str, type] = {
    "override_transformer_config": MLATransformerConfig,
    "override_ddp_config": DistributedDataParallelConfig,
    "override_optimizer_config": OptimizerConfig,
}
# Fields that let tokens of experts travel by DeepEP.
_DISPATCHER = "moe_token_dispatcher_type"
_DISPATCH = (_DISPATCHER, "moe_enable_deepep", "moe_flex_dispatcher_backend")
# Fields that ask for a fused kernel -> which one, and what happens without it.
_FUSED = {
    "gradient_accumulation_fusion": (
        "fused_weight_gradient_mlp_cuda of apex",
        "gradients are added up without it, to the same sums",
    ),
    "moe_permute_fusion": (
        "of transformer-engine 2.1 or newer",
        "tokens are sorted by their experts without it, in the same order",
    ),
}


def override_violations(section: str, config: MegatronConfig | OptimConfig) -> Iterator[str]:
    """One sentence for each field that Megatron does not have or whose value has a wrong type. section: of `config`."""
    for name, owner in CLASSES.items():
        hints = _hints(owner)
        for field, value in getattr(config, name, {}).items():
            key = f"{section}.{name}.{field}"
            if field not in hints:
                yield f"{key} = {show(value)}: Megatron's {owner.__name__} has no such field; leave it out"
            elif not fits(value, hints[field]):
                yield f"{key} = {show(value)}: Megatron's {owner.__name__} wants {_described(hints[field])}"


def megatron_values(key: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides as arguments of CLASSES[key]: names of enum members and of torch's types become these."""
    hints = _hints(CLASSES[key])
    return {field: _converted(value, hints[field]) for field, value in overrides.items()}


def kernel_violations(section: str, config: MegatronConfig | OptimConfig, *, device: str) -> Iterator[str]:
    """One sentence where the experts' tokens should travel by kernels that cannot run here. device: cuda or cpu."""
    fields = getattr(config, "override_transformer_config", {})
    deepep = fields.get("moe_enable_deepep")
    dispatcher = _with_dispatcher(fields).get(_DISPATCHER)
    if dispatcher != "flex" and not deepep:
        return
    wanted = [f"{name} = {show(fields[name])}" for name in _DISPATCH if fields.get(name)]
    what = f"{section}.override_transformer_config.{' and '.join(wanted)}"
    remedy = "or leave out what says so: the tokens then travel by torch's all-to-all, with the same numbers"
    if dispatcher != "flex":
        key = f"{section}.override_transformer_config.{_DISPATCHER}"
        yield f"{what}: DeepEP is of the dispatcher flex alone; set {key}=flex, {remedy}"
        return
    backend = "deepep" if deepep else fields.get("moe_flex_dispatcher_backend", "deepep")
    package = {"deepep": "deep_ep", "hybridep": "deep_ep with HybridEPBuffer"}.get(backend, backend)
    is_there = fused_a2a.HAVE_HYBRIDEP if backend == "hybridep" else fused_a2a.HAVE_DEEP_EP
    if device != "cuda":
        yield f"{what}: DeepEP runs on GPUs only, and the device is {device}; set trainer.device=cuda, {remedy}"
    elif not is_there:
        yield f"{what}: needs {package}, which cannot be imported here; install it (docs/gpu.md), {remedy}"


def dispatcher_line(section: str, config: MegatronConfig | OptimConfig) -> str | None:
    """The line of a run whose dispatcher of tokens follows from another field; None where none does."""
    fields = getattr(config, "override_transformer_config", {})
    if _with_dispatcher(fields) == fields:
        return None
    name = next(name for name in _DISPATCH[1:] if fields.get(name))
    prefix = f"{section}.override_transformer_config"
    return f"{prefix}.{_DISPATCHER} = flex, which follows from {prefix}.{name} = {show(fields[name])}"


def _with_dispatcher(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, with the dispatcher that moe_enable_deepep and moe_flex_dispatcher_backend need, if none is given."""
    needs_flex = any(fields.get(name) for name in _DISPATCH[1:])
    return ({_DISPATCHER: "flex"} if needs_flex else {}) | dict(fields)


def unfused(section: str, config: MegatronConfig | OptimConfig, *, on_cpu: bool) -> Iterator[str]:
    """One line for each fused kernel that is asked for, is not there, and without which the numbers are the same."""
    fields = getattr(config, "override_transformer_config", {})
    for name in _missing_kernels(fields, on_cpu):
        kernel, without = _FUSED[name]
        yield f"{section}.override_transformer_config.{name} = true: its kernel ({kernel}) is not here; {without}"


def transformer_values(overrides: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
    """`override_transformer_config` as arguments of Megatron's config.

    With the dispatcher of tokens that DeepEP needs, and without fused kernels that are not there.
    """
    values = megatron_values("override_transformer_config", _with_dispatcher(overrides))
    return values | dict.fromkeys(_missing_kernels(values, on_cpu), False)


def _missing_kernels(fields: Mapping[str, Any], on_cpu: bool) -> list[str]:
    """The fields that ask for a fused kernel which is not here; each one runs on GPUs only."""
    has_kernel = {
        "gradient_accumulation_fusion": layers._grad_accum_fusion_available,
        # Without transformer-engine megatron does not even define the name.
        "moe_permute_fusion": getattr(moe_utils, "fused_permute", None) is not None,
    }
    return [name for name in _FUSED if fields.get(name) and (on_cpu or not has_kernel[name])]


@functools.cache
def _hints(owner: type) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(owner) if not field.name.startswith("_")}
    return {name: hint for name, hint in typing.get_type_hints(owner).items() if name in names}


def _options(hint: Any) -> tuple[Any, ...]:
    """The types that a hint allows, one by one."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(option for part in typing.get_args(hint) for option in _options(part))
    return (hint,)


def fits(value: Any, hint: Any) -> bool:
    """Whether a configuration's value fits a field's type."""
    return any(_fits(value, option) for option in _options(hint))


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin in (list, tuple) or hint in (list, tuple):
        return isinstance(value, list)
    if hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is torch.dtype:
        return isinstance(getattr(torch, str(value), None), torch.dtype)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return value in hint.__members__
    return isinstance(hint, type) and type(value) is hint


def _converted(value: Any, hint: Any) -> Any:
    for option in _options(hint):
        if option is torch.dtype and isinstance(value, str) and _fits(value, option):
            return getattr(torch, value)
        if isinstance(option, type) and issubclass(option, enum.Enum) and _fits(value, option):
            return option[value]
    return value


def _described(hint: Any) -> str:
    options = []
    for option in _options(hint):
        if typing.get_origin(option) is Literal:
            options += map(str, typing.get_args(option))
        elif isinstance(option, type) and issubclass(option, enum.Enum):
            options += option.__members__
        else:
            options.append("null" if option is type(None) else getattr(option, "__name__", str(option)))
    return " or ".join(options)
