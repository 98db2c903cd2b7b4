"""Adapters train to the same numbers on every layout, and to those of transformers and peft."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scalerl.models import ModelShape
from scalerl.models.adapters import (
    ALL_LINEAR,
    PEFT_PREFIX,
    Adapter,
    adapter_shapes,
    read_peft,
    resolve_targets,
    write_peft,
)
from tests.dist.launch import run_ranks
from tests.dist.layouts import LAYOUTS, MIXTURE_LAYOUTS, ONE
from tests.dist.test_layout_invariance import (
    LENGTHS,
    OVERLAPS,
    TEMPERATURE,
    Outcome,
    assert_same,
    make_model,
    relative,
    run,
)
from tests.lanes import full, mostly_full
from tests.tiny_models import load_tiny_model

FAMILIES = ("qwen3", "qwen3_moe", "deepseek_v3", "qwen3_5_text", "glm4")
RANK, ALPHA = 3, 5
# With some others Adam makes a step of full size out of the rounding of one element, as in `make_model`.
SEEDS = dict.fromkeys(FAMILIES, 6) | {"deepseek_v3": 5}
# Experts that are split have no adapters.
OF_EXPERTS = {name: sizes for name, sizes in MIXTURE_LAYOUTS.items() if "etp_size" not in sizes}
CASES = [(family, layout) for family in FAMILIES for layout in LAYOUTS]
CASES += [(family, layout) for family in ("qwen3_moe", "deepseek_v3") for layout in OF_EXPERTS]
MAIN = {"tp2": "qwen3", "tp2_ep2_etp1": "qwen3_moe", "pp2": "deepseek_v3"}
TOLERANCE = 1e-5


def make_adapted(directory: Path, family: str) -> tuple[Path, dict[str, Any]]:
    """A model, and what an engine gets for an adapter whose A and B are both random."""
    path = make_model(directory / "model", family)
    return path, make_adapter(directory / "adapter", path, SEEDS[family])


def make_adapter(directory: Path, model: Path, seed: int = 6) -> dict[str, Any]:
    """What an engine gets for an adapter of all projections whose A and B are both random."""
    shape = ModelShape.from_hf(model)
    adapter = Adapter(RANK, ALPHA, resolve_targets(shape, ALL_LINEAR))
    generator = torch.Generator().manual_seed(seed)
    sizes = adapter_shapes(shape, adapter)
    tensors = {name: 0.1 * torch.randn(size, generator=generator) for name, size in sizes.items()}
    write_peft(directory, adapter, tensors, str(model))
    return {"adapter": adapter, "adapter_path": str(directory)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    return functools.cache(lambda family: make_adapted(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="module")
def one_process(models: Callable) -> Callable[[str], Outcome]:
    def on_one(family: str) -> Outcome:
        path, adapter = models(family)
        return run(path, ONE, adapter=adapter)

    return functools.cache(on_one)


@pytest.mark.parametrize(("family", "layout"), mostly_full(CASES, lambda case: MAIN.get(case[1]) == case[0]))
def test_layout(models: Callable, one_process: Callable[[str], Outcome], family: str, layout: str) -> None:
    path, adapter = models(family)
    assert_same(run(path, (LAYOUTS | OF_EXPERTS)[layout], adapter=adapter), one_process(family))


@pytest.mark.parametrize(
    ("family", "layout", "options"),
    [
        ("qwen3_moe", "one", {"recompute_granularity": "full"}),
        full("qwen3_moe", "pp2_dp2", {"recompute_granularity": "full"}),
        full("qwen3_moe", "one", {"recompute_granularity": "selective"}),
        full("qwen3", "tp2", {"sequence_parallel": False}),
        full("qwen3", "tp2_dp2", {"use_distributed_optimizer": False}),
        full("qwen3_moe", "tp2_dp2", {"ddp": OVERLAPS[0]}),
        full("qwen3_moe", "dp2", {"ddp": OVERLAPS[1]}),
        full("qwen3", "pp2_dp2", {"ddp": OVERLAPS[1]}),
    ],
)
def test_options_change_no_number(
    models: Callable, one_process: Callable[[str], Outcome], family: str, layout: str, options: dict[str, Any]
) -> None:
    """Recompute from an embedding that has no gradient; parameters that come when a layer asks for them."""
    path, adapter = models(family)
    assert_same(run(path, (LAYOUTS | {"one": ONE})[layout], adapter=adapter, **options), one_process(family))


def test_training_moves_the_adapter_alone(models: Callable, one_process: Callable[[str], Outcome]) -> None:
    path, options = models("qwen3_moe")
    outcome = one_process("qwen3_moe")
    assert outcome.updates[0]["actor/ppo_kl"] == 0.0 and outcome.updates[-1]["actor/ppo_kl"] != 0.0
    _, before = read_peft(options["adapter_path"], ModelShape.from_hf(path))
    assert not [name for name in before if before[name].equal(outcome.weights[name])]
    base = load_file(path / "model.safetensors")
    changed = {f"{name.removeprefix(PEFT_PREFIX).rpartition('.lora_')[0]}.weight" for name in before}
    assert {name for name in base if not base[name].equal(outcome.weights[name])} == changed


def measure(model_path: str, sizes: dict[str, Any], options: dict[str, Any]) -> Any:
    """Log-probs of the batch's rows of this rank, and the gradients of the adapter of their sum, on rank 0."""
    from scalerl.batch.data_proto import DataProto, Jagged
    from scalerl.config.schema import MegatronConfig, OptimConfig
    from scalerl.parallel import platform
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize

    groups = initialize(Layout(**sizes), backend=platform.backend(), timeout_s=60, seed=1)
    # Without the distributed optimizer every rank has the whole sum of the gradients; they are not clipped.
    config = MegatronConfig(dtype="float32", use_distributed_optimizer=False)
    engine = MegatronEngine(model_path, config, groups, optim=OptimConfig(clip_grad=1e9), **options)
    shard = DataProto({"input_ids": Jagged.from_list(batch(), torch.int64)})
    rows = [range(len(LENGTHS))]
    outputs = engine.logprobs(shard, rows, temperature=TEMPERATURE)
    with engine.without_adapter():
        of_base = engine.logprobs(shard, rows, temperature=TEMPERATURE)

    def objective(logprobs_T: Tensor, *_: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return -logprobs_T.sum() / sum(LENGTHS), {"loss": logprobs_T.detach().sum()}

    engine.update(shard, rows, objective, temperature=TEMPERATURE)
    # In the place of the adapter its gradients leave the engine.
    with torch.no_grad():
        for parameter in (p for chunk in engine.chunks for p in chunk.parameters() if p.requires_grad):
            parameter.copy_(getattr(parameter, "main_grad"))  # noqa: B009
    gradients = {name: tensor.clone() for name, tensor in engine.export_adapter()}
    return outputs["logprobs"].values, of_base["logprobs"].values, gradients


def batch() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 500, (length,), generator=generator) for length in LENGTHS]


