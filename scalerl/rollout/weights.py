"""Weights on their way into a rollout server, and the checksums that prove they arrived.

Imports no sglang on a CPU (5 s and 350 MB in every trainer rank): the payload is written in sglang's pickle format.
"""

from __future__ import annotations

import base64
import copyreg
import ctypes
import hashlib
import io
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor

EngineKind = Literal["sglang", "embedded"]
NamedTensors = Sequence[tuple[str, Tensor]]

# sglang.srt.layers.vocab_parallel_embedding.DEFAULT_VOCAB_PADDING_SIZE
VOCAB_PADDING = 64
# Bytes; the widest dtype, complex128, has 16.
BUCKET_ALIGNMENT = 16


# --- the payload ------------------------------------------------------------------------------------------------------


@dataclass
class _BucketEntry:
    """Pickled under the name of sglang's FlattenedTensorMetadata, whose fields it has. Offsets in bytes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


class _SglangPickler(pickle._Pickler):
    """Tensors go by shared memory (as torch.multiprocessing sends them), `_BucketEntry` as sglang's class."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.DEFAULT_PROTOCOL)
        self.dispatch_table = {**copyreg.dispatch_table, **ForkingPickler._extra_reducers}

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if obj is not _BucketEntry:
            super().save_global(obj, name)
            return
        self.save("sglang.srt.weight_sync.tensor_bucket")
        self.save("FlattenedTensorMetadata")
        self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)


def serialize_bucket(named_tensors: NamedTensors, kind: EngineKind) -> str:
    """Base64 text for `RolloutClient.update_weights`; call it once per tensor-parallel rank of the engine.

    sglang: the text holds a one-shot handle of shared memory (CPU) or of device memory (CUDA), no values. The memory is
    freed when the server has read it; on CPU it lives until this process ends if the server never does.
    embedded: the text holds the values.
    """
    if not named_tensors:
        raise ValueError("serialize_bucket: an empty bucket; send only buckets with tensors")
    if kind == "embedded":
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in named_tensors}
        return base64.b64encode(safetensors.torch.save(tensors)).decode("ascii")
    flat, entries = _flatten(named_tensors)
    if flat.is_cuda:
        # Names the device by its UUID: sender and server may see the devices in different orders.
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
    file = io.BytesIO()
    # The other strategy hands file descriptors over a socket that only processes of one Python family can open.
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        _SglangPickler(file).dump({"flattened_tensor": flat, "metadata": entries})
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    return base64.b64encode(file.getvalue()).decode("ascii")


