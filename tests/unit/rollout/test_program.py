"""What a program builds, what it gets again when it begins again, and what is said of one that is wrong."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalerl.base.user_code import UserCodeError
from scalerl.config.schema import DataConfig, ProgramConfig
from scalerl.data import PromptRow, RLHFDataset
from scalerl.data.pictures import Picture
from scalerl.models.routing import RoutingShape
from scalerl.rewards import ScoreResult
from scalerl.rollout.load_program import load_program
from scalerl.rollout.program import (
    Ask,
    EnvironmentFailed,
    Sample,
    Servers,
    Tools,
    Trajectory,
    attempt_program,
    single_turn,
)
from scalerl.rollout.program import run_program as run
from scalerl.rollout.samples import turn_seed
from scalerl.rollout.sampling.worker import with_turns
from scalerl.rollout.servers.requests import GenerateOutput, SamplingParams
from tests.tiny_models import tiny_tokenizer

PROMPT = PromptRow(3, [1, 2], 2, "source", "truth", {}, [{"role": "user", "content": "?"}], "rule")
TOOLS = Tools(None, 0)


class Policy:
    """Writes one token a turn, the number of tokens before it, or as many as are left to a turn that is cut."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[int], int]] = []

    async def __call__(self, sample: Servers, number: int, ask: Ask) -> GenerateOutput:
        self.asked.append((number, ask.input_ids, 0 if ask.output is None else len(ask.output.output_ids)))
        ids = [len(ask.input_ids)]
        return GenerateOutput("r", 0, ids, [-0.5] * len(ids), "stop", 4 + number)


def servers(policy: Policy, asks: Sequence[Ask] = (), max_tokens: int = 8) -> Servers:
    sampling, ids = SamplingParams(max_tokens), PROMPT.input_ids
    return Servers(policy, ids, sampling, uid=7, sample_index=1, seed=5, asks=asks, max_prompt_length=3)


def run_program(program: Any, prompt: PromptRow, servers: Servers, tools: Tools) -> Trajectory:
    (trajectory,) = sample_of(program, servers, prompt, tools).trajectories
    return trajectory


def sample_of(program: Any, servers: Servers, prompt: PromptRow = PROMPT, tools: Tools = TOOLS) -> Sample:
    return asyncio.run(run(program, prompt, servers, tools))


async def with_a_tool(prompt: Any, servers: Servers, tools: Tools) -> Any:
    trajectory = servers.begin()
    await servers.generate(trajectory)
    trajectory.observe([50, 51])
    await servers.generate(trajectory, max_new_tokens=3)
    return trajectory


def test_turns_and_observations_are_one_sequence() -> None:
    policy = Policy()
    trajectory = run_program(with_a_tool, PROMPT, servers(policy), TOOLS)
    assert policy.asked == [(0, [1, 2], 0), (1, [1, 2, 2, 50, 51], 0)]
    assert trajectory.token_ids == [2, 50, 51, 5]
    assert trajectory.response_mask == [True, False, False, True]
    assert trajectory.logprobs == [-0.5, 0.0, 0.0, -0.5]
    assert trajectory.token_versions == [4, -1, -1, 5]
    assert (trajectory.num_tokens, trajectory.num_sampled_tokens, trajectory.room) == (4, 2, 4)
    assert (trajectory.policy_version, trajectory.finish_reason) == (4, "stop")
    assert (trajectory.uid, trajectory.sample_index, len(trajectory.turns)) == (7, 1, 2)


def test_a_prompt_is_the_row_with_the_schemas_of_its_functions(tmp_path: Path) -> None:
    async def with_the_rows_functions(prompt: Any, servers: Servers, tools: Tools) -> Any:
        trajectory = await with_a_tool(prompt, servers, tools)
        trajectory.extra = {"functions": [tool["function"]["name"] for tool in prompt.tools]}
        return trajectory

    row = {
        "data_source": "source",
        "prompt": PROMPT.messages,
        "ability": "",
        "reward_model": {"style": "rule", "ground_truth": "truth"},
        "extra_info": None,
    }
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row | {"tools": own}) + "\n" for own in (tools, None)))
    # The template of the model shows no functions.
    config = DataConfig(chat_template_kwargs={"tools": tools}, unknown_tokens="allow")
    rows = RLHFDataset(path, tiny_tokenizer(), config)
    samples = [run_program(with_the_rows_functions, rows[i], servers(Policy()), TOOLS) for i in range(2)]
    assert [sample.extra["functions"] for sample in samples] == [["add"], []]


