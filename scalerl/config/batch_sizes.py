"""The tokens that the longest sample has and needs in a micro-batch, and the samples that a mini-batch needs."""

from __future__ import annotations

from scalerl.config.layout_sizes import LayoutSizes
from scalerl.config.schema import MegatronConfig, PPOConfig

LONGEST_SAMPLE_KEYS = ("data.max_prompt_length", "data.max_response_length")
LONGEST_SAMPLE = " + ".join(LONGEST_SAMPLE_KEYS)


def longest_sample(cfg: PPOConfig) -> int:
    """The number of tokens of the longest sample: data.max_prompt_length + data.max_response_length."""
    return cfg.data.max_prompt_length + cfg.data.max_response_length


def tokens_needed(longest: int, megatron: MegatronConfig) -> int:
    """The tokens of a micro-batch that is one sequence of `longest` tokens, padding included."""
    return LayoutSizes.of(megatron).padded_tokens(longest, sequence_parallel=megatron.sequence_parallel)


def fewest_samples(layout: LayoutSizes) -> tuple[int, str]:
    """The fewest samples of a mini-batch with which every data-parallel rank has its micro-batches.

    Returns (samples, what needs them, for messages).
    """
    ranks, multiple = layout.dp_size, layout.micro_batch_multiple
    if multiple == 1:
        return ranks, f"{ranks} data-parallel ranks"
    return ranks * multiple, f"{ranks} data-parallel ranks x {multiple} stages of the interleaved pipeline"
