"""The packed engine against transformers: log-probs, entropy, gradients and exported weights, for every family."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.dist.launch import run_ranks
from tests.tiny_models import make_tiny_model

# (tp_size, pp_size, world_size)
LAYOUTS = {"one": (1, 1, 1), "tp2": (2, 1, 2), "pp2": (1, 2, 2)}
FAMILIES = ("qwen3", "qwen2", "llama")
LENGTHS = (9, 17, 1, 12, 31, 8, 2, 21)
MICRO_BATCHES = ((3, 0, 2), (4,), (7, 1, 6, 5))
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
    """outputs[temperature]: logprobs and entropy per row, empty except on the last stage."""

    outputs: dict[float, dict[str, list[Tensor]]]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    update: dict[str, float]
    bfloat16: list[Tensor]
    bfloat16_update: dict[str, float]


def batch() -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]


def token_weights() -> list[Tensor]:
    """What the loss multiplies each token's log-prob with: signs and sizes differ."""
    generator = torch.Generator().manual_seed(12)
    return [torch.randn(length, generator=generator) for length in LENGTHS]


def measure(models: dict[str, str], tp_size: int, pp_size: int, world_size: int) -> dict[str, FromEngine]:
    from scalerl.config.schema import MegatronConfig, OptimConfig
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize
    from scalerl.protocol import DataProto, Jagged

    groups = initialize(Layout(world_size, tp_size, pp_size), backend="gloo", timeout_s=60, seed=1)
    # So large that it never clips: gradients stay what backward made them.
    optim = OptimConfig(lr=1e-3, clip_grad=1e9)
    shard = DataProto(
        {
            "input_ids": Jagged.from_list(batch(), torch.int64),
            "weight": Jagged.from_list(token_weights(), torch.float32),
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

    found = {}
    for family, path in models.items():
        engine = MegatronEngine(path, MegatronConfig(dtype="float32"), groups, optim=optim)
        outputs = {}
        for temperature in TEMPERATURES:
            columns = engine.logprobs(shard, MICRO_BATCHES, temperature=temperature)
            outputs[temperature] = {name: [column[i] for i in range(len(LENGTHS))] for name, column in columns.items()}
        weights = exported(engine)
        update = engine.update(shard, MICRO_BATCHES, objective, temperature=0.7)
        # In the place of the weights, gradients leave the engine under the names that transformers knows.
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.copy_(parameter.main_grad)
        half = MegatronEngine(path, MegatronConfig(dtype="bfloat16"), groups, optim=optim)
        columns = half.logprobs(shard, MICRO_BATCHES, temperature=1.0)
        found[family] = FromEngine(
            outputs,
            weights,
            exported(engine),
            update,
            [columns["logprobs"][i] for i in range(len(LENGTHS))] if columns else [],
            half.update(shard, MICRO_BATCHES, objective, temperature=0.7),
        )
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        family: str(
            make_tiny_model(tmp_path_factory.mktemp(family), family, vocab_size=VOCAB_SIZE, initializer_range=0.1)
        )
        for family in FAMILIES
    }


@pytest.fixture(scope="module", params=LAYOUTS)
def measured(request: pytest.FixtureRequest, models: dict[str, str]) -> list[dict[str, FromEngine]]:
    """[rank][family]"""
    layout = LAYOUTS[request.param]
    return run_ranks(layout[2], measure, models, *layout)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def hf(models: dict[str, str], family: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(models[family], dtype=torch.float32, attn_implementation="eager")


def of_transformers(hf: PreTrainedModel, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy), [len(ids)] each, 0 at the first token."""
    distribution = (hf(ids[None]).logits[0] / temperature).log_softmax(-1)[:-1]
    logprobs = distribution.gather(1, ids[1:, None])[:, 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    return torch.cat([torch.zeros(1), logprobs]), torch.cat([torch.zeros(1), entropy])


def last_stage(measured: list[dict[str, FromEngine]], family: str) -> list[FromEngine]:
    return [rank[family] for rank in measured if rank[family].outputs[1.0]]


@pytest.mark.parametrize("temperature", TEMPERATURES)
@torch.no_grad()
def test_logprobs_and_entropy(
    measured: list[dict[str, FromEngine]], family: str, hf: PreTrainedModel, temperature: float
) -> None:
    ranks = last_stage(measured, family)
    assert ranks
    for row, ids in enumerate(batch()):
        logprobs, entropy = of_transformers(hf, ids, temperature)
        for rank in ranks:
            torch.testing.assert_close(rank.outputs[temperature]["logprobs"][row], logprobs, rtol=0, atol=ABSOLUTE)
            torch.testing.assert_close(rank.outputs[temperature]["entropy"][row], entropy, rtol=0, atol=ABSOLUTE)


def test_temperature_matters(measured: list[dict[str, FromEngine]], family: str) -> None:
    outputs = last_stage(measured, family)[0].outputs
    assert all(
        (outputs[1.0]["entropy"][row][1:] > outputs[0.7]["entropy"][row][1:]).all() for row in range(len(LENGTHS))
    )


def test_export_is_what_was_loaded(measured: list[dict[str, FromEngine]], family: str, models: dict[str, str]) -> None:
    original = load_file(Path(models[family]) / "model.safetensors")
    for rank in measured:
        weights = rank[family].weights
        assert weights.keys() == original.keys()
        assert [name for name in original if not torch.equal(weights[name], original[name])] == []


def test_gradient(measured: list[dict[str, FromEngine]], family: str, hf: PreTrainedModel) -> None:
    """One backward pass over all micro-batches, tensor by tensor, against autograd on one sequence at a time."""
    loss = torch.zeros(())
    for ids, weights in zip(batch(), token_weights(), strict=True):
        logprobs, entropy = of_transformers(hf, ids, 0.7)
        loss = loss + (logprobs * weights).sum() + ENTROPY_WEIGHT * entropy.sum()
    loss = loss / sum(LENGTHS)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in hf.named_parameters()}
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in expected.values()))
    for rank in measured:
        gradients = rank[family].gradients
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            assert float((gradients[name] - gradient).norm() / gradient.norm()) < GRADIENT_RELATIVE, name
        assert rank[family].update["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for rank in last_stage(measured, family):
        assert rank.update["loss"] == pytest.approx(float(loss), rel=1e-5)


@torch.no_grad()
def test_bfloat16_is_near(measured: list[dict[str, FromEngine]], family: str, hf: PreTrainedModel) -> None:
    for rank in last_stage(measured, family):
        errors = torch.cat(
            [mine - of_transformers(hf, ids, 1.0)[0] for mine, ids in zip(rank.bfloat16, batch(), strict=True)]
        )
        assert 0 < float(errors.abs().mean()) < BFLOAT16_MEAN
        assert float(errors.abs().max()) < BFLOAT16_MAX
        assert rank.bfloat16_update["grad_norm"] == pytest.approx(rank.update["grad_norm"], rel=0.05)


# --- a gradient that is no number ---


def poisoned(
    model: str, tp_size: int, pp_size: int, world_size: int, poison: float
) -> tuple[str, bool, dict[str, float]]:
    """An update with a gradient poisoned on one dp rank: its error, whether it left no trace, the next update."""
    from scalerl.config.schema import MegatronConfig, OptimConfig
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize
    from scalerl.protocol import DataProto, Jagged

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
    if groups.at.dp_rank == groups.layout.dp_size - 1:
        factor = torch.tensor(poison)
    with pytest.raises(FloatingPointError) as error:
        engine.update(shard, [(0, 1)], objective, temperature=1.0)
    unchanged = engine.num_updates == 0 and all(torch.equal(*pair) for pair in zip(state, before, strict=True))
    factor = torch.ones(())
    return str(error.value), unchanged, engine.update(shard, [(0, 1)], objective, temperature=1.0)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 4), (1, 2, 2)], ids=["one", "tp2_dp2", "pp2"])
def test_a_gradient_that_is_no_number(models: dict[str, str], layout: tuple[int, int, int], poison: float) -> None:
    """No rank changes a weight or optimizer state, also where only one rank's part is poisoned; at the limit all stop."""
    for message, unchanged, following in run_ranks(layout[2], poisoned, models["qwen3"], *layout, poison):
        assert message.startswith("update 0 skipped on all ranks, no weight was changed: the gradient norm is ")
        assert unchanged
        assert math.isfinite(following["grad_norm"]) and following["grad_norm"] > 0


# --- log-probs over a vocabulary that is split and padded ---

# (words, columns per rank, tp_size): none, some and all of the last rank's columns are padding.
VOCABULARIES = [(128, 64, 2), (100, 64, 2), (60, 64, 2), (100, 128, 1), (128, 128, 1)]


def split_logprobs(words: int, columns: int, tp_size: int, temperature: float) -> list[Tensor]:
    """Log-probs, entropy and the gradient of this rank's columns."""
    import torch.distributed as dist

    from scalerl.parallel.logprobs import vocab_parallel_logprobs

    dist.init_process_group("gloo")
    logits, labels, weights = split_case(words, columns * tp_size)
    rank = dist.get_rank()
    mine = logits[:, rank * columns : (rank + 1) * columns].clone().requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(
        mine, labels, vocab_size=words, temperature=temperature, tp_rank=rank, tp_group=dist.group.WORLD
    )
    (logprobs * weights[0] + entropy * weights[1]).sum().backward()
    return [logprobs.detach(), entropy.detach(), mine.grad]


def split_case(words: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits up to +-60 with the largest in the padding, so that a padding column that counted would take it all."""
    generator = torch.Generator().manual_seed(words)
    logits = 20 * torch.randn(6, columns, generator=generator)
    logits[:, words:] = 500.0
    labels = torch.randint(0, words, (6,), generator=generator)
    labels[0], labels[1] = 0, words - 1
    return logits, labels, torch.randn(2, 6, generator=generator)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(("words", "columns", "tp_size"), VOCABULARIES)
def test_split_vocabulary(words: int, columns: int, tp_size: int, temperature: float) -> None:
    ranks = run_ranks(tp_size, split_logprobs, words, columns, tp_size, temperature)
    logits, labels, weights = split_case(words, columns * tp_size)
    exact = logits.double().requires_grad_()
    distribution = (exact[:, :words] / temperature).log_softmax(-1)
    logprobs = distribution.gather(1, labels[:, None])[:, 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    (logprobs * weights[0] + entropy * weights[1]).sum().backward()
    for found in ranks:
        torch.testing.assert_close(found[0].double(), logprobs.detach(), rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(found[1].double(), entropy.detach(), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(torch.cat([found[2] for found in ranks], 1).double(), exact.grad, rtol=1e-5, atol=1e-6)
