"""Activation recompute changes what is kept, not what is computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from tests.dist.launch import run_ranks
from tests.dist.trainee import Trainee
from tests.lanes import mostly_full
from tests.tiny_models import make_tiny_model

# (tp_size, pp_size, world_size)
LAYOUTS = {"one": (1, 1, 1), "tp2": (2, 1, 2), "pp2": (1, 2, 2)}
SETTINGS: dict[str, dict[str, Any]] = {
    "core_attn": {"recompute_granularity": "selective"},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "layernorm": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
    "all modules": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]},
    "uniform": {"recompute_granularity": "full"},
    "two layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
}
NUM_LAYERS = 4
NUM_UPDATES = 2
RELATIVE = 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", num_layers=NUM_LAYERS, initializer_range=0.1))


def train(model: str, layout: tuple[int, int, int], settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Per setting: log-probs, updates and weights."""
    numbers_by_setting = {}
    for name, megatron in settings.items():
        trainee = Trainee(model, layout, **megatron)
        before = trainee.logprobs()
        numbers_by_setting[name] = before, [trainee.update() for _ in range(NUM_UPDATES)], trainee.weights()
    return numbers_by_setting


def is_main(case: tuple[str, str]) -> bool:
    """Of the settings those that have all of the others in them."""
    layout, setting = case
    return layout == "pp2" and setting in ("all modules", "two layers", "block")


CASES = list(itertools.product(LAYOUTS, SETTINGS))


@pytest.fixture(scope="module")
def measured_on(model: str) -> Callable[[str, bool], list[dict[str, Any]]]:
    """Layout, and whether `make test` has the settings -> [rank][setting]"""

    @cache
    def run(layout: str, main: bool) -> list[dict[str, Any]]:
        settings = {name: SETTINGS[name] for at, name in CASES if at == layout and is_main((at, name)) == main}
        return run_ranks(LAYOUTS[layout][2], train, model, LAYOUTS[layout], {"none": {}} | settings)

    return run


def numbers(trained: Any) -> list[torch.Tensor]:
    """Every number of what `train` found, in float64."""
    logprobs, updates, weights = trained
    rows = [torch.tensor([update[key] for key in sorted(update)], dtype=torch.float64) for update in updates]
    return [*(x.double() for x in logprobs), *rows, *(weights[name].double() for name in sorted(weights))]


@pytest.mark.parametrize(("layout", "setting"), mostly_full(CASES, is_main))
def test_numbers_are_those_without(
    measured_on: Callable[[str, bool], list[dict[str, Any]]], layout: str, setting: str
) -> None:
    """Bitwise. Recomputed norms excepted: autograd then adds the residual's gradient and the norm's in the other order,
    below 1e-6 of a gradient, of which Adam's division makes more in a weight: the bound is that between layouts."""
    for rank in measured_on(layout, is_main((layout, setting))):
        expected = numbers(rank["none"])
        assert rank["none"][1][0]["grad_norm"] > 0 and rank["none"][1][0] != rank["none"][1][1]
        for mine, theirs in zip(numbers(rank[setting]), expected, strict=True):
            if setting in ("layernorm", "all modules"):
                assert float((mine - theirs).norm()) <= RELATIVE * float(theirs.norm())
            else:
                assert torch.equal(mine, theirs)


def layer_calls(model: str, layout: tuple[int, int, int], megatron: dict[str, Any]) -> tuple[int, int, int]:
    """Calls of the core attention, of the first layer's MLP and of its first norm, in one update."""
    trainee = Trainee(model, layout, **megatron)
    counts = {"attention": 0, "mlp": 0, "norm": 0}

    def count(name: str) -> Any:
        def hook(*_: Any) -> None:
            counts[name] += 1

        return hook

    layer = trainee.engine.chunks[0].decoder.layers[0]
    layer.self_attention.core_attention.register_forward_pre_hook(count("attention"))
    layer.mlp.register_forward_pre_hook(count("mlp"))
    layer.input_layernorm.register_forward_pre_hook(count("norm"))
    trainee.logprobs()
    assert set(counts.values()) == {2}, "no recompute without a backward: one call per micro-batch"
    trainee.update()
    return tuple(value - 2 for value in counts.values())


