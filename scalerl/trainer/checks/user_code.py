"""Checks of the code that a user brings: files are imported, and functions tried on rows of the data."""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from scalerl.algorithms import AdvantageEstimator, get_adv_estimator, get_policy_loss, rewards_at_last_token
from scalerl.algorithms.advantages import TURN_INDEX
from scalerl.base.user_code import UserCodeError, import_files, is_users_own, place_of
from scalerl.batch import episodes
from scalerl.batch.columns import BASELINE_SCORE, RESPONSE_MASK
from scalerl.batch.data_proto import DataProto
from scalerl.batch.turns import Turns
from scalerl.config import PPOConfig, model_roles, uses_reference
from scalerl.config.correction import corrects
from scalerl.config.errors import ErrorCollector
from scalerl.config.schema import DataConfig, RunConfig
from scalerl.data.pictures import text_of
from scalerl.rewards import RewardManager, ScoreRequest, ScoreResult, build_reward_manager
from scalerl.rewards.judge import STYLE
from scalerl.rewards.trial import TRIAL_RESPONSE, trial_results
from scalerl.rollout.load_program import load_program
from scalerl.rollout.program import KEY, Ask, EnvironmentFailed, Program, Sample, Servers, Tools, run_program
from scalerl.rollout.sampling.groups import SCORE
from scalerl.rollout.sampling.sample_columns import to_batch
from scalerl.rollout.sampling.worker import extra_info_of
from scalerl.rollout.servers.requests import GenerateOutput, SamplingParams
from scalerl.rollout.tools import load_tools, schema_of
from scalerl.tracking import check_backends
from scalerl.tracking.metrics import validation_metrics
from scalerl.trainer.custom_fit import Fit, load_fit
from scalerl.trainer.saving.checkpoints import matching
from scalerl.trainer.step_advantages import check_turn_level, turn_advantages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from scalerl.data import PromptRow, PromptTable, RLHFDataset
    from scalerl.data.pictures import PictureProcessor

    Dataset = RLHFDataset | PromptTable

log = logging.getLogger(__name__)

# Each failure of a reward is shown with its sample on several lines.
_MAX_SHOWN = 3
# Names that the error about an unknown one proposes.
_MAX_PROPOSED = 8
# Seconds that a program may take on all samples of the trial; one that waits longer is not judged by it.
PROGRAM_S = 60.0
# Groups and samples of each that an estimator is tried on, of a run that has no fewer.
NUM_GROUPS, MOST_SAMPLES = 2, 4

# (data set, data source, the scorer's reward style; "rule": the reward function) -> its trial; a text: it failed.
Trials = dict[tuple[str, str, str], ScoreResult | str]


@dataclass(frozen=True)
class RunCode:
    """The functions that a configuration names, scalerl's or the user's; None: not set, or it has an error."""

    fit: Fit | None
    program: Program | None
    estimator: AdvantageEstimator | None
    rewards: RewardManager | None


def import_user_files(errors: ErrorCollector, trainer: RunConfig) -> bool:
    """Imports the user's files and, if that works, checks the tracking backends. Returns whether the import worked."""
    before = len(errors.violations)
    errors.attempt(lambda: import_files(trainer.import_files))
    if len(errors.violations) > before:
        return False
    errors.attempt(lambda: check_backends(trainer.logger))
    return True


def load_code(errors: ErrorCollector, cfg: PPOConfig) -> RunCode:
    """Imports the user's files, and looks up the functions that the configuration names."""
    imported = import_user_files(errors, cfg.trainer)
    fit = errors.attempt(lambda: load_fit(cfg.trainer.custom_fit))
    own = cfg.actor_rollout_ref.rollout.program
    program = errors.attempt(lambda: load_program(own, cfg.data.chat_template_kwargs))
    # Without these files, registered names would be reported as unknown.
    if not imported:
        return RunCode(fit, program, None, None)
    estimator = errors.attempt(lambda: get_adv_estimator(cfg.algorithm.adv_estimator))
    errors.attempt(lambda: get_policy_loss(cfg.actor_rollout_ref.actor.policy_loss.loss_mode))
    rewards = errors.attempt(lambda: build_reward_manager(cfg.reward_model, cfg.custom_reward_function))
    return RunCode(fit, program, estimator, rewards)


def with_tools(cfg: PPOConfig, code: RunCode) -> DataConfig:
    """The configuration of the data with the tools that the program shows in every prompt, whose tokens count there."""
    path = cfg.actor_rollout_ref.rollout.program.tool_config_path
    if path is None or code.program is None:
        return cfg.data
    schemas = [schema_of(tool) for tool in load_tools(path, f"{KEY}.tool_config_path").values()]
    return replace(cfg.data, chat_template_kwargs=cfg.data.chat_template_kwargs | {"tools": schemas})


