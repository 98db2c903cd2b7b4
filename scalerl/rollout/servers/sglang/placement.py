"""Places where SGLang stores the tensors of a model, dense or one of the mixtures in `placement_arguments.MIXTURES`.

q, k, v and gate, up are fused, and a rank's experts of a layer are in two tensors; heads, MLP widths and vocabulary are
divided over its ranks, experts too with expert parallelism. Of latent attention (DeepSeek-V3) the two down projections
are fused, whole on every rank. Of a gated delta net queries, keys and values are cut each by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scalerl.models import family_named
from scalerl.rollout.servers.checksums import Placement, TensorPlace
from scalerl.rollout.servers.sglang.adapters import TENSOR_MARK
from scalerl.rollout.servers.sglang.placement_arguments import (
    CPU_WIDTH_PADDING,
    FLOAT32_ROUTERS,
    MIXTURES,
    UNFUSED,
    ExpertParallel,
)

# sglang.srt.layers.vocab_parallel_embedding.DEFAULT_VOCAB_PADDING_SIZE
VOCAB_PADDING = 64

# By HF module: (SGLang's fused module, position in it)
FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
LATENT_FUSED = {"q_a_proj": ("fused_qkv_a_proj_with_mqa", 0), "kv_a_proj_with_mqa": ("fused_qkv_a_proj_with_mqa", 1)}
NUM_PARTS = {"qkv_proj": 3, "gate_up_proj": 2, "fused_qkv_a_proj_with_mqa": 2}
# For an expert's gate, up and down matrix: (SGLang's tensor of a rank's experts, position, positions per expert)
EXPERT_PLACES = (("w13_weight", 0, 2), ("w13_weight", 1, 2), ("w2_weight", 0, 1))
NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
# Of stacked experts, whose rows are columns in the files: SGLang's tensor of a rank's experts.
STACK_PLACES = {
    "gate_up_proj": "w13_weight",
    "gate_up_proj_bias": "w13_weight_bias",
    "down_proj": "w2_weight",
    "down_proj_bias": "w2_weight_bias",
}
# Of a router; SGLang stores it in float32 whatever the model's dtype.
ROUTER_BIAS = "e_score_correction_bias"

# Of a gated delta net: (SGLang's parameter, position in it, positions, how it is cut; see `_shard`).
DELTA_NET = {
    "in_proj_qkv.weight": ("in_proj_qkvz.weight", 0, 2, "heads"),
    "in_proj_z.weight": ("in_proj_qkvz.weight", 1, 2, "rows"),
    "in_proj_b.weight": ("in_proj_ba.weight", 0, 2, "rows"),
    "in_proj_a.weight": ("in_proj_ba.weight", 1, 2, "rows"),
    "in_proj_qkvz.weight": ("in_proj_qkvz.weight", 0, 1, "rows"),
    "in_proj_ba.weight": ("in_proj_ba.weight", 0, 1, "rows"),
    "conv1d.weight": ("conv1d.weight", 0, 1, "heads"),
    "A_log": ("A_log", 0, 1, "rows"),
    "dt_bias": ("dt_bias", 0, 1, "rows"),
    "norm.weight": ("norm.weight", 0, 1, "whole"),
    "out_proj.weight": ("out_proj.weight", 0, 1, "columns"),
}
DECAY = ".linear_attn.A_log"
# Of a vision tower: the end of a module's name -> how it is cut; of what is cut in columns the bias is whole.
TOWER_CUTS = {
    "attn.qkv": "thirds",
    "attn.proj": "columns",
    "mlp.gate_proj": "width_rows",
    "mlp.up_proj": "width_rows",
    "mlp.down_proj": "width_columns",
    "merger.mlp.0": "rows",
    "merger.mlp.2": "columns",
    "mlp.linear_fc1": "width_rows",
    "mlp.linear_fc2": "width_columns",
    "linear_fc1": "rows",
    "linear_fc2": "columns",
    "pos_embed": "positions",
}

_NAME = re.compile(r"^(?P<prefix>.*?)(?P<module>[a-z_]+)\.(?P<leaf>weight|bias|e_score_correction_bias)$")
_DELTA_NAME = re.compile(r"^(?P<prefix>.*\.linear_attn\.)(?P<part>.+)$")
_ZERO_CENTRED_NORM = re.compile(r"^(?P<prefix>(?!visual\.|.*\.linear_attn\.).*norm\.)weight$")
_STACK_NAME = re.compile(rf"^(?P<prefix>.*\.experts\.)(?P<part>{'|'.join(STACK_PLACES)})$")
_TOWER_NAME = re.compile(r"^(?:model\.)?(?P<module>visual\..+)\.(?P<leaf>weight|bias)$")
_EXPERT_NAME = re.compile(r"^(?P<prefix>.*\.experts\.)(?P<expert>\d+)\.(?P<part>[a-z0-9_]+)\.weight$")


class SGLangPlacement(Placement):
    """The places in an SGLang server."""

    def __init__(self, model_config: Mapping[str, Any], num_ranks: int, experts: ExpertParallel | None = None) -> None:
        """Reads the placement from model_config, the model's config.json.

        experts: how the ranks share them; None: every rank has a part of each.
        """
        self.num_ranks, self._experts = num_ranks, experts or ExpertParallel()
        self._family = family_named(model_config.get("model_type"))
        self._has_tower = self._family is not None and self._family.tower is not None
        text = (
            model_config.get(self._family.text_config or "") if self._family is not None and self._has_tower else None
        )
        self._config = {**(text or {}), **model_config}
        rules = self._family.layer if self._family else ()
        # Of stacked experts gate and up follow each other; else their rows take turns.
        self._has_halves = any(rule.stacked and rule.sections for rule in rules)
        names = self._family.expert_names if self._family else ()
        # Places by the last part of the name.
        self._expert_parts = {name.rpartition(".")[2]: place for name, place in zip(names, EXPERT_PLACES, strict=False)}

    def stored_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        if name.endswith(".sinks"):
            # But for the attention backend trtllm_mha.
            return torch.bfloat16
        if name.endswith((".gate_up_proj_bias", ".down_proj_bias")):
            return torch.float32
        is_router = name.endswith(".gate.weight") and self._config.get("model_type") in FLOAT32_ROUTERS
        return torch.float32 if is_router or name.endswith((ROUTER_BIAS, DECAY)) else dtype

    def parts(self, name: str, tensor: Tensor, ranks: Sequence[int]) -> Iterator[tuple[int, TensorPlace, Tensor]]:
        if self._config.get("tie_word_embeddings") and name == "lm_head.weight":
            return
        if TENSOR_MARK in name:
            place = _adapter_place(name)
            yield from ((rank, place, tensor) for rank in ranks)
            return
        if self._has_tower:
            name = name.replace("model.language_model.", "model.")
        expert = _EXPERT_NAME.match(name)
        if expert is not None and expert["part"] in self._expert_parts:
            yield from self._parts_of_expert(expert, tensor, ranks)
            return
        if (stack := _STACK_NAME.match(name)) is not None:
            place = TensorPlace(stack["prefix"] + STACK_PLACES[stack["part"]])
            for rank in ranks:
                yield rank, place, self._part_of_stack(stack["part"], tensor, rank)
            return
        place, cut = self._place_in_tower(name) if self._has_tower else self._place(name)
        for rank in ranks:
            yield rank, place, self._shard(cut, tensor, rank)
        if self._family is not None and self._family.delta_net and (norm := _ZERO_CENTRED_NORM.match(place.name)):
            # SGLang keeps what it multiplies with, too.
            for rank in ranks:
                yield rank, TensorPlace(f"{norm['prefix']}gemma_weight"), tensor + 1.0

    def _parts_of_expert(
        self, name: re.Match[str], tensor: Tensor, ranks: Sequence[int]
    ) -> Iterator[tuple[int, TensorPlace, Tensor]]:
        """Yields what `parts` does, of one expert; the ranks that have it are neighbours, which divide its width."""
        fused, position, per_expert = self._expert_parts[name["part"]]
        num_local, num_parts = self._num_experts // self._experts.ep_size, self.num_ranks // self._experts.ep_size
        owner, number = divmod(int(name["expert"]), num_local)
        place = TensorPlace(name["prefix"] + fused, number * per_expert + position, num_local * per_expert)
        for rank in ranks:
            ep_rank, part = divmod(rank, num_parts)
            if ep_rank == owner:
                yield rank, place, self._width_shard(tensor, 1 if fused == "w2_weight" else 0, part, num_parts)

    def _part_of_stack(self, part: str, tensor: Tensor, rank: int) -> Tensor:
        """A rank's experts of a layer, and its part of their width; of the last biases all, on the first rank alone."""
        num_parts = self.num_ranks // self._experts.ep_size
        ep_rank, index = divmod(rank, num_parts)
        tensor = _slice(tensor, 0, ep_rank, self._experts.ep_size)
        if part == "down_proj_bias":
            return tensor if index == 0 else torch.zeros_like(tensor)
        if part == "gate_up_proj_bias":
            return self._width_shard(tensor, 1, index, num_parts, per_width=2)
        rows = tensor.transpose(1, 2)
        if part == "down_proj":
            return self._width_shard(rows, 2, index, num_parts)
        if self._has_halves:
            return torch.cat([self._width_shard(half, 1, index, num_parts) for half in rows.chunk(2, 1)], 1)
        return self._width_shard(rows, 1, index, num_parts, per_width=2)

    def _place_in_tower(self, name: str) -> tuple[TensorPlace, str]:
        """As `_place`, of a model with a vision tower."""
        tower = _TOWER_NAME.match(name)
        if tower is None:
            return self._place(name)
        module, leaf = tower["module"], tower["leaf"]
        cut = next((cut for end, cut in TOWER_CUTS.items() if module.endswith(f".{end}")), "whole")
        before, _, last = module.rpartition(".")
        place = TensorPlace(f"{module}.{leaf}")
        if last == "qkv":
            place = TensorPlace(f"{module}_proj.{leaf}")
        elif last in FUSED:
            fused, position = FUSED[last]
            place = TensorPlace(f"{before}.{fused}.{leaf}", position, NUM_PARTS[fused])
        return place, "whole" if cut.endswith("columns") and leaf == "bias" else cut

    def _place(self, name: str) -> tuple[TensorPlace, str]:
        """The place of a tensor that is no expert's, and how it is divided over the ranks (see `_shard`)."""
        if name.endswith(".sinks"):
            return TensorPlace(name), "rows"
        if self._family is not None and self._family.delta_net:
            delta = _DELTA_NAME.match(name)
            if delta is not None and delta["part"] in DELTA_NET:
                parameter, position, count, cut = DELTA_NET[delta["part"]]
                return TensorPlace(delta["prefix"] + parameter, position, count), cut
            # SGLang's layers are their attention.
            name = name.replace(".self_attn.", ".")
        match = _NAME.match(name)
        is_latent = self._family is not None and self._family.latent
        has_bias = self._family is not None and self._family.mixture is not None and self._family.mixture.bias
        is_expert = _EXPERT_NAME.match(name) is not None
        if match is None or is_expert or (match["leaf"] == ROUTER_BIAS and not has_bias):
            raise ValueError(
                f"expected checksums: no rule for the parameter {name!r} (dense models and {', '.join(MIXTURES)})"
            )
        module, leaf = match["module"], match["leaf"]
        is_whole = self._experts.whole_shared_experts and match["prefix"].endswith(".shared_experts.")
        rows, columns = ("whole", "whole") if is_whole else ("width_rows", "width_columns")
        fused_modules = self._latent_fused if is_latent else FUSED
        if module in fused_modules:
            fused, position = fused_modules[module]
            place = TensorPlace(f"{match['prefix']}{fused}.{leaf}", position, NUM_PARTS[fused])
            if self._config.get("model_type") in UNFUSED:
                place = TensorPlace(name)
            cuts = {"q_proj": "rows", "k_proj": "kv_rows", "v_proj": "kv_rows"}
            return place, "whole" if module in LATENT_FUSED else cuts.get(module, rows)
        cuts = {"embed_tokens": "vocab", "lm_head": "vocab", "gate_up_proj": "width_halves"}
        if self._family is not None and "joint_qk_norm" in self._family.facts:
            cuts |= {"q_norm": "rows", "k_norm": "kv_rows"}
        if is_latent:
            cuts |= dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj"), "rows")
        if leaf == "weight":
            cuts |= {"o_proj": "columns", "down_proj": columns}
        return TensorPlace(name), cuts.get(module, "whole")

    @property
    def _latent_fused(self) -> dict[str, tuple[str, int]]:
        """The fused modules of a model with latent attention; without q_lora_rank only those of its MLPs."""
        mlp = {module: place for module, place in FUSED.items() if place[0] == "gate_up_proj"}
        return mlp | LATENT_FUSED if self._config.get("q_lora_rank") else mlp

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
            return self._vocab_shard(tensor, rank, self._config["vocab_size"])
        if cut == "positions":
            # SGLang has them as words.
            return self._vocab_shard(tensor, rank, len(tensor))
        if cut == "kv_rows":
            return self._kv_shard(tensor, rank)
        if cut == "heads":
            return self._heads_shard(tensor, rank)
        if cut == "thirds":
            return torch.cat([_slice(part, 0, rank, self.num_ranks) for part in tensor.chunk(3)])
        if cut == "width_halves":
            halves = tensor.chunk(2)
            return torch.cat([self._width_shard(half, 0, rank, self.num_ranks) for half in halves])
        if cut.startswith("width"):
            return self._width_shard(tensor, 1 if cut == "width_columns" else 0, rank, self.num_ranks)
        return _slice(tensor, 1 if cut == "columns" else 0, rank, self.num_ranks)

    def _heads_shard(self, tensor: Tensor, rank: int) -> Tensor:
        """A rank's rows of a gated delta net's queries, of its keys and of its values, which follow each other."""
        keys = self._config["linear_num_key_heads"] * self._config["linear_key_head_dim"]
        sections = tensor.split([keys, keys, len(tensor) - 2 * keys])
        return torch.cat([_slice(section, 0, rank, self.num_ranks) for section in sections])

    def _vocab_shard(self, tensor: Tensor, rank: int, vocab_size: int) -> Tensor:
        """A rank's rows of the vocabulary, which is padded with zeros at its end."""
        padded = -(-vocab_size // VOCAB_PADDING) * VOCAB_PADDING
        if padded % self.num_ranks:
            padding = VOCAB_PADDING * self.num_ranks
            padded = -(-vocab_size // padding) * padding
        return _padded_slice(tensor, 0, rank, padded // self.num_ranks)

    def _width_shard(self, tensor: Tensor, dim: int, index: int, count: int, *, per_width: int = 1) -> Tensor:
        """A part of an MLP's inner width, one of `count`.  per_width: numbers in that dimension for each of the width.

        On a CPU SGLang pads it with zeros at its end to a multiple for all ranks, however many have a part of it.
        """
        if tensor.is_cuda:
            return _slice(tensor, dim, index, count)
        padding = CPU_WIDTH_PADDING * self.num_ranks * per_width
        return _padded_slice(tensor, dim, index, -(-tensor.shape[dim] // padding) * padding // count)

    def _kv_shard(self, tensor: Tensor, rank: int) -> Tensor:
        """A rank's key-value heads; with more ranks than heads each is on several ranks (GPU; on a CPU SGLang pads)."""
        num_kv_heads, tp_size = self._num_kv_heads, self.num_ranks
        if num_kv_heads >= tp_size:
            return _slice(tensor, 0, rank, tp_size)
        if not tensor.is_cuda or tp_size % num_kv_heads:
            raise ValueError(
                f"rollout.tensor_model_parallel_size={tp_size} does not divide num_key_value_heads={num_kv_heads}; "
                f"set it to a divisor of {num_kv_heads}"
            )
        return _slice(tensor, 0, rank // (tp_size // num_kv_heads), num_kv_heads)


def _adapter_place(name: str) -> TensorPlace:
    """The place of a tensor of an adapter, which every rank has whole."""
    module = name.rsplit(".", 3)[1]
    fused, position = FUSED.get(module, (module, 0))
    return TensorPlace(name.replace(f".{module}.lora_", f".{fused}.lora_"), position, NUM_PARTS.get(fused, 1))


def _slice(tensor: Tensor, dim: int, index: int, count: int) -> Tensor:
    if tensor.shape[dim] % count:
        raise ValueError(
            f"a tensor of {tensor.shape[dim]} {'columns' if dim else 'rows'} cannot be cut over {count} ranks of the "
            "rollout engine; set rollout.tensor_model_parallel_size to a divisor"
        )
    size = tensor.shape[dim] // count
    return tensor.narrow(dim, index * size, size)


def _padded_slice(tensor: Tensor, dim: int, index: int, size: int) -> Tensor:
    """`size` rows or columns from index * size on, with zeros beyond the end of the tensor."""
    start = min(index * size, tensor.shape[dim])
    part = tensor.narrow(dim, start, min(size, tensor.shape[dim] - start))
    lacking = size - part.shape[dim]
    if not lacking:
        return part
    padding = list(part.shape)
    padding[dim] = lacking
    return torch.cat([part, part.new_zeros(padding)], dim)
