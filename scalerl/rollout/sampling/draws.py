"""How a sample is drawn: its sampling parameters and its seed, whoever draws it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from scalerl.data import PromptRow
    from scalerl.rollout.servers.client import SamplingParams


def sampling_of(dataset: str, prompt: PromptRow, base: SamplingParams) -> SamplingParams:
    """`base` with the changes of the prompt's extra_info["sampling"]. Raises ValueError naming the prompt."""
    from scalerl.rollout.prompt_sampling import override_sampling

    name = f"{dataset} prompt {prompt.uid}"
    sampling = override_sampling(base, prompt.extra_info, name)
    if dataset == "train" and base.temperature == 0:
        # The greedy baseline of the samples stays greedy, whatever temperature the prompt asks for.
        return replace(sampling, temperature=0.0)
    if dataset == "train" and sampling.temperature != base.temperature:
        raise ValueError(
            f"{name}: extra_info.sampling.temperature is {sampling.temperature}, the run trains at {base.temperature}: "
            "the log-probs of a step are all at one temperature; leave it out, or set "
            f"actor_rollout_ref.rollout.temperature={sampling.temperature}"
        )
    return sampling


@lru_cache(maxsize=2**14)
def sample_seed(seed: int, step: int, position: int, sample: int) -> int:
    """A seed of 63 bits from the four numbers, so that the same sample of the same step always draws the same.

    Cached, because it is needed when a sample is asked for and when it has come.
    """
    return int(np.random.SeedSequence([seed, step, position, sample]).generate_state(1, np.uint64)[0] >> 1)