def test_a_turn_asks_for_no_more_than_there_is_room_for() -> None:
    asked = servers(Policy(), max_tokens=6)
    run_program(with_a_tool, PROMPT, asked, TOOLS)
    assert [ask.sampling.max_new_tokens for ask in asked.asks] == [6, 3]
    asked = servers(Policy(), max_tokens=4)
    run_program(with_a_tool, PROMPT, asked, TOOLS)
    assert [ask.sampling.max_new_tokens for ask in asked.asks] == [4, 1]


def test_an_observation_without_room_is_cut_and_the_sample_says_so() -> None:
    trajectory = servers(Policy(), max_tokens=2).begin()
    trajectory.observe([50])
    assert not trajectory.is_cut
    trajectory.observe([51, 52])
    assert trajectory.token_ids == [50, 51] and trajectory.finish_reason == "length"


def test_a_program_that_begins_again_gets_its_turns_again() -> None:
    """The second turn had one token when it was interrupted; it goes on with that."""
    first = servers(Policy())
    whole = run_program(with_a_tool, PROMPT, first, TOOLS)
    record = first.record()
    cut = GenerateOutput("r", 0, [9], [-1.0], "abort", 4)
    policy = Policy()
    again = servers(policy, [record[0], Ask(record[1].input_ids, record[1].sampling, cut)])
    trajectory = run_program(with_a_tool, PROMPT, again, TOOLS)
    assert policy.asked == [(1, [1, 2, 2, 50, 51], 1)]
    assert trajectory.token_ids == whole.token_ids
    # Interrupted before it came to the second turn, it keeps what it has of that.
    early = servers(Policy(), record)
    run_program(single_turn, PROMPT, early, TOOLS)
    assert early.record() == record


def test_a_program_that_begins_again_rewards_its_turns_anew() -> None:
    """A turn keeps no reward of an earlier attempt; the sampler's record of it is left as it was."""
    first = servers(Policy())
    whole = run_program(with_a_tool, PROMPT, first, TOOLS)
    whole.turns[0].reward, whole.turns[1].reward = 0.25, 1.0
    again = run_program(with_a_tool, PROMPT, servers(Policy(), first.record()), TOOLS)
    assert [turn.reward for turn in again.turns] == [0.0, 0.0] and again.token_ids == whole.token_ids
    again.turns[0].reward = 0.5
    assert [turn.reward for turn in whole.turns] == [0.25, 1.0]


def test_the_rewards_of_turns_are_a_part_of_the_score() -> None:
    """The sum over all trajectories of the agent, whoever gave the rest; a sample that failed has none."""
    sample = sample_of(with_a_helper, servers(Policy()))
    (episode,) = sample.episodes
    for trajectory, rewards in zip(episode, ([0.25, 0.25], [-0.25], [2.0]), strict=True):
        for turn, reward in zip(trajectory.turns, rewards, strict=True):
            turn.reward = reward
    result = ScoreResult(1.0, {"acc": 1}, penalty=-0.5)
    assert with_turns(result, episode) == replace(result, score=3.25)
    failed = ScoreResult(0.0, error="raised")
    assert with_turns(failed, episode) is failed
    for trajectory in episode:
        for turn in trajectory.turns:
            turn.reward = 0.0
    assert with_turns(result, episode) is result
    with pytest.raises(AttributeError, match="rewards"):
        episode[0].turns[0].rewards = 1.0  # pyright: ignore[reportAttributeAccessIssue]


def test_a_turn_asks_for_the_experts_that_no_turn_before_it_has() -> None:
    """The first for all, the second from the last token of the first on: two of the prompt, and none of token 2."""
    routing = RoutingShape((True,), 8, 2)

    async def policy(sample: Servers, number: int, ask: Ask) -> GenerateOutput:
        rows = routing.unknown(len(ask.input_ids) - ask.routed_from)
        return GenerateOutput("r", 0, [9], [-0.5], "stop", 4, routed_experts=rows)

    first = servers(policy)  # pyright: ignore[reportArgumentType]
    trajectory = run_program(with_a_tool, PROMPT, first, TOOLS)
    assert [ask.routed_from for ask in first.asks] == [0, 2] and trajectory.num_routed == 5
    again = servers(Policy(), first.record())
    assert run_program(with_a_tool, PROMPT, again, TOOLS).num_routed == 5


