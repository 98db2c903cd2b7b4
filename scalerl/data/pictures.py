"""Pictures of a row: read from bytes or files, counted in tokens, and made into what a server and a trainer take."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl.base.lean_imports import lean_imports
from scalerl.data.problems import DataError, excerpt, type_name
from scalerl.models import read_config
from scalerl.models.vision import VisionModel, vision_config

if TYPE_CHECKING:
    from PIL.Image import Image

    from scalerl.batch.jagged import Jagged
    from scalerl.config.schema.data import ChatConfig

# Stands for a picture in the text of a message.
MARK = "<image>"
# A picture as a data set holds it: its file's content, or the absolute path of its file.
PictureSource = bytes | str
# The file of a model's image processor.
_PROCESSOR = "preprocessor_config.json"
_SHAPE = 'write bytes, a path, or {"bytes": ...} or {"path": ...}'
# Longer text is an image in base64.
_MAX_PATH_CHARS = 1024
# Pillow's names of what has 16 bits for a shade of gray, and of what it does not know the white of, or cannot convert.
_GRAY_16, _UNKNOWN_WHITE = ("I;16", "I;16L", "I;16B", "I;16N"), ("I", "F", "LAB")


class PictureError(ValueError):
    """Raised for a picture that cannot be used.  problem: what was found.  advice: what to do."""

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(problem, advice)
        self.problem, self.advice = problem, advice

    def __str__(self) -> str:
        return f"{self.problem}; {self.advice}"


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture as servers and trainers take it: of a size that neither changes any more.

    url: PNG as a data URL.  pixel_values: [patches, channels * temporal * patch * patch] float32.  grid_thw: patches
    in time, height and width.  In a prompt `num_tokens` tokens `token_id` stand for it.
    """

    url: str = field(repr=False)
    token_id: int
    num_tokens: int = field(compare=False)
    grid_thw: tuple[int, int, int] = field(compare=False)
    pixel_values: np.ndarray = field(compare=False, repr=False)


def load_processor(directory: str | os.PathLike, config: ChatConfig, *, served: bool = True) -> PictureProcessor | None:
    """The processor in a model's directory; None for a model that takes no pictures, or whose config.json is not there.

    served: whether servers take pictures. Of a model that is trained without its tower, too, None where they do not, or
    where the directory has no image processor.
    Raises DataError as `PictureProcessor`.
    """
    try:
        model_config = read_config(Path(directory))
    except ValueError:
        # Who reads the model's shape says so.
        return None
    vision = vision_config(model_config)
    if vision is None or (vision.is_optional and not (served and (Path(directory) / _PROCESSOR).is_file())):
        return None
    video = model_config.get("video_token_id")
    return PictureProcessor(directory, vision, [vision.image_token_id, *([] if video is None else [video])], config)