def oracle(model: Any) -> Tensor:
    """Computes the gradients of the same loss; returns the log-probs."""
    parts = []
    for row in batch():
        logits = model(input_ids=row[None]).logits[0, :-1].double() / TEMPERATURE
        logprobs = logits.log_softmax(-1).gather(1, row[1:, None])[:, 0]
        parts += [logprobs.new_zeros(1), logprobs]
    (-torch.cat(parts).sum() / sum(LENGTHS)).backward()
    return torch.cat(parts).detach()


def assert_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    wrong = {name: relative(actual[name], expected[name]) for name in actual}
    assert not {name: value for name, value in wrong.items() if not value < TOLERANCE}


@pytest.mark.parametrize("layout", ["one", full("tp2")])
def test_numbers_are_those_of_peft(models: Callable, peft: Any, layout: str) -> None:
    path, options = models("qwen3")
    sizes = {"one": ONE, **LAYOUTS}[layout]
    logprobs, of_base, gradients = run_ranks(sizes["world_size"], measure, str(path), sizes, options)[0]
    base = load_tiny_model(path, "qwen3")
    torch.testing.assert_close(of_base.double(), oracle(base), rtol=0, atol=TOLERANCE)
    model = peft.PeftModel.from_pretrained(base, options["adapter_path"], is_trainable=True)
    torch.testing.assert_close(logprobs.double(), oracle(model), rtol=0, atol=TOLERANCE)
    expected = {name.replace(".default.", "."): p.grad for name, p in model.named_parameters() if ".lora_" in name}
    assert_gradients(gradients, expected)


@pytest.mark.parametrize("family", ["qwen3_moe", full("deepseek_v3"), full("qwen3_5_text"), full("glm4")])
def test_numbers_are_those_of_the_merged_model(models: Callable, tmp_path: Path, family: str) -> None:
    """transformers' gradients of the merged weights, by the chain rule: peft has no adapter of a single expert."""
    path, options = models(family)
    logprobs, _, gradients = run_ranks(1, measure, str(path), ONE, options)[0]
    adapter, tensors = read_peft(options["adapter_path"], ModelShape.from_hf(path))
    shutil.copytree(path, tmp_path / "merged")
    weights = load_file(path / "model.safetensors")
    stems = [name.removesuffix(".lora_A.weight") for name in tensors if ".lora_A." in name]
    for stem in stems:
        change = tensors[f"{stem}.lora_B.weight"].double() @ tensors[f"{stem}.lora_A.weight"].double()
        name = f"{stem.removeprefix(PEFT_PREFIX)}.weight"
        weights[name] = (weights[name].double() + adapter.scale * change).float()
    save_file(weights, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
    model = load_tiny_model(tmp_path / "merged", family)
    torch.testing.assert_close(logprobs.double(), oracle(model), rtol=0, atol=TOLERANCE)
    # Under the names of the files, in the place of the weights.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(tmp_path / "gradients")
    of_weights = load_file(tmp_path / "gradients" / "model.safetensors")
    expected = {}
    for stem in stems:
        gradient = adapter.scale * of_weights[f"{stem.removeprefix(PEFT_PREFIX)}.weight"]
        expected[f"{stem}.lora_A.weight"] = tensors[f"{stem}.lora_B.weight"].T @ gradient
        expected[f"{stem}.lora_B.weight"] = gradient @ tensors[f"{stem}.lora_A.weight"].T
    assert_gradients(gradients, expected)