def _flatten(named_tensors: NamedTensors) -> tuple[Tensor, list[_BucketEntry]]:
    """-> (uint8 [bytes], entries): the tensors one after the other, at offsets that every dtype can be read at."""
    entries, start = [], 0
    for name, tensor in named_tensors:
        entries.append(_BucketEntry(name, tensor.shape, tensor.dtype, start, start + tensor.nbytes, tensor.nbytes))
        start += -(-tensor.nbytes // BUCKET_ALIGNMENT) * BUCKET_ALIGNMENT
    flat = torch.zeros(start, dtype=torch.uint8, device=named_tensors[0][1].device)
    for entry, (_, tensor) in zip(entries, named_tensors, strict=True):
        flat[entry.start_idx : entry.end_idx] = tensor.detach().contiguous().flatten().view(torch.uint8)
    return flat, entries


# --- the checksums ----------------------------------------------------------------------------------------------------


def tensor_checksum(tensor: Tensor) -> str:
    """16 hex digits over the tensor's bytes, equal to SGLang's: SHA-256 cut to 8 bytes on CPU, its own hash on CUDA."""
    if tensor.is_cuda:
        from sglang.srt.managers.mm_utils import tensor_hash

        return f"{tensor_hash(tensor):016x}"
    data = tensor.detach().contiguous()
    # Not through numpy(): it would forbid the storage to be resized, which is how a parameter leaves its device.
    content = (ctypes.c_char * data.nbytes).from_address(data.data_ptr()) if data.nbytes else b""
    return hashlib.sha256(content).hexdigest()[:16]


@dataclass(frozen=True)
class _Layout:
    """The numbers of an HF config that decide how SGLang cuts a dense Qwen3, Qwen2 or Llama model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> _Layout:
        num_heads = config["num_attention_heads"]
        return cls(
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            vocab_size=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )


# HF module -> (SGLang's fused module, place in it)
FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
NUM_PARTS = {"qkv_proj": 3, "gate_up_proj": 2}
ROW_PARALLEL = ("o_proj", "down_proj")
VOCAB_PARALLEL = ("embed_tokens", "lm_head")
_HF_NAME = re.compile(r"^(?P<prefix>.*?)(?P<module>[a-z_]+)\.(?P<leaf>weight|bias)$")


class ExpectedChecksums:
    """What `RolloutClient.checksums` must answer once a stream of HF tensors is loaded.

    SGLang hashes its own parameters per tensor-parallel rank: q, k, v and gate, up fused, heads and vocabulary cut over
    the ranks. A fused parameter is hashed as soon as its last part has come, so that a stream of buckets needs no
    second copy of the model. Serves dense models, not mixtures, whose experts SGLang fuses in its own way.
    """

    def __init__(
        self, model_config: Mapping[str, Any], engine_tp_size: int, kind: EngineKind, dtype: torch.dtype | None = None
    ) -> None:
        """dtype: what the engine stores; None: as the tensors come."""
        self._layout = _Layout.from_config(model_config)
        self._tp_size = engine_tp_size if kind == "sglang" else 1
        self._kind = kind
        self._dtype = dtype
        self._parts: dict[str, dict[int, Tensor]] = {}
        self._ranks: list[dict[str, str]] = [{} for _ in range(self._tp_size)]

    def add(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in named_tensors:
            tensor = tensor.detach() if self._dtype is None else tensor.detach().to(self._dtype)
            if self._kind == "embedded":
                self._ranks[0][name] = tensor_checksum(tensor)
            elif not (self._layout.tied and name == "lm_head.weight"):
                self._add_sglang(name, tensor)

    def result(self) -> list[dict[str, str]]:
        """Per engine rank {server's parameter name: checksum}. ValueError when a part of a fused one is missing."""
        if self._parts:
            missing = {
                name: sorted(set(range(NUM_PARTS[_module(name)])) - parts.keys()) for name, parts in self._parts.items()
            }
            raise ValueError(f"expected checksums: parts of fused parameters were not sent: {missing}")
        return self._ranks

    def _add_sglang(self, name: str, tensor: Tensor) -> None:
        match = _HF_NAME.match(name)
        if match is None:
            raise ValueError(f"expected checksums: no rule for the parameter {name!r} (dense Qwen3, Qwen2, Llama)")
        module = match["module"]
        if module not in FUSED:
            for rank in range(self._tp_size):
                self._ranks[rank][name] = tensor_checksum(self._shard(module, match["leaf"], tensor, rank))
            return
        fused, place = FUSED[module]
        fused_name = f"{match['prefix']}{fused}.{match['leaf']}"
        parts = self._parts.setdefault(fused_name, {})
        # The sender may reuse its buffer for the next bucket.
        parts[place] = torch.cat([self._shard(module, match["leaf"], tensor, rank) for rank in range(self._tp_size)])
        if len(parts) == NUM_PARTS[fused]:
            del self._parts[fused_name]
            by_rank = [parts[place].chunk(self._tp_size) for place in range(NUM_PARTS[fused])]
            for rank in range(self._tp_size):
                self._ranks[rank][fused_name] = tensor_checksum(torch.cat([chunks[rank] for chunks in by_rank]))

    def _shard(self, module: str, leaf: str, tensor: Tensor, rank: int) -> Tensor:
        tp_size = self._tp_size
        if module in VOCAB_PARALLEL:
            return self._vocab_shard(tensor, rank)
        if module in ROW_PARALLEL and leaf == "weight":
            return _slice(tensor, 1, rank, tp_size, module)
        if module in ("k_proj", "v_proj"):
            return self._kv_shard(tensor, rank, module)
        if module in FUSED:
            return _slice(tensor, 0, rank, tp_size, module)
        return tensor

    def _vocab_shard(self, tensor: Tensor, rank: int) -> Tensor:
        """Rows of one rank; the vocabulary is padded with zeros at its end."""
        padded = -(-self._layout.vocab_size // VOCAB_PADDING) * VOCAB_PADDING
        if padded % self._tp_size:
            padding = VOCAB_PADDING * self._tp_size
            padded = -(-self._layout.vocab_size // padding) * padding
        rows = padded // self._tp_size
        shard = tensor[rank * rows : (rank + 1) * rows]
        return torch.cat([shard, shard.new_zeros(rows - len(shard), *tensor.shape[1:])])

    def _kv_shard(self, tensor: Tensor, rank: int, module: str) -> Tensor:
        """With more ranks than key-value heads each head is on several ranks (GPU; SGLang on CPU pads instead)."""
        num_kv_heads, tp_size = self._layout.num_kv_heads, self._tp_size
        if num_kv_heads >= tp_size:
            return _slice(tensor, 0, rank, tp_size, module)
        if not tensor.is_cuda or tp_size % num_kv_heads:
            raise ValueError(
                f"rollout.tensor_model_parallel_size={tp_size} does not divide num_key_value_heads={num_kv_heads}; "
                f"set it to a divisor of {num_kv_heads}"
            )
        return _slice(tensor, 0, rank // (tp_size // num_kv_heads), num_kv_heads, module)


def expected_checksums(
    named_hf_tensors: Iterable[tuple[str, Tensor]],
    model_config: Mapping[str, Any],
    engine_tp_size: int,
    kind: EngineKind,
    dtype: torch.dtype | None = None,
) -> list[dict[str, str]]:
    """`ExpectedChecksums` over all tensors of a model at once."""
    expected = ExpectedChecksums(model_config, engine_tp_size, kind, dtype)
    expected.add(named_hf_tensors)
    return expected.result()


def checksum_differences(expected: list[dict[str, str]], actual: list[dict[str, str]]) -> list[str]:
    """One line per parameter that differs, is missing or too many; empty when the server has exactly these weights."""
    if len(expected) != len(actual):
        return [f"{len(actual)} engine ranks answered, {len(expected)} expected"]
    lines = []
    for rank, (want, got) in enumerate(zip(expected, actual, strict=True)):
        for name in sorted(want.keys() | got.keys()):
            if want.get(name) != got.get(name):
                lines.append(
                    f"rank {rank} {name}: trainer {want.get(name, 'absent')}, server {got.get(name, 'absent')}"
                )
    return lines


def _module(name: str) -> str:
    return name.split(".")[-2]


def _slice(tensor: Tensor, dim: int, index: int, count: int, module: str) -> Tensor:
    if tensor.shape[dim] % count:
        raise ValueError(
            f"{module} has {tensor.shape[dim]} rows or columns to cut over {count} ranks of the rollout engine; "
            "set rollout.tensor_model_parallel_size to a divisor"
        )
    size = tensor.shape[dim] // count
    return tensor.narrow(dim, index * size, size)
