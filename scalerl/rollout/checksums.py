"""The checksums that a rollout server's weights must have, made from Hugging Face tensors while they stream by."""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from scalerl.families import FAMILIES

EngineKind = Literal["sglang", "embedded"]

# sglang.srt.layers.vocab_parallel_embedding.DEFAULT_VOCAB_PADDING_SIZE
VOCAB_PADDING = 64
# sglang.srt.configs.update_config.DEFAULT_MOE_PADDING_SIZE: of every MLP's inner width on one rank of a CPU server
CPU_WIDTH_PADDING = 32

# HF module -> (SGLang's fused module, place in it)
FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
NUM_PARTS = {"qkv_proj": 3, "gate_up_proj": 2}
# Of one expert's gate, up and down matrix: (SGLang's tensor of all experts, place, places per expert)
EXPERT_PLACES = (("w13_weight", 0, 2), ("w13_weight", 1, 2), ("w2_weight", 0, 1))
# Mixtures whose experts SGLang holds as EXPERT_PLACES says; shown on a CPU by tests/sglang/test_sync_mixture.py.
MIXTURES = ("qwen3_moe", "mixtral")
NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts")

_NAME = re.compile(r"^(?P<prefix>.*?)(?P<module>[a-z_]+)\.(?P<leaf>weight|bias)$")
_EXPERT_NAME = re.compile(r"^(?P<prefix>.*\.experts\.)(?P<expert>\d+)\.(?P<part>[a-z0-9_]+)\.weight$")


def tensor_checksum(tensor: Tensor) -> str:
    """16 hex digits over the tensor's bytes, equal to SGLang's: SHA-256 cut to 8 bytes on CPU, its own hash on CUDA."""
    if tensor.is_cuda:
        from sglang.srt.managers.mm_utils import tensor_hash

        return f"{tensor_hash(tensor):016x}"
    digest = hashlib.sha256()
    _hash_into(digest, tensor)
    return digest.hexdigest()[:16]


def _hash_into(digest: Any, tensor: Tensor) -> None:
    data = tensor.detach().contiguous()
    if data.nbytes:
        # Not through numpy(): it would forbid the storage to be resized, which is how a parameter leaves its device.
        digest.update((ctypes.c_char * data.nbytes).from_address(data.data_ptr()))


@dataclass(frozen=True)
class _Place:
    """Where a Hugging Face tensor goes: part `position` of the `count` that make up the server's parameter `name`."""

    name: str
    position: int = 0
    count: int = 1