@pytest.mark.parametrize(
    ("setting", "calls"),
    [
        ("none", (2, 2, 2)),
        ("core_attn", (4, 2, 2)),
        ("mlp", (2, 4, 2)),
        ("layernorm", (2, 2, 4)),
        ("uniform", (4, 4, 4)),
    ],
)
def test_what_is_computed_again(model: str, setting: str, calls: tuple[int, int, int]) -> None:
    """Two micro-batches: twice each, and twice more what is computed again."""
    assert run_ranks(1, layer_calls, model, (1, 1, 1), SETTINGS.get(setting, {})) == [calls]


def kept_bytes(model: str, layout: tuple[int, int, int], settings: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Per setting what autograd holds when the forward of the first micro-batch is over, parameters apart."""
    bytes_by_setting = {}
    for name, megatron in settings.items():
        trainee = Trainee(model, layout, **megatron)
        parameters = {p.untyped_storage()._cdata for p in trainee.engine.chunks[0].parameters()}
        saved: list[torch.Tensor] = []

        def save(tensor: torch.Tensor, saved: list[torch.Tensor] = saved) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        def objective(
            logprobs_T: torch.Tensor,
            *_: Any,
            saved: list[torch.Tensor] = saved,
            name: str = name,
            trainee: Trainee = trainee,
            parameters: set[int] = parameters,
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in saved}
            bytes_by_setting.setdefault(name, sum(s.nbytes() for key, s in storages.items() if key not in parameters))
            return trainee.loss(logprobs_T)

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            trainee.update(objective)
    return bytes_by_setting


def test_less_is_kept_for_backward(model: str) -> None:
    (kept,) = run_ranks(1, kept_bytes, model, (1, 1, 1), {"none": {}} | SETTINGS)
    for setting in SETTINGS:
        assert kept[setting] < kept["none"], (setting, kept)
    assert kept["two layers"] < kept["uniform"] < kept["block"], kept
    assert kept["uniform"] < kept["all modules"] < min(kept["core_attn"], kept["mlp"], kept["layernorm"]), kept


# --- mixtures of experts and latent attention ---

# family -> modules that only it has
MIXTURES = {
    "qwen3_moe": ["moe"],
    "deepseek_v3": ["moe", "shared_experts", "mla_up_proj"],
    # Its sinks are learned.
    "gpt_oss": ["moe", "core_attn"],
}


@pytest.mark.parametrize("family", mostly_full(MIXTURES, lambda family: family == "deepseek_v3"))
def test_modules_of_mixtures(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Bitwise, module by module, the losses and counts of routers too; latent attention within the bound of norms.

    On two stages the second micro-batch goes forward before the first is computed again.
    """
    model = str(make_tiny_model(tmp_path_factory.mktemp(family), family, initializer_range=0.1))
    settings: dict[str, dict[str, Any]] = {
        name: {"recompute_granularity": "selective", "recompute_modules": [name]} for name in MIXTURES[family]
    }
    settings = {"none": {}, "full": SETTINGS["uniform"]} | settings
    routers = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1, "moe_router_bias_update_rate": 0.01}
    settings = {name: setting | routers for name, setting in settings.items()}
    (kept,) = run_ranks(1, kept_bytes, model, (1, 1, 1), settings)
    for layout in ("one", "pp2"):
        for numbers_by_setting in run_ranks(LAYOUTS[layout][2], train, model, LAYOUTS[layout], settings):
            for setting in settings.keys() - {"none"}:
                for mine, theirs in zip(
                    numbers(numbers_by_setting[setting]), numbers(numbers_by_setting["none"]), strict=True
                ):
                    if setting == "mla_up_proj":
                        assert float((mine - theirs).norm()) <= RELATIVE * float(theirs.norm())
                    else:
                        assert torch.equal(mine, theirs), (layout, setting)
                assert kept[setting] < kept["none"], (setting, kept)