def try_code(
    errors: ErrorCollector,
    cfg: PPOConfig,
    code: RunCode,
    datasets: Mapping[str, Dataset],
    tokenizer: PreTrainedTokenizerBase | None,
    processor: PictureProcessor | None,
    *,
    sizes_agree: bool,
) -> None:
    """Tries the functions on rows of the data, as far as they could be read. Closes the reward manager.

    datasets: `train` and `val`.  processor: of the policy's pictures.
    sizes_agree: False: samples of the configuration's sizes cannot be made up.
    """
    scores_itself = False
    if tokenizer is not None and "train" in datasets and code.program and code.estimator and sizes_agree:
        own, scores_itself = try_own_code(cfg, code.program, code.estimator, datasets["train"], tokenizer, processor)
        errors.violations.extend(own)
    if code.rewards is None:
        return
    # A program that scores its samples needs no rule for their data source.
    needed = not scores_itself or cfg.custom_reward_function.path is not None
    try:
        if tokenizer is not None and needed:
            errors.violations.extend(reward_violations(code.rewards, cfg, datasets, tokenizer))
    finally:
        code.rewards.close()


def reward_violations(
    manager: RewardManager,
    cfg: PPOConfig,
    datasets: Mapping[str, Dataset],
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
            prompt_str=text_of(prompt.messages[-1]),
            solution_str=TRIAL_RESPONSE,
            ground_truth=prompt.ground_truth,
            extra_info=extra_info_of(prompt, cfg.custom_reward_function),
            response_length=response_length,
        )
    trials |= zip(requests, trial_results(manager, list(requests.values())), strict=True)
    failures = [result for result in trials.values() if isinstance(result, str)]
    yield from failures[:_MAX_SHOWN]
    if len(failures) > _MAX_SHOWN:
        yield f"{len(failures)} of {len(requests)} trial scores failed, one for each data source; the first are above"
    # A program of the user's may add any number to those of the reward function.
    if not cfg.actor_rollout_ref.rollout.program.is_users_own:
        yield from _filter_violations(cfg, trials)
        if "val" in datasets and cfg.trainer.custom_fit.path is None:
            yield from _best_metric_violations(cfg, trials)


def _first_of_each_source(cfg: PPOConfig, datasets: Mapping[str, Dataset]) -> dict[tuple[str, str, str], int]:
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


def try_own_code(
    cfg: PPOConfig,
    program: Program,
    estimator: AdvantageEstimator,
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    processor: PictureProcessor | None = None,
) -> tuple[list[str], bool]:
    """What the user's own program or estimator does wrong with made-up answers to, and scores of, real rows; and
    whether the program scores all of these samples itself."""
    own_program = cfg.actor_rollout_ref.rollout.program.is_users_own
    if not len(dataset) or not (own_program or is_users_own(estimator.function)):
        return [], False
    prompts = [dataset[uid % len(dataset)] for uid in range(NUM_GROUPS)]
    prompts = [prompt for prompt in prompts for _ in range(min(cfg.actor_rollout_ref.rollout.n, MOST_SAMPLES))]
    samples: list[Sample] = []
    violations: list[str] = []
    try:
        samples = asyncio.run(_samples(cfg, program, prompts, tokenizer, processor))
        if is_users_own(estimator.function):
            _try_estimator(cfg, estimator, prompts, samples)
    except UserCodeError as error:
        violations.append(f"{error}; tried with the response {TRIAL_RESPONSE!r} before the run starts")
    except TimeoutError:
        log.warning("the program takes more than %g s on trial, so that its result is not checked", PROGRAM_S)
    except EnvironmentFailed as error:
        log.warning("what is around the program failed on trial, so that its result is not checked: %s", error)
    episodes_of_all = [episode for sample in samples for episode in sample.episodes]
    scored = [any(trajectory.reward is not None for trajectory in episode) for episode in episodes_of_all]
    return violations, bool(scored) and all(scored)


