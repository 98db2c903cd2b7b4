"""Floating-point operations that a transformer needs, and the share of the hardware's peak that they use.

Only matrix products and those with the states of gated delta nets count (a multiply-add is 2), each once and only if
its result is needed: attention to the tokens that a causal mask leaves, the experts that a token is routed to; no
embedding lookup, padding or recomputation.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from scalerl.models.adapters import counted_trained_params
from scalerl.models.registry import family_of
from scalerl.models.shape import ModelShape
from scalerl.models.table import VALUE_HEAD
from scalerl.models.vision import VisionModel

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike

logger = logging.getLogger(__name__)

# Of each sequence, the patches of each of its pictures.
Patches = Iterable[Sequence[int]]

# FLOP/s of dense matrix products as the vendors' data sheets state them, without structured sparsity:
# (name, bfloat16 and float16 with float32 accumulation, float32 without TF32). First match counts.
_PEAKS: tuple[tuple[str, float, float | None], ...] = (
    (r"GB200", 2500e12, 80e12),
    (r"B200", 2250e12, 80e12),
    (r"GH200", 989e12, 67e12),
    (r"H200", 989e12, 67e12),
    (r"H100.*PCIe", 756e12, 51e12),
    (r"H100 NVL", 835e12, 60e12),
    (r"H100", 989e12, 67e12),
    (r"H800.*PCIe", 756e12, 51e12),
    (r"H800", 989e12, 67e12),
    (r"H20", 148e12, 44e12),
    (r"A100", 312e12, 19.5e12),
    (r"A800", 312e12, 19.5e12),
    (r"A40", 149.7e12, 37.4e12),
    (r"A10", 125e12, 31.2e12),
    (r"L40S", 362.05e12, 91.6e12),
    (r"L40", 181.05e12, 90.5e12),
    (r"L20", 119.5e12, 59.8e12),
    (r"L4", 121e12, 30.3e12),
    (r"MI300X", 1307e12, 163.4e12),
    (r"MI325X", 1307e12, 163.4e12),
    (r"MI350X", 2300e12, None),
    (r"MI355X", 2500e12, None),
)
_DTYPES = {"bfloat16": 1, "bf16": 1, "float16": 1, "fp16": 1, "float32": 2, "fp32": 2}
_warned: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class TowerFlops:
    """The sizes of a vision tower that determine its matrix products.

    patch_params: weights that one patch is multiplied with.  merged_params: those of a square of merge_size x
    merge_size patches.  num_blocks: those whose patches see the whole picture; num_window_blocks: those whose patches
    see window_patches at most.  trained: it has a backward pass.
    """

    patch_params: int
    merged_params: int
    merge_size: int
    hidden_size: int
    num_blocks: int
    num_window_blocks: int
    window_patches: int
    trained: bool

    def forward(self, patches: Iterable[int]) -> float:
        """FLOPs of a forward pass over pictures of so many patches."""
        return float(sum(self._forward(number) for number in patches))

    def train(self, patches: Iterable[int]) -> float:
        """FLOPs of a forward pass, and of a backward pass unless the tower is frozen."""
        return self.forward(patches) * (3 if self.trained else 1)

    def _forward(self, patches: int) -> float:
        seen = self.num_blocks * patches + self.num_window_blocks * min(patches, self.window_patches)
        merged = self.merged_params * patches / self.merge_size**2
        return 2 * (self.patch_params * patches + merged) + 4 * self.hidden_size * patches * seen


@dataclass(frozen=True)
class FlopsShape:
    """The sizes of a decoder that determine its matrix products.

    ffn_hidden_size: inner width of a dense layer's MLP.  gated: an MLP or expert has three matrices, else two.
    vocab_size: width of the head; 1 for a value head (`as_critic`).
    num_moe_layers: layers whose MLP is a mixture: a router over num_experts, of which every token uses
    num_experts_per_token, each moe_ffn_hidden_size wide, and shared experts with a total width of
    shared_expert_ffn_hidden_size. shared_expert_gate: these have one more row.
    num_linear_layers: layers with a gated delta net in the place of attention, and its heads. attention_gate: attention
    has as many rows for a gate as for queries.
    kv_lora_rank set: latent attention (MLA) with its q_lora_rank (None: queries uncompressed), qk_nope_head_dim,
    qk_rope_head_dim and v_head_dim; num_kv_heads and head_dim are ignored then.
    num_sliding_layers: layers whose tokens see the last sliding_window tokens alone.
    adapter_params: weights of adapters that one token is multiplied with. They are trained then, and of the model's own
    weights those of a value head.
    tower: that of a model which sees pictures. Patches, where a method takes them, are those of each of a sequence's
    pictures; None: no sequence has any.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    gated: bool = True
    num_moe_layers: int = 0
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0
    shared_expert_ffn_hidden_size: int = 0
    shared_expert_gate: bool = False
    attention_gate: bool = False
    num_linear_layers: int = 0
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    num_sliding_layers: int = 0
    sliding_window: int = 0
    adapter_params: int = 0
    tower: TowerFlops | None = None

    def as_critic(self) -> FlopsShape:
        """The same model with a value head of width 1 in place of the vocabulary."""
        return replace(self, vocab_size=1)

    @property
    def matmul_params(self) -> int:
        """Weights that one token is multiplied with: attention projections, MLP or its experts, head, adapters."""
        mlp = self._mlp(self.ffn_hidden_size) * (self.num_layers - self.num_moe_layers)
        mixture = self.num_moe_layers * (
            self.hidden_size * self.num_experts
            + self.num_experts_per_token * self._mlp(self.moe_ffn_hidden_size)
            + self._mlp(self.shared_expert_ffn_hidden_size)
            + self.hidden_size * self.shared_expert_gate
        )
        mixers = self._num_attending * self._attention_params + self.num_linear_layers * self._delta_net_params
        return mixers + mlp + mixture + self.hidden_size * self.vocab_size + self.adapter_params

    @property
    def _frozen_params(self) -> int:
        """Weights that one token is multiplied with and that have no gradient: those beside an adapter."""
        value_head = self.hidden_size if self.vocab_size == 1 else 0
        return self.matmul_params - self.adapter_params - value_head if self.adapter_params else 0

    @property
    def _num_attending(self) -> int:
        return self.num_layers - self.num_linear_layers

    @property
    def _delta_net_params(self) -> int:
        key = self.linear_num_key_heads * self.linear_key_head_dim
        value = self.linear_num_value_heads * self.linear_value_head_dim
        # Queries, keys, values, gate, strength and decay; then the output.
        return self.hidden_size * (2 * key + 2 * value + 2 * self.linear_num_value_heads + value)

    @property
    def _state_flops(self) -> int:
        """FLOPs of a token with the states: they are asked by its key, changed, and asked by its query."""
        state = self.linear_num_value_heads * self.linear_key_head_dim * self.linear_value_head_dim
        return 2 * 3 * self.num_linear_layers * state

    def _mlp(self, width: int) -> int:
        return self.hidden_size * width * (3 if self.gated else 2)

    @property
    def _attention_params(self) -> int:
        heads, hidden = self.num_heads, self.hidden_size
        if self.kv_lora_rank is None:
            return hidden * self.head_dim * (2 * (heads + self.num_kv_heads) + heads * self.attention_gate)
        qk_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        query = hidden * heads * qk_dim if self.q_lora_rank is None else self.q_lora_rank * (hidden + heads * qk_dim)
        key_value = hidden * (self.kv_lora_rank + self.qk_rope_head_dim)
        key_value += self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        return query + key_value + heads * self.v_head_dim * hidden

    @property
    def _flops_per_pair(self) -> int:
        """FLOPs of a (query, key) pair in all heads of a layer: a dot product for its score, an axpy for its value."""
        mla = self.kv_lora_rank is not None
        qk_dim = self.qk_nope_head_dim + self.qk_rope_head_dim if mla else self.head_dim
        return 2 * self.num_heads * (qk_dim + (self.v_head_dim if mla else self.head_dim))

    def forward_each(self, seq_lens: ArrayLike, patches: Patches | None = None) -> np.ndarray:
        """[S] FLOPs of a forward pass over each sequence of these lengths (tokens), logits of every token included."""
        lengths = np.asarray(seq_lens, dtype=np.int64)
        # A causal mask leaves s * (s + 1) / 2 pairs; a window of the tokens after the first w leaves w of each.
        begun = np.minimum(lengths, self.sliding_window)
        near = begun * (begun + 1) // 2 + (lengths - begun) * self.sliding_window
        pairs = (self._num_attending - self.num_sliding_layers) * (lengths * (lengths + 1) // 2)
        pairs += self.num_sliding_layers * near
        per_token = 2 * self.matmul_params + self._state_flops
        flops = (per_token * lengths + self._flops_per_pair * pairs).astype(float)
        if self.tower is not None and patches is not None:
            flops += np.array([self.tower.forward(of_row) for of_row in patches])
        return flops

    def forward(self, seq_lens: Iterable[int], patches: Patches | None = None) -> float:
        """FLOPs of one forward pass over sequences of these lengths (tokens), logits of every token included."""
        return float(self.forward_each(list(seq_lens), patches).sum())

    def backward(self, seq_lens: Iterable[int]) -> float:
        """FLOPs of the backward pass without pictures: two products (gradients of input and weight) for each before.

        One, of the input, for a weight that is frozen beside an adapter.
        """
        lengths = list(seq_lens)
        return 2.0 * self.forward(lengths) - 2.0 * self._frozen_params * sum(lengths)

    def train(self, seq_lens: Iterable[int], patches: Patches | None = None) -> float:
        """FLOPs of a forward and backward pass."""
        lengths = list(seq_lens)
        flops = self.forward(lengths) + self.backward(lengths)
        if self.tower is not None and patches is not None:
            flops += sum(self.tower.train(of_row) for of_row in patches)
        return flops


def device_peak_flops(device_name: str, dtype: str | torch.dtype) -> float | None:
    """Peak FLOP/s of a device's dense matmuls, by its name (torch.cuda.get_device_name).

    Returns None, with one warning, for an unknown device.
    """
    kind = str(dtype).removeprefix("torch.")
    column = _DTYPES.get(kind)
    for row in _PEAKS if column is not None else ():
        if re.search(rf"(?<![A-Za-z0-9]){row[0]}(?![A-Za-z0-9])", device_name, re.IGNORECASE):
            peak = row[1] if column == 1 else row[2]
            if peak is not None:
                return peak
            break
    if (device_name, kind) not in _warned:
        _warned.add((device_name, kind))
        logger.warning("peak FLOP/s of %r in %s is not known: no perf/mfu/* metrics", device_name, kind)
    return None


def measured_matmul_peak(
    device: str | torch.device, dtype: str | torch.dtype, size: int | None = None, seconds: float = 0.5
) -> float:
    """Measures the FLOP/s of the fastest square matmul within about `seconds`, with this process' number of threads.

    size: rows and columns; default 8192 on cuda, 1024 elsewhere.
    """
    import torch

    device = torch.device(device)
    on_cuda = device.type == "cuda"
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    size = size or (8192 if on_cuda else 1024)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best_s, deadline, runs = float("inf"), time.perf_counter() + seconds, 0
    while runs < 4 or time.perf_counter() < deadline:
        begin = time.perf_counter()
        torch.matmul(a, b)
        if on_cuda:
            torch.cuda.synchronize(device)
        # The first runs do not count: they start threads, allocate workspace and raise clocks.
        best_s, runs = min(best_s, time.perf_counter() - begin if runs > 1 else best_s), runs + 1
    return 2.0 * size**3 / best_s


def mfu(flops: float, seconds: float, num_devices: int, peak: float | None) -> float | None:
    """Model FLOPs utilization: flops / (seconds * num_devices * peak), peak in FLOP/s; None if peak is None."""
    if peak is None:
        return None
    if seconds <= 0 or num_devices < 1 or peak <= 0:
        raise ValueError(f"mfu: seconds={seconds}, num_devices={num_devices}, peak={peak} must all be positive")
    return flops / (seconds * num_devices * peak)


@cache
def flops_shape(shape: ModelShape) -> FlopsShape:
    """The sizes of a model, and of its head, that its floating-point operations follow from."""
    whole = FlopsShape(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
        vocab_size=shape.vocab_size,
        num_moe_layers=sum(shape.moe_layers),
        num_experts=shape.num_experts,
        num_experts_per_token=shape.num_experts_per_token,
        moe_ffn_hidden_size=shape.moe_ffn_hidden_size,
        shared_expert_ffn_hidden_size=shape.shared_expert_ffn_hidden_size,
        shared_expert_gate=shape.shared_expert_gate,
        attention_gate=shape.attention_gate,
        num_linear_layers=sum(shape.linear_layers),
        linear_num_key_heads=shape.linear_num_key_heads,
        linear_num_value_heads=shape.linear_num_value_heads,
        linear_key_head_dim=shape.linear_key_head_dim,
        linear_value_head_dim=shape.linear_value_head_dim,
        q_lora_rank=shape.q_lora_rank,
        kv_lora_rank=shape.kv_lora_rank,
        qk_nope_head_dim=shape.qk_nope_head_dim or 0,
        qk_rope_head_dim=shape.qk_rope_head_dim or 0,
        v_head_dim=shape.v_head_dim or 0,
        num_sliding_layers=sum(shape.sliding_layers),
        sliding_window=shape.sliding_window,
        adapter_params=0 if shape.adapter is None else _adapter_params(shape),
        tower=None if shape.vision is None else _tower(shape, shape.vision),
    )
    return whole.as_critic() if shape.head == "value" else whole


def _tower(shape: ModelShape, vision: VisionModel) -> TowerFlops:
    matrices = [param for param in family_of(shape).params(shape) if param.of_tower and len(param.dims[0]) > 1]
    sizes = {param.name: prod(param.joined_shape(shape)) for param in matrices if "pos_embed" not in param.name}
    merged = sum(size for name, size in sizes.items() if "merger" in name)
    num_blocks = len(vision.full_attention_blocks) if vision.window_size else vision.depth
    return TowerFlops(
        patch_params=sum(sizes.values()) - merged,
        merged_params=merged,
        merge_size=vision.merge_size,
        hidden_size=vision.hidden_size,
        num_blocks=num_blocks,
        num_window_blocks=vision.depth - num_blocks,
        window_patches=(vision.window_size // vision.patch_size) ** 2,
        trained=not (shape.frozen_tower or shape.adapter),
    )


def _adapter_params(shape: ModelShape) -> int:
    """Numbers in those A and B that one token is multiplied with: of all experts its own."""
    return sum(
        prod(part.joined_shape(shape)) * (1 if part.expert is None else shape.num_experts_per_token)
        for part, _ in counted_trained_params(shape)
        if part.hf != VALUE_HEAD.hf
    )
