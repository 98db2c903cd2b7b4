"""Bytes that a forward pass keeps for the backward pass, layer by layer, and bytes that a pass needs in addition.

Dims: a rank sees t tokens of a micro-batch (the whole micro-batch / cp_size); norms and residuals see t / tp of them
with sequence parallelism. Everything is bytes per token t. The tensors are those that megatron's local layer spec, with
the modules of scalerl.parallel, gives autograd: on the CPU as tests measure them, on a GPU as their fused kernels
(RMSNorm, SwiGLU, variable-length attention) declare them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scalerl.config.schema import MegatronConfig
from scalerl.models import ModelShape, Param, family_of
from scalerl.models.adapters import adapter_pairs
from scalerl.models.sizes import FLOAT, ITEMSIZE
from scalerl.models.vision import VisionModel
from scalerl.parallel.delta_rule import CHUNK
from scalerl.parallel.layout import Layout
from scalerl.parallel.logprobs import tokens_of_chunk

# Bytes of a token: a position, a label, and float32 statistics of the log-probs and of the objective.
_TOKEN_BYTES = 64


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per token of one layer.

    kept: for the backward pass, after recompute of modules.  whole: without recompute, as when the layer is recomputed.
    inputs: of the layer's input.  working: gradients that its backward pass holds at the same time.
    """

    kept: float
    whole: float
    inputs: float
    working: float


@dataclass(frozen=True)
class _Sizes:
    """The sizes that the formulas of a layer use.  part: share of the tokens that norms and residuals see."""

    shape: ModelShape
    layout: Layout
    itemsize: int
    part: float
    on_cpu: bool

    @property
    def is_fused(self) -> bool:
        """Whether a norm and a SwiGLU are one operation each, as on a GPU."""
        return not self.on_cpu

    def norm(self, width: float) -> float:
        """Bytes per token kept of an RMSNorm: its input and a float32 number; else float32 input and output.

        The output is for the gradient of its weight, which an adapter leaves as it is.
        """
        unfused = FLOAT * (1 if self.shape.adapter else 2)
        return (self.itemsize if self.is_fused else unfused) * width + FLOAT

    @property
    def hidden(self) -> float:
        """Bytes per token of a hidden state: the residual, or any tensor of its size."""
        return self.itemsize * self.shape.hidden_size * self.part

    def swiglu(self, width: float) -> float:
        """Bytes per token kept of a SwiGLU: gate, up and their product; else two temporaries more."""
        return (3 if self.is_fused else 5) * self.itemsize * width


def layer_bytes(shape: ModelShape, layout: Layout, megatron: MegatronConfig, layer: int, *, on_cpu: bool) -> LayerBytes:
    """The bytes of a layer; over its experts, if it has any, tokens are assumed to be spread evenly."""
    is_mixture, is_linear = _kind(shape, layer)
    with_parts = megatron.sequence_parallel and layout.tp_size > 1
    part = 1 / layout.tp_size if with_parts else 1.0
    sizes = _Sizes(shape, layout, ITEMSIZE[megatron.dtype], part, on_cpu)
    modules = set(megatron.recompute_modules) if megatron.recompute_granularity == "selective" else set()
    adapted = _adapted(sizes, layer)
    return LayerBytes(
        kept=_layer(sizes, is_mixture, is_linear, modules) + adapted,
        whole=_layer(sizes, is_mixture, is_linear, set()) + adapted,
        inputs=sizes.hidden,
        working=_working(sizes, is_mixture),
    )


def _kind(shape: ModelShape, layer: int) -> tuple[bool, bool]:
    """Whether a layer has experts, and whether it has a gated delta net in the place of attention."""
    return bool(shape.moe_layers) and shape.moe_layers[layer], bool(shape.linear_layers) and shape.linear_layers[layer]


def _adapted(sizes: _Sizes, layer: int) -> float:
    """Bytes per token kept of a layer's adapters: what each A makes of the tokens.

    Their inputs are those of the matrices, which are counted as if all of these had adapters.
    """
    if sizes.shape.adapter is None:
        return 0.0
    kept = 0.0
    for param, pairs in _pairs_of_layer(sizes.shape, layer):
        if param.expert is not None:
            tokens = _routed_tokens(sizes)
        else:
            tokens = sizes.part if param.kind in ("row", "replicated") else 1.0
        kept += pairs * sizes.itemsize * sizes.shape.adapter.rank * tokens
    return kept


def _pairs_of_layer(shape: ModelShape, layer: int) -> Iterator[tuple[Param, int]]:
    """The matrices of a layer, one expert for all, each with the number of its adapters' pairs."""
    for rule in family_of(shape).layer:
        if rule.exists(shape, layer):
            param = rule.param(layer, "layer", 0 if rule.of_expert else None)
            yield param, sum(pair is not None for pair in adapter_pairs(param, shape))


