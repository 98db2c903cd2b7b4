"""Low-rank adapters (LoRA, arXiv 2106.09685) of a model: which matrices have one, their names and shapes, peft's files.

A matrix W [out, in] with an adapter is W + alpha / rank * B A, with A [rank, in] and B [out, rank]. Each projection of
the Hugging Face model has a pair by itself, as peft has them, where Megatron-Core joins projections too; each expert
has its own pairs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.models.registry import family_of
from scalerl.models.sizes import counted_params
from scalerl.models.table import HF_MODEL, VALUE_HEAD, Family, Param
from scalerl.models.weights import ADAPTER_NAME

if TYPE_CHECKING:
    import torch

    from scalerl.models.shape import ModelShape

WEIGHTS_FILE = "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
# How peft begins the name of a tensor, before the name that the matrix has in the model's files.
PEFT_PREFIX = "base_model.model."
# How transformers' module of a model with a vision tower begins the names of its language model.
_OF_VISION_MODEL = "model.language_model."
_A, _B = "lora_A", "lora_B"
_WEIGHT = ".weight"
# What Mixtral and MiniMax-M2 call the gate, down and up projections of an expert.
_OTHER_PROJECTIONS = ("w1", "w2", "w3")
# Projections of experts, and the parameter in which transformers has gate and up of all experts of a layer.
_GATE_UP = ("gate_proj", "up_proj", "w1", "w3")
_DOWN = ("down_proj", "w2")
_JOINED = "gate_up_proj"
_NEVER = {
    "embed_tokens": "the embedding has no adapter",
    "lm_head": "the head has no adapter",
}
# Keys of adapter_config.json by which an adapter is another function of A and B, or is more than A and B; with the
# value that they may have beside null.
_REFUSED_KEYS: dict[str, Any] = {
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": [],
    "bias": "none",
    "lora_bias": False,
    "target_parameters": [],
}
_OF_EXPERTS = ".experts."
# The modules of a vision tower, as a pattern of peft.
_TOWER = r".*\.visual\..*"


@dataclass(frozen=True)
class Adapter:
    """Which matrices of a model have a low-rank adapter, and of which size.

    targets: names of projections (q_proj), in the order of the model's parameters (`resolve_targets`).
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank


def projections(shape: ModelShape) -> tuple[str, ...]:
    """Names of the projections of a model that can have an adapter, in the order of its parameters.

    Not among them: the embedding, the head, routers, gates of shared experts, and experts that the files stack.
    """
    params = (param for param, _ in counted_params(shape))
    return tuple(dict.fromkeys(_leaf(hf) for param in params for hf in param.hf if _is_projection(param, hf)))


def resolve_targets(
    shape: ModelShape, target_modules: str | Sequence[str], exclude_modules: Sequence[str] = ()
) -> tuple[str, ...]:
    """The projections that target_modules (`all-linear`, or names) leave after exclude_modules, in order.

    Raises ValueError that names every name of which the model has no projection, or when none is left.
    """
    known = projections(shape)
    named = (target_modules,) if isinstance(target_modules, str) else tuple(target_modules)
    wanted = known if target_modules == ALL_LINEAR else named
    problems = [
        f"{key} names {name!r}: {_NEVER.get(name) or 'the model has no such projection'}"
        for key, names in (("target_modules", wanted), ("exclude_modules", exclude_modules))
        for name in names
        if name not in known
    ]
    targets = tuple(name for name in known if name in wanted and name not in exclude_modules)
    problems += _expert_problems(shape, targets)
    if not targets and not problems:
        problems.append("target_modules without exclude_modules are no projection at all")
    if problems:
        raise ValueError(f"{'; '.join(problems)}; projections of {shape.model_type}: {', '.join(known)}")
    return targets


def _expert_problems(shape: ModelShape, targets: Sequence[str]) -> Iterator[str]:
    """What peft cannot read of experts: it has their gate and up in one pair, and finds that behind the one of down."""
    known = {_leaf(hf) for param, _ in counted_params(shape) if param.expert is not None for hf in param.hf}
    joined, needed = known & set(_GATE_UP) & set(targets), known & {*_GATE_UP, *_DOWN}
    if joined and (missing := sorted(needed - set(targets))):
        yield f"{' and '.join(sorted(joined))} of experts need {' and '.join(missing)} beside them, for peft"


def trained_params(shape: ModelShape) -> list[Param]:
    """The parameters that are saved, in order: all, or those of the adapter, and a value head.

    They are trained, but for a frozen vision tower.
    """
    params = family_of(shape).params(shape)
    if shape.adapter is None:
        return params
    return adapter_params(shape) + [param for param in params if param.hf == VALUE_HEAD.hf]


