"""Sampling of the embedded engine, where a token depends only on the sample's seed, its position and its logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class SampleSettings:
    """The sampling settings of one sample; temperature 0 is greedy, top_k -1 and top_p 1.0 are off."""

    temperature: float
    top_p: float
    top_k: int
    seed: int


def counter_uniform(seeds_S: np.ndarray, positions_S: np.ndarray) -> np.ndarray:
    """[S] float64 in [0, 1): a hash of (seed, position) by splitmix64 (Steele, Lea and Flood, 2014), applied twice.

    seeds_S, positions_S: [S] int64.
    """
    with np.errstate(over="ignore"):
        hashed = _mix(seeds_S.astype(np.uint64) * _GOLDEN + _GOLDEN)
        hashed = _mix(hashed + positions_S.astype(np.uint64) * _GOLDEN)
    return (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def sample(logits_SV: Tensor, settings: list[SampleSettings], positions: list[int]) -> tuple[list[int], list[float]]:
    """Draws a token for each sample; returns (token ids [S], log-probs [S]).

    logits_SV: [S, V].  positions: index of the new token in its response.  The log-prob is that under
    softmax(logits / temperature) over the whole vocabulary (temperature 1 for a greedy sample), as SGLang reports it:
    top_p and top_k restrict the choice and do not renormalize.
    """
    device, logits_SV = logits_SV.device, logits_SV.float()
    if any(s.temperature not in (0.0, 1.0) for s in settings):
        temperature_S = torch.tensor([s.temperature or 1.0 for s in settings], dtype=torch.float32, device=device)
        logits_SV = logits_SV / temperature_S[:, None]
    logprobs_SV = torch.log_softmax(logits_SV, dim=-1)
    greedy = [s.temperature == 0.0 for s in settings]
    if all(greedy):
        tokens_S = logprobs_SV.argmax(dim=-1)
    else:
        uniform = counter_uniform(np.array([s.seed for s in settings], dtype=np.int64), np.array(positions))
        tokens_S = _inverse_cdf(_truncate(logprobs_SV.double().exp_(), settings), torch.from_numpy(uniform).to(device))
        if any(greedy):
            tokens_S = torch.where(torch.tensor(greedy, device=device), logprobs_SV.argmax(dim=-1), tokens_S)
    return tokens_S.tolist(), logprobs_SV.gather(1, tokens_S[:, None])[:, 0].tolist()


def _truncate(probs_SV: Tensor, settings: list[SampleSettings]) -> Tensor:
    """Sets probabilities to 0 outside the top_k tokens and the smallest set of mass top_p, both of the full softmax."""
    if all(s.top_p >= 1.0 and s.top_k < 1 for s in settings):
        return probs_SV
    vocab_size = probs_SV.shape[1]
    top_p_S = torch.tensor([s.top_p for s in settings], dtype=probs_SV.dtype, device=probs_SV.device)
    top_k_S = torch.tensor([s.top_k if s.top_k > 0 else vocab_size for s in settings], device=probs_SV.device)
    sorted_SV, order_SV = probs_SV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(vocab_size, device=probs_SV.device)
    mass_before_SV = sorted_SV.cumsum(-1) - sorted_SV
    keep_SV = (rank_V[None] < top_k_S[:, None]) & (mass_before_SV <= top_p_S[:, None])
    return torch.zeros_like(probs_SV).scatter(1, order_SV, sorted_SV * keep_SV)


def _inverse_cdf(weights_SV: Tensor, uniform_S: Tensor) -> Tensor:
    """[S] index with cdf[index - 1] <= u * total < cdf[index], in vocabulary order, which ties cannot change."""
    cdf_SV = weights_SV.cumsum(-1)
    target_S = uniform_S.to(cdf_SV.dtype) * cdf_SV[:, -1]
    index_S = torch.searchsorted(cdf_SV, target_S[:, None], right=True)[:, 0]
    vocab_size = weights_SV.shape[1]
    # If u * total rounds up to the total, the last token with any weight is taken.
    for row in (index_S == vocab_size).nonzero()[:, 0].tolist():
        with_weight = (weights_SV[row] > 0).nonzero()
        index_S[row] = with_weight[-1, 0] if len(with_weight) else 0
    return index_S