def _layer(sizes: _Sizes, is_mixture: bool, is_linear: bool, recomputed: set[str]) -> float:
    norm = sizes.norm(sizes.shape.hidden_size) * sizes.part
    # A norm that is computed again keeps the residual before it, and not its own output.
    norms = 2 * (sizes.hidden if "layernorm" in recomputed else norm) + 2 * norm * sizes.shape.post_norms
    if is_linear:
        attention = _delta_net(sizes, recomputed)
    elif sizes.shape.kv_lora_rank is not None:
        attention = _latent(sizes, recomputed)
    else:
        attention = _grouped(sizes, recomputed)
        # The gate, and what it multiplies.
        width = sizes.shape.num_attention_heads * sizes.shape.head_dim / sizes.layout.tp_size
        attention += 2 * sizes.itemsize * width * sizes.shape.attention_gate
    mlp = _mixture(sizes, recomputed) if is_mixture else _dense(sizes, recomputed)
    return norms + attention + mlp


def _input_of_linear(sizes: _Sizes, recomputed: set[str]) -> float:
    return 0.0 if "layernorm" in recomputed else sizes.hidden


def _grouped(sizes: _Sizes, recomputed: set[str]) -> float:
    """Bytes per token kept of grouped-query attention, from the input of its first matrix to that of the projection."""
    shape, tp_size, itemsize = sizes.shape, sizes.layout.tp_size, sizes.itemsize
    heads, kv_heads = shape.num_attention_heads / tp_size, shape.num_kv_heads / tp_size
    query, key = heads * shape.head_dim, kv_heads * shape.head_dim
    # One tensor, of which queries, keys and values are views.
    joined = query + 2 * key
    over_cp = sizes.layout.cp_size > 1
    # Where there are fewer, Ulysses repeats them.
    repeated = max(key, shape.head_dim * sizes.layout.cp_size) if over_cp else key
    statistics = FLOAT * heads
    kept = _input_of_linear(sizes, recomputed)
    if shape.joint_qk_norm:
        # In torch's operations: numbers in float32, and normed ones.
        kept += 2 * FLOAT * (query + key)
    if shape.qk_norm and not sizes.is_fused:
        kept += sizes.norm(query) + sizes.norm(key) + FLOAT * (heads + kv_heads - 2)
    elif shape.qk_norm:
        kept += itemsize * query + FLOAT * (heads + kv_heads)
        kept += itemsize * joined if over_cp and "core_attn" not in recomputed else 0
    if "core_attn" in recomputed:
        return kept + itemsize * (query + joined + (key if shape.qk_norm else 0) + query)
    if over_cp:
        # Queries, keys and values of whole sequences, the output about these, and that about this rank's tokens.
        return kept + itemsize * (query + 2 * repeated + query + query) + statistics
    # On a CPU the outputs of the calls are put together.
    outputs = 2 * query if sizes.on_cpu else query
    return kept + itemsize * (query + key + joined + outputs) + statistics


def _delta_net(sizes: _Sizes, recomputed: set[str]) -> float:
    """Bytes per token kept of a gated delta net. An estimate: of fla's kernels on a GPU, of torch's rule on a CPU.

    Convolution and rule are of all tokens of all cp ranks, and of as many heads fewer.
    """
    shape, tp_size, itemsize = sizes.shape, sizes.layout.tp_size, sizes.itemsize
    heads = shape.linear_num_value_heads / tp_size
    key = shape.linear_num_key_heads * shape.linear_key_head_dim / tp_size
    value = heads * shape.linear_value_head_dim
    projected = itemsize * (2 * key + 2 * value + 2 * heads)
    # Input in float32 and output of the convolution.
    convolved = (FLOAT + itemsize) * (2 * key + value)
    repeated = heads * shape.linear_key_head_dim
    if sizes.on_cpu:
        rule = FLOAT * (6 * CHUNK * heads + 8 * repeated + 4 * value)
    else:
        rule = itemsize * (2 * repeated + 2 * value + CHUNK * heads) + 4 * FLOAT * heads
    normed = 2 * FLOAT * value + itemsize * value
    return _input_of_linear(sizes, recomputed) + projected + convolved + rule + normed


