"""The vision tower of a model, as its config.json describes it, and the tokens that its pictures take.

A picture is cut into patches of patch_size x patch_size points in temporal_patch_size frames. A square of merge_size x
merge_size patches becomes one vector of the language model, at one placeholder token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scalerl.models.registry import family_named

_SECTIONS = "mrope_section"


@dataclass(frozen=True)
class VisionModel:
    """The vision tower of a model, and where its language model takes what the tower makes of a picture.

    image_token_id: the placeholder. prefix: how the names of the tower's tensors in the files begin.
    num_positions: learned positions of patches (0: none). window_size: points of a window's side, that the patches of
    a block outside of full_attention_blocks see alone (0: they see the whole picture).
    deepstack_blocks: blocks whose output is added to the hidden states after the language model's first layers.
    sections: pairs of a head that turn by the position in time, height and width. interleaved: these take turns.
    is_optional: as of `Tower`.
    """

    image_token_id: int
    prefix: str
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    in_channels: int
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    sections: tuple[int, ...]
    interleaved: bool = False
    num_positions: int = 0
    window_size: int = 0
    full_attention_blocks: tuple[int, ...] = ()
    deepstack_blocks: tuple[int, ...] = ()
    is_optional: bool = False

    @property
    def numbers_per_patch(self) -> int:
        """Numbers in a row of pixel_values."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    def num_tokens(self, grid_thw: tuple[int, int, int]) -> int:
        """Placeholder tokens of a picture.  grid_thw: its patches in time, height and width."""
        frames, height, width = grid_thw
        return frames * (height // self.merge_size) * (width // self.merge_size)


def vision_config(config: Mapping[str, Any]) -> VisionModel | None:
    """The vision tower of a model's config.json; None for a family without one.

    Raises ValueError, one sentence for each problem, for a tower that transformers would make otherwise.
    """
    family = family_named(config.get("model_type"))
    tower = family.tower if family else None
    if tower is None:
        return None
    given = config.get("vision_config") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"vision_config is {given!r}, not an object with the vision tower's keys")
    values = {key: given.get(key, default) for key, default in tower.defaults.items()}
    problems = [
        f"vision_config.{key} is {value!r}, not {kind}"
        for key, value in values.items()
        if (kind := _wanted(value, tower.defaults[key])) is not None
    ]
    token_id = config.get("image_token_id", tower.image_token_id)
    if type(token_id) is not int:
        problems.append(f"image_token_id is {token_id!r}, not a token id")
    text = config.get("text_config") or config
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    sections = rope.get(_SECTIONS, tower.sections)
    if not isinstance(sections, list | tuple) or len(sections) != 3 or any(type(n) is not int for n in sections):
        problems.append(f"{_SECTIONS} is {sections!r}, not three numbers: of time, height and width")
    if problems:
        raise ValueError("; ".join(problems))
    return VisionModel(
        image_token_id=token_id,
        prefix=tower.prefix,
        patch_size=values["patch_size"],
        merge_size=values["spatial_merge_size"],
        temporal_patch_size=values["temporal_patch_size"],
        in_channels=values["in_channels"],
        depth=values["depth"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_heads=values["num_heads"],
        out_hidden_size=values["out_hidden_size"],
        sections=tuple(sections),
        interleaved=tower.interleaved,
        num_positions=values.get("num_position_embeddings", 0),
        window_size=values.get("window_size", 0),
        full_attention_blocks=tuple(values.get("fullatt_block_indexes", ())),
        deepstack_blocks=tuple(values.get("deepstack_visual_indexes", ())),
        is_optional=tower.is_optional,
    )


def _wanted(value: Any, default: Any) -> str | None:
    """What a value of vision_config should be, where it is not: of the type of transformers' default."""
    if isinstance(default, tuple):
        fits = isinstance(value, list | tuple) and all(type(item) is int for item in value)
        return None if fits else "a list of blocks"
    return None if type(value) is int and value >= 1 else "a positive integer"
