"""Rows with images: what a prompt's tokens and a picture's pixels are, and which rows are refused, and why."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scalerl.config.schema import DataConfig
from scalerl.data import DataError, RLHFDataset
from scalerl.data import files as files_module
from scalerl.data.pictures import (
    Picture,
    PictureError,
    PictureProcessor,
    cut,
    expand,
    load_processor,
    places_of,
    shrink,
    text_of,
    with_parts,
)
from tests.pictures import MAX_PIXELS, content, noise, write_processor
from tests.tiny_vision import IMAGE, VIDEO, tiny_vision_tokenizer

FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("vision")
    write_processor(path, FAMILY)
    tokenizer = tiny_vision_tokenizer()
    ids = {
        f"{kind}_token_id": tokenizer.convert_tokens_to_ids(name) for kind, name in (("image", IMAGE), ("video", VIDEO))
    }
    text = {"vocab_size": len(tokenizer), "hidden_size": 64}
    config = {"model_type": FAMILY, "text_config": text, "vision_config": {"patch_size": 14, "depth": 2}, **ids}
    (path / "config.json").write_text(json.dumps(config))
    return path


def processor_of(model: Path, **data) -> PictureProcessor:
    processor = load_processor(model, DataConfig(**data))
    assert processor is not None
    return processor


@pytest.fixture(scope="module")
def processor(model) -> PictureProcessor:
    return processor_of(model)


@pytest.fixture(scope="module")
def vision_tokenizer(model):
    from scalerl.data import load_tokenizer

    return load_tokenizer(model)


def geo3k_row(make_row, images, text="<image>How many?", **changes):
    return make_row(text) | {"data_source": "hiyouga/geometry3k", "images": images} | changes


def with_placeholders(tokenizer, texts, counts) -> list[int]:
    """The tokens of texts, with so many placeholders between them: an oracle without a template or a processor."""
    pad, start, end = (
        tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "vision_start", "vision_end")
    )
    ids = tokenizer.encode(texts[0], add_special_tokens=False)
    for text, count in zip(texts[1:], counts, strict=True):
        ids += [start, *[pad] * count, end, *tokenizer.encode(text, add_special_tokens=False)]
    return ids


# --- what comes out


def test_a_prompt_has_a_placeholder_for_each_merged_patch(write, vision_tokenizer, processor, make_row, tmp_path):
    """In text or in parts, from bytes, paths and dicts of either, several in a row, beside rows without any."""
    one, two = noise(1, 84, 56), noise(2, 60, 130)
    two.save(tmp_path / "two.png")
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    rows = [
        geo3k_row(make_row, [{"bytes": content(one), "path": None}]),
        geo3k_row(
            make_row, [{"bytes": None, "path": "two.png"}, {"bytes": content(one), "path": None}], "x<image>y<image>z"
        ),
        geo3k_row(make_row, None, "no image"),
    ]
    in_json = [geo3k_row(make_row, ["two.png"], prompt=[{"role": "user", "content": parts}])]
    data = RLHFDataset([write(rows), write(in_json, "t.jsonl")], vision_tokenizer, DataConfig(), processor)
    begin, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    # 84 x 56 points are 3 x 2 squares of 28; 60 x 130 become 56 x 140.
    expected = [
        ([begin, "How many?" + end], [6]),
        ([begin + "x", "y", "z" + end], [10, 6]),
        ([begin + "no image" + end], []),
        ([begin + "a", "b" + end], [10]),
    ]
    for row, (texts, counts) in zip(data, expected, strict=True):
        assert row.input_ids == with_placeholders(vision_tokenizer, texts, counts)
        assert row.prompt_length_before == len(row.input_ids)
    assert data[0].images == [content(one)] and data[1].images[0] == str(tmp_path / "two.png")
    assert data[0].messages == [{"role": "user", "content": "<image>How many?"}]


def test_pixels_are_those_of_transformers_and_the_png_has_them_again(processor, model):
    """A server that resizes what it gets, as it resizes all, changes nothing."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    own = Qwen2VLImageProcessorPil.from_pretrained(model)
    for image in (noise(1, 84, 56), noise(2, 60, 130), noise(3, 900, 700), noise(4, 10, 9)):
        picture = processor.read(content(image))
        expected = own(images=[image], return_tensors="np")
        assert picture.grid_thw == tuple(expected["image_grid_thw"][0])
        assert picture.num_tokens == processor.num_tokens(content(image)) == np.prod(picture.grid_thw) // 4
        np.testing.assert_array_equal(picture.pixel_values, expected["pixel_values"])
        sent = Image.open(io.BytesIO(base64.b64decode(picture.url.partition(",")[2])))
        assert sent.width * sent.height <= MAX_PIXELS
        np.testing.assert_array_equal(own(images=[sent], return_tensors="np")["pixel_values"], picture.pixel_values)


