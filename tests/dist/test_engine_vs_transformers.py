"""The packed engine against transformers: log-probs, entropy, gradients and exported weights, for every family."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.dist import layouts
from tests.dist.launch import run_ranks
from tests.dist.layouts import ONE
from tests.lanes import full, mostly_full
from tests.tiny_models import FAMILIES, VARIANTS, WITH_EXPERTS, load_tiny_model, make_tiny_model

# tp2 has experts whole on each rank.
DENSE_LAYOUTS = {"one": ONE} | {name: layouts.LAYOUTS[name] for name in ("tp2", "pp2")}
LAYOUTS = DENSE_LAYOUTS | {name: layouts.MIXTURE_LAYOUTS[name] for name in ("ep2", "tp2_etp2", "tp2_ep2")}
MIXTURES = (*WITH_EXPERTS, *VARIANTS)
CASES = [
    (layout, family)
    for layout in LAYOUTS
    for family in (*FAMILIES, *VARIANTS)
    if family in MIXTURES or layout in DENSE_LAYOUTS
]
LENGTHS = (9, 17, 1, 12, 31, 8, 2, 21)
MICRO_BATCHES = ((3, 0, 2), (4,), (7, 1, 6, 5))
# Of two dp ranks: even and odd rows.
HALVES = ((3, 0, 2, 5), (4, 7, 1, 6))
TEMPERATURES = (1.0, 0.7)
# Not a multiple of the padding on any layout.
VOCAB_SIZE = 520
ENTROPY_WEIGHT = 0.3
ABSOLUTE = 1e-5
# Norm of the difference over norm of the gradient, per tensor.
GRADIENT_RELATIVE = 1e-5
# bfloat16 has 8 bits: over two layers and log-probs of about 6 that is some hundredths.
BFLOAT16_MEAN, BFLOAT16_MAX = 0.02, 0.1


@dataclass
class FromEngine:
    """outputs[temperature]: logprobs and entropy of this dp rank's rows, empty except on the last stage."""

    outputs: dict[float, dict[str, dict[int, Tensor]]]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    update: dict[str, float]
    bfloat16: dict[int, Tensor]
    bfloat16_update: dict[str, float]


def batch() -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]


def token_weights() -> list[Tensor]:
    """What the loss multiplies each token's log-prob with: signs and sizes differ."""
    generator = torch.Generator().manual_seed(12)
    return [torch.randn(length, generator=generator) for length in LENGTHS]


def measure(models: dict[str, str], layout: dict[str, int]) -> dict[str, FromEngine]:
    from scalerl.batch.data_proto import DataProto, Jagged
    from scalerl.config.schema import MegatronConfig, OptimConfig
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize

    groups = initialize(Layout(**layout), backend="gloo", timeout_s=60, seed=1)
    dp_size, dp_rank = groups.layout.dp_size, groups.coordinates.dp_rank
    mine = [row for row in range(len(LENGTHS)) if row % dp_size == dp_rank]
    micro_batches = [[mine.index(row) for row in rows if row in mine] for rows in (MICRO_BATCHES, HALVES)[dp_size - 1]]
    # So large that it never clips: gradients stay what backward made them.
    optim = OptimConfig(lr=1e-3, clip_grad=1e9)
    shard = DataProto(
        {
            "input_ids": Jagged.from_list([batch()[row] for row in mine], torch.int64),
            "weight": Jagged.from_list([token_weights()[row] for row in mine], torch.float32),
        }
    )

    def objective(
        logprobs_T: Tensor, entropy_T: Tensor, columns: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss = (logprobs_T * columns["weight"]).sum() + ENTROPY_WEIGHT * entropy_T.sum()
        loss = loss / sum(LENGTHS)
        return loss, {"loss": loss.detach()}

    def exported(engine: MegatronEngine) -> dict[str, Tensor]:
        return {name: tensor.clone() for bucket in engine.export_buckets(20_000) for name, tensor in bucket}

    numbers_by_family = {}
    for family, path in models.items():
        # Without the distributed optimizer every rank has the whole sum of the gradients.
        config = MegatronConfig(dtype="float32", use_distributed_optimizer=False)
        engine = MegatronEngine(path, config, groups, optim=optim)
        outputs = {}
        for temperature in TEMPERATURES:
            columns = engine.logprobs(shard, micro_batches, temperature=temperature)
            outputs[temperature] = {
                name: {row: column[i] for i, row in enumerate(mine)} for name, column in columns.items()
            }
        # Near ties fall otherwise in bfloat16: its routers follow those of float32.
        routed = engine.logprobs(shard, micro_batches, temperature=1.0, record_routing=family in MIXTURES)
        routed_shard = shard.union(DataProto({name: routed[name] for name in routed if name == "routed_experts"}))
        weights = exported(engine)
        update = engine.update(shard, micro_batches, objective, temperature=0.7)
        # In the place of the weights, gradients leave the engine under the names that transformers knows.
        with torch.no_grad():
            for parameter in itertools.chain(*(chunk.parameters() for chunk in engine.chunks)):
                parameter.copy_(parameter.main_grad)
        half = MegatronEngine(path, MegatronConfig(dtype="bfloat16"), groups, optim=optim)
        columns = half.logprobs(routed_shard, micro_batches, temperature=1.0)
        numbers_by_family[family] = FromEngine(
            outputs,
            weights,
            exported(engine),
            update,
            {row: columns["logprobs"][i] for i, row in enumerate(mine)} if columns else {},
            half.update(routed_shard, micro_batches, objective, temperature=0.7),
        )
    return numbers_by_family


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        family: str(
            make_tiny_model(tmp_path_factory.mktemp(family), family, vocab_size=VOCAB_SIZE, initializer_range=0.1)
        )
        for family in (*FAMILIES, *VARIANTS)
    }


