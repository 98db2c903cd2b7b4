"""Pictures of packed rows: positions of their tokens, against transformers, and which rank has which of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.batch import Alignment
from scalerl.batch.data_proto import DataProto, Jagged
from scalerl.models import ModelShape
from scalerl.models.vision import VisionModel
from scalerl.parallel.micro_batch import MicroBatch, pack_rows
from tests.tiny_vision import FAMILIES, make_tiny_vision_model, picture_rows

EVEN = st.integers(1, 4).map(lambda half: 2 * half)
PICTURES = st.lists(st.lists(st.tuples(EVEN, EVEN), max_size=3), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision_model(tmp_path_factory.mktemp("model"), "qwen3_vl")


@pytest.fixture(scope="module")
def vision(model: Path) -> VisionModel:
    vision = ModelShape.from_hf(model).vision
    assert vision is not None
    return vision


def batch_of(pictures: list[list[tuple[int, int]]]) -> DataProto:
    rows = picture_rows("qwen3_vl", pictures)
    return DataProto(
        {
            "input_ids": Jagged.from_list([row["input_ids"] for row in rows], torch.int64),
            "pixel_values": Jagged.from_list([row["pixel_values"] for row in rows], torch.float32, per_token=False),
            "image_grid_thw": Jagged.from_list([row["image_grid_thw"] for row in rows], torch.int32, per_token=False),
        }
    )


@pytest.fixture(scope="module")
def theirs(model: Path) -> Any:
    """transformers' model, without numbers."""
    config_class, model_class = FAMILIES["qwen3_vl"]
    with torch.device("meta"):
        return model_class(config_class.from_pretrained(model)).model


@settings(deadline=None)
@given(PICTURES)
def test_positions_are_those_of_transformers(theirs: Any, vision: VisionModel, pictures: list) -> None:
    packed = pack_rows(batch_of(pictures), range(len(pictures)), device="cpu", vision=vision)
    start = 0
    for row in picture_rows("qwen3_vl", pictures):
        ids = row["input_ids"][None]
        types = (ids == vision.image_token_id).int()
        expected, _ = theirs.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=row["image_grid_thw"])
        mine = packed.position_ids[:, start : start + ids.shape[1]]
        assert torch.equal(mine.expand(3, -1), expected[:, 0])
        start += ids.shape[1]
    assert len(packed.position_ids) == (3 if any(pictures) else 1)


def sums_at_tokens(parts: list[MicroBatch], tp_size: int, batch: DataProto) -> torch.Tensor:
    """[P of all ranks] at each token, what the tower makes of its patches: here the sum of four."""
    results = []
    for rank, part in enumerate(parts):
        length = part.input_ids.shape[1] // tp_size
        values = torch.zeros(length, dtype=torch.float64)
        if (pictures := part.packing.pictures) is not None:
            sums = torch.cat(list(pictures.pixels)).double().sum(-1).view(-1, 4).sum(-1)
            values[pictures.places] = sums[pictures.features]
        assert rank % tp_size == 0 or part.packing.pictures is None or parts[rank - 1].packing.pictures is not None
        results.append(values)
    return torch.cat(results)


@settings(deadline=None)
@given(PICTURES, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_each_placeholder_gets_its_feature_on_one_rank(
    vision: VisionModel, pictures: list, cp_size: int, tp_size: int
) -> None:
    batch, rows = batch_of(pictures), list(range(len(pictures)))[::-1]
    alignment = Alignment.of_layout(tp_size=tp_size, cp_size=cp_size, sequence_parallel=True)
    parts = [
        pack_rows(
            batch,
            rows,
            device="cpu",
            alignment=alignment,
            cp_size=cp_size,
            cp_rank=cp_rank,
            vision=vision,
            sp=(tp_rank, tp_size),
        )
        for cp_rank in range(cp_size)
        for tp_rank in range(tp_size)
    ]
    at_tokens = parts[0].to_own_token(sums_at_tokens(parts, tp_size, batch))
    is_picture = parts[0].columns["input_ids"] == vision.image_token_id
    expected = torch.cat([batch.tokens["pixel_values"][row].double().sum(-1).view(-1, 4).sum(-1) for row in rows])
    assert torch.equal(at_tokens[is_picture], expected) and not at_tokens[~is_picture].any()


def test_a_rank_computes_the_pictures_of_its_own_tokens(vision: VisionModel) -> None:
    """Of four in a long row, those in the middle are the last rank's: it has the middle pieces."""
    batch = batch_of([[(2, 2), (8, 8), (8, 8), (2, 2)]])
    alignment = Alignment.of_layout(tp_size=1, cp_size=4, sequence_parallel=False)
    parts = [
        pack_rows(batch, [0], device="cpu", alignment=alignment, cp_size=4, cp_rank=rank, vision=vision)
        for rank in range(4)
    ]
    numbers = [0 if part.packing.pictures is None else len(part.packing.pictures.grids) for part in parts]
    assert max(numbers) < 4 and sum(numbers) >= 4


def test_a_model_that_sees_no_pictures() -> None:
    batch = batch_of([[], [(2, 2)]])
    assert pack_rows(batch, [0], device="cpu").packing.pictures is None
    with pytest.raises(ValueError, match=r"one of the rows \[1, 0\] of the batch has a picture, and the"):
        pack_rows(batch, [1, 0], device="cpu")


def test_a_placeholder_that_the_policy_sampled_is_a_word(vision: VisionModel) -> None:
    batch = batch_of([[(4, 4)], []])
    ids = [torch.cat([batch.tokens["input_ids"][row], torch.tensor([vision.image_token_id, 5])]) for row in range(2)]
    masks = [torch.tensor([False] * (len(row) - 2) + [True] * 2) for row in ids]
    batch.tokens["input_ids"] = Jagged.from_list(ids, torch.int64)
    with pytest.raises(ValueError, match=r"row 0 of the batch has 5 placeholders .* \[\(1, 4, 4\)\] patches take 4"):
        pack_rows(batch, [0, 1], device="cpu", vision=vision)
    batch.tokens["response_mask"] = Jagged.from_list(masks, torch.bool)
    packed = pack_rows(batch, [0, 1], device="cpu", vision=vision)
    assert packed.packing.pictures is not None and len(packed.packing.pictures.places) == 4
    words = packed.position_ids[:, packed.input_ids[0] != vision.image_token_id]
    assert torch.equal(words[0], words[1]) and torch.equal(words[0], words[2])
