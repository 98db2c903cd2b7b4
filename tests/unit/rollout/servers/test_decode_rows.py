"""A row's numbers are its own: bit by bit the same wherever it is and whoever its neighbours are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from scalerl.rollout.servers.embedded.decode_rows import (
    MIN_KEYS,
    NUM_ROWS,
    DeltaStates,
    SequenceCache,
    decode,
    prefill,
)
from scalerl.rollout.servers.embedded.engine import _model
from tests.tiny_models import make_tiny_model

# Some rows get more keys on their way.
NUM_STEPS, LONGEST = 8, 2 * MIN_KEYS + 20
NUM_SEQUENCES = 512
DRAW = torch.Generator().manual_seed(0)
PROMPTS = [
    torch.randint(3, 300, (1 + 7 * number % LONGEST,), generator=DRAW).tolist() for number in range(NUM_SEQUENCES)
]
TOKENS = torch.randint(3, 300, (NUM_SEQUENCES, NUM_STEPS), generator=DRAW).tolist()
# Prompts of 1, 36, 57 (which outgrows its keys), 60 and 75 tokens.
PROBES = [0, 5, 8, 56, 83]


@torch.inference_mode()
def logits_of(model: PreTrainedModel, sequences: Sequence[int]) -> dict[int, list[torch.Tensor]]:
    """Sequence -> its logits of every step, those of its prompt first."""
    caches, logits = [], {}
    for sequence in sequences:
        logits_V, layers = prefill(model, PROMPTS[sequence])
        caches.append(SequenceCache(len(PROMPTS[sequence]), layers))
        logits[sequence] = [logits_V.clone()]
    for step in range(NUM_STEPS):
        after = decode(model, caches, [TOKENS[sequence][step] for sequence in sequences])
        for sequence, row in zip(sequences, after, strict=True):
            logits[sequence].append(row.clone())
    return logits


def load(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return _model(str(path), dtype, False).eval()


FULL = pytest.mark.full
MODELS = [
    *("qwen3-float32", "mixtral-float32", "deepseek_v3-float32", "qwen3-bfloat16", "qwen3_5_moe_text-float32"),
    *(pytest.param(f"{family}-float32", marks=FULL) for family in ("llama", "qwen2", "mistral", "qwen3_moe")),
    *(pytest.param(f"gpt_oss-{dtype}", marks=FULL) for dtype in ("float32", "bfloat16")),
    *(pytest.param(f"{family}-bfloat16", marks=FULL) for family in ("llama", "qwen2", "mistral")),
    *(pytest.param(f"{family}-bfloat16", marks=FULL) for family in ("qwen3_moe", "mixtral", "deepseek_v3")),
]


@pytest.fixture(scope="module", params=MODELS)
def path_and_dtype(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    family, dtype = request.param.split("-")
    path = tmp_path_factory.mktemp(request.param)
    make_tiny_model(path, family, seed=0, dtype=getattr(torch, dtype))
    return path, getattr(torch, dtype)


@pytest.fixture(scope="module")
def model(path_and_dtype: tuple[Path, Any]) -> PreTrainedModel:
    return load(*path_and_dtype)


@pytest.fixture(scope="module")
def alone(model: PreTrainedModel) -> dict[int, list[torch.Tensor]]:
    return {probe: logits_of(model, [probe])[probe] for probe in PROBES}


def assert_same_bits(logits: dict[int, list[torch.Tensor]], expected: dict[int, list[torch.Tensor]]) -> None:
    shared = logits.keys() & expected.keys()
    assert shared
    for sequence in shared:
        assert torch.equal(torch.stack(logits[sequence]), torch.stack(expected[sequence])), sequence


@pytest.mark.parametrize("others", [2, 32, 99, *(pytest.param(number, marks=FULL) for number in (30, 31, 511))])
def test_neighbours_and_places_do_not_change_a_bit(
    model: PreTrainedModel, alone: dict[int, list[torch.Tensor]], others: int
) -> None:
    # The probes are spread among the others, at other places in each order.
    sequences = [number for number in range(NUM_SEQUENCES) if number not in PROBES]
    probes = PROBES[: min(len(PROBES), others)]
    sequences = sequences[: others + 1 - len(probes)]
    for at, probe in enumerate(probes):
        sequences.insert(at * (others // len(probes)), probe)
    for order in (sequences, sequences[::-1]):
        assert_same_bits(logits_of(model, order), alone)


class _Products(TorchDispatchMode):
    """Shapes of matrix products and attention, of a batch those of one of its products.

    A product over one number adds nothing and is left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        batched = name in ("bmm", "baddbmm") or "attention" in name
        shapes = tuple(tuple(arg.shape)[batched:] for arg in args if isinstance(arg, torch.Tensor))
        is_product = name in ("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "einsum", "linear")
        if (is_product and shapes[-1][-2:-1] != (1,)) or "attention" in name or "convolution" in name:
            self.shapes.add((name, *shapes))
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def test_a_step_over_many_rows_makes_the_products_of_a_step_over_one(model: PreTrainedModel) -> None:
    shapes = []
    _, layers = prefill(model, PROMPTS[5])
    for num_rows in (1, 3 * NUM_ROWS + 1):
        caches = [SequenceCache(len(PROMPTS[5]), layers) for _ in range(num_rows)]
        with _Products() as products:
            decode(model, caches, [7] * num_rows)
        shapes.append(products.shapes)
    assert shapes[0]
    assert shapes[0] == shapes[1]


@torch.inference_mode()
def test_logits_are_those_of_one_forward_over_everything(model: PreTrainedModel) -> None:
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.5}[model.dtype]
    logits = logits_of(model, range(NUM_ROWS))
    for sequence in (0, 8, 12):
        expected = model(torch.tensor([PROMPTS[sequence] + TOKENS[sequence]])).logits[0, len(PROMPTS[sequence]) - 1 :]
        torch.testing.assert_close(torch.stack(logits[sequence]), expected, atol=tolerance, rtol=0)