@pytest.fixture(scope="module")
def measured_on(models: dict[str, str]) -> Callable[[str, bool], list[dict[str, FromEngine]]]:
    """Layout, and whether `make test` has it of the family -> [rank][family]"""

    @cache
    def run(name: str, main: bool) -> list[dict[str, FromEngine]]:
        cases = [case for case in CASES if is_main(case) == main]
        mine = {family: path for family, path in models.items() if (name, family) in cases}
        return run_ranks(LAYOUTS[name]["world_size"], measure, mine, LAYOUTS[name])

    return run


def is_main(case: tuple[str, str]) -> bool:
    layout, family = case
    return family in FAMILIES and layout in ("one", "tp2_etp2" if family in WITH_EXPERTS else "tp2")


on_layouts = pytest.mark.parametrize(("layout", "family"), mostly_full(CASES, is_main))


@pytest.fixture
def measured(layout: str, family: str, measured_on: Callable) -> list[FromEngine]:
    """One for each rank."""
    return [rank[family] for rank in measured_on(layout, is_main((layout, family)))]


@pytest.fixture
def hf(models: dict[str, str], family: str) -> PreTrainedModel:
    return load_tiny_model(Path(models[family]), family, attn_implementation="eager")


def of_transformers(hf: PreTrainedModel, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy), [len(ids)] each, 0 at the first token."""
    distribution = (hf(ids[None]).logits[0] / temperature).log_softmax(-1)[:-1]
    logprobs = distribution.gather(1, ids[1:, None])[:, 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    return torch.cat([torch.zeros(1), logprobs]), torch.cat([torch.zeros(1), entropy])


def last_stage(measured: list[FromEngine]) -> list[FromEngine]:
    return [rank for rank in measured if rank.outputs[1.0]]


def of_files(family: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' parameters under the names of the files, which store every expert by itself, gpt-oss's not."""
    file_tensors = {}
    if family == "gpt_oss":
        return tensors
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            prefix, part = name.rsplit(".", 1)
            for expert, weight in enumerate(tensor):
                parts = weight.chunk(2) if part == "gate_up_proj" else [weight]
                names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
                file_tensors |= {f"{prefix}.{expert}.{n}.weight": p for n, p in zip(names, parts, strict=True)}
        else:
            file_tensors[name] = tensor
    if family in ("mixtral", "minimax_m2"):
        of_mixtral = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "mlp": "block_sparse_moe"}
        file_tensors = {
            ".".join(of_mixtral.get(part, part) for part in name.split(".")): x for name, x in file_tensors.items()
        }
    return file_tensors


@pytest.mark.shows("log-probs")
@on_layouts
@pytest.mark.parametrize("temperature", TEMPERATURES)
@torch.no_grad()
def test_logprobs_and_entropy(measured: list[FromEngine], hf: PreTrainedModel, temperature: float) -> None:
    outputs = [rank.outputs[temperature] for rank in last_stage(measured)]
    assert {row for columns in outputs for row in columns["logprobs"]} == set(range(len(LENGTHS)))
    for row, ids in enumerate(batch()):
        logprobs, entropy = of_transformers(hf, ids, temperature)
        for columns in outputs:
            if row in columns["logprobs"]:
                torch.testing.assert_close(columns["logprobs"][row], logprobs, rtol=0, atol=ABSOLUTE)
                torch.testing.assert_close(columns["entropy"][row], entropy, rtol=0, atol=ABSOLUTE)


@on_layouts
def test_temperature_matters(measured: list[FromEngine]) -> None:
    outputs = last_stage(measured)[0].outputs
    assert all((warm[1:] > outputs[0.7]["entropy"][row][1:]).all() for row, warm in outputs[1.0]["entropy"].items())


