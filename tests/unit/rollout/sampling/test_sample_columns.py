"""Samples of the server + their prompts + their scores -> the step's columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from scalerl.batch.columns import COLUMNS, IMAGE_GRID_THW, PICTURE_PATCHES, PIXEL_VALUES, ROUTED_EXPERTS
from scalerl.batch.data_proto import DataProto
from scalerl.data import PromptRow
from scalerl.data.pictures import Picture
from scalerl.models.routing import RoutingShape, is_known
from scalerl.models.vision import VisionModel, vision_config
from scalerl.rewards.manager import ScoreResult
from scalerl.rollout.program import Trajectory
from scalerl.rollout.prompt_sampling import sampling_of
from scalerl.rollout.sampling.sample_columns import numbers_of, to_batch
from scalerl.rollout.servers.client import GenerateOutput, SamplingParams


def prompt(uid: int, ids: list[int], before: int | None = None) -> PromptRow:
    return PromptRow(
        uid, ids, before or len(ids), f"source {uid}", "truth", {}, [{"role": "user", "content": "?"}], "rule"
    )


KEYS = [(0, 0), (0, 1), (1, 0)]


def batch() -> DataProto:
    """Position 0 of the step is prompt 30, position 1 prompt 10; two samples of the first, one of which has a tool's
    answer between two turns."""
    prompts = [prompt(30, [1, 2]), prompt(30, [1, 2]), prompt(10, [3, 4, 5], before=9)]
    trajectories = [Trajectory(uid, index, prompts[row].input_ids, 9) for row, (uid, index) in enumerate(KEYS)]
    trajectories[0].parts.append(GenerateOutput("0/0", 0, [7, 8, 9], [-0.5, -1.5, -2.5], "stop", 4, ((0, 4), (1, 6))))
    trajectories[1].parts.append(GenerateOutput("0/0", 1, [6], [-0.25], "stop", 4))
    trajectories[1].observe([5, 5])
    trajectories[1].parts.append(GenerateOutput("0/1", 0, [8, 9], [-0.75, -1.25], "length", 5, reward=0.5))
    trajectories[2].parts.append(GenerateOutput("1/0", 0, [], [], "length", 5, reward=0.5))
    results = [ScoreResult(1.0, {"acc": 1}, penalty=-0.5), ScoreResult(0.0, {}), ScoreResult(0.0, {}, error="raised")]
    return to_batch(trajectories, prompts, results, seeds=[11, 12, 2**63 - 1])


def test_a_prompt_may_ask_for_its_own_sampling() -> None:
    base = SamplingParams(8, temperature=0.7)
    plain = prompt(3, [1, 2])
    asking = dataclasses.replace(plain, extra_info={"sampling": {"max_new_tokens": 2, "temperature": None}})
    hot = dataclasses.replace(plain, extra_info={"sampling": {"temperature": 1.5}})
    assert sampling_of("train", plain, base) == base
    assert sampling_of("train", asking, base) == SamplingParams(2, temperature=0.7)
    assert sampling_of("val", hot, base) == SamplingParams(8, temperature=1.5)
    # What samples are compared with is greedy, whatever the prompt wants for its samples.
    assert sampling_of("train", asking, SamplingParams(8, temperature=0.0)) == SamplingParams(2, temperature=0.0)
    with pytest.raises(ValueError, match=r"train prompt 3: extra_info.sampling.temperature is 1.5, the run trains at"):
        sampling_of("train", hot, base)


def test_token_columns() -> None:
    tokens = batch().tokens
    assert [tokens["input_ids"][row].tolist() for row in range(3)] == [
        [1, 2, 7, 8, 9],
        [1, 2, 6, 5, 5, 8, 9],
        [3, 4, 5],
    ]
    assert [tokens["response_mask"][row].tolist() for row in range(3)] == [
        [False, False, True, True, True],
        [False, False, True, False, False, True, True],
        [False, False, False],
    ]
    # At position t the log-prob of token t: the prompt has none.
    assert [tokens["rollout_logprobs"][row].tolist() for row in range(3)] == [
        [0.0, 0.0, -0.5, -1.5, -2.5],
        [0.0, 0.0, -0.25, 0.0, 0.0, -0.75, -1.25],
        [0.0, 0.0, 0.0],
    ]
    # An interrupted sample went on under version 6.
    assert [tokens["policy_versions"][row].tolist() for row in range(3)] == [
        [-1, -1, 4, 6, 6],
        [-1, -1, 4, -1, -1, 5, 5],
        [-1, -1, -1],
    ]


def test_sample_columns() -> None:
    samples = batch().samples
    assert {name: column.tolist() for name, column in samples.items()} == {
        # Groups are by position: a prompt that comes twice in a step makes two.
        "uid": [0, 0, 1],
        "prompt_uid": [30, 30, 10],
        "sample_index": [0, 1, 0],
        "trajectory_index": [0, 0, 0],
        "agent": ["", "", ""],
        "seed": [11, 12, 2**63 - 1],
        "prompt_length": [2, 2, 3],
        "prompt_length_before": [2, 2, 9],
        "response_length": [3, 5, 0],
        "num_sampled_tokens": [3, 3, 0],
        "num_turns": [1, 2, 1],
        "turn_lengths": [(3,), (1, 2), (0,)],
        # The last one failed.
        "turn_rewards": [(0.0,), (0.0, 0.5), (0.0,)],
        "score": [1.0, 0.0, 0.0],
        "reward_failed": [False, False, True],
        "reward_penalty": [-0.5, 0.0, 0.0],
        "policy_version": [4, 4, 5],
        "finish_reason": ["stop", "length", "length"],
        "data_source": ["source 30", "source 30", "source 10"],
        "reward_style": ["rule", "rule", "rule"],
        "reward_extra": [{"acc": 1}, {}, {}],
        "reward_error": ["", "", "raised"],
    }
    assert samples["score"].dtype == "float64"
    # Strings as objects: numpy's fixed-width strings would be as wide as the longest.
    assert all(samples[name].dtype == object for name in ("finish_reason", "data_source", "reward_extra"))


def test_the_columns_are_those_of_the_table_with_their_dtypes() -> None:
    made = batch()
    dtypes = {name: str(column.values.dtype).removeprefix("torch.") for name, column in made.tokens.items()}
    dtypes |= {name: str(column.dtype) for name, column in made.samples.items()}
    assert dtypes == {name: COLUMNS[name].dtype for name in dtypes}
    assert all(COLUMNS[name].shape == "T" for name in made.tokens) and COLUMNS["uid"].shape == "S"


ROUTING = RoutingShape((True,), 256, 2)


def routed(ids: list[int], positions: Sequence[int]) -> GenerateOutput:
    """A turn with these tokens, and rows of these positions: expert p and p + 1 at position p."""
    rows = ROUTING.packed(np.array([[[p, p + 1]] for p in positions], np.int32).reshape(-1, 1, 2))
    return GenerateOutput("r", 0, ids, [-0.5] * len(ids), "stop", 4, routed_experts=rows)


def first_experts(*samples: Trajectory) -> list[list[int]]:
    """The first expert of each token of each sample, -1 where it is not known."""
    prompts = [prompt(0, sample.prompt_ids) for sample in samples]
    made = to_batch(samples, prompts, [ScoreResult(0.0)] * len(samples), [0] * len(samples), routing=ROUTING)
    column = made[ROUTED_EXPERTS]
    assert column.values.dtype == torch.uint8
    return [torch.where(is_known(rows), rows[..., 0].int(), -1).flatten().tolist() for rows in column]


def test_rows_of_turns_are_one_column() -> None:
    """Of a prompt, of what a tool said, and of all that was sampled, but of the last token."""
    one, two, none = (Trajectory(0, index, [1, 2], 9) for index in range(3))
    one.parts.append(routed([7, 8, 9], range(4)))
    two.parts.append(routed([6], range(2)))
    assert two.num_routed == 2
    two.observe([5, 5])
    # From the last token of the turn before on.
    two.parts.append(routed([8, 9], range(2, 6)))
    assert two.num_routed == 6
    two.observe([4])
    none.parts.append(GenerateOutput("r", 0, [3], [-0.5], "stop", 4))
    assert first_experts(one, two, none) == [[0, 1, 2, 3, -1], [0, 1, 2, 3, 4, 5, -1, -1], [-1, -1, -1]]
    assert first_experts() == []


def test_a_program_that_takes_tokens_away_leaves_others_without_rows() -> None:
    sample = Trajectory(0, 0, [1, 2], 9)
    sample.parts.append(routed([6], range(2)))
    sample.observe([5, 5])
    sample.parts.append(routed([8, 9, 7], range(2, 7)))
    del sample.parts[1]
    # Tokens 5 and 6 of the conversation are 3 and 4 now; what the model made of the token before them is not known.
    assert first_experts(sample) == [[0, 1, -1, 5, 6, -1]]


def test_a_loss_gets_numbers_of_the_reward_function_or_of_the_data() -> None:
    weighted = dataclasses.replace(prompt(30, [1]), extra_info={"weight": 0.5, "level": "hard"})
    results = [ScoreResult(1.0, {"weight": 2}), ScoreResult(0.0, {}), ScoreResult(0.0, {}, error="raised")]
    assert numbers_of("weight", [weighted, weighted, prompt(10, [1])], results).tolist() == [2.0, 0.5, 0.0]
    for name in ("level", "price"):
        with pytest.raises(ValueError, match=rf"prompt 30: .*{name}.*\['acc'\].*\['level', 'weight'\]"):
            numbers_of(name, [weighted], [ScoreResult(1.0, {"acc": 1})])


def test_each_trajectory_of_a_sample_has_a_row_and_its_own_prompt() -> None:
    row = prompt(30, [1, 2], before=6)
    made = [
        Trajectory(0, 0, row.input_ids, 9),
        Trajectory(0, 0, [7, 7, 7], 9, agent="helper"),
        Trajectory(0, 1, [1], 9),
    ]
    for trajectory in made:
        trajectory.parts.append(GenerateOutput("0/0", 0, [5], [-0.5], "stop", 4))
    columns = to_batch(made, [row] * 3, [ScoreResult(1.0)] * 3, seeds=[11, 11, 12]).samples
    names = ("sample_index", "trajectory_index", "agent", "prompt_length", "prompt_length_before", "seed")
    assert [columns[name].tolist() for name in names] == [
        [0, 0, 1],
        [0, 1, 0],
        ["", "helper", ""],
        [2, 3, 1],
        [6, 3, 1],
        [11, 11, 12],
    ]


def test_pictures_are_columns_with_lengths_of_their_own(vision: VisionModel) -> None:
    """Of all rows of a run with images: so that batches with and without any can be joined."""
    prompts = [prompt(30, [1, 9, 9, 2]), prompt(10, [3])]
    shown = Picture("url", 9, 2, (1, 2, 4), np.arange(8 * vision.numbers_per_patch, dtype=np.float32).reshape(8, -1))
    trajectories = [
        Trajectory(0, 0, prompts[0].input_ids, 9, pictures=[shown]),
        Trajectory(1, 0, prompts[1].input_ids, 9),
    ]
    made = [
        to_batch(own, [row] * len(own), [ScoreResult(0.0, {})] * len(own), [1] * len(own), vision=vision)
        for own, row in (([trajectories[0]], prompts[0]), ([trajectories[1]] * 2, prompts[1]))
    ]
    joined = DataProto.concat(made)
    assert joined[PIXEL_VALUES].lengths.tolist() == [8, 0, 0] and joined[IMAGE_GRID_THW].lengths.tolist() == [1, 0, 0]
    np.testing.assert_array_equal(joined[PIXEL_VALUES][0].numpy(), shown.pixel_values)
    assert joined[IMAGE_GRID_THW][0].tolist() == [[1, 2, 4]]
    assert joined[PICTURE_PATCHES].tolist() == [(8,), (), ()]
    for column in (PIXEL_VALUES, IMAGE_GRID_THW):
        assert str(joined[column].values.dtype).endswith(column.dtype)


@pytest.fixture
def vision() -> VisionModel:
    found = vision_config({"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 2}})
    assert found is not None
    return found
