"""Checks of a run's rewards before anything starts: one real row of each data source is scored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from scalerl.config.schema import RewardModelConfig
from scalerl.rewards import RewardManager, ScoreRequest
from scalerl.rewards.judge import STYLE
from scalerl.rewards.trial import TRIAL_RESPONSE, trial_failures

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from scalerl.data import PromptTable, RLHFDataset

# Each failure is shown with its sample on several lines.
_MAX_SHOWN = 3


def reward_violations(
    manager: RewardManager,
    config: RewardModelConfig,
    datasets: Mapping[str, RLHFDataset | PromptTable],
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[str]:
    """Yields the failures of scoring a trial response to one row of each data source. datasets: by name, for errors."""
    response_length = len(tokenizer.encode(TRIAL_RESPONSE, add_special_tokens=False))
    requests = []
    for name, dataset in datasets.items():
        for uid in _first_of_each_source(dataset, config):
            prompt = dataset[uid]
            requests.append(
                ScoreRequest(
                    sample_name=f"{name} prompt {uid}, with a response for trial before the run starts",
                    data_source=prompt.data_source,
                    prompt_str=prompt.messages[-1]["content"],
                    solution_str=TRIAL_RESPONSE,
                    ground_truth=prompt.ground_truth,
                    extra_info=prompt.extra_info,
                    response_length=response_length,
                )
            )
    failures = trial_failures(manager, requests)
    yield from failures[:_MAX_SHOWN]
    if len(failures) > _MAX_SHOWN:
        yield f"{len(failures)} of {len(requests)} trial scores failed, one for each data source; the first are above"


def _first_of_each_source(dataset: RLHFDataset | PromptTable, config: RewardModelConfig) -> list[int]:
    """The first row of each data source that the reward function scores, and not a reward model or judge of the run."""
    left_out = {style for style, is_on in (("model", config.enable), (STYLE, config.judge.enable)) if is_on}
    first_uids: dict[str, int] = {}
    for uid in range(len(dataset)):
        prompt = dataset[uid]
        if prompt.reward_style not in left_out:
            first_uids.setdefault(prompt.data_source, uid)
    return list(first_uids.values())
