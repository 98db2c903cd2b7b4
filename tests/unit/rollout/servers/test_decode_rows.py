"""A row's numbers are its own: bit by bit the same wherever it is and whoever its neighbours are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from scalerl.rollout.servers.embedded.decode_rows import MIN_KEYS, PREFILL_TOKENS, DecodeRows, prefill
from scalerl.rollout.servers.embedded.fixed_shapes import (
    NUM_ROWS,
    attention_of_one_token,
    compute_in_blocks,
    computes_in_blocks,
    lay_weights_by_column,
)
from tests.tiny_models import make_tiny_model

# Some rows get more keys on their way.
NUM_STEPS, CAPACITY, LONGEST = 8, 100, 2 * MIN_KEYS + 20
NUM_SEQUENCES = 512
DRAW = torch.Generator().manual_seed(0)
PROMPTS = [
    torch.randint(3, 300, (1 + 7 * number % LONGEST,), generator=DRAW).tolist() for number in range(NUM_SEQUENCES)
]
TOKENS = torch.randint(3, 300, (NUM_SEQUENCES, NUM_STEPS), generator=DRAW).tolist()
# Prompts of 1, 36, 57 (which outgrows its keys), 60 and 75 tokens.
PROBES = [0, 5, 8, 56, 83]


@torch.inference_mode()
def logits_of(model: PreTrainedModel, places: dict[int, int]) -> dict[int, list[torch.Tensor]]:
    """places: sequence -> row.  -> sequence -> its logits of every step, those of its prompt first."""
    rows = DecodeRows(model, CAPACITY)
    logits_of_sequence: dict[int, list[torch.Tensor]] = {}
    prefilled = prefill(model, [PROMPTS[sequence] for sequence in places])
    for (sequence, row), of_prompt in zip(places.items(), prefilled, strict=True):
        rows.put([row], of_prompt)
        logits_of_sequence[sequence] = [of_prompt.logits_V.clone()]
    for step in range(NUM_STEPS):
        logits = rows.step({row: TOKENS[sequence][step] for sequence, row in places.items()})
        for sequence, row_logits in zip(places, logits, strict=True):
            logits_of_sequence[sequence].append(row_logits.clone())
    return logits_of_sequence


def sdpa_by_key_heads(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """transformers' sdpa attention, but for one token of each row of a pass, which the engine computes by key heads."""
    if query.shape[2] > 1 or mask is None:  # one prompt
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    added = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    output = attention_of_one_token(query, key, value, added, kwargs["scaling"])
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register("sdpa_by_key_heads", sdpa_by_key_heads)
AttentionMaskInterface.register("sdpa_by_key_heads", sdpa_mask)


def load(path: Path, dtype: torch.dtype = torch.float32, in_blocks: bool = True) -> PreTrainedModel:
    attention = "sdpa" if in_blocks or dtype != torch.float32 else "sdpa_by_key_heads"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention).eval()
    if in_blocks:
        compute_in_blocks(model)
    else:
        lay_weights_by_column(model)
    assert computes_in_blocks(model) == in_blocks
    return model


FULL = pytest.mark.full
MODELS = [
    *("qwen3-float32", "mixtral-float32", "deepseek_v3-float32", "qwen3-bfloat16"),
    *(pytest.param(f"{family}-float32", marks=FULL) for family in ("llama", "qwen2", "mistral", "qwen3_moe")),
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
    return {probe: logits_of(model, {probe: 3 * probe})[probe] for probe in PROBES}


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
        assert_same_bits(logits_of(model, {sequence: row for row, sequence in enumerate(order)}), alone)


def test_numbers_are_those_of_passes_of_32_rows(path_and_dtype: tuple[Path, Any], model: PreTrainedModel) -> None:
    places = {sequence: sequence for sequence in [*range(NUM_ROWS + 8), *PROBES]}
    assert_same_bits(logits_of(model, places), logits_of(load(*path_and_dtype, in_blocks=False), places))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_key_heads"), [(4, 4), (4, 2), (6, 1)])
def test_attention_of_one_token(num_heads: int, num_key_heads: int, dtype: torch.dtype) -> None:
    """Against one head, row and key after the other, in float64; the last keys of every row are hidden."""
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(3, num_heads, 1, 8, generator=draw).to(dtype)
    key, value = (torch.randn(3, num_key_heads, 5, 8, generator=draw).to(dtype) for _ in range(2))
    lengths = [5, 1, 3]
    hidden = torch.arange(5) >= torch.tensor(lengths)[:, None]
    mask = torch.zeros(3, 5, dtype=dtype).masked_fill_(hidden, -torch.inf)[:, None, None]
    output = attention_of_one_token(query, key, value, mask, scaling=0.3)
    assert output.shape == (3, num_heads, 1, 8) and output.dtype == dtype
    for row, length in enumerate(lengths):
        for head in range(num_heads):
            of_keys = head * num_key_heads // num_heads
            keys, values = (states[row, of_keys, :length].double() for states in (key, value))
            expected = (keys @ query[row, head, 0].double() * 0.3).softmax(0) @ values
            tolerance = 1e-6 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(output[row, head, 0].double(), expected, atol=tolerance, rtol=0)


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
    for num_rows in (1, 3 * NUM_ROWS + 1):
        rows = DecodeRows(model, CAPACITY)
        rows.put(range(num_rows), prefill(model, [PROMPTS[5]])[0])
        with _Products() as products:
            rows.step(dict.fromkeys(range(num_rows), 7))
        shapes.append(products.shapes)
    assert shapes[0]
    assert shapes[0] == shapes[1]


def test_prompts_that_do_not_fit_into_one_pass_are_computed_in_several(model: PreTrainedModel) -> None:
    prompts = [PROMPTS[number % 100] for number in range(70)]
    assert sum(map(len, prompts)) > PREFILL_TOKENS
    with torch.inference_mode():
        prefilled = prefill(model, prompts)
        for prompt, one in list(zip(prompts, prefilled, strict=True))[::9]:
            (expected,) = prefill(model, [prompt])
            assert torch.equal(one.logits_V, expected.logits_V)
            for layer, expected_layer in zip(one.layers, expected.layers, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(layer, expected_layer, strict=True))


@torch.inference_mode()
def test_logits_are_those_of_one_forward_over_everything(model: PreTrainedModel) -> None:
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.5}[model.dtype]
    logits = logits_of(model, {sequence: sequence for sequence in range(NUM_ROWS)})
    for sequence in (0, 8, 12):
        expected = model(torch.tensor([PROMPTS[sequence] + TOKENS[sequence]])).logits[0, len(PROMPTS[sequence]) - 1 :]
        torch.testing.assert_close(torch.stack(logits[sequence]), expected, atol=tolerance, rtol=0)