@on_layouts
def test_export_is_what_was_loaded(measured: list[FromEngine], family: str, models: dict[str, str]) -> None:
    original = load_file(Path(models[family]) / "model.safetensors")
    for rank in measured:
        weights = rank.weights
        assert weights.keys() == original.keys()
        assert [name for name in original if not torch.equal(weights[name], original[name])] == []


@pytest.mark.shows("train step")
@on_layouts
def test_gradient(measured: list[FromEngine], family: str, hf: PreTrainedModel) -> None:
    """One backward pass over all micro-batches, tensor by tensor, against autograd on one sequence at a time."""
    loss = torch.zeros(())
    for ids, weights in zip(batch(), token_weights(), strict=True):
        logprobs, entropy = of_transformers(hf, ids, 0.7)
        loss = loss + (logprobs * weights).sum() + ENTROPY_WEIGHT * entropy.sum()
    loss = loss / sum(LENGTHS)
    loss.backward()
    expected = of_files(family, {name: parameter.grad for name, parameter in hf.named_parameters()})
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in expected.values()))
    for rank in measured:
        gradients = {name: x for name, x in rank.gradients.items() if not name.endswith("e_score_correction_bias")}
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            assert float((gradients[name] - gradient).norm() / gradient.norm()) < GRADIENT_RELATIVE, name
        assert rank.update["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for rank in last_stage(measured):
        assert rank.update["loss"] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.shows("log-probs", "train step", dtype="bfloat16")
@on_layouts
@torch.no_grad()
def test_bfloat16_is_near(measured: list[FromEngine], hf: PreTrainedModel) -> None:
    for rank in last_stage(measured):
        errors = torch.cat([mine - of_transformers(hf, batch()[row], 1.0)[0] for row, mine in rank.bfloat16.items()])
        assert 0 < float(errors.abs().mean()) < BFLOAT16_MEAN
        assert float(errors.abs().max()) < BFLOAT16_MAX
        assert rank.bfloat16_update["grad_norm"] == pytest.approx(rank.update["grad_norm"], rel=0.05)


# --- a gradient that is no number ---


def poisoned(
    model: str, tp_size: int, pp_size: int, world_size: int, poison: float
) -> tuple[str, bool, dict[str, float]]:
    """An update with a gradient poisoned on one dp rank: its error, whether it left no trace, the next update."""
    from scalerl.batch.data_proto import DataProto, Jagged
    from scalerl.config.schema import MegatronConfig, OptimConfig
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize

    groups = initialize(Layout(world_size, tp_size, pp_size), backend="gloo", timeout_s=60, seed=1)
    config = MegatronConfig(dtype="float32", max_consecutive_skipped_updates=1)
    engine = MegatronEngine(model, config, groups, optim=OptimConfig(lr=1e-3))
    shard = DataProto({"input_ids": Jagged.from_list(batch()[:2], torch.int64)})
    factor = torch.ones(())

    def objective(logprobs_T: Tensor, *_: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss = logprobs_T.mean() * factor
        return loss, {"loss": loss.detach()}

    state = [parameter for chunk in engine.chunks for parameter in chunk.parameters()]
    state += [
        value
        for part in engine.optimizer.chained_optimizers
        for entry in part.optimizer.state.values()
        for value in entry.values()
    ]
    before = [tensor.detach().clone() for tensor in state]
    if groups.coordinates.dp_rank == groups.layout.dp_size - 1:
        factor = torch.tensor(poison)
    with pytest.raises(FloatingPointError) as error:
        engine.update(shard, [(0, 1)], objective, temperature=1.0)
    unchanged = engine.num_updates == 0 and all(torch.equal(*pair) for pair in zip(state, before, strict=True))
    factor = torch.ones(())
    return str(error.value), unchanged, engine.update(shard, [(0, 1)], objective, temperature=1.0)


@pytest.mark.parametrize(
    ("layout", "poison"),
    [
        full((1, 1, 1), math.nan, id="one-nan"),
        full((1, 1, 1), math.inf, id="one-inf"),
        full((2, 1, 4), math.nan, id="tp2_dp2-nan"),
        pytest.param((2, 1, 4), math.inf, id="tp2_dp2-inf"),
        pytest.param((1, 2, 2), math.nan, id="pp2-nan"),
        full((1, 2, 2), math.inf, id="pp2-inf"),
    ],
)
def test_a_gradient_that_is_no_number(models: dict[str, str], layout: tuple[int, int, int], poison: float) -> None:
    """No rank changes a weight or optimizer state, also where only one is poisoned; at the limit all stop."""
    for message, unchanged, following in run_ranks(layout[2], poisoned, models["qwen3"], *layout, poison):
        assert message.startswith("update 0 skipped on all ranks, no weight was changed: the gradient norm is ")
        assert unchanged
        assert math.isfinite(following["grad_norm"]) and following["grad_norm"] > 0