def test_a_tool_that_answers_otherwise_makes_another_conversation() -> None:
    first = servers(Policy())
    run_program(with_a_tool, PROMPT, first, TOOLS)
    record = first.record()
    other = [
        Ask([1, 2], record[0].sampling, record[0].output),
        Ask([1, 2, 2, 60], record[1].sampling, record[1].output),
    ]
    policy = Policy()
    again = servers(policy, [*other, Ask([0], record[1].sampling)])
    trajectory = run_program(with_a_tool, PROMPT, again, TOOLS)
    assert policy.asked == [(1, [1, 2, 2, 50, 51], 0)] and trajectory.token_versions == [4, -1, -1, 5]
    assert [ask.output for ask in again.record()[2:]] == [record[1].output, None], "it may ask for them yet"


async def with_a_helper(prompt: Any, servers: Servers, tools: Tools) -> Any:
    """Two first turns; a helper that answers another prompt; and the second conversation once more from its first
    turn."""
    own, helper = servers.begin(), servers.begin([7, 7, 7])
    await servers.generate(own)
    await servers.generate(helper)
    again = own.branch()
    again.observe([60])
    await servers.generate(again)
    own.observe([50])
    await servers.generate(own)
    return [own, helper, again]


def test_a_sample_of_several_trajectories() -> None:
    policy = Policy()
    own, helper, again = sample_of(with_a_helper, servers(policy)).trajectories
    assert [asked[1] for asked in policy.asked] == [[1, 2], [7, 7, 7], [1, 2, 2, 60], [1, 2, 2, 50]]
    assert (own.token_ids, own.response_mask) == ([2, 50, 4], [True, False, True])
    assert (helper.prompt_ids, helper.token_ids) == ([7, 7, 7], [3])
    # What the branch begins with is trained with the conversation that sampled it.
    assert (again.token_ids, again.response_mask) == ([2, 60, 4], [False, False, True])
    assert again.room == 5 and again.turns[0].output_ids == [4]


def test_turns_are_found_again_in_any_order() -> None:
    """Conversations that run at the same time may come to their turns in another order."""
    first = servers(Policy())
    whole = sample_of(with_a_helper, first)
    policy = Policy()
    turned = sample_of(with_a_helper, servers(policy, first.record()[::-1]))
    assert policy.asked == [] and turned.trajectories == whole.trajectories


def test_what_one_agent_does_is_one_episode() -> None:
    async def two_agents(prompt: Any, servers: Servers, tools: Tools) -> Any:
        made = [servers.begin(agent=agent) for agent in ("black", "white", "black")]
        for trajectory, reward in zip(made, (1.0, -1.0, None), strict=True):
            await servers.generate(trajectory)
            trajectory.reward = reward
        return made

    sample = sample_of(two_agents, servers(Policy()))
    assert [[t.reward for t in episode] for episode in sample.episodes] == [[1.0, None], [-1.0]]
    assert [t.agent for t in sample.trajectories] == ["black", "black", "white"]


@pytest.mark.parametrize(
    ("num_failures", "config", "error"),
    [
        (1, ProgramConfig(max_attempts=2), None),
        (2, ProgramConfig(max_attempts=2), "environment: no container"),
        (1, ProgramConfig(), "environment: no container"),
        (-1, ProgramConfig(timeout_s=0.05), "environment: no result within .*timeout_s=0.05"),
    ],
)
def test_a_sample_whose_surroundings_fail(num_failures: int, config: ProgramConfig, error: str | None) -> None:
    """It is begun again, and gets the turn that it had; in the end its prompt is left, which trains nothing."""
    num_begun = 0

    async def in_a_container(prompt: Any, servers: Servers, tools: Tools) -> Trajectory:
        nonlocal num_begun
        num_begun += 1
        trajectory = servers.begin()
        await servers.generate(trajectory)
        if num_failures < 0:
            await asyncio.sleep(60)
        if num_begun <= num_failures:
            raise EnvironmentFailed("no container")
        return trajectory

    policy = Policy()
    sample = asyncio.run(attempt_program(in_a_container, PROMPT, servers(policy), TOOLS, config))
    assert len(policy.asked) == 1 and num_begun == config.max_attempts
    (trajectory,) = sample.trajectories
    if error is None:
        assert sample.error is None and trajectory.token_ids == [2] and sample.other_s >= 0
    else:
        assert re.fullmatch(error, sample.error or "") and (trajectory.prompt_ids, trajectory.parts) == ([1, 2], [])