def test_a_jpeg_of_a_turned_camera_is_upright(processor):
    image = noise(5, 140, 56)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = content(image, "JPEG", exif=exif)
    assert processor.read(turned).grid_thw == (1, 10, 4)
    assert processor.num_tokens(turned) == 10


def test_broken_exif_data_is_passed_over(processor):
    image, exif = noise(5, 140, 56), Image.Exif()
    exif[0x0112] = 6
    turned = content(image, "WEBP", exif=exif, lossless=True)
    assert processor.read(turned).grid_thw == (1, 10, 4) and b"MM\0*" in turned
    broken = processor.read(turned.replace(b"MM\0*", b"MM\x80*"))
    np.testing.assert_array_equal(broken.pixel_values, processor.read(content(image)).pixel_values)


def test_a_server_gets_colors_alone(processor):
    """Of a picture with a transparent color too, which is shown as it is."""
    red = Image.new("RGB", (56, 56), "red")
    for source in (content(red, transparency=(255, 0, 0)), content(red, icc_profile=b"profile"), content(red)):
        picture = processor.read(source)
        sent = Image.open(io.BytesIO(base64.b64decode(picture.url.partition(",")[2])))
        assert sent.mode == "RGB" and not sent.info
        np.testing.assert_array_equal(picture.pixel_values, processor.read(content(red)).pixel_values)


def test_16_bits_of_gray_are_their_upper_eight(processor):
    """Pillow makes all but the darkest of them white."""
    gray = np.arange(56 * 56, dtype=np.uint16).reshape(56, 56) * 20
    expected = processor.read(content(Image.fromarray((gray >> 8).astype(np.uint8)))).pixel_values
    for kind in ("PNG", "TIFF"):
        np.testing.assert_array_equal(processor.read(content(Image.fromarray(gray), kind)).pixel_values, expected)


def test_limits_of_pixels_change_the_number_of_tokens(model):
    image = content(noise(1, 280, 280))
    assert processor_of(model).num_tokens(image) == 64
    small = processor_of(model, max_pixels=28 * 28 * 9)
    assert small.num_tokens(image) == 9 and small.read(image).grid_thw == (1, 6, 6)
    assert processor_of(model, min_pixels=28 * 28 * 16).num_tokens(content(noise(1, 28, 28))) == 16


def test_limits_beyond_the_model_s_own_are_refused(model):
    with pytest.raises(DataError) as caught:
        load_processor(model, DataConfig(min_pixels=10, max_pixels=10**7))
    assert "set data.min_pixels=784 or more" in str(caught.value) and "data.max_pixels=50176" in str(caught.value)
    for limits, advice in (
        ({"max_pixels": 100}, "max_pixels=784 or more"),
        ({"min_pixels": 10**7}, "min_pixels=50176"),
    ):
        with pytest.raises(DataError) as caught:
            processor_of(model, **limits)
        assert str(caught.value).endswith(f"; set data.{advice}")


@pytest.mark.parametrize(("key", "own"), [("patch_size", 14), ("temporal_patch_size", 2), ("merge_size", 2)])
def test_a_processor_of_another_model_is_refused(model, tmp_path, key, own):
    """Its patches would be of another size, or in another order, which no number of tokens tells."""
    config = json.loads((model / "preprocessor_config.json").read_text()) | {key: 1}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises(DataError, match=f"preprocessor_config.json in {tmp_path} has {key} = 1, and its .* {own}; "):
        load_processor(tmp_path, DataConfig())