@torch.inference_mode()
def test_rows_that_leave_change_nothing_of_those_that_stay(
    model: PreTrainedModel, alone: dict[int, list[torch.Tensor]]
) -> None:
    rows = DecodeRows(model, CAPACITY)
    others = [number for number in range(60) if number not in PROBES]
    for number in [*others[:20], *PROBES, *others[20:]]:
        rows.put([number], prefill(model, [PROMPTS[number]])[0])
    stay = [*PROBES, *others]
    for step in range(NUM_STEPS):
        logits = rows.step({number: TOKENS[number][step] for number in stay})
        for place, probe in enumerate(PROBES):
            assert torch.equal(logits[place], alone[probe][step + 1])
        rows.clear(stay[-9::2])
        stay = [number for number in stay if number not in stay[-9::2]]


@torch.inference_mode()
def test_a_row_that_waits_with_all_its_keys_used_disturbs_nobody(
    model: PreTrainedModel, alone: dict[int, list[torch.Tensor]]
) -> None:
    waits, beside = PROBES[2], PROBES[1]
    rows = DecodeRows(model, CAPACITY)
    for number in (waits, beside):
        rows.put([number], prefill(model, [PROMPTS[number]])[0])
    used = 2 * MIN_KEYS - len(PROMPTS[waits])
    assert 0 < used < NUM_STEPS
    for step in range(used):
        rows.step({number: TOKENS[number][step] for number in (waits, beside)})
    assert torch.equal(rows.step({beside: TOKENS[beside][used]})[0], alone[beside][used + 1])
    assert torch.equal(rows.step({waits: TOKENS[waits][used]})[0], alone[waits][used + 1])


@torch.inference_mode()
def test_a_place_is_clean_for_the_next_sequence(model: PreTrainedModel, alone: dict[int, list[torch.Tensor]]) -> None:
    rows = DecodeRows(model, CAPACITY)
    (longer,) = prefill(model, [PROMPTS[6]])
    for keys, values in longer.layers:
        keys[:, -3:], values[:, -3:] = torch.nan, torch.inf
    rows.put([3], longer)
    rows.step({3: 9})
    rows.clear([3])
    rows.put([3], prefill(model, [PROMPTS[0]])[0])
    assert torch.equal(rows.step({3: TOKENS[0][0]})[0], alone[0][1])


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
@pytest.mark.parametrize("in_blocks", [True, False])
@torch.inference_mode()
def test_a_sliding_window_hides_old_keys(family: str, in_blocks: bool, tmp_path: Path) -> None:
    window: dict[str, Any] = {"sliding_window": 6}
    if family == "qwen3":
        window |= {"use_sliding_window": True, "max_window_layers": 1}
    make_tiny_model(tmp_path, family, seed=0, **window)
    model = load(tmp_path, in_blocks=in_blocks)
    assert model.config.sliding_window == 6
    logits = logits_of(model, {12: 0, 13: 5})
    expected = load(tmp_path, in_blocks=False)(torch.tensor([PROMPTS[12] + TOKENS[12]])).logits[0]
    torch.testing.assert_close(torch.stack(logits[12]), expected[len(PROMPTS[12]) - 1 :], atol=1e-4, rtol=0)
    model.config.sliding_window = 7
    wider = torch.stack(logits_of(model, {12: 0})[12])
    assert not torch.allclose(wider, expected[len(PROMPTS[12]) - 1 :], atol=1e-3)
