"""The columns of a batch: the tokens of all trajectories end to end, and the numbers of each. S trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from scalerl.batch.columns import INPUT_IDS, PICTURE_PATCHES, ROUTED_EXPERTS
from scalerl.batch.data_proto import DataProto, Jagged
from scalerl.batch.turns import column_of
from scalerl.data.pictures import picture_columns

if TYPE_CHECKING:
    from scalerl.data import PromptRow
    from scalerl.models.routing import RoutingShape
    from scalerl.models.vision import VisionModel
    from scalerl.rewards import ScoreResult
    from scalerl.rollout.program import Trajectory


def to_batch(
    trajectories: Sequence[Trajectory],
    prompts: Sequence[PromptRow],
    results: Sequence[ScoreResult],
    seeds: Sequence[int],
    *,
    more: Sequence[str] = (),
    routing: RoutingShape | None = None,
    vision: VisionModel | None = None,
) -> DataProto:
    """The batch of these trajectories, one row each, with the prompt, score and seed of its sample: [S].

    Those of a sample follow one another, and among them those of an agent.

    more: names of further columns (`numbers_of`).  routing: of the column routed_experts; None: there is none.
    vision: of the columns of pictures; None: there are none.
    """
    tokens = _token_columns(trajectories)
    if routing is not None:
        tokens[ROUTED_EXPERTS.name] = _routed_experts(trajectories, tokens[INPUT_IDS.name].cu_seqlens, routing)
    samples = {
        "uid": np.array([t.uid for t in trajectories]),
        "prompt_uid": np.array([p.uid for p in prompts]),
        "sample_index": np.array([t.sample_index for t in trajectories]),
        "trajectory_index": _positions([(t.uid, t.sample_index) for t in trajectories]),
        "seed": np.array(seeds, dtype=np.int64),
        "prompt_length": np.array([len(t.prompt_ids) for t in trajectories]),
        "prompt_length_before": np.array(
            [
                prompt.prompt_length_before if t.prompt_ids == prompt.input_ids else len(t.prompt_ids)
                for t, prompt in zip(trajectories, prompts, strict=True)
            ]
        ),
        "response_length": np.array([t.num_tokens for t in trajectories]),
        "num_sampled_tokens": np.array([t.num_sampled_tokens for t in trajectories]),
        "num_turns": np.array([len(t.turns) for t in trajectories]),
        "turn_lengths": column_of([[len(turn.output_ids) for turn in t.turns] for t in trajectories]),
        "turn_rewards": column_of(
            [
                # What failed has no score, of its turns neither.
                [0.0 if result.error is not None else float(turn.reward) for turn in t.turns]
                for t, result in zip(trajectories, results, strict=True)
            ]
        ),
        "score": np.array([result.score for result in results], dtype=np.float64),
        "reward_failed": np.array([result.error is not None for result in results], dtype=bool),
        "reward_penalty": np.array([result.penalty for result in results], dtype=np.float64),
        "policy_version": np.array([t.policy_version for t in trajectories]),
    }
    for name, values in {
        "agent": [t.agent for t in trajectories],
        "finish_reason": [t.finish_reason for t in trajectories],
        "data_source": [p.data_source for p in prompts],
        "reward_style": [p.reward_style for p in prompts],
        "reward_extra": [result.extra for result in results],
        "reward_error": [result.error or "" for result in results],
    }.items():
        samples[name] = np.empty(len(trajectories), dtype=object)
        samples[name][:] = values
    if vision is not None:
        pictures = [t.pictures for t in trajectories]
        tokens |= picture_columns(pictures, vision)
        samples[PICTURE_PATCHES.name] = column_of([[len(p.pixel_values) for p in own] for own in pictures])
    return DataProto(tokens, samples | {name: numbers_of(name, prompts, results) for name in more})


def _positions(names: Sequence[tuple[int, int]]) -> np.ndarray:
    """[S] how many rows before it have the name of a row.  names: [S], equal ones in a row."""
    positions = np.zeros(len(names), dtype=np.int64)
    for row in range(1, len(names)):
        positions[row] = positions[row - 1] + 1 if names[row] == names[row - 1] else 0
    return positions


def numbers_of(name: str, prompts: Sequence[PromptRow], results: Sequence[ScoreResult]) -> np.ndarray:
    """The number of that name [S] float64 that the reward function returned, or that extra_info of the data has.

    A sample whose reward function failed may have none: it is 0.  Raises ValueError naming the prompt otherwise.
    """
    numbers = np.zeros(len(prompts))
    for row, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        value = result.extra.get(name, prompt.extra_info.get(name))
        if isinstance(value, int | float):
            numbers[row] = value
        elif result.error is None:
            raise ValueError(
                f"prompt {prompt.uid}: the policy loss needs a number {name}; the reward function returned "
                f"{sorted(result.extra)} with the score, and extra_info of the data has {sorted(prompt.extra_info)}"
            )
    return numbers


def _token_columns(trajectories: Sequence[Trajectory]) -> dict[str, Jagged]:
    """Token columns with prompt and response of each sample. Written once: a step has tens of millions of tokens."""
    from scalerl.rollout.servers.requests import NO_VERSION, GenerateOutput

    ends = np.cumsum([len(t.prompt_ids) + t.num_tokens for t in trajectories], dtype=int)
    num_tokens = int(ends[-1]) if len(ends) else 0
    ids = np.empty(num_tokens, np.int64)
    mask = np.zeros(num_tokens, np.bool_)
    logprobs = np.zeros(num_tokens, np.float32)
    versions = np.full(num_tokens, NO_VERSION, np.int32)
    start = 0
    for trajectory in trajectories:
        end = start + len(trajectory.prompt_ids)
        ids[start:end] = trajectory.prompt_ids
        for part in trajectory.parts:
            start, end = end, end + len(part.output_ids)
            ids[start:end] = part.output_ids
            if isinstance(part, GenerateOutput):
                mask[start:end] = True
                logprobs[start:end] = part.logprobs
                for first, stop, version in part.spans():
                    versions[start + first : start + stop] = version
        start = end
    cu_seqlens = torch.from_numpy(np.concatenate([[0], ends]))
    columns = {"input_ids": ids, "response_mask": mask, "rollout_logprobs": logprobs, "policy_versions": versions}
    return {name: Jagged(torch.from_numpy(values), cu_seqlens) for name, values in columns.items()}


def _routed_experts(trajectories: Sequence[Trajectory], cu_seqlens: torch.Tensor, routing: RoutingShape) -> Jagged:
    """The experts of each token, as far as the turns know them: not of a sample's last token, which no model has seen.

    A turn's rows end before its last token and begin where those of the turn before end. Where a program has changed
    what stands before a turn, only the turn's own tokens have rows.
    """
    column = routing.unknown(int(cu_seqlens[-1]))
    for trajectory, start in zip(trajectories, cu_seqlens[:-1].tolist(), strict=True):
        known, end = start, start + len(trajectory.prompt_ids)
        for part in trajectory.parts:
            begin, end = end, end + len(part.output_ids)
            rows = getattr(part, "routed_experts", None)
            if rows is None or not len(rows):
                continue
            first = known if known + len(rows) == end - 1 else begin
            num_rows = max(0, end - 1 - first)
            column[first : first + num_rows] = rows[len(rows) - num_rows :]
            known = end - 1
    return Jagged(column, cu_seqlens)