async def _samples(
    cfg: PPOConfig,
    program: Program,
    prompts: Sequence[PromptRow],
    tokenizer: PreTrainedTokenizerBase,
    processor: PictureProcessor | None,
) -> list[Sample]:
    answer, rollout = tokenizer.encode(TRIAL_RESPONSE, add_special_tokens=False) or [0], cfg.actor_rollout_ref.rollout

    async def turn(sample: Servers, number: int, ask: Ask) -> GenerateOutput:
        ids = answer[: ask.sampling.max_new_tokens]
        reason = "stop" if len(ids) == len(answer) else "length"
        return GenerateOutput(sample.uid, sample.sample_index, ids, [-1.0] * len(ids), reason, 0)

    async def one(place: int, prompt: PromptRow) -> Sample:
        group, index = divmod(place, len(prompts) // NUM_GROUPS)
        sampling = SamplingParams(cfg.data.max_response_length, rollout.temperature, rollout.top_p, rollout.top_k)
        servers = Servers(
            turn,
            prompt.input_ids,
            sampling,
            uid=group,
            sample_index=index,
            seed=place,
            max_prompt_length=cfg.data.max_prompt_length,
            pictures=[] if processor is None else [processor.read(image) for image in prompt.images],
        )
        return await run_program(program, prompt, servers, Tools(tokenizer, place, processor))

    return await asyncio.wait_for(asyncio.gather(*map(one, range(len(prompts)), prompts)), PROGRAM_S)


def _try_estimator(
    cfg: PPOConfig, estimator: AdvantageEstimator, prompts: Sequence[PromptRow], samples: Sequence[Sample]
) -> None:
    """Calls the estimator on a batch of these samples: every second one of the first group is right, and all others."""
    scores = [ScoreResult(float(place % 2 or place >= len(prompts) // NUM_GROUPS)) for place in range(len(prompts))]
    rows = [(place, trajectory) for place, sample in enumerate(samples) for trajectory in sample.trajectories]
    places, trajectories = [place for place, _ in rows], [trajectory for _, trajectory in rows]
    batch = to_batch(trajectories, [prompts[place] for place in places], [scores[place] for place in places], places)
    samples_S = batch.samples if estimator.per_token else episodes.columns(batch.samples)
    columns = _columns(cfg, batch, samples_S)
    if missing := [name for name in estimator.needs if name not in columns]:
        if cfg.trainer.custom_fit.path is None:
            raise UserCodeError(
                f"algorithm.adv_estimator={cfg.algorithm.adv_estimator} needs {', '.join(missing)}, which this run "
                f"does not make: it has {', '.join(sorted(columns))}"
            )
        # A training loop of the user's may add it.
        return
    needed = {name: columns[name] for name in estimator.needs}
    scores_S, mask = samples_S["score"], batch.tokens["response_mask"]
    if cfg.algorithm.turn_level:
        check_turn_level(estimator, cfg.algorithm)
        advantages_K = turn_advantages(estimator, {**batch.samples, "rewards": batch.samples["score"]}, cfg.algorithm)
        results = [torch.from_numpy(advantages_K)]
    elif estimator.per_token:
        tensors = {name: torch.as_tensor(column) for name, column in needed.items()}
        rewards_T = rewards_at_last_token(torch.tensor(scores_S, dtype=torch.float32), mask.values, mask.cu_seqlens)
        results = estimator(rewards_T, mask.values, mask.cu_seqlens, cfg.algorithm, **tensors)
        results = [result[mask.values] for result in results]
    else:
        results = [estimator(torch.tensor(scores_S), episodes.groups(samples_S), cfg.algorithm, **needed)]
    if not all(result.isfinite().all() for result in results):
        raise UserCodeError(
            f"algorithm.adv_estimator: {place_of(estimator.function)} returned a number that is not finite for the "
            f"scores {scores_S.tolist()} of {NUM_GROUPS} groups; those of one group are often equal"
        )


def _columns(cfg: PPOConfig, batch: DataProto, samples_S: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The columns that an estimator of this run may need, by name: [S], and of tokens [T]."""
    roles = {role.name for role in model_roles(cfg)}
    tokens = {name: column.values for name, column in batch.tokens.items()}
    made = {"old_logprobs": True, "ref_logprobs": uses_reference(cfg), "values": "critic" in roles}
    made |= dict.fromkeys(("rollout_is_weights", "loss_mask"), corrects(cfg.algorithm.rollout_correction))
    zeros_T = torch.zeros_like(tokens["rollout_logprobs"])
    tokens |= {name: zeros_T for name, is_made in made.items() if is_made}
    turns = Turns.of(batch.samples)
    turn_T = turns.on_tokens(turns.numbers(turns.before_rows(batch.samples)), batch[RESPONSE_MASK], elsewhere=-1)
    tokens[TURN_INDEX] = turn_T
    return {**samples_S, BASELINE_SCORE.name: np.zeros(len(samples_S["score"])), **tokens}
