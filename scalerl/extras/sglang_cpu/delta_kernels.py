"""Gated delta nets, gated attention and gated shared experts in torch: kernels of SGLang's CPU build (0.5.21).

Names and arguments are SGLang's. Dims: T tokens of all sequences of a batch, K key heads, V value heads.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def register_kernels() -> None:
    """Puts the kernels where SGLang's models look for them, before these are imported."""
    kernels = {
        "fused_sigmoid_mul_cpu": _gate,
        "fused_qk_gemma_rmsnorm_cpu": _norm_heads,
        "fused_qk_gemma_rmsnorm_with_gate_cpu": _norm_heads_with_gate,
        "fused_qkvzba_split_reshape_cat_contiguous_cpu": _split_projections,
        "fused_rmsnorm_gated_cpu": _gated_norm,
        "fused_gdn_gating_cpu": _decay_and_strength,
        "fused_sigmoid_gating_delta_rule_update_cpu": _decode,
    }
    for name, kernel in kernels.items():
        setattr(torch.ops.sgl_kernel, name, kernel)


def use_kernels_of_norms() -> None:
    """Makes SGLang's gated norms take the kernel, which by themselves they do with AMX alone."""
    from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated

    fused_norm_gate._use_cpu = layernorm_gated._use_cpu = True


def _normed(x: Tensor, eps: float) -> Tensor:
    numbers = x.float()
    return numbers * torch.rsqrt(numbers.square().mean(-1, keepdim=True) + eps)


# --- attention ---


def _gate(x: Tensor, gate: Tensor) -> None:
    x.mul_(gate.reshape(x.shape).sigmoid())


def _norm_heads(
    query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Norms each head, [heads of all tokens, head_dim], with 1 + weight."""
    both = ((query, query_weight), (key, key_weight))
    query, key = ((_normed(x.reshape(-1, head_dim), eps) * (1 + w.float())).to(x.dtype) for x, w in both)
    return query, key


def _norm_heads_with_gate(
    query_gate: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for queries each of which its gate follows; returns queries, keys and gates of each token."""
    query, gate = query_gate.unflatten(-1, (num_heads, 2, head_dim)).unbind(2)
    query, key = _norm_heads(query, key, query_weight, key_weight, eps, head_dim)
    num_tokens = len(query_gate)
    return query.view(num_tokens, -1), key.view(num_tokens, -1), gate.reshape(num_tokens, -1)


def add_gated(hidden: Tensor, gate_weight: Tensor, shared: Tensor, out: Tensor) -> None:
    """Adds a shared expert's output [T, H] to that of the routed ones, multiplied with the sigmoid of its gate."""
    out.add_((hidden @ gate_weight).sigmoid()[:, None] * shared)


# --- gated delta nets ---


def _split_projections(
    qkvz: Tensor, strength_decay: Tensor, num_keys: int, num_values: int, key_dim: int, value_dim: int
) -> tuple[Tensor, ...]:
    """Queries, keys and values joined; gate [T, V, dv]; strength and decay [T, V]."""
    values = num_values * value_dim
    mixed, gate = qkvz.split([2 * num_keys * key_dim + values, values], dim=-1)
    strength, decay = strength_decay.chunk(2, dim=-1)
    return mixed.contiguous(), gate.unflatten(-1, (-1, value_dim)).contiguous(), strength.clone(), decay.clone()


def _gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    return (_normed(x, eps) * weight.float() * F.silu(gate.float())).to(x.dtype)


def _decay_and_strength(rate: Tensor, decay: Tensor, strength: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """[1, T, V] each, the decay as a logarithm."""
    logs = -rate.float().exp() * F.softplus(decay.float() + bias.float())
    return logs[None], strength.float().sigmoid()[None]


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None = None,
    conv_states: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    cache_indices: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Convolves each sequence's tokens, [channels, T], and keeps the last ones for the next call.

    conv_states: [slots, channels, taps - 1], of which cache_indices names each sequence's.
    """
    assert conv_states is not None and cache_indices is not None and query_start_loc is not None
    out = torch.empty_like(x)
    for number, (first, last) in enumerate(pairwise(query_start_loc.tolist())):
        kept = conv_states[int(cache_indices[number])]
        is_continued = has_initial_state is not None and bool(has_initial_state[number])
        before = kept if is_continued else torch.zeros_like(kept)
        seen = torch.cat([before.to(x.dtype), x[:, first:last]], dim=1)
        made = F.conv1d(seen[None], weight[:, None], bias, groups=len(weight))[0]
        out[:, first:last] = F.silu(made) if activation in ("silu", "swish") else made
        kept.copy_(seen[:, -kept.shape[1] :])
    return out


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Convolves one more token of each sequence: [sequences, channels]."""
    assert conv_state_indices is not None
    starts = torch.arange(len(x) + 1)
    more = torch.ones(len(x), dtype=torch.bool)
    return causal_conv1d_fn_cpu(x.T, weight, bias, activation, conv_state, more, conv_state_indices, starts).T


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    initial_state_indices: Tensor,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """The rule over the tokens of each sequence: q, k [1, T, K, dk], v [1, T, V, dv], g, beta [1, T, V].

    initial_state: [slots, V, dv, dk], of which initial_state_indices names each sequence's; it is changed.
    """
    query, key, value = (x[0].float() for x in (q, k, v))
    query, key = (
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(v.shape[2] // k.shape[2], dim=1)
        for x in (query, key)
    )
    query = query * q.shape[-1] ** -0.5
    out = torch.empty_like(value)
    for number, (first, last) in enumerate(pairwise(cu_seqlens.tolist())):
        kept = initial_state[int(initial_state_indices[number])]
        state = kept.float()
        for token in range(first, last):
            state = state * g[0, token].exp()[:, None, None]
            known = (state * key[token][:, None]).sum(-1)
            error = beta[0, token][:, None] * (value[token] - known)
            state = state + error[..., None] * key[token][:, None]
            out[token] = (state * query[token][:, None]).sum(-1)
        kept.copy_(state)
    return out[None].to(v.dtype), None, None


def _decode(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> Tensor:
    """The rule over one more token of each sequence."""
    num_values = v.shape[2]
    decay, strength = _decay_and_strength(A_log, a.reshape(-1, num_values), b.reshape(-1, num_values), dt_bias)
    rule = chunk_gated_delta_rule_cpu
    return rule(q, k, v, decay, strength, initial_state_source, cu_seqlens, initial_state_indices)[0]
