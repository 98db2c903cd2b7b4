"""Transformer Engine's experts (`moe_experts_impl`) on a CPU: megatron's real TEGroupedMLP, on linear layers of torch.

Transformer Engine itself does not run here. Its grouped linear layer is replaced by one with the same arguments, names
and shapes of weights; names, marks, loading, export, checkpoints and what megatron does around it are the real ones.
"""

from __future__ import annotations

import ast
import inspect
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.extensions import transformer_engine
from safetensors.torch import load_file
from torch import Tensor

from scalerl.merge import merge
from tests.dist.launch import run_ranks
from tests.dist.test_experts import ABSOLUTE, RELATIVE, VOCAB_SIZE, Rank
from tests.lanes import full
from tests.tiny_models import make_tiny_model

# Arguments of Layout.
LAYOUTS: dict[str, dict[str, int]] = {
    "one": {"world_size": 1},
    "tp2": {"world_size": 2, "tp_size": 2},
    "tp2_ep2": {"world_size": 2, "tp_size": 2, "ep_size": 2},
    "tp2_etp2": {"world_size": 2, "tp_size": 2, "etp_size": 2},
    "pp2": {"world_size": 2, "pp_size": 2},
}
IMPLS = ("torch", "transformer_engine")
NUM_EXPERTS = 8


class GroupedLinear(torch.nn.Module):
    """As megatron's TEGroupedLinear: a weight [out, in] of each expert, marked as that one marks it."""

    parallel_mode = "column"

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str,
        pg_collection: Any,
        name: str | None = None,
    ) -> None:
        super().__init__()
        assert is_expert and not bias
        self.num_gemms = num_gemms
        tp_size = pg_collection.expt_tp.size()
        rows = output_size // tp_size if self.parallel_mode == "column" else output_size
        columns = input_size // tp_size if self.parallel_mode == "row" else input_size
        for expert in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(rows, columns, dtype=config.params_dtype))
            of_experts = config.expert_model_parallel_size > 1
            of_experts |= config.expert_tensor_parallel_size != config.tensor_model_parallel_size
            weight.allreduce = not of_experts  # pyright: ignore[reportAttributeAccessIssue]
            self.register_parameter(f"weight{expert}", weight)

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
        weights = [getattr(self, f"weight{expert}") for expert in range(self.num_gemms)]
        return torch.cat([F.linear(*pair) for pair in zip(x.split(m_splits), weights, strict=True)]), None


class RowGroupedLinear(GroupedLinear):
    parallel_mode = "row"


@contextmanager
def grouped_linear_of_torch() -> Iterator[None]:
    from scalerl.parallel import experts
    from scalerl.parallel.te_experts import experts_of

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(experts, "transformer_engine_experts", lambda: experts_of(GroupedLinear, RowGroupedLinear))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_moe")
    return make_tiny_model(path, "qwen3_moe", vocab_size=VOCAB_SIZE, initializer_range=0.1, num_experts=NUM_EXPERTS)


def test_the_linear_layer_here_has_the_arguments_of_megatrons() -> None:
    """Read from the source: where Transformer Engine is absent, megatron has no such class."""
    module = ast.parse(Path(transformer_engine.__file__).read_text())
    for name in ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"):
        (theirs,) = (node for node in ast.walk(module) if isinstance(node, ast.ClassDef) and node.name == name)
        (init,) = (node for node in theirs.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
        arguments = [argument.arg for argument in init.args.args + init.args.kwonlyargs]
        assert arguments == list(inspect.signature(GroupedLinear.__init__).parameters)


# --- megatron's own kinds of experts ---


def three_kinds(model: str, layout: dict[str, int]) -> dict[str, tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]]:
    """Of each kind of experts on this rank: weights by name, output, gradients by name; all from the same numbers."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    from scalerl.config.schema import MegatronConfig
    from scalerl.models import ModelShape
    from scalerl.parallel.expert_weights import named_gradients, named_tensors
    from scalerl.parallel.experts import Experts
    from scalerl.parallel.layout import Layout, initialize
    from scalerl.parallel.model import transformer_config
    from scalerl.parallel.te_experts import experts_of

    groups = initialize(Layout(**layout), backend="gloo", timeout_s=60, seed=1)
    config = transformer_config(ModelShape.from_hf(model), MegatronConfig(dtype="float32"), groups, on_cpu=True)
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    kinds = {
        "sequential": ModuleSpec(module=SequentialMLP, submodules=linear),
        "torch": ModuleSpec(module=Experts),
        "transformer_engine": experts_of(GroupedLinear, RowGroupedLinear),
    }
    num_local = NUM_EXPERTS // groups.layout.ep_size
    sizes = torch.arange(num_local) * 3 % 7
    outcome = {}
    for kind, spec in kinds.items():
        experts: Any = build_module(spec, num_local, config, pg_collection=get_default_pg_collection())
        layer = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": experts})})
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        weights = named_tensors(layer)
        for _, weight in sorted(weights.items()):
            weight.data.copy_(torch.randn(weight.shape, generator=generator) / 8)
        tokens = torch.randn(int(sizes.sum()), config.hidden_size, generator=generator)
        out, _ = experts(tokens, sizes, torch.rand(len(tokens), generator=generator))
        (out * torch.randn(out.shape, generator=generator)).sum().backward()
        for parameter in layer.parameters():
            parameter.main_grad = parameter.grad
        detached = {name: weight.detach().clone() for name, weight in weights.items()}
        outcome[kind] = (detached, out.detach(), named_gradients(layer))
    return outcome


@pytest.mark.parametrize("layout", ["one", "tp2_ep2", "tp2_etp2"])
def test_names_and_weights_are_those_of_sequential_experts(model: Path, layout: str) -> None:
    """megatron's SequentialMLP has a module for each expert, with the names that the family tables have."""
    for kinds in run_ranks(LAYOUTS[layout]["world_size"], three_kinds, str(model), LAYOUTS[layout]):
        weights, out, gradients = kinds["sequential"]
        assert "mlp.experts.local_experts.0.linear_fc1.weight" in weights
        for kind in IMPLS:
            assert kinds[kind][0].keys() == weights.keys()
            assert all(torch.equal(kinds[kind][0][name], weight) for name, weight in weights.items())
            torch.testing.assert_close(kinds[kind][1], out, rtol=RELATIVE, atol=ABSOLUTE)
            for name, gradient in gradients.items():
                torch.testing.assert_close(kinds[kind][2][name], gradient, rtol=RELATIVE, atol=ABSOLUTE)