def adapter_params(shape: ModelShape) -> list[Param]:
    """A and B of every projection with an adapter, in the order of the model's parameters: A of each before its B.

    Their Hugging Face names are peft's.  shape: with `adapter` set.
    """
    return [
        part
        for param in family_of(shape).params(shape)
        for pair in adapter_pairs(param, shape)
        if pair is not None
        for part in pair
    ]


def counted_trained_params(shape: ModelShape) -> Iterator[tuple[Param, int]]:
    """The parameters that have a gradient, counted as `sizes.counted_params`.

    With an adapter: its own, and a value head. Not a frozen vision tower.
    """
    for param, count in counted_params(shape):
        if shape.adapter is None:
            is_frozen = shape.frozen_tower and param.of_tower
            yield from [(param, count)] if param.has_gradient and not is_frozen else []
            continue
        yield from ((part, count) for pair in adapter_pairs(param, shape) if pair is not None for part in pair)
        if param.hf == VALUE_HEAD.hf:
            yield param, count


def adapter_pairs(param: Param, shape: ModelShape) -> list[tuple[Param, Param] | None]:
    """A and B of each Hugging Face tensor that a parameter of the model consists of; None where it has no adapter.

    Tensor parallelism splits A where it splits the columns of the matrix, and B where it splits the rows.
    """
    adapter, family = shape.adapter, family_of(shape)
    assert adapter is not None, "a shape with an adapter"
    return [
        _pair(param, number, family) if _is_projection(param, hf) and _leaf(hf) in adapter.targets else None
        for number, hf in enumerate(param.hf)
    ]


def _pair(param: Param, number: int, family: Family) -> tuple[Param, Param]:
    """peft's names are those of transformers' module, whatever the files have: of the language model alone where there
    is one, for which peft knows the names of experts, too."""
    hf, (rows, columns) = param.hf[number].removesuffix(_WEIGHT), param.dims[number]
    has_tower = family.tower is not None and not family.tower.is_optional
    hf = (_OF_VISION_MODEL if has_tower else HF_MODEL) + hf.removeprefix(family.prefix)
    sections = (param.sections[number],) if param.sections else ()
    # One of two tensors, each of which is split over its rows.
    by_rows = "column" if param.kind == "gate_up" and not sections else param.kind
    is_row = param.kind == "row"

    def part(letter: str, **fields: Any) -> Param:
        name = f"{param.name.removesuffix(_WEIGHT)}.{_leaf(param.hf[number])}.{letter}"
        return replace(param, name=name, hf=(f"{PEFT_PREFIX}{hf}.{letter}{_WEIGHT}",), joins_previous=False, **fields)

    return (
        part(_A, dims=(("lora_rank", columns),), kind="row" if is_row else "replicated", sections=()),
        part(_B, dims=((rows, "lora_rank"),), kind="replicated" if is_row else by_rows, sections=sections),
    )


def adapter_shapes(shape: ModelShape, adapter: Adapter) -> dict[str, tuple[int, ...]]:
    """peft's name of every tensor of an adapter, and its shape, in the order of `adapter_params`."""
    shape = replace(shape, adapter=adapter)
    return {name: size for param in adapter_params(shape) for name, size in param.hf_shapes(shape).items()}


