"""Reading of the safetensors files of a Hugging Face model directory."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from scalerl.base.files import CONFIG_NAME, files_beside_weights
from scalerl.models import mxfp4
from scalerl.models.block_scales import (
    SCALE_SUFFIX,
    STORED_DTYPE,
    BlockScaledTensor,
    scales_shape,
    weight_block,
    without_quantization,
)
from scalerl.models.mxfp4 import BLOCKS_SUFFIX, SCALES_SUFFIX, Mxfp4Tensor
from scalerl.models.rules import EMBEDDING, HEAD
from scalerl.models.shape import ModelShape, read_config
from scalerl.models.table import HF_MODEL, Family, LazyTensor, stacked_place

if TYPE_CHECKING:
    import torch

# Buffers that old checkpoints contain and no model needs.
HARMLESS = re.compile(r"(rotary_emb\.inv_freq|\.attn\.bias|\.masked_bias|\.attention\.rotary_emb\..*)$")
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
ADAPTER_NAME = "adapter_config.json"
# Data types, as safetensors names them, whose numbers are the weights: quantized ones need a rule to multiply them out.
DTYPES = ("F64", "F32", "BF16", "F16", STORED_DTYPE)
# How the name of an embedding ends.
_EMBEDDING = EMBEDDING.hf[0].removeprefix(HF_MODEL)
# Rows of the head that are compared with the embedding's at a time.
_COMPARED_ROWS = 4096


def copy_beside_weights(model_dir: str | Path, target_dir: str | Path) -> None:
    """Copies `files_beside_weights`; the config.json of the copy asks for weights that are not quantized."""
    for name in files_beside_weights(model_dir):
        copy = Path(target_dir) / name
        copy.parent.mkdir(exist_ok=True)
        shutil.copy2(Path(model_dir) / name, copy)
        if name == Path(CONFIG_NAME) and weight_block(config := read_config(model_dir)) is not None:
            copy.write_text(json.dumps(without_quantization(config), indent=2) + "\n", encoding="utf-8")


def joined_digest(digests: Mapping[str, str]) -> str:
    """SHA-256 of all weights of a model, however they are split over files.  digests: those of tensors, by name."""
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()


class HFWeights:
    """The tensors of a model directory: model.safetensors, or the shards that model.safetensors.index.json names.

    Files are memory-mapped, and pages that were read stay resident until they are unmapped. So the files are unmapped
    before the tensors read from them exceed the size of the largest tensor: no more than that stays resident, unless
    the caller keeps the tensors.

    Tensors in 8-bit floating point are read as float32, multiplied with the scales that are stored beside them; those
    in mxfp4 as bfloat16.

    Raises ValueError from the constructor when the directory has no readable safetensors. Use as a context manager,
    or call close().
    """

    def __init__(self, model_dir: str | Path) -> None:
        self.dir = Path(model_dir)
        self._open_files: dict[str, Any] = {}
        self._resident_bytes = 0
        self._file_of = self._locate()

    def _locate(self) -> dict[str, str]:
        if (self.dir / ADAPTER_NAME).is_file():
            raise ValueError(
                f"{self.dir} has {ADAPTER_NAME}, by which transformers reads another model, with an adapter; merge the "
                "adapter into its model (peft's merge_and_unload), or take the file away"
            )
        if (self.dir / INDEX_NAME).is_file():
            return self._read_index()
        if (self.dir / SINGLE_NAME).is_file():
            return dict.fromkeys(self._file(SINGLE_NAME).keys(), SINGLE_NAME)
        raise ValueError(self._nothing_there())

    def _read_index(self) -> dict[str, str]:
        path = self.dir / INDEX_NAME
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a safetensors index: {error!r}") from None
        if set(weight_map.values()) != {SINGLE_NAME} and (self.dir / SINGLE_NAME).is_file():
            others = sorted(set(weight_map.values()) - {SINGLE_NAME}) or ["no file"]
            raise ValueError(
                f"{self.dir} has {SINGLE_NAME}, which transformers reads, and an {INDEX_NAME} that names "
                f"{', '.join(others[:3])}, which SGLang reads; take away what is left over of another save"
            )
        missing = sorted({f for f in weight_map.values() if not (self.dir / f).is_file()})
        if missing:
            raise ValueError(f"{path} names files that are not there: {', '.join(missing)}; download the model again")
        return weight_map

    def _nothing_there(self) -> str:
        if not self.dir.is_dir():
            return f"{self.dir} is not a directory; give a local Hugging Face model directory"
        pickles = sorted(p.name for p in self.dir.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        if pickles:
            return (
                f"{self.dir} has no safetensors, only {', '.join(pickles[:3])}: these are pickles, which can run any "
                "code when read, so they are refused. Convert them where you trust them: AutoModelForCausalLM"
                f".from_pretrained({str(self.dir)!r}).save_pretrained(NEW_DIR)"
            )
        others = sorted(p.name for p in self.dir.glob("*.safetensors"))
        present = f"; {', '.join(others[:3])} there, but no {INDEX_NAME}" if others else ""
        return f"{self.dir} has neither {SINGLE_NAME} nor {INDEX_NAME}{present}; give a Hugging Face model directory"

    def _file(self, name: str) -> Any:
        if name not in self._open_files:
            try:
                self._open_files[name] = safe_open(self.dir / name, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self.dir / name} cannot be read ({error}); download the model again") from None
        return self._open_files[name]

    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._file_of)

    def unread(self, name: str) -> LazyTensor:
        """A tensor of the files as it is stored, whose slices are read on access and stay in memory until the end."""
        return self._slice(name)

    def read(self, name: str) -> LazyTensor:
        """The tensor of a name, whose slices are read on access.  Raises ValueError when there is none."""
        place = stacked_place(name) if name not in self._file_of else None
        if place is not None and place[0] in self._file_of:
            return _OfStack(self._slice(place[0]), *place[1:])
        blocks_of = self._blocks_of(name)
        stored = name if blocks_of is None else blocks_of[0]
        source = self._slice(stored)
        num_bytes = _num_bytes(source)
        if self._resident_bytes + num_bytes > self.largest_bytes:
            self.close()
            source = self._slice(stored)
        # The whole tensor counts, because a rank's columns lie on all of its pages.
        self._resident_bytes += num_bytes
        if blocks_of is not None:
            return Mxfp4Tensor(source, self._slice(blocks_of[1]))
        if source.get_dtype() != STORED_DTYPE:
            return source
        if self.block is None:
            raise ValueError(
                f"{self.dir}: {name} is stored as {STORED_DTYPE}, and config.json has no quantization_config"
            )
        return BlockScaledTensor(source, self._slice(name + SCALE_SUFFIX), self.block)

    @cached_property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale; None: the model is not quantized.  Raises ValueError as weight_block."""
        return weight_block(read_config(self.dir)) if (self.dir / CONFIG_NAME).is_file() else None

    @cached_property
    def in_mxfp4(self) -> bool:
        """Whether config.json says that tensors are stored as mxfp4."""
        return (self.dir / CONFIG_NAME).is_file() and mxfp4.is_mxfp4(read_config(self.dir))

    @cached_property
    def largest_bytes(self) -> int:
        """Bytes of the largest tensor as stored."""
        return max((_num_bytes(self._slice(name)) for name in self.names()), default=0)

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise ValueError(f"{self.dir} has no tensor {name}")
        file_name = self._file_of[name]
        try:
            return self._file(file_name).get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{self.dir / file_name}: tensor {name} cannot be read: {error}") from None

    def digest(self, name: str) -> str:
        """SHA-256 of a tensor as it is stored: of its name, dtype, shape and bytes.  Unmaps the files."""
        import torch

        tensor = self._slice(name)[:]
        digest = hashlib.sha256(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        # What was read stays resident until then.
        self.close()
        return digest.hexdigest()

    def check(self, family: Family, shape: ModelShape, may_have: Collection[str] = ()) -> None:
        """Raises one ValueError that lists all missing, extra and wrongly shaped tensors; reads headers only.

        may_have: tensors beside those of the family that are not extra.
        """
        expected = family.stored_shapes(shape)
        tied_head = set(family.head.hf) if shape.tie_word_embeddings else set()
        unused = tuple(f"model.layers.{shape.num_layers + n}." for n in range(shape.num_prediction_layers))
        unused += family.untrained_in(shape)
        extra = [
            n
            for n in self.names()
            if n not in expected
            and n not in tied_head
            and n not in may_have
            and not HARMLESS.search(n)
            and not n.startswith(unused)
            and not (self.block is not None and n.removesuffix(SCALE_SUFFIX) in expected)
            and not (self.in_mxfp4 and n.removesuffix(BLOCKS_SUFFIX).removesuffix(SCALES_SUFFIX) in expected)
        ]
        problems = [f"missing {n}" for n in expected if n not in self._file_of and not self._blocks_of(n)]
        for name, size in expected.items():
            problems += self._mxfp4_problems(name, size)
        problems += self._stored_twice()
        problems += [f"unexpected {n}" for n in extra]
        for name, size in expected.items():
            if name in self._file_of:
                stored_size = tuple(self._slice(name).get_shape())
                if stored_size != size:
                    problems.append(f"{name} has shape {stored_size}, config.json says {size}")
                if (dtype := self._slice(name).get_dtype()) not in DTYPES:
                    problems.append(f"{name} is stored as {dtype}, which is none of {', '.join(DTYPES)}")
                problems += self._scale_problems(name)
        if problems:
            raise ValueError(
                f"{self.dir} does not hold the {family.model_type} model of its config.json "
                f"({len(problems)} problems):\n  " + "\n  ".join(problems)
            )

    def check_head(self, *, tied: bool) -> None:
        """Raises ValueError for a stored head that is not the embedding, to which config.json ties it.

        tied: tie_word_embeddings.  Reads both tensors, where both are stored.
        """
        names = [name for name in self._file_of if name.endswith(_EMBEDDING)]
        if not tied or HEAD.hf[0] not in self._file_of or not names:
            return
        head, embedding = self._slice(HEAD.hf[0]), self._slice(names[0])
        is_same = head.get_shape() == embedding.get_shape() and head.get_dtype() == embedding.get_dtype()
        if is_same and all(
            head[start : start + _COMPARED_ROWS].equal(embedding[start : start + _COMPARED_ROWS])
            for start in range(0, head.get_shape()[0], _COMPARED_ROWS)
        ):
            return
        raise ValueError(
            f"{self.dir} has a {HEAD.hf[0]} that is not {names[0]}, and config.json says tie_word_embeddings: "
            "transformers reads both, SGLang only the embedding; set tie_word_embeddings to false, or take the head out"
        )

    def _stored_twice(self) -> Iterator[str]:
        """Yields tensors that are in two files, of which engines take different ones."""
        for file_name in sorted(set(self._file_of.values())):
            for name in sorted(self._file(file_name).keys()):
                if (indexed := self._file_of.get(name, file_name)) != file_name:
                    yield f"{name} is in {file_name} too; {INDEX_NAME} names {indexed}"

    def _scale_problems(self, name: str) -> Iterator[str]:
        source, scales = self._slice(name), name + SCALE_SUFFIX
        if source.get_dtype() != STORED_DTYPE:
            return
        if self.block is None:
            yield f"{name} is stored as {STORED_DTYPE}, and config.json has no quantization_config"
        elif scales not in self._file_of:
            yield f"missing {scales}, the scales of a tensor that is stored as {STORED_DTYPE}"
        elif self._slice(scales).get_shape() != (wanted := scales_shape(source.get_shape(), self.block)):
            size = self._slice(scales).get_shape()
            yield f"{scales} has shape {tuple(size)}, blocks of {self.block} make {tuple(wanted)}"

    def _blocks_of(self, name: str) -> tuple[str, str] | None:
        """The names of a tensor's blocks and scales; None where it is not stored as mxfp4."""
        if not self.in_mxfp4 or name in self._file_of or name + BLOCKS_SUFFIX not in self._file_of:
            return None
        return name + BLOCKS_SUFFIX, name + SCALES_SUFFIX

    def _mxfp4_problems(self, name: str, size: tuple[int, ...]) -> Iterator[str]:
        if (names := self._blocks_of(name)) is None:
            return
        if names[1] not in self._file_of:
            yield f"missing {names[1]}, the scales of {names[0]}"
            return
        blocks, scales = (self._slice(part) for part in names)
        if {blocks.get_dtype(), scales.get_dtype()} != {mxfp4.STORED_DTYPE}:
            dtypes = f"{blocks.get_dtype()} and {scales.get_dtype()}"
            yield f"{' and '.join(names)} are stored as {dtypes}, not as {mxfp4.STORED_DTYPE}"
        elif (problem := mxfp4.shape_problem(blocks, scales, size)) is not None:
            yield f"{name} has {problem}"

    def close(self) -> None:
        """Unmaps the files; tensors already read stay valid."""
        self._open_files.clear()
        self._resident_bytes = 0

    def __enter__(self) -> HFWeights:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True)
class _OfStack:
    """One of the `parts` equal parts of the rows of one expert, in a tensor [experts, rows, columns] of the files."""

    source: Any
    expert: int
    part: int
    parts: int

    def get_shape(self) -> list[int]:
        _, rows, columns = self.source.get_shape()
        return [rows // self.parts, columns]

    def get_dtype(self) -> str:
        return self.source.get_dtype()

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows, *columns = index if isinstance(index, tuple) else (index,)
        count = self.get_shape()[0]
        start, stop, _ = rows.indices(count)
        first = self.part * count
        here = slice(self.expert, self.expert + 1)
        return self.source[(here, slice(first + start, first + stop), *columns)][0]


def _num_bytes(source: Any) -> int:
    """Bytes of a safetensors slice; all its dtypes but BOOL have their bits in the name (BF16, F8_E4M3)."""
    bits = re.search(r"\d+", source.get_dtype())
    return math.prod(source.get_shape()) * int(bits[0] if bits else 8) // 8