def _latent(sizes: _Sizes, recomputed: set[str]) -> float:
    """Bytes per token kept of latent attention. Its kernel takes one head size: values are as wide as queries."""
    shape, itemsize = sizes.shape, sizes.itemsize
    assert shape.kv_lora_rank is not None and shape.qk_rope_head_dim is not None and shape.v_head_dim is not None
    heads = shape.num_attention_heads / sizes.layout.tp_size
    query_rank, kv_rank = shape.q_lora_rank or 0, shape.kv_lora_rank
    value = shape.head_dim
    kept = _input_of_linear(sizes, recomputed)
    ranks = query_rank + kv_rank
    compressed = sizes.norm(query_rank) * bool(query_rank) + sizes.norm(kv_rank) + itemsize * ranks
    if sizes.is_fused:
        compressed += itemsize * shape.qk_rope_head_dim
    kept += compressed * sizes.part
    core = itemsize * heads * (2 * shape.head_dim + 2 * value) + FLOAT * heads
    if "mla_up_proj" in recomputed:
        core = itemsize * heads * value + FLOAT * heads
    if "core_attn" in recomputed:
        core = itemsize * heads * (2 * shape.head_dim + shape.v_head_dim)
    return kept + core + itemsize * heads * shape.v_head_dim


def _dense(sizes: _Sizes, recomputed: set[str]) -> float:
    if "mlp" in recomputed:
        return sizes.hidden
    return _input_of_linear(sizes, recomputed) + sizes.swiglu(sizes.shape.ffn_hidden_size / sizes.layout.tp_size)


def _mixture(sizes: _Sizes, recomputed: set[str]) -> float:
    """Bytes per token kept of a layer's router, experts and shared experts, which have the same input."""
    shape, layout = sizes.shape, sizes.layout
    if "moe" in recomputed:
        return sizes.hidden
    scores = (21 if shape.router_score == "sigmoid" else 5) * shape.num_experts + 20 * shape.num_experts_per_token
    width = shape.hidden_size + 5 * shape.moe_ffn_hidden_size / layout.etp_size
    if shape.linear_bias:
        # Gate, up and what their activation keeps, its output, and that of the experts, which is weighed last; on a GPU
        # two times which expert a token has.
        inner = (3 if sizes.is_fused else 7) * shape.moe_ffn_hidden_size / layout.etp_size
        chosen = 2 * shape.num_experts / layout.ep_size if sizes.is_fused else 0.0
        width = 2 * shape.hidden_size + inner + chosen
    routed = _routed_tokens(sizes) * (sizes.itemsize * width + FLOAT)
    shared = 0.0
    if shape.shared_expert_ffn_hidden_size and "shared_experts" not in recomputed:
        shared = sizes.swiglu(shape.shared_expert_ffn_hidden_size / layout.tp_size)
    return _input_of_linear(sizes, recomputed) + scores * sizes.part + routed + shared


def _routed_tokens(sizes: _Sizes) -> float:
    """Tokens that this rank's experts see, for each token of the rank."""
    return sizes.part * sizes.shape.num_experts_per_token * sizes.layout.etp_size


def _working(sizes: _Sizes, is_mixture: bool) -> float:
    """Bytes per token of the gradients that a layer's backward pass holds in addition to kept tensors, at their peak.

    They are the gradients of the residual and of an MLP's inner tensors. On a GPU the product's gradient is freed when
    gate and up have theirs; on a CPU the tensors that were kept are freed as fast. Sequence parallelism gathers all
    tokens of the residual's gradient, and on a GPU of a matrix' input again. Of experts with adapters there is the
    gradient of what these add, too, which is scaled.
    """
    shape, layout = sizes.shape, sizes.layout
    inner = 1 if sizes.on_cpu else 2
    gathered = sizes.itemsize * shape.hidden_size * inner if sizes.part < 1 else 0.0
    residual = 2 * sizes.hidden + gathered
    if not is_mixture:
        return residual + inner * sizes.itemsize * shape.ffn_hidden_size / layout.tp_size
    routed = inner * shape.moe_ffn_hidden_size / layout.etp_size + shape.hidden_size
    if shape.adapter is not None:
        routed += 2 * shape.moe_ffn_hidden_size / layout.etp_size + shape.hidden_size
    return residual + _routed_tokens(sizes) * sizes.itemsize * routed