# --- an engine ---

Outcome = dict[str, Any]


def make_rank(model: str, layout: dict[str, int], impl: str) -> Rank:
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    with grouped_linear_of_torch():
        rank = Rank(model, layout, moe_experts_impl=impl)
    uses_it = any(isinstance(module, TEGroupedMLP) for chunk in rank.engine.chunks for module in chunk.modules())
    assert uses_it == (impl == "transformer_engine")
    return rank


def train(model: str, layout: dict[str, int], impl: str, directory: str | None = None) -> Outcome:
    """Log-probs and two updates, with a checkpoint between."""
    from scalerl.parallel import checkpoint

    rank = make_rank(model, layout, impl)
    before = rank.logprobs()
    updates, saved = [rank.update()], rank.exported()
    if directory is not None:
        checkpoint.save_engine(rank.engine, directory)
    updates.append(rank.update())
    return {"logprobs": before.get("logprobs"), "updates": updates, "saved": saved, "weights": rank.exported()}


def resume(model: str, layout: dict[str, int], impl: str, directory: str) -> Outcome:
    from scalerl.parallel import restore

    rank = make_rank(model, layout, impl)
    restore.load_engine(rank.engine, directory)
    saved = rank.exported()
    return {"updates": [rank.update()], "saved": saved, "weights": rank.exported()}


def assert_same(actual: Outcome, expected: Outcome) -> None:
    for mine, theirs in zip(actual["updates"], expected["updates"][-len(actual["updates"]) :], strict=True):
        assert mine == pytest.approx(theirs, rel=RELATIVE)
    assert actual["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        assert float((actual["weights"][name] - weight).norm() / weight.norm()) < RELATIVE, name


@pytest.mark.parametrize("layout", ["one", "tp2", "tp2_ep2", full("tp2_etp2"), full("pp2")])
def test_an_engine_trains_to_the_same_numbers(model: Path, layout: str) -> None:
    """Two updates, as copies of experts that are not summed alike differ from the second one on."""
    own, theirs = (run_ranks(LAYOUTS[layout]["world_size"], train, str(model), LAYOUTS[layout], impl) for impl in IMPLS)
    for mine, others in zip(theirs, own, strict=True):
        assert_same(mine, others)
        for row, logprobs in (others["logprobs"] or {}).items():
            torch.testing.assert_close(mine["logprobs"][row], logprobs, rtol=0, atol=ABSOLUTE)


@pytest.mark.parametrize(
    ("saved_by", "layout", "loaded_on"),
    [("transformer_engine", "tp2_ep2", "tp2_etp2"), ("torch", "tp2_etp2", "tp2_ep2"), full("torch", "one", "tp2")],
)
def test_either_goes_on_from_a_checkpoint_of_the_other(
    model: Path, tmp_path: Path, saved_by: str, layout: str, loaded_on: str
) -> None:
    actor = tmp_path / "actor"
    world_size = LAYOUTS[layout]["world_size"]
    outcome = run_ranks(world_size, train, str(model), LAYOUTS[layout], saved_by, str(actor))[0]
    (actor / "huggingface").mkdir()
    for file in model.glob("*.json"):
        shutil.copy(file, actor / "huggingface")
    merge(actor, tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == outcome["saved"].keys()
    (other,) = set(IMPLS) - {saved_by}
    resumed = run_ranks(LAYOUTS[loaded_on]["world_size"], resume, str(model), LAYOUTS[loaded_on], other, str(actor))[0]
    for name, weight in outcome["saved"].items():
        assert torch.equal(merged[name], weight) and torch.equal(resumed["saved"][name], weight), name
    assert_same(resumed, outcome)
