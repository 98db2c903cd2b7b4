"""A row's numbers are its own: bit by bit the same wherever it is and whoever its neighbours are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from scalerl.servers.embedded.decode_rows import NUM_ROWS, DecodeRows, prefill
from tests.tiny_models import make_tiny_model

NUM_STEPS, CAPACITY = 8, 48
DRAW = torch.Generator().manual_seed(0)
PROMPTS = [torch.randint(3, 300, (1 + row % 13,), generator=DRAW).tolist() for row in range(NUM_ROWS)]
TOKENS = torch.randint(3, 300, (NUM_ROWS, NUM_STEPS), generator=DRAW).tolist()


@torch.inference_mode()
def logits_of(
    model: PreTrainedModel, places: dict[int, int], capacity: int = CAPACITY
) -> dict[int, list[torch.Tensor]]:
    """places: sequence -> row.  -> sequence -> its logits of every step."""
    rows = DecodeRows(model, capacity)
    for sequence, row in places.items():
        rows.put(row, prefill(model, PROMPTS[sequence]))
    found: dict[int, list[torch.Tensor]] = {sequence: [] for sequence in places}
    for step in range(NUM_STEPS):
        logits = rows.step([(row, TOKENS[sequence][step]) for sequence, row in places.items()])
        for sequence, row_logits in zip(places, logits, strict=True):
            found[sequence].append(row_logits.clone())
    return found


@pytest.fixture(scope="module", params=["qwen3", "mixtral", "deepseek_v3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    path = tmp_path_factory.mktemp(request.param)
    make_tiny_model(path, request.param, seed=0)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()


def test_neighbours_and_places_do_not_change_a_bit(model: PreTrainedModel) -> None:
    together = logits_of(model, {sequence: sequence for sequence in range(NUM_ROWS)})
    reversed_order = logits_of(model, {sequence: NUM_ROWS - 1 - sequence for sequence in range(NUM_ROWS)})
    for sequence in range(0, NUM_ROWS, 5):
        alone = logits_of(model, {sequence: (7 * sequence) % NUM_ROWS})
        for step in range(NUM_STEPS):
            assert torch.equal(together[sequence][step], alone[sequence][step])
            assert torch.equal(together[sequence][step], reversed_order[sequence][step])


@torch.inference_mode()
def test_logits_are_those_of_one_forward_over_everything(model: PreTrainedModel) -> None:
    found = logits_of(model, {sequence: sequence for sequence in range(NUM_ROWS)})
    for sequence in (0, 7, 12):
        expected = model(torch.tensor([PROMPTS[sequence] + TOKENS[sequence]])).logits[0, len(PROMPTS[sequence]) :]
        torch.testing.assert_close(torch.stack(found[sequence]), expected, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_a_place_is_clean_for_the_next_sequence(model: PreTrainedModel) -> None:
    rows = DecodeRows(model, CAPACITY)
    rows.put(3, prefill(model, PROMPTS[12]))
    rows.step([(3, 9)])
    rows.clear(3)
    rows.put(3, prefill(model, PROMPTS[0]))
    assert torch.equal(rows.step([(3, TOKENS[0][0])])[0], logits_of(model, {0: 3})[0][0])


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
@torch.inference_mode()
def test_a_sliding_window_hides_old_keys(family: str, tmp_path: Path) -> None:
    window = {"sliding_window": 6}
    if family == "qwen3":
        window |= {"use_sliding_window": True, "max_window_layers": 1}
    make_tiny_model(tmp_path, family, seed=0, **window)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="sdpa").eval()
    assert model.config.sliding_window == 6
    found = logits_of(model, {12: 0})
    expected = model(torch.tensor([PROMPTS[12] + TOKENS[12]])).logits[0, len(PROMPTS[12]) :]
    torch.testing.assert_close(torch.stack(found[12]), expected, atol=1e-4, rtol=0)
    model.config.sliding_window = 7
    assert not torch.allclose(torch.stack(logits_of(model, {12: 0})[12]), expected, atol=1e-3)