class _Parameter:
    """One parameter of one server rank, hashed part by part in the order of its memory.

    A part that comes before its turn is kept as a copy, since the sender may reuse its buffer. CUDA's hash is of whole
    tensors, so there all parts are kept until the last has come.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.checksum: str | None = None
        self._digest = hashlib.sha256()
        self._next = 0
        self._kept: dict[int, Tensor] = {}

    @property
    def missing(self) -> list[int]:
        return [position for position in range(self._next, self.count) if position not in self._kept]

    def add(self, position: int, part: Tensor) -> None:
        if part.is_cuda and self.count > 1:
            self._kept[position] = part.clone()
            if len(self._kept) == self.count:
                self.checksum = tensor_checksum(torch.cat([self._kept[i].flatten() for i in range(self.count)]))
                self._kept.clear()
                self._next = self.count
            return
        if position != self._next:
            self._kept[position] = part.clone()
            return
        if part.is_cuda:
            self.checksum = tensor_checksum(part)
            self._next = 1
            return
        _hash_into(self._digest, part)
        self._next += 1
        while self._next in self._kept:
            _hash_into(self._digest, self._kept.pop(self._next))
            self._next += 1
        if self._next == self.count:
            self.checksum = self._digest.hexdigest()[:16]


class ExpectedChecksums:
    """What `RolloutClient.checksums` must answer once a stream of HF tensors is loaded.

    SGLang hashes its own parameters per tensor-parallel rank: q, k, v and gate, up fused, all experts of a layer in two
    tensors, heads, MLP widths and vocabulary cut over the ranks. Parts are hashed as they come by: a stream in the
    order of the family's table is never copied on a CPU. Serves dense models and the mixtures in MIXTURES.
    """

    def __init__(
        self, model_config: Mapping[str, Any], engine_tp_size: int, kind: EngineKind, dtype: torch.dtype | None = None
    ) -> None:
        """model_config: the model's config.json. dtype: what the engine stores; None: as the tensors come."""
        self._config = model_config
        family = FAMILIES.get(str(model_config.get("model_type")))
        names = family.expert_names if family else ()
        # Last part of the name -> place.
        self._expert_parts = {name.rpartition(".")[2]: place for name, place in zip(names, EXPERT_PLACES, strict=False)}
        self._tp_size = engine_tp_size if kind == "sglang" else 1
        self._kind = kind
        self._dtype = dtype
        self._ranks: list[dict[str, _Parameter]] = [{} for _ in range(self._tp_size)]

    def add(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in named_tensors:
            tensor = tensor.detach() if self._dtype is None else tensor.detach().to(self._dtype)
            if self._kind == "embedded":
                self._add(0, _Place(name), tensor)
            elif not (self._config.get("tie_word_embeddings") and name == "lm_head.weight"):
                place, cut = self._place(name)
                for rank in range(self._tp_size):
                    self._add(rank, place, self._shard(cut, tensor, rank))

    def result(self) -> list[dict[str, str]]:
        """Per engine rank {server's parameter name: checksum}. ValueError when a part of a fused one is missing."""
        missing = {name: p.missing[:8] for name, p in self._ranks[0].items() if p.checksum is None}
        if missing:
            raise ValueError(f"expected checksums: parts of fused parameters were not sent: {missing}")
        return [{name: str(parameter.checksum) for name, parameter in rank.items()} for rank in self._ranks]

    def _add(self, rank: int, place: _Place, part: Tensor) -> None:
        self._ranks[rank].setdefault(place.name, _Parameter(place.count)).add(place.position, part)

    def _place(self, name: str) -> tuple[_Place, str]:
        """-> (place, how it is cut over the ranks: see `_shard`)."""
        of_expert = _EXPERT_NAME.match(name)
        if of_expert is not None and of_expert["part"] in self._expert_parts:
            tensor, position, per_expert = self._expert_parts[of_expert["part"]]
            place = _Place(
                of_expert["prefix"] + tensor,
                int(of_expert["expert"]) * per_expert + position,
                self._num_experts * per_expert,
            )
            return place, "width_columns" if tensor == "w2_weight" else "width_rows"
        match = _NAME.match(name)
        if match is None or of_expert is not None:
            raise ValueError(
                f"expected checksums: no rule for the parameter {name!r} (dense models and {', '.join(MIXTURES)})"
            )
        module, leaf = match["module"], match["leaf"]
        if module in FUSED:
            fused, position = FUSED[module]
            place = _Place(f"{match['prefix']}{fused}.{leaf}", position, NUM_PARTS[fused])
            return place, {"q_proj": "rows", "k_proj": "kv_rows", "v_proj": "kv_rows"}.get(module, "width_rows")
        cuts = {"embed_tokens": "vocab", "lm_head": "vocab"}
        if leaf == "weight":
            cuts |= {"o_proj": "columns", "down_proj": "width_columns"}
        return _Place(name), cuts.get(module, "whole")

    @property
    def _num_experts(self) -> int:
        for key in NUM_EXPERTS_KEYS:
            if self._config.get(key):
                return self._config[key]
        raise ValueError(f"expected checksums: config.json of a mixture has none of {', '.join(NUM_EXPERTS_KEYS)}")

    @property
    def _num_kv_heads(self) -> int:
        return self._config.get("num_key_value_heads") or self._config["num_attention_heads"]

    def _shard(self, cut: str, tensor: Tensor, rank: int) -> Tensor:
        if cut == "whole":
            return tensor
        if cut == "vocab":
            return self._vocab_shard(tensor, rank)
        if cut == "kv_rows":
            return self._kv_shard(tensor, rank)
        if cut.startswith("width"):
            return self._width_shard(tensor, 1 if cut == "width_columns" else 0, rank)
        return _slice(tensor, 1 if cut == "columns" else 0, rank, self._tp_size)

    def _vocab_shard(self, tensor: Tensor, rank: int) -> Tensor:
        """Rows of one rank; the vocabulary is padded with zeros at its end."""
        vocab_size = self._config["vocab_size"]
        padded = -(-vocab_size // VOCAB_PADDING) * VOCAB_PADDING
        if padded % self._tp_size:
            padding = VOCAB_PADDING * self._tp_size
            padded = -(-vocab_size // padding) * padding
        return _padded_slice(tensor, 0, rank, padded // self._tp_size)

    def _width_shard(self, tensor: Tensor, dim: int, rank: int) -> Tensor:
        """Of an MLP's inner width, which SGLang pads with zeros at its end on a CPU."""
        if tensor.is_cuda:
            return _slice(tensor, dim, rank, self._tp_size)
        padding = CPU_WIDTH_PADDING * self._tp_size
        return _padded_slice(tensor, dim, rank, -(-tensor.shape[dim] // padding) * CPU_WIDTH_PADDING)

    def _kv_shard(self, tensor: Tensor, rank: int) -> Tensor:
        """With more ranks than key-value heads each head is on several ranks (GPU; SGLang on CPU pads instead)."""
        num_kv_heads, tp_size = self._num_kv_heads, self._tp_size
        if num_kv_heads >= tp_size:
            return _slice(tensor, 0, rank, tp_size)
        if not tensor.is_cuda or tp_size % num_kv_heads:
            raise ValueError(
                f"rollout.tensor_model_parallel_size={tp_size} does not divide num_key_value_heads={num_kv_heads}; "
                f"set it to a divisor of {num_kv_heads}"
            )
        return _slice(tensor, 0, rank // (tp_size // num_kv_heads), num_kv_heads)


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


def checksum_differences(expected: Sequence[dict[str, str]], actual: Sequence[dict[str, str]]) -> list[str]:
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


def _slice(tensor: Tensor, dim: int, index: int, count: int) -> Tensor:
    if tensor.shape[dim] % count:
        raise ValueError(
            f"a tensor of {tensor.shape[dim]} {'columns' if dim else 'rows'} cannot be cut over {count} ranks of the "
            "rollout engine; set rollout.tensor_model_parallel_size to a divisor"
        )
    size = tensor.shape[dim] // count
    return tensor.narrow(dim, index * size, size)


def _padded_slice(tensor: Tensor, dim: int, index: int, size: int) -> Tensor:
    """size rows or columns from index * size on; zeros where the tensor has ended."""
    start = min(index * size, tensor.shape[dim])
    part = tensor.narrow(dim, start, min(size, tensor.shape[dim] - start))
    lacking = size - part.shape[dim]
    if not lacking:
        return part
    padding = list(part.shape)
    padding[dim] = lacking
    return torch.cat([part, part.new_zeros(padding)], dim)