def test_turns_draw_from_seeds_of_their_own() -> None:
    seeds = [turn_seed(seed, number) for seed in (5, 6) for number in range(4)]
    assert len(set(seeds)) == 8 and seeds[0] == 5 and all(0 <= seed < 2**63 for seed in seeds)


PROGRAMS = """
async def program(prompt, servers, tools):
    trajectory = servers.begin()
    await servers.generate(trajectory)
    return trajectory

async def nothing(prompt, servers, tools):
    await servers.generate(servers.begin())

async def no_turn(prompt, servers, tools):
    return servers.begin()

async def own_turn(prompt, servers, tools):
    import dataclasses
    trajectory = servers.begin()
    turn = await servers.generate(trajectory)
    trajectory.parts = [dataclasses.replace(turn, output_ids=[1])]
    return trajectory

async def too_long(prompt, servers, tools):
    trajectory = servers.begin()
    await servers.generate(trajectory)
    trajectory.max_tokens = 100
    trajectory.observe([1] * 9)
    return trajectory

async def no_number(prompt, servers, tools):
    trajectory = servers.begin()
    await servers.generate(trajectory)
    trajectory.reward = float("nan")
    return trajectory

async def no_number_of_a_turn(prompt, servers, tools):
    trajectory = servers.begin()
    (await servers.generate(trajectory)).reward = None
    return trajectory

async def broken(prompt, servers, tools):
    return {}["tool"]

async def of_two(prompt, servers):
    pass

def not_async(prompt, servers, tools):
    pass

async def empty(prompt, servers, tools):
    return []

async def twice(prompt, servers, tools):
    trajectory = await program(prompt, servers, tools)
    return [trajectory, trajectory]

async def two_rewards(prompt, servers, tools):
    made = [await program(prompt, servers, tools) for _ in range(2)]
    made[1].reward, made[0].reward = 0.0, 1.0
    return made

async def long_prompt(prompt, servers, tools):
    return servers.begin([1] * 4)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "tool.py").write_text(PROGRAMS)
    return str(tmp_path / "tool.py")


def test_a_program_of_a_file(file: str) -> None:
    assert load_program(ProgramConfig()) is single_turn
    program = load_program(ProgramConfig(file))
    assert run_program(program, PROMPT, servers(Policy()), TOOLS).token_ids == [2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("not_async", r"program.path=.*tool.py does not define the async function 'not_async' .*no_turn, own_turn"),
        ("brokn", r"does not define .*; set actor_rollout_ref.rollout.program.name=broken"),
        ("of_two", r"program: of_two \(.*tool.py:41\) cannot be called with prompt, servers, tools"),
    ],
)
def test_a_function_that_is_no_program_is_refused(file: str, name: str, message: str) -> None:
    with pytest.raises((UserCodeError, ValueError), match=message):
        load_program(ProgramConfig(file, name))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", r"nothing \(.*tool.py:7\) returned None; return the trajectory .*, on prompt 3 sample 1"),
        ("no_turn", "returned a trajectory without a turn"),
        ("own_turn", "a turn that servers.generate did not give"),
        ("too_long", "returned 10 tokens, at most 8 fit"),
        ("no_number", "set the reward nan; set a finite number"),
        ("no_number_of_a_turn", "set the reward None of turn 0; set a finite number"),
        ("empty", r"returned \[\]; return the trajectory that servers.begin\(\) gave, or a list of such"),
        ("twice", r"returned a turn in two trajectories.* go on from one by trajectory.branch\(\)"),
        ("two_rewards", r"set rewards \[0.0, 1.0\] on trajectories of one agent \(''\)"),
        ("long_prompt", "a prompt of 4 tokens; it must have 1 to data.max_prompt_length=3"),
        ("broken", r"broken \(.*\) raised KeyError: 'tool' \(.*tool.py:39: return"),
    ],
)
def test_what_a_program_does_wrong_is_said_with_its_line(file: str, name: str, message: str) -> None:
    program = load_program(ProgramConfig(file, name))
    with pytest.raises(UserCodeError, match=f"^actor_rollout_ref.rollout.program: .*{message}"):
        run_program(program, PROMPT, servers(Policy()), TOOLS)


def test_shared_values_of_a_prompt_are_no_program_s_to_change(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        "async def program(prompt, servers, tools):\n"
        "    prompt.extra_info['turns'].pop()\n"
        "    trajectory = servers.begin()\n"
        "    await servers.generate(trajectory)\n"
        "    return trajectory\n"
    )
    program = load_program(ProgramConfig(path=str(path), name="program"))
    prompt = replace(PROMPT, extra_info={"turns": [1]})
    for _ in range(2):
        run_program(program, prompt, servers(Policy()), TOOLS)
    assert prompt.extra_info == {"turns": [1]}


# --- pictures


def picture(num_tokens: int) -> Picture:
    return Picture(f"url{num_tokens}", 9, num_tokens, (1, 2, 2 * num_tokens), np.zeros((4 * num_tokens, 1), np.float32))


def test_observed_pictures_are_asked_with_and_never_cut() -> None:
    asked: list[Ask] = []

    async def policy(sample: Servers, number: int, ask: Ask) -> GenerateOutput:
        asked.append(ask)
        return GenerateOutput("r", 0, [5], [-0.5], "stop", 4)

    async def look(prompt: PromptRow, servers: Servers, tools: Tools) -> Trajectory:
        trajectory = servers.begin()
        for size in (2, 4):
            await servers.generate(trajectory)
            trajectory.observe([7, *[9] * size], [picture(size)])
        await servers.generate(trajectory)
        return trajectory

    own = Servers(
        policy, [9, 9, 9], SamplingParams(8), uid=7, sample_index=1, seed=5, pictures=[picture(3)], placeholders=[9]
    )
    trajectory = run_program(look, PROMPT, own, TOOLS)
    assert [[shown.num_tokens for shown in ask.pictures] for ask in asked] == [[3], [3, 2], [3, 2]]
    # Six of eight tokens were there, and the second picture has four.
    assert trajectory.token_ids == [5, 7, 9, 9, 5, 7, 5] and trajectory.is_cut
    assert (
        trajectory.branch().pictures == trajectory.pictures and trajectory.branch().pictures is not trajectory.pictures
    )


def test_a_policy_that_samples_a_placeholder_says_no_more() -> None:
    """A server would look for its picture. The token itself is trained, as a word."""
    asked: list[Ask] = []

    async def policy(sample: Servers, number: int, ask: Ask) -> GenerateOutput:
        asked.append(ask)
        if not ask.sampling.max_new_tokens:
            return GenerateOutput("r", 0, [], [], "length", 4)
        return GenerateOutput("r", 0, [5, 9], [-0.5, -0.5], "stop", 4)

    async def talk(prompt: PromptRow, servers: Servers, tools: Tools) -> Trajectory:
        trajectory = servers.begin()
        await servers.generate(trajectory)
        trajectory.observe([7])
        await servers.generate(trajectory)
        return trajectory

    own = Servers(
        policy, [9], SamplingParams(8), uid=7, sample_index=1, seed=5, pictures=[picture(1)], placeholders=[9]
    )
    trajectory = run_program(talk, PROMPT, own, TOOLS)
    assert trajectory.token_ids == [5, 9] and trajectory.response_mask == [True, True] and trajectory.is_cut
    assert [len(ask.pictures) for ask in asked] == [1, 0]


def test_placeholders_without_their_pictures_are_the_program_s_mistake() -> None:
    async def policy(sample: Servers, number: int, ask: Ask) -> GenerateOutput:
        return GenerateOutput("r", 0, [5], [-0.5], "stop", 4)

    async def show(prompt: PromptRow, servers: Servers, tools: Tools) -> Trajectory:
        trajectory = servers.begin()
        await servers.generate(trajectory)
        trajectory.observe([9, 9])
        return trajectory

    own = Servers(policy, [1], SamplingParams(8), uid=7, sample_index=1, seed=5, placeholders=[9])
    with pytest.raises(UserCodeError, match="returned 2 placeholders for pictures of 0; give pictures with the tokens"):
        run_program(show, PROMPT, own, TOOLS)
