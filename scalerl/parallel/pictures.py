"""Pictures of a packed micro-batch: positions of their tokens, and which rank computes which of them.

A picture has a feature for each square of merged patches, and a placeholder token for each feature. A cp rank computes
the pictures of its own tokens.

Dims: T tokens of the rows, P with padding, t tokens of this rank, F features of the pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from scalerl.batch.columns import IMAGE_GRID_THW, INPUT_IDS, PIXEL_VALUES, RESPONSE_MASK
from scalerl.batch.data_proto import DataProto
from scalerl.models.vision import VisionModel

Grid = tuple[int, int, int]


@dataclass
class Pictures:
    """The pictures that a rank computes in one micro-batch.

    pixels: rows of pixel_values of each picture, in host memory.  grids: patches of each in time, height and width.
    places_t: the rank's tokens that are placeholders.  features_t: which of the F features each of them gets.
    deepstack: what the layers add there, [F, H] for each layer; only between the tower's pass and its last use.
    """

    pixels: Sequence[Tensor]
    grids: Sequence[Grid]
    places: Tensor
    features: Tensor
    deepstack: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class RowPictures:
    """The pictures of some rows, whose real tokens are end to end: T.

    sizes: features of each picture.
    positions_3T: of each token in time, height and width.  feature_T: the feature that a token gets; -1: none.
    """

    pixels: list[Tensor]
    grids: list[Grid]
    sizes: list[int]
    positions_3T: Tensor
    feature_T: Tensor


def pictures_of_rows(batch: DataProto, rows: Sequence[int], vision: VisionModel | None) -> RowPictures | None:
    """The pictures of these rows of a batch, in their order; None if they have none.

    A placeholder that the policy sampled is a word.  Raises ValueError naming a row whose tokens and pictures differ,
    or whose pictures the model cannot see (vision None).
    """
    if PIXEL_VALUES.name not in batch.tokens or not len(batch[IMAGE_GRID_THW].select(rows).values):
        return None
    if vision is None:
        raise ValueError(f"one of the rows {list(rows)} of the batch has a picture, and the model sees none")
    sampled = batch.tokens.get(RESPONSE_MASK.name)
    pixels: list[Tensor] = []
    grids: list[Grid] = []
    sizes: list[int] = []
    positions, features = [], []
    for row in rows:
        is_picture_T = batch[INPUT_IDS][row] == vision.image_token_id
        if sampled is not None:
            is_picture_T &= ~sampled[row].bool()
        of_row: list[Grid] = [(t, h, w) for t, h, w in batch[IMAGE_GRID_THW][row].tolist()]
        patches = batch[PIXEL_VALUES][row].split([t * h * w for t, h, w in of_row])
        of_pictures = [vision.num_tokens(grid) for grid in of_row]
        if int(is_picture_T.sum()) != sum(of_pictures):
            raise ValueError(
                f"row {row} of the batch has {int(is_picture_T.sum())} placeholders of pictures (token "
                f"{vision.image_token_id}), and its pictures of {of_row} patches take {sum(of_pictures)}"
            )
        positions.append(positions_of(is_picture_T, of_row, vision))
        features.append(torch.where(is_picture_T, is_picture_T.cumsum(0) - 1 + sum(sizes), -1))
        pixels += patches
        grids += of_row
        sizes += of_pictures
    return RowPictures(pixels, grids, sizes, torch.cat(positions, 1), torch.cat(features))


def positions_of(is_picture_T: Tensor, grids: Sequence[Grid], vision: VisionModel) -> Tensor:
    """[3, T] positions of a row's tokens in time, height and width, as transformers' get_rope_index counts them.

    A word moves all three by one. The tokens of a picture count from the word before it in each dimension, and the word
    after it follows the largest of them (Qwen2-VL, arXiv 2409.12191, section 2.1).
    """
    parts, start, position = [], 0, 0
    begins = is_picture_T.nonzero()[:, 0]
    before = 0
    for grid in grids:
        begin = int(begins[before])
        num_words = begin - start
        parts.append((torch.arange(num_words) + position).expand(3, -1))
        position += num_words
        t, h, w = grid[0], grid[1] // vision.merge_size, grid[2] // vision.merge_size
        axes = torch.meshgrid(torch.arange(t), torch.arange(h), torch.arange(w), indexing="ij")
        parts.append(torch.stack([axis.flatten() for axis in axes]) + position)
        position += max(h, w)
        start, before = begin + t * h * w, before + t * h * w
    parts.append((torch.arange(len(is_picture_T) - start) + position).expand(3, -1))
    return torch.cat(parts, 1)


def part_of(pictures: RowPictures, feature_t: Tensor, device: str, sp: tuple[int, int]) -> Pictures | None:
    """The pictures that a cp rank computes, which has tokens with these features; None if it needs none.

    sp: (rank, size) of the tp ranks that share the tokens (sequence parallelism); these compute the same pictures.
    """
    picture_F = torch.arange(len(pictures.sizes)).repeat_interleave(torch.tensor(pictures.sizes))
    mine = picture_F[feature_t[feature_t >= 0]].unique().tolist()
    if not mine:
        return None
    is_mine_F = torch.isin(picture_F, torch.tensor(mine))
    number_F = torch.where(is_mine_F, is_mine_F.cumsum(0) - 1, -1)
    rank, size = sp
    local_t = feature_t.chunk(size)[rank]
    places = (local_t >= 0).nonzero()[:, 0]
    return Pictures(
        [pictures.pixels[i] for i in mine],
        [pictures.grids[i] for i in mine],
        places.to(device),
        number_F[local_t[places]].to(device),
    )
