"""Checks of a user's own program and advantage estimator before anything starts: a trial on two rows of the data."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from scalerl.algorithms import AdvantageEstimator, rewards_at_last_token
from scalerl.base.user_code import UserCodeError, is_users_own, place_of
from scalerl.batch.data_proto import DataProto
from scalerl.config import PPOConfig, model_roles
from scalerl.config.correction import corrects
from scalerl.rewards import ScoreResult
from scalerl.rewards.trial import TRIAL_RESPONSE
from scalerl.rollout.program import Ask, Program, Servers, Tools, Trajectory, run_program
from scalerl.rollout.sampling.sample_columns import to_batch
from scalerl.rollout.servers.requests import GenerateOutput, SamplingParams
from scalerl.trainer.step_advantages import GREEDY_SCORE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from scalerl.data import PromptRow, PromptTable, RLHFDataset

log = logging.getLogger(__name__)

# Seconds that a program may take on all samples of the trial; one that waits longer is not judged by it.
PROGRAM_S = 60.0
# Groups and samples of each that an estimator is tried on, of a run that has no fewer.
NUM_GROUPS, MOST_SAMPLES = 2, 4


def own_code_violations(
    cfg: PPOConfig,
    program: Program,
    estimator: AdvantageEstimator,
    dataset: RLHFDataset | PromptTable,
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[str]:
    """Yields what the user's own program or estimator does wrong with made-up answers to, and scores of, real rows."""
    if not len(dataset) or not (is_users_own(program) or is_users_own(estimator.function)):
        return
    prompts = [dataset[uid % len(dataset)] for uid in range(NUM_GROUPS)]
    prompts = [prompt for prompt in prompts for _ in range(min(cfg.actor_rollout_ref.rollout.n, MOST_SAMPLES))]
    try:
        trajectories = asyncio.run(_samples(cfg, program, prompts, tokenizer))
        if is_users_own(estimator.function):
            _try_estimator(cfg, estimator, prompts, trajectories)
    except UserCodeError as error:
        yield f"{error}; tried with the response {TRIAL_RESPONSE!r} before the run starts"
    except TimeoutError:
        log.warning("the program takes more than %g s on trial, so that its result is not checked", PROGRAM_S)


async def _samples(
    cfg: PPOConfig, program: Program, prompts: Sequence[PromptRow], tokenizer: PreTrainedTokenizerBase
) -> list[Trajectory]:
    answer = tokenizer.encode(TRIAL_RESPONSE, add_special_tokens=False) or [0]

    async def turn(sample: Servers, number: int, ask: Ask) -> GenerateOutput:
        ids = answer[: ask.sampling.max_new_tokens]
        reason = "stop" if len(ids) == len(answer) else "length"
        return GenerateOutput(sample.uid, sample.sample_index, ids, [-1.0] * len(ids), reason, 0)

    async def one(place: int, prompt: PromptRow) -> Trajectory:
        group, index = divmod(place, len(prompts) // NUM_GROUPS)
        sampling = SamplingParams(cfg.data.max_response_length)
        servers = Servers(turn, prompt.input_ids, sampling, uid=group, sample_index=index, seed=place)
        return await run_program(program, prompt, servers, Tools(tokenizer, place))

    return await asyncio.wait_for(asyncio.gather(*map(one, range(len(prompts)), prompts)), PROGRAM_S)


def _try_estimator(
    cfg: PPOConfig, estimator: AdvantageEstimator, prompts: Sequence[PromptRow], trajectories: Sequence[Trajectory]
) -> None:
    """Calls the estimator on a batch of these samples: every second one of the first group is right, and all others."""
    scores = [ScoreResult(float(place % 2 or place >= len(prompts) // NUM_GROUPS)) for place in range(len(prompts))]
    batch = to_batch(trajectories, prompts, scores, list(range(len(prompts))))
    columns = _columns(cfg, batch)
    if missing := [name for name in estimator.needs if name not in columns]:
        if cfg.trainer.custom_fit.path is None:
            raise UserCodeError(
                f"algorithm.adv_estimator={cfg.algorithm.adv_estimator} needs {', '.join(missing)}, which this run "
                f"does not make: it has {', '.join(sorted(columns))}"
            )
        # A training loop of the user's may add it.
        return
    needed = {name: columns[name] for name in estimator.needs}
    scores_S, mask = batch.samples["score"], batch.tokens["response_mask"]
    if estimator.per_token:
        tensors = {name: torch.as_tensor(column) for name, column in needed.items()}
        rewards_T = rewards_at_last_token(torch.tensor(scores_S, dtype=torch.float32), mask.values, mask.cu_seqlens)
        results = estimator(rewards_T, mask.values, mask.cu_seqlens, cfg.algorithm, **tensors)
        results = [result[mask.values] for result in results]
    else:
        results = [estimator(torch.tensor(scores_S), batch.samples["uid"], cfg.algorithm, **needed)]
    if not all(result.isfinite().all() for result in results):
        raise UserCodeError(
            f"algorithm.adv_estimator: {place_of(estimator.function)} returned a number that is not finite for the "
            f"scores {scores_S.tolist()} of {NUM_GROUPS} groups; those of one group are often equal"
        )


def _columns(cfg: PPOConfig, batch: DataProto) -> dict[str, Any]:
    """The columns that an estimator of this run may need, by name: [S], and of tokens [T]."""
    roles = {role.name for role in model_roles(cfg)}
    tokens = {name: column.values for name, column in batch.tokens.items()}
    made = {"old_logprobs": True, "ref_logprobs": "ref" in roles, "values": "critic" in roles}
    made |= dict.fromkeys(("rollout_is_weights", "loss_mask"), corrects(cfg.algorithm.rollout_correction))
    zeros_T = torch.zeros_like(tokens["rollout_logprobs"])
    tokens |= {name: zeros_T for name, is_made in made.items() if is_made}
    return {**batch.samples, GREEDY_SCORE: np.zeros(len(batch.samples["score"])), **tokens}