def test_a_model_without_a_tower_takes_no_images(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert load_processor(tmp_path, DataConfig()) is None


def test_overlong_prompts_are_counted_with_their_images_and_never_cut(write, vision_tokenizer, processor, make_row):
    rows = [geo3k_row(make_row, [content(noise(1, 224, 224))]), geo3k_row(make_row, [content(noise(2, 28, 28))])]
    path = write(rows)
    limit = len(RLHFDataset(path, vision_tokenizer, DataConfig(), processor)[0].input_ids) - 1
    data = RLHFDataset(
        path, vision_tokenizer, DataConfig(max_prompt_length=limit, filter_overlong_prompts=True), processor
    )
    assert data.num_filtered == 1 and len(data) == 1
    for truncation in ("error", "left"):
        with pytest.raises(DataError, match=f"row 0, column 'prompt'.*data.max_prompt_length={limit + 1} .*longest"):
            RLHFDataset(path, vision_tokenizer, DataConfig(max_prompt_length=limit, truncation=truncation), processor)


@pytest.mark.full
def test_several_processes_make_the_same_rows(write, vision_tokenizer, processor, make_row, monkeypatch):
    monkeypatch.setattr(files_module, "CHUNK_ROWS", 2)
    rows = [geo3k_row(make_row, [content(noise(seed, 28 * (seed + 1), 56))]) for seed in range(5)]
    path = write(rows)
    one, two = (
        RLHFDataset(path, vision_tokenizer, DataConfig(filter_overlong_prompts_workers=workers), processor)
        for workers in (1, 2)
    )
    assert [row.input_ids for row in one] == [row.input_ids for row in two]
    assert one.digest == two.digest


def test_the_digest_knows_the_images(write, vision_tokenizer, processor, make_row):
    digests = {
        RLHFDataset(
            write([geo3k_row(make_row, [content(noise(seed, 28, 28))])]), vision_tokenizer, DataConfig(), processor
        ).digest
        for seed in (1, 2)
    }
    assert len(digests) == 2


# --- what is refused


def refused(write, tokenizer, processor, rows, name="train.jsonl") -> str:
    with pytest.raises(DataError) as caught:
        RLHFDataset(write(rows, name), tokenizer, DataConfig(), processor)
    return str(caught.value)


def truncated(kind: str) -> bytes:
    return content(noise(1, 84, 84), kind)[:-400]


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (b"no image at all", "15 bytes, which is no picture that Pillow can read; write it as PNG or JPEG"),
        (truncated("PNG"), "a broken picture"),
        (truncated("JPEG"), "a broken picture"),
        (content(Image.new("1", (12000, 12000))), "a picture of 12000 x 12000 pixels, more than Pillow's limit"),
        (content(Image.new("1", (20000, 12000))), "which cannot be read (Image size (240000000 pixels) exceeds limit"),
        (content(Image.new("L", (900, 4))), "a picture of 900 x 4 pixels (absolute aspect ratio"),
        (content(Image.new("L", (56, 56)), "DDS").replace(b"\0\0\2\0", bytes(4), 1), "which cannot be read (Unknown"),
        (content(Image.new("F", (56, 56)), "TIFF"), "a picture of Pillow's mode F; write it as RGB or gray"),
        (content(Image.new("LAB", (56, 56)), "TIFF"), "a picture of Pillow's mode LAB; write it as RGB or gray"),
    ],
    ids=["none", "broken-png", "broken-jpeg", "huge", "bomb", "narrow", "dds", "float", "lab"],
)
def test_images_that_cannot_be_read_name_row_and_reason(write, vision_tokenizer, processor, make_row, image, reason):
    good = content(noise(1, 84, 84))
    rows = [geo3k_row(make_row, [{"bytes": data, "path": None}]) for data in (good, image, good, image)]
    message = refused(write, vision_tokenizer, processor, rows, "train.parquet")
    assert "rows 1, 3, column 'images': found " in message and reason in message


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"images": ["away.png"]},
            "row 1, column 'images': found no file {dir}/away.png as picture 0; correct the path",
        ),
        ({"images": [7]}, "row 1, column 'images': found int as picture 0; write bytes"),
        ({"images": [{"bytes": None}]}, "row 1, column 'images': found a dict with the keys bytes as picture 0"),
        ({"images": ["https://a/b.png"]}, 'found "https://a/b.png" as picture 0, which is no path; write bytes'),
        ({"images": ["data:image/png;base64," + "a" * 9999]}, 'found "data:image/png;base64,aaa'),
        ({"images": [{"bytes": "a" * 9999}]}, "... as picture 0, which is no path; write bytes"),
        ({"images": ["a" * 999]}, "found no file {dir}/aaaaaaa"),
        ({"images": "a.png"}, "row 1, column 'images': found str, not a list of images"),
        (
            {"images": None},
            "row 1, column 'images': found no images for <image> in the messages; give them in the column",
        ),
        (
            {"images": []},
            "row 1, column 'images': found 0 images for 1 placeholders in the rendered messages; write <image>",
        ),
        ({"images": ["a.png", "a.png"]}, "row 1, column 'images': found 2 images for 1 placeholders"),
        ({"videos": ["a.mp4"]}, "row 1, column 'videos': found videos, which scalerl does not take; put frames"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "audio"}]}]},
            "a part of message 0 that is neither text nor",
        ),
    ],
)
def test_rows_that_cannot_be_used_say_why(write, vision_tokenizer, processor, make_row, tmp_path, row, message):
    noise(1, 56, 56).save(tmp_path / "a.png")
    text = f"{IMAGE} what" if row.get("images") == [] else "<image> what"
    rows = [geo3k_row(make_row, ["a.png"]), geo3k_row(make_row, ["a.png"], text) | row]
    assert message.format(dir=tmp_path) in refused(write, vision_tokenizer, processor, rows)