class PictureProcessor:
    """Turns pictures into tokens and pixel values by the image processor in a model's directory.

    vision: the model's tower.  placeholders: tokens that stand for pictures or videos, which no text may have.
    """

    def __init__(
        self, directory: str | os.PathLike, vision: VisionModel, placeholders: Iterable[int], config: ChatConfig
    ) -> None:
        """Loads the processor.

        Raises DataError for a directory without one, one of another model, or one that does not work with
        data.min_pixels and max_pixels.
        """
        with lean_imports(compiler=False):
            # Of all families with a tower. Pillow's, which needs no torchvision.
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        try:
            images: Any = Qwen2VLImageProcessorPil.from_pretrained(str(directory), local_files_only=True)
        except Exception as error:  # transformers raises anything here
            raise DataError(
                [
                    f"image processor in {directory} does not load: {type(error).__name__}: {error}; add the model's "
                    f"{_PROCESSOR}"
                ]
            ) from error
        if others := [
            f"{key} = {getattr(images, key)}, and its config.json {own}"
            for key in ("patch_size", "temporal_patch_size", "merge_size")
            if getattr(images, key) != (own := getattr(vision, key))
        ]:
            said = f"{_PROCESSOR} in {directory} has {', '.join(others)}"
            raise DataError([f"{said}; it is another model's: put this model's there"])
        self._images = images
        self.vision, self.placeholders = vision, frozenset(placeholders)
        least, most = (images.size[edge] for edge in ("shortest_edge", "longest_edge"))
        self._pixels = {
            "min_pixels": config.min_pixels if config.min_pixels is not None else least,
            "max_pixels": config.max_pixels if config.max_pixels is not None else most,
        }
        if problems := list(_pixel_problems(self._pixels["min_pixels"], self._pixels["max_pixels"], least, most)):
            raise DataError(problems)

    def num_tokens(self, source: PictureSource) -> int:
        """The number of tokens that stand for a picture.  Raises PictureError for one that cannot be read."""
        with _opened(source) as image:
            height, width = self._size(image)
            # A jpeg's smallest version: it reads the whole file, in a tenth of the time.
            image.draft("RGB", (1, 1))
            _load(image)
        return self.vision.num_tokens((1, height // self.vision.patch_size, width // self.vision.patch_size))

    def read(self, source: PictureSource) -> Picture:
        """Decodes a picture.  Raises PictureError for one that cannot be read."""
        with _opened(source) as image:
            _load(image)
            rgb = _in_8_bits(_upright(image)).convert("RGB")
        # The PNG has colors alone: no transparent one, no profile.
        rgb.info.clear()
        height, width = self._size(rgb)
        if rgb.size != (width, height):
            rgb = rgb.resize((width, height), self._images.resample)
        made = self._images(images=[rgb], do_resize=False, return_tensors="np")
        buffer = io.BytesIO()
        # Little compression: it is sent once, to a server that unpacks it.
        rgb.save(buffer, "PNG", compress_level=1)
        t, h, w = (int(n) for n in made["image_grid_thw"][0])
        return Picture(
            url="data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode(),
            token_id=self.vision.image_token_id,
            num_tokens=self.vision.num_tokens((t, h, w)),
            grid_thw=(t, h, w),
            pixel_values=np.ascontiguousarray(made["pixel_values"], np.float32),
        )

    def check_marks(self, messages: Sequence[Mapping[str, Any]], images: Sequence[PictureSource]) -> None:
        """Raises PictureError for <image> in the texts of a row without images, where it would remain a word.

        Not for a model that may be trained without its tower: its rows may be text that has this word.
        """
        if images or self.vision.is_optional:
            return
        if any(MARK in text for message in messages for text in texts_of(message)):
            advice = f"give them in the column that data.image_key names, or remove {MARK}"
            raise PictureError(f"no images for {MARK} in the messages", advice)

    def expand(self, input_ids: Sequence[int], images: Sequence[PictureSource]) -> list[int]:
        """The tokens with as many placeholders as the images take.  Raises PictureError as `counts`."""
        return expand(input_ids, self.vision.image_token_id, self.counts(input_ids, images))

    def counts(self, input_ids: Sequence[int], images: Sequence[PictureSource]) -> list[int]:
        """The tokens that each image takes.  Raises PictureError for an image that cannot be read, and unless
        input_ids has one placeholder for each.
        """
        placeholders = [token for token in input_ids if token in self.placeholders]
        if placeholders != [self.vision.image_token_id] * len(images):
            raise PictureError(
                f"{len(images)} images for {len(placeholders)} placeholders in the rendered messages",
                f"write {MARK} into the messages once for each image, and use a chat template that knows images",
            )
        return [self.num_tokens(image) for image in images]

    def problem_of(self, input_ids: Sequence[int], images: Sequence[Any]) -> str | None:
        """What is wrong with images, or with their placeholders among tokens; None: nothing."""
        if not all(isinstance(image, bytes | str) for image in images):
            return "images has other values than bytes and paths; give the content of each file, or its absolute path"
        try:
            expected = sum(self.num_tokens(image) for image in images)
        except PictureError as error:
            return str(error)
        found = sum(token in self.placeholders for token in input_ids)
        if found == expected:
            return None
        return (
            f"input_ids has {found} placeholders, its images take {expected}; give them processor.expand(ids, images)"
        )

    def _size(self, image: Image) -> tuple[int, int]:
        """Height and width that a picture gets."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        try:
            factor = self.vision.patch_size * self.vision.merge_size
            return smart_resize(image.height, image.width, factor, **self._pixels)
        except ValueError as error:
            raise PictureError(f"a picture of {image.width} x {image.height} pixels ({error})", "cut it") from None


def _pixel_problems(min_pixels: int, max_pixels: int, least: int, most: int) -> Iterator[str]:
    own = "a server would change pictures beyond the model's own limit in preprocessor_config.json"
    if min_pixels < least:
        yield f"data.min_pixels = {min_pixels}: {own}, {least}; set data.min_pixels={least} or more"
    if max_pixels > most:
        yield f"data.max_pixels = {max_pixels}: {own}, {most}; set data.max_pixels={most} or less"
    if max_pixels < least:
        yield f"data.max_pixels = {max_pixels}: {own}, {least}; set data.max_pixels={least} or more"
    elif min_pixels > max_pixels:
        more = f"more than data.max_pixels = {max_pixels}"
        yield f"data.min_pixels = {min_pixels}: {more}; set data.min_pixels={min(max_pixels, most)}"


def expand(input_ids: Sequence[int], token_id: int, counts: Sequence[int]) -> list[int]:
    """The tokens with the i-th token_id counts[i] times. Raises ValueError unless there are as many as counts."""
    num = sum(token == token_id for token in input_ids)
    if num != len(counts):
        raise ValueError(f"{num} placeholders for {len(counts)} pictures")
    left = iter(counts)
    expanded: list[int] = []
    for token in input_ids:
        expanded += [token] * (next(left) if token == token_id else 1)
    return expanded


def places_of(input_ids: Sequence[int], pictures: Sequence[Picture]) -> list[range]:
    """The positions of the placeholders of each picture. Raises ValueError where placeholders and pictures differ."""
    if not pictures:
        return []
    positions = iter([position for position, token in enumerate(input_ids) if token == pictures[0].token_id])
    places = []
    for number, picture in enumerate(pictures):
        taken = list(itertools.islice(positions, picture.num_tokens))
        if not taken or taken != list(range(taken[0], taken[0] + picture.num_tokens)):
            raise ValueError(f"{len(taken)} placeholders for picture {number}, which takes {picture.num_tokens}")
        places.append(range(taken[0], taken[-1] + 1))
    if (left := len(list(positions))) > 0:
        raise ValueError(f"{left} placeholders more than the {len(pictures)} pictures take")
    return places


def shrink(input_ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
    """The tokens with one placeholder for each picture.  Raises ValueError as `places_of`."""
    left_out = {position for place in places_of(input_ids, pictures) for position in place[1:]}
    return [token for position, token in enumerate(input_ids) if position not in left_out]


def cut(input_ids: Sequence[int], pictures: Sequence[Picture], max_length: int) -> tuple[list[int], Sequence[Picture]]:
    """The first tokens, at most so many, and the pictures among them, of which none is cut."""
    if len(input_ids) <= max_length:
        return list(input_ids), pictures
    for number, place in enumerate(places_of(input_ids, pictures)):
        if place[-1] >= max_length:
            return list(input_ids[: min(place[0], max_length)]), pictures[:number]
    return list(input_ids[:max_length]), pictures


def sources_of(value: Any, directory: str | os.PathLike) -> list[PictureSource]:
    """The pictures in a row's column, which is a list or null.  directory: that of the file, for relative paths.

    Raises PictureError for what is no picture or no file.
    """
    return [_source_of(item, i, directory) for i, item in enumerate(value or [])]


def _source_of(item: Any, number: int, directory: str | os.PathLike) -> PictureSource:
    content = item
    if isinstance(item, dict):
        content = item.get("bytes") or item.get("path")
    if isinstance(content, bytes | bytearray) and content:
        return bytes(content)
    if not isinstance(content, str) or not content:
        what = f"a dict with the keys {', '.join(map(str, item))}" if isinstance(item, dict) else type_name(item)
        raise PictureError(f"{what} as picture {number}", _SHAPE)
    path = Path(directory, Path(content).expanduser()).absolute()
    # Path.is_file raises for a name that is too long, such as an image in base64.
    if not os.path.isfile(path):
        if ":" in content.partition("/")[0] or len(content) > _MAX_PATH_CHARS:
            raise PictureError(f"{excerpt(content)} as picture {number}, which is no path", _SHAPE)
        advice = "correct the path, which is relative to the data file's directory"
        raise PictureError(f"no file {path} as picture {number}", advice)
    return str(path)


def picture_columns(pictures: Sequence[Sequence[Picture]], vision: VisionModel) -> dict[str, Jagged]:
    """The columns pixel_values and image_grid_thw of a batch.  pictures: of each row, in the order of placeholders."""
    import torch

    from scalerl.batch.columns import IMAGE_GRID_THW, PIXEL_VALUES
    from scalerl.batch.jagged import Jagged, cu_seqlens_of

    no_patches = torch.empty(0, vision.numbers_per_patch)
    patches = [torch.from_numpy(picture.pixel_values) for own in pictures for picture in own]
    grids = [picture.grid_thw for own in pictures for picture in own]
    num_patches = [sum(len(picture.pixel_values) for picture in own) for own in pictures]
    grids_I3, num_pictures = torch.tensor(grids, dtype=torch.int32).reshape(-1, 3), [len(own) for own in pictures]
    return {
        PIXEL_VALUES.name: Jagged(torch.cat([no_patches, *patches]), cu_seqlens_of(num_patches), per_token=False),
        IMAGE_GRID_THW.name: Jagged(grids_I3, cu_seqlens_of(num_pictures), per_token=False),
    }


def source_of_url(url: str) -> bytes:
    """The content of a picture in a data URL.  Raises PictureError for any other URL: a run fetches nothing."""
    head, _, data = url.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64")):
        raise PictureError(f"the URL {url[:40]!r}", "give data:image/png;base64,...")
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise PictureError(f"a data URL that is no base64 ({error})", "write it again") from None


def digest_of(source: PictureSource) -> str:
    """What says in a digest of rows which picture it is: its content, or the name of its file."""
    return hashlib.sha256(source).hexdigest() if isinstance(source, bytes) else Path(source).name


def texts_of(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message's content, which is text or a list of parts."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or [] if part["type"] == "text"]


def text_of(message: Mapping[str, Any]) -> str:
    """The content of a message as text, in which <image> stands for each picture."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else MARK for part in content)


def with_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a part of type image for each <image> of their texts, as chat templates take them."""
    made = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and MARK in content:
            content = list(_parts(content))
        elif isinstance(content, list):
            content = [part for given in content for part in _parts_of(given)]
        made.append({**message, "content": content})
    return made


def with_image_urls(messages: Sequence[Mapping[str, Any]], images: Sequence[PictureSource]) -> list[dict[str, Any]]:
    """The messages as clients of OpenAI's API send them, with images as data URLs in the place of <image>."""
    left = iter(images)

    def shown(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] == "text":
            return part
        image = next(left)
        content = image if isinstance(image, bytes) else Path(image).read_bytes()
        # Who reads it looks at the content.
        return {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{base64.b64encode(content).decode()}"},
        }

    if not images:
        return [dict(message) for message in messages]
    made = with_parts(messages)
    for message in made:
        if isinstance(message["content"], list):
            message["content"] = [shown(part) for part in message["content"]]
    return made


def _parts_of(given: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    return _parts(given["text"]) if given["type"] == "text" else [{"type": "image"}]


def _parts(text: str) -> Iterator[dict[str, Any]]:
    for number, piece in enumerate(text.split(MARK)):
        if number:
            yield {"type": "image"}
        if piece:
            yield {"type": "text", "text": piece}


@contextmanager
def _opened(source: PictureSource) -> Iterator[Image]:
    """Opens a picture, of which the header alone is read yet. Raises PictureError for what is none, or is huge."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    except UnidentifiedImageError:
        problem = f"{_named(source)}, which is no picture that Pillow can read"
        raise PictureError(problem, "write it as PNG or JPEG") from None
    except (OSError, SyntaxError, ValueError, NotImplementedError, Image.DecompressionBombError) as error:
        raise PictureError(f"{_named(source)}, which cannot be read ({error})", "write it again") from None
    with image:
        if (limit := Image.MAX_IMAGE_PIXELS) is not None and image.width * image.height > limit:
            # With more a small file fills the memory.
            problem = f"a picture of {image.width} x {image.height} pixels, more than Pillow's limit of {limit}"
            raise PictureError(problem, "make it smaller")
        if image.mode in _UNKNOWN_WHITE:
            raise PictureError(f"a picture of Pillow's mode {image.mode}", "write it as RGB or gray, of 8 or 16 bits")
        yield image


def _upright(image: Image) -> Image:
    """The image as it is seen, since a camera may have been turned; as it is stored where its EXIF data is broken."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except (OSError, SyntaxError, ValueError, struct.error):
        return image


def _in_8_bits(image: Image) -> Image:
    """The image, of 16 bits for a shade of gray the upper eight, as Pillow takes those of a color."""
    from PIL import Image as Images

    return Images.fromarray((np.asarray(image) >> 8).astype(np.uint8)) if image.mode in _GRAY_16 else image


def _named(source: PictureSource) -> str:
    return f"{len(source)} bytes" if isinstance(source, bytes) else f"file {source}"


def _load(image: Image) -> None:
    try:
        image.load()
    except (OSError, SyntaxError, ValueError, EOFError, IndexError) as error:
        raise PictureError(f"a broken picture ({error})", "write it again") from None
