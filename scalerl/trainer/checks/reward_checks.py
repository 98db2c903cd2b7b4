"""Checks of a run's rewards before anything starts: one real row of each data source is scored."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from scalerl.config import PPOConfig
from scalerl.rewards import RewardManager, ScoreRequest, ScoreResult
from scalerl.rewards.judge import STYLE
from scalerl.rewards.trial import TRIAL_RESPONSE, trial_results
from scalerl.rollout.sampling.groups import SCORE
from scalerl.tracking.metrics import validation_metrics
from scalerl.trainer.saving.checkpoints import matching

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from scalerl.data import PromptTable, RLHFDataset

# Each failure is shown with its sample on several lines.
_MAX_SHOWN = 3
# Names that the error about an unknown one proposes.
_MAX_PROPOSED = 8

# (data set, data source, the scorer's reward style; "rule": the reward function) -> its trial; a text: it failed.
Trials = dict[tuple[str, str, str], ScoreResult | str]


def reward_violations(
    manager: RewardManager,
    cfg: PPOConfig,
    datasets: Mapping[str, RLHFDataset | PromptTable],
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[str]:
    """Scores a trial response to one row of each data source; yields what fails, and keys whose metric no result has.

    datasets: `train` and `val`, as far as they can be read.
    """
    response_length = len(tokenizer.encode(TRIAL_RESPONSE, add_special_tokens=False))
    trials: Trials = {}
    requests: dict[tuple[str, str, str], ScoreRequest] = {}
    for key, uid in _first_of_each_source(cfg, datasets).items():
        name, data_source, scorer = key
        if scorer != "rule":
            # What a judge or a reward model gives: not 0 or 1, so that no pass@k is expected of it.
            numbers = {"judge_score": 0.5, "judge_length": 1} if scorer == STYLE else {}
            trials[key] = ScoreResult(0.5, numbers)
            continue
        prompt = datasets[name][uid]
        requests[key] = ScoreRequest(
            sample_name=f"{name} prompt {uid}, with a response for trial before the run starts",
            data_source=data_source,
            prompt_str=prompt.messages[-1]["content"],
            solution_str=TRIAL_RESPONSE,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
            response_length=response_length,
        )
    trials |= zip(requests, trial_results(manager, list(requests.values())), strict=True)
    failures = [result for result in trials.values() if isinstance(result, str)]
    yield from failures[:_MAX_SHOWN]
    if len(failures) > _MAX_SHOWN:
        yield f"{len(failures)} of {len(requests)} trial scores failed, one for each data source; the first are above"
    # A program of the user's may add any number to those of the reward function.
    if cfg.actor_rollout_ref.rollout.program.path is None:
        yield from _filter_violations(cfg, trials)
        if "val" in datasets and cfg.trainer.custom_fit.path is None:
            yield from _best_metric_violations(cfg, trials)


def _first_of_each_source(
    cfg: PPOConfig, datasets: Mapping[str, RLHFDataset | PromptTable]
) -> dict[tuple[str, str, str], int]:
    """The first row of each data source, as the keys of `Trials`."""
    styles = {"model": cfg.reward_model.enable, STYLE: cfg.reward_model.judge.enable}
    first_uids: dict[tuple[str, str, str], int] = {}
    for name, dataset in datasets.items():
        for uid in range(len(dataset)):
            prompt = dataset[uid]
            scorer = prompt.reward_style if styles.get(prompt.reward_style) else "rule"
            first_uids.setdefault((name, prompt.data_source, scorer), uid)
    return first_uids


def _filter_violations(cfg: PPOConfig, trials: Trials) -> Iterator[str]:
    filters, key = cfg.algorithm.filter_groups, "algorithm.filter_groups.metric"
    if not filters.enable or filters.metric == SCORE:
        return
    for (name, data_source, _), result in trials.items():
        if name == "train" and isinstance(result, ScoreResult) and result.error is None:
            numbers = [name for name, value in result.extra.items() if isinstance(value, int | float)]
            if filters.metric not in numbers:
                yield (
                    f"{key} = {filters.metric}: no number of that name came with the trial score of a prompt of "
                    f"data_source {data_source!r}, and every sample needs it; set {key} to "
                    f"{' or '.join([SCORE, *numbers])}, or return it from the reward function"
                )


def _best_metric_violations(cfg: PPOConfig, trials: Trials) -> Iterator[str]:
    """Holds trainer.best_ckpt_metric against the metrics that a validation with the results of the trial would have."""
    metric, n = cfg.trainer.best_ckpt_metric, cfg.actor_rollout_ref.rollout.val_kwargs.n
    rows: list[tuple[str, int, ScoreResult]] = []
    for prompt, ((name, data_source, _), result) in enumerate(trials.items()):
        if name != "val":
            continue
        if isinstance(result, str) or result.error is not None:
            return  # Nobody knows what comes with a score that could be made.
        rows += [(data_source, prompt, result)] * n
    if metric is None:
        return
    sources, uids, results = zip(*rows, strict=True)
    failed = [False] * len(rows) if cfg.reward_model.on_error == "zero" else None
    scores, extras = [result.score for result in results], [result.extra for result in results]
    names = list(validation_metrics(sources, uids, scores, extras, failed))
    if not matching(metric, names):
        proposed = difflib.get_close_matches(metric, names, _MAX_PROPOSED, 0.0)
        yield (
            f"trainer.best_ckpt_metric = {metric}: none of the {len(names)} metrics that a validation on "
            f"data.val_files has by a trial score of each data source; set it to one of {', '.join(proposed)}"
        )