@torch.inference_mode()
def test_sequences_that_leave_change_nothing_of_those_that_stay(
    model: PreTrainedModel, alone: dict[int, list[torch.Tensor]]
) -> None:
    others = [number for number in range(60) if number not in PROBES]
    stay = [*PROBES, *others]
    caches = {number: SequenceCache(len(PROMPTS[number]), prefill(model, PROMPTS[number])[1]) for number in stay}
    for step in range(NUM_STEPS):
        logits = decode(model, [caches[number] for number in stay], [TOKENS[number][step] for number in stay])
        for place, probe in enumerate(PROBES):
            assert torch.equal(logits[place], alone[probe][step + 1])
        stay = [number for number in stay if number not in stay[-9::2]]


@torch.inference_mode()
def test_what_is_behind_a_prompt_reaches_nobody(model: PreTrainedModel, alone: dict[int, list[torch.Tensor]]) -> None:
    _, layers = prefill(model, PROMPTS[6])
    for layer in layers:
        # A gated delta net keeps nothing of single tokens.
        if not isinstance(layer, DeltaStates):
            layer[0][:, 2:], layer[1][:, 2:] = torch.nan, torch.inf
    caches = [SequenceCache(2, layers), SequenceCache(len(PROMPTS[0]), prefill(model, PROMPTS[0])[1])]
    logits = decode(model, caches, [9, TOKENS[0][0]])
    assert logits.isfinite().all() and torch.equal(logits[1], alone[0][1])


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
@torch.inference_mode()
def test_a_sliding_window_hides_old_keys(family: str, tmp_path: Path) -> None:
    window: dict[str, Any] = {"sliding_window": 6}
    if family == "qwen3":
        window |= {"use_sliding_window": True, "max_window_layers": 1}
    make_tiny_model(tmp_path, family, seed=0, **window)
    model = load(tmp_path)
    assert model.config.sliding_window == 6
    logits = logits_of(model, [12, 13])
    expected = load(tmp_path)(torch.tensor([PROMPTS[12] + TOKENS[12]])).logits[0]
    torch.testing.assert_close(torch.stack(logits[12]), expected[len(PROMPTS[12]) - 1 :], atol=1e-4, rtol=0)
    model.config.sliding_window = 7
    wider = torch.stack(logits_of(model, [12])[12])
    assert not torch.allclose(wider, expected[len(PROMPTS[12]) - 1 :], atol=1e-3)
