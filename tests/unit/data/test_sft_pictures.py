"""Conversations with images: what is learned, and which rows are refused."""

from __future__ import annotations

from typing import Any

import pytest

from scalerl.config.schema import SFTDataConfig
from scalerl.data import DataError, SFTDataset
from scalerl.data.pictures import PictureProcessor
from tests.pictures import content, noise
from tests.unit.data.test_pictures import model, processor, vision_tokenizer  # noqa: F401  (fixtures)

ONE, TWO = content(noise(1, 84, 56)), content(noise(2, 56, 56))


def conversation(images: Any, *turns: str, **more: Any) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(turns)
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    return {"messages": messages, "images": images} | more


def test_what_is_learned_is_the_answer_and_never_an_image(write, vision_tokenizer, processor: PictureProcessor):  # noqa: F811
    """The tokens of a row are those of its text with each placeholder repeated."""
    rows = [conversation([ONE, TWO], "a<image>", "yes", "b<image>", "no"), conversation(None, "c", "d")]
    data = SFTDataset(write(rows), vision_tokenizer, SFTDataConfig(), processor)
    row, text = data[0], data[1]
    is_image = [token == processor.vision.image_token_id for token in row.input_ids]
    assert sum(is_image) == 6 + 4 and not text.images and processor.vision.image_token_id not in text.input_ids
    assert len(row.loss_mask) == len(row.input_ids)
    assert not any(mask and image for mask, image in zip(row.loss_mask, is_image, strict=True))
    learned = [token for token, mask in zip(row.input_ids, row.loss_mask, strict=True) if mask]
    assert vision_tokenizer.decode(learned) == "yes<|im_end|>no<|im_end|>"
    assert row.images == [ONE, TWO] and row.picture_patches == [24, 16]


def test_a_template_that_rewrites_turns_gives_each_conversation_its_images(write, vision_tokenizer, processor):  # noqa: F811
    from copy import deepcopy

    tokenizer = deepcopy(vision_tokenizer)
    # Of an answer before the last message the thoughts are dropped.
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ message['content'] }}{% else %}",
        "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('</think>')[-1] }}"
        "{% else %}{{ message['content'] }}{% endif %}{% else %}",
    )
    turns = ("a<image>", "<think>x</think>yes", "b<image>", "<think>y</think>no")
    data = SFTDataset(write([conversation([ONE, TWO], *turns)]), tokenizer, SFTDataConfig(), processor)
    assert [row.images for row in data] == [[ONE], [ONE, TWO]]
    assert [row.input_ids.count(processor.vision.image_token_id) for row in data] == [6, 10]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (conversation([b"none"], "<image>", "x"), "column 'images': found 4 bytes, which is no picture"),
        (conversation([ONE], "a", "x"), "found 1 images for 0 placeholders"),
        (conversation([], "<image>a", "x"), "found no images for <image> in the messages"),
        (
            conversation([ONE], "a", "<image>"),
            "found an image in an assistant message; show images",
        ),
        (conversation([ONE], "<image>" + "a" * 100, "x"), "a conversation longer than data.max_length=64 tokens"),
        (conversation(None, "a", "x", videos=["b.mp4"]), "column 'videos': found videos"),
    ],
)
def test_rows_that_cannot_be_used_say_why(write, vision_tokenizer, processor, row, message):  # noqa: F811
    with pytest.raises(DataError) as caught:
        SFTDataset(
            write([row], "t.parquet"), vision_tokenizer, SFTDataConfig(max_length=64, truncation="right"), processor
        )
    assert message in str(caught.value) and "row 0" in str(caught.value)
