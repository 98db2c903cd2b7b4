"""The memory that a rollout server takes on each of its devices: weights, KV cache by the token, and the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import prod

from scalerl.base.files import GIB
from scalerl.config.schema import ServerConfig
from scalerl.config.servers import quantization_of
from scalerl.models import ModelShape
from scalerl.models.adapters import counted_trained_params
from scalerl.models.sizes import FLOAT, ITEMSIZE, counted_params, stored_itemsize
from scalerl.rollout.servers.engines import ENGINES

# Assumed, of SGLang on a GPU: its CUDA context and communicators; captured graphs and the buffers of a prefill.
CONTEXT_BYTES = 1 * GIB
GRAPH_BYTES = 2 * GIB
# Of the names of a model's shared experts.
SHARED_EXPERTS = ".shared_experts."
# Share of the tokens that would fit which a server is told to have, so that every replica finds room for them.
KV_SURE_FRAC = 0.95
# Tokens of a KV cache come in multiples of this.
KV_GRANULE = 256


@dataclass(frozen=True)
class ServerBytes:
    """The bytes that a server takes on one of its devices. kv_token_bytes: of each token of the KV cache.
    states: of the states of gated delta nets of all sequences at a time.  adapters: of the room for adapters.

    kv_tokens: of the whole cache, what each replica gets; None where the device's memory is not known, negative where
    not even the weights fit.
    """

    weights: int
    kv_token_bytes: int
    kv_tokens: int | None
    states: int = 0
    adapters: int = 0

    @property
    def kv_bytes(self) -> int:
        return self.kv_token_bytes * max(0, self.kv_tokens or 0)


def server_bytes(
    shape: ModelShape, config: ServerConfig, free_bytes: int | None, *, on_cpu: bool = False, with_adapter: bool = False
) -> ServerBytes:
    """The bytes that a server takes on one of its devices.

    with_adapter: it gets the model's adapter beside the model.  free_bytes: of the device when the server starts; None:
    not known. The cache has config.kv_cache_tokens tokens or, if that is null, those that gpu_memory_utilization leaves
    room for. That is a share of what is free once the server's process has its context, before it loads weights
    (SGLang's `measure_pre_model_load_memory`).
    """
    weights = weight_bytes(
        shape,
        config.tensor_model_parallel_size,
        ITEMSIZE[config.dtype],
        in_fp8=quantization_of(config) is not None,
        whole_shared_experts=ENGINES[config.name].has_whole_shared_experts(config),
    )
    token = kv_token_bytes(shape, config.tensor_model_parallel_size, ITEMSIZE[config.dtype])
    states = config.max_num_seqs * state_bytes(shape, config.tensor_model_parallel_size, ITEMSIZE[config.dtype])
    adapters = ENGINES[config.name].adapter_slots * _adapter_bytes(shape, config) if with_adapter else 0
    if config.kv_cache_tokens is not None or free_bytes is None:
        return ServerBytes(weights, token, config.kv_cache_tokens, states, adapters)
    taken = weights + states + adapters
    room = int(config.gpu_memory_utilization * (free_bytes - (0 if on_cpu else CONTEXT_BYTES))) - taken
    tokens = int(room * KV_SURE_FRAC) // token // KV_GRANULE * KV_GRANULE
    return ServerBytes(weights, token, tokens, states, adapters)


def _adapter_bytes(shape: ModelShape, config: ServerConfig) -> int:
    """The bytes of an adapter on a server's rank: its part of what goes with split rows or columns, the rest whole."""
    assert shape.adapter is not None
    served = replace(shape, adapter=ENGINES[config.name].served_adapter(shape.adapter, shape))
    numbers = 0
    for param, count in counted_trained_params(served):
        size = 1 if param.kind == "replicated" else config.tensor_model_parallel_size
        numbers += count * -(-prod(param.joined_shape(served)) // size)
    return ITEMSIZE[config.dtype] * numbers


@cache
def weight_bytes(
    shape: ModelShape, tp_size: int, itemsize: int, *, in_fp8: bool = False, whole_shared_experts: bool = False
) -> int:
    """The bytes of a server rank's weights: its part of them, but norms, routers and latent down projections whole.

    in_fp8: as `quantize` makes them.

    Of routed experts it is the same part, whether a rank has some of them or some of the width of each.
    """
    num_bytes = 0
    for param, count in counted_params(shape):
        sizes = [prod(size) for size in param.part_shapes(shape)]
        if whole_shared_experts and any(SHARED_EXPERTS in name for name in param.hf):
            numbers = sum(sizes)
        elif param.kind == "qkv" and tp_size > shape.num_kv_heads:
            # A rank has one key and value head at least.
            query, *others = sizes
            numbers = query // tp_size + sum(size // shape.num_kv_heads for size in others)
        else:
            numbers = sum(sizes) if param.kind == "replicated" else -(-sum(sizes) // tp_size)
        size = stored_itemsize(param, shape, itemsize, in_fp8=in_fp8)
        num_bytes += int(count * numbers * size)
    return num_bytes


def kv_token_bytes(shape: ModelShape, tp_size: int, itemsize: int) -> int:
    """The bytes of a token's keys and values in all layers, on one rank of a server.

    With latent attention these are the compressed ones, whole on every rank.
    """
    if shape.kv_lora_rank is not None:
        return shape.num_layers * (shape.kv_lora_rank + (shape.qk_rope_head_dim or 0)) * itemsize
    heads = max(1, shape.num_kv_heads // tp_size)
    return 2 * (shape.num_layers - sum(shape.linear_layers)) * heads * shape.head_dim * itemsize


def state_bytes(shape: ModelShape, tp_size: int, itemsize: int) -> int:
    """The bytes of a sequence's states in all gated delta nets, on one rank of a server: float32, and the tokens that
    the convolution still sees."""
    key = shape.linear_num_key_heads * shape.linear_key_head_dim
    value = shape.linear_num_value_heads * shape.linear_value_head_dim
    seen = (2 * key + value) * max(0, shape.linear_conv_kernel_dim - 1) * itemsize
    return sum(shape.linear_layers) * (value * shape.linear_key_head_dim * FLOAT + seen) // tp_size