def kept_bytes(
    shape: ModelShape, layout: Layout, megatron: MegatronConfig, pp_rank: int, *, on_cpu: bool
) -> tuple[float, float]:
    """The bytes per token of one micro-batch in the layers of a stage: (kept after its forward pass, at most held).

    The second is the most that its backward pass holds at a time.
    """
    layers = [layer for chunk in layout.layers(shape.num_layers, pp_rank) for layer in chunk]
    # Layers of a kind are alike.
    alike = {_kind(shape, layer): layer for layer in layers}
    bytes_of_kind = {kind: layer_bytes(shape, layout, megatron, layer, on_cpu=on_cpu) for kind, layer in alike.items()}
    bytes_by_layer = [bytes_of_kind[_kind(shape, layer)] for layer in layers]
    groups = _recomputed_together(bytes_by_layer, megatron, layers_per_chunk=len(bytes_by_layer) // layout.vpp_size)
    held, most = sum(group.kept for group in groups), 0.0
    # The last group's backward pass comes first, and frees what the group kept.
    for group in reversed(groups):
        most = max(most, held + group.whole - group.kept * (not group.is_stored) + group.working)
        held -= group.kept
    return sum(group.kept for group in groups), most


@dataclass(frozen=True)
class _Group:
    """Layers whose backward pass begins at the same time. is_stored: what is kept stays while they are recomputed."""

    kept: float
    whole: float
    working: float
    is_stored: bool


def _recomputed_together(
    bytes_by_layer: list[LayerBytes], megatron: MegatronConfig, *, layers_per_chunk: int
) -> list[_Group]:
    if megatron.recompute_granularity != "full":
        return [_Group(layer.kept, layer.whole, layer.working, is_stored=False) for layer in bytes_by_layer]
    size = megatron.recompute_num_layers
    if megatron.recompute_method == "uniform":
        parts = [bytes_by_layer[start : start + size] for start in range(0, len(bytes_by_layer), size)]
        return [_group(part) for part in parts]
    in_block = [number % layers_per_chunk < size for number in range(len(bytes_by_layer))]
    return [
        _group([layer]) if mine else _Group(layer.whole, layer.whole, layer.working, is_stored=False)
        for layer, mine in zip(bytes_by_layer, in_block, strict=True)
    ]


def _group(layers: list[LayerBytes]) -> _Group:
    whole = sum(layer.whole for layer in layers)
    return _Group(layers[0].inputs, whole, max(layer.working for layer in layers), is_stored=True)


def tower_bytes(shape: ModelShape, vision: VisionModel, megatron: MegatronConfig) -> tuple[float, float]:
    """Bytes of a picture's token in the vision tower: (kept for the backward pass, held by the block that computes).

    A token is of merge_size x merge_size patches; the features of it are counted with what is kept.
    """
    tower, itemsize = family_of(shape).tower, ITEMSIZE[megatron.dtype]
    assert tower is not None
    is_gated = any(name.startswith("mlp.gate_proj") for name, _ in tower.block)
    # Residuals, norms, queries, keys, values and outputs; an RMSNorm in transformers' operations keeps float32 too.
    widths = (13 if itemsize == FLOAT else 15) if is_gated else 11
    block = widths * vision.hidden_size + (4 if is_gated else 2) * vision.intermediate_size
    features = (1 + len(vision.deepstack_blocks)) * shape.hidden_size
    if shape.frozen_tower or shape.adapter:
        kept = 0
    else:
        of_blocks = vision.hidden_size if megatron.recompute_granularity == "full" else block
        # The patches, their embeddings, and what the mergers keep.
        rest = vision.numbers_per_patch + (4 + 2 * len(vision.deepstack_blocks)) * vision.hidden_size
        kept = vision.depth * of_blocks + rest
    return itemsize * (kept * vision.merge_size**2 + features), itemsize * block * vision.merge_size**2


def micro_batches_in_flight(layout: Layout, pp_rank: int, num_micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at once: the schedule's warm-up and the one under way.

    An interleaved schedule counts model chunks, of which a stage has vpp_size.
    """
    ahead = layout.pp_size - pp_rank
    if layout.vpp_size == 1:
        return min(ahead, num_micro_batches)
    chunks = 2 * (ahead - 1) + (layout.vpp_size - 1) * layout.pp_size + 1
    return min(chunks, num_micro_batches * layout.vpp_size) / layout.vpp_size


def head_bytes(
    shape: ModelShape, layout: Layout, megatron: MegatronConfig, tokens: int, *, on_cpu: bool
) -> tuple[float, float]:
    """Bytes of the output head: (kept per micro-batch, temporary while it is computed).

    tokens: of the micro-batch on this rank.
    """
    part = 1 / layout.tp_size if megatron.sequence_parallel and layout.tp_size > 1 else 1.0
    itemsize, hidden = ITEMSIZE[megatron.dtype], shape.hidden_size
    sizes = _Sizes(shape, layout, itemsize, part, on_cpu)
    kept = sizes.norm(hidden) * part + itemsize * hidden + _TOKEN_BYTES
    if shape.head == "value":
        return kept * tokens, FLOAT * tokens
    words = -(-shape.vocab_size // layout.tp_size)
    in_chunk = min(tokens, tokens_of_chunk("cpu" if on_cpu else "cuda", words))
    # Logits and scratch in float32; the product, or the gradient, in the model's type.
    chunk = in_chunk * words * (2 * FLOAT + (itemsize if itemsize != FLOAT else 0))
    gradients = itemsize * hidden * tokens
    return kept * tokens, chunk + gradients