def test_text_for_a_model_that_need_not_see_may_have_the_word(model):
    processor, messages = processor_of(model), [{"role": "user", "content": "<image>"}]
    with pytest.raises(PictureError, match="no images for <image>"):
        processor.check_marks(messages, [])
    processor.vision = replace(processor.vision, is_optional=True)
    processor.check_marks(messages, [])


def test_reading_later_says_why_too(processor, tmp_path):
    with pytest.raises(PictureError, match=f"file {tmp_path}/gone.png, which cannot be read"):
        processor.read(str(tmp_path / "gone.png"))


# --- placeholders


def picture(num_tokens: int) -> Picture:
    return Picture(f"url{num_tokens}", 9, num_tokens, (1, 2, 2 * num_tokens), np.zeros((4 * num_tokens, 1), np.float32))


def test_placeholders_of_pictures_side_by_side_are_told_apart():
    pictures, short = [picture(3), picture(1), picture(2)], [1, 9, 9, 5, 9, 2]
    ids = expand(short, 9, [3, 1, 2])
    assert ids == [1, 9, 9, 9, 9, 5, 9, 9, 2]
    assert places_of(ids, pictures) == [range(1, 4), range(4, 5), range(6, 8)]
    assert shrink(ids, pictures) == short
    assert shrink(ids, []) == ids


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([9, 9], "2 placeholders for picture 0, which takes 3"),
        ([9, 9, 1, 9], "3 placeholders for picture 0"),
        ([9, 9, 9, 9], "1 placeholders more than the 1 pictures take"),
        ([1], "0 placeholders for picture 0"),
    ],
)
def test_other_placeholders_than_the_pictures_take_are_an_error(ids, message):
    with pytest.raises(ValueError, match=message):
        shrink(ids, [picture(3)])


def test_cutting_tokens_never_cuts_a_picture():
    pictures, ids = [picture(2), picture(2)], [1, 9, 9, 5, 9, 9, 2]
    kept = {length: cut(ids, pictures, length) for length in range(8)}
    assert [len(tokens) for tokens, _ in kept.values()] == [0, 1, 1, 3, 4, 4, 6, 7]
    assert [len(shown) for _, shown in kept.values()] == [0, 0, 0, 1, 1, 1, 2, 2]


def test_text_and_parts_of_a_message():
    parts = [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}]
    assert with_parts([{"role": "user", "content": "<image>a<image>"}])[0]["content"] == parts
    assert text_of({"content": parts}) == "<image>a<image>" and text_of({"content": "x"}) == "x"