def adapter_config(adapter: Adapter, base_model: str | None = None) -> dict[str, Any]:
    """What adapter_config.json says of an adapter.  base_model: path or name of the model without it."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(adapter.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "use_dora": False,
    }


def write_peft(
    directory: str | Path, adapter: Adapter, tensors: Mapping[str, torch.Tensor], base_model: str | None = None
) -> None:
    """Writes a directory that peft reads: adapter_config.json and adapter_model.safetensors.

    tensors: by peft's names, contiguous.
    """
    from safetensors.torch import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), directory / WEIGHTS_FILE, metadata={"format": "pt"})
    write_peft_config(directory, adapter, tensors, base_model)


def write_peft_config(directory: Path, adapter: Adapter, names: Collection[str], base_model: str | None = None) -> None:
    """Writes adapter_config.json.  names: peft's, of the adapter's tensors."""
    config = adapter_config(adapter, base_model) | _keys_of_experts(adapter, names)
    if any(name.startswith(PEFT_PREFIX + _OF_VISION_MODEL) for name in names):
        # Projections of the tower have such names, too.
        config["exclude_modules"] = _TOWER
    text = json.dumps(config, indent=2) + "\n"
    (directory / ADAPTER_NAME).write_text(text, encoding="utf-8")


def _keys_of_experts(adapter: Adapter, names: Collection[str]) -> dict[str, Any]:
    """Keys of adapter_config.json by which peft reads a file that has the pairs of each expert by themselves.

    transformers has gate and up of all experts of a layer in one parameter, for which peft joins both pairs. Of what
    has such a name outside of experts peft takes the parameter too, in some families in the place of the module.
    """
    of_experts = {_target_of(name) for name in names if _OF_EXPERTS in name}
    if not of_experts:
        return {}
    alike = {_target_of(name) for name in names if _OF_EXPERTS not in name} & {*_GATE_UP, *_DOWN}
    joined = [_JOINED] if of_experts & set(_GATE_UP) else []
    down = ["down_proj"] if of_experts & set(_DOWN) else []
    pattern = rf".*\.{_JOINED}"
    return {
        "target_parameters": [*joined, *down, *(f"{name}.weight" for name in sorted(alike))],
        "exclude_modules": sorted(alike) or None,
        "rank_pattern": dict.fromkeys([pattern] if joined else [], 2 * adapter.rank),
        "alpha_pattern": dict.fromkeys([pattern] if joined else [], 2 * adapter.alpha),
    }


def read_peft_config(directory: str | Path, shape: ModelShape) -> Adapter:
    """The adapter of this model that a directory of peft has; reads headers only.

    Raises ValueError: a file is missing or unreadable, a key of adapter_config.json is of another kind of adapter, or
    tensors are missing, unexpected or wrongly shaped (all of them listed).
    """
    directory = Path(directory)
    config, sizes = _read_config(directory), _stored_shapes(directory)
    problems = list(_config_problems(config, sizes))
    if problems:
        raise ValueError(f"{directory / ADAPTER_NAME}: {'; '.join(problems)}")
    stored = {_target_of(name) for name in sizes}
    targets = tuple(name for name in projections(shape) if name in stored)
    adapter = Adapter(config["r"], config["lora_alpha"], targets)
    if problems := list(_tensor_problems(sizes, adapter_shapes(shape, adapter))):
        raise ValueError(
            f"{directory / WEIGHTS_FILE} does not hold an adapter of rank {adapter.rank} of this {shape.model_type} "
            f"model ({len(problems)} problems):\n  " + "\n  ".join(problems)
        )
    return adapter


def read_peft(directory: str | Path, shape: ModelShape) -> tuple[Adapter, dict[str, torch.Tensor]]:
    """Reads the adapter of this model that a directory of peft has, and its tensors by peft's names, in order.

    Raises ValueError as `read_peft_config`.
    """
    from safetensors.torch import load_file

    adapter = read_peft_config(directory, shape)
    stored = load_file(Path(directory) / WEIGHTS_FILE)
    return adapter, {name: stored[name] for name in adapter_shapes(shape, adapter)}


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / ADAPTER_NAME
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{directory} has no {ADAPTER_NAME}; give a directory that peft's save_pretrained wrote"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object")
    return config


def _config_problems(config: Mapping[str, Any], names: Collection[str]) -> Iterator[str]:
    """names: of the stored tensors."""
    if config.get("peft_type") != "LORA":
        yield f"peft_type is {config.get('peft_type')!r}; only LORA is read"
    yield from (numbers := list(_number_problems(config)))
    of_experts = {} if numbers else _keys_of_experts(Adapter(config["r"], config["lora_alpha"], ()), names)
    for key, plain in _REFUSED_KEYS.items():
        if config.get(key) not in (None, plain, of_experts.get(key)):
            yield f"{key} is {config[key]!r}, which is not read: only A and B of one rank and one alpha are"


def _number_problems(config: Mapping[str, Any]) -> Iterator[str]:
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1:
        yield f"r is {rank!r}, it must be a whole number of at least 1"
    if not isinstance(alpha, int | float) or alpha <= 0:
        yield f"lora_alpha is {alpha!r}, it must be a number above 0"


def _stored_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    path = directory / WEIGHTS_FILE
    if not path.is_file():
        raise ValueError(f"{directory} has no {WEIGHTS_FILE}; save the adapter with safe_serialization=True")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}); write it again") from None


def _tensor_problems(stored: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    if not wanted:
        yield "no tensor of a projection of this model"
    yield from (f"missing {name}" for name in wanted if name not in stored)
    yield from (f"unexpected {name}" for name in stored if name not in wanted)
    for name, size in wanted.items():
        if stored.get(name, size) != size:
            yield f"{name} has shape {stored[name]}, should be {size}"


def _is_projection(param: Param, hf: str) -> bool:
    if param.layer is None or param.stacked or len(param.dims[0]) != 2 or not hf.endswith(_WEIGHT):
        return False
    return "proj" in _leaf(hf) or _leaf(hf) in _OTHER_PROJECTIONS


def _leaf(hf: str) -> str:
    """The name of the module in its parent, of a tensor's name in the files."""
    return hf.removesuffix(_WEIGHT).rpartition(".")[2]


def _target_of(name: str) -> str:
    """The projection of a tensor of peft."""
    return _leaf(name.removesuffix(_WEIGHT).rpartition(".")[0])
