"""What a program builds, what it gets again when it begins again, and what is said of one that is wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalerl.base.user_code import UserCodeError
from scalerl.config.schema import DataConfig, ProgramConfig
from scalerl.data import PromptRow, RLHFDataset
from scalerl.models.routing import RoutingShape
from scalerl.rollout.program import Ask, Servers, Tools, load_program, run_program, single_turn
from scalerl.rollout.samples import turn_seed
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
    return Servers(policy, PROMPT.input_ids, SamplingParams(max_tokens), uid=7, sample_index=1, seed=5, asks=asks)


async def with_a_tool(prompt: Any, servers: Servers, tools: Tools) -> Any:
    trajectory = servers.begin()
    await servers.generate(trajectory)
    trajectory.observe([50, 51])
    await servers.generate(trajectory, max_new_tokens=3)
    return trajectory


def test_turns_and_observations_are_one_sequence() -> None:
    policy = Policy()
    trajectory = asyncio.run(run_program(with_a_tool, PROMPT, servers(policy), TOOLS))
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
    samples = [asyncio.run(run_program(with_the_rows_functions, rows[i], servers(Policy()), TOOLS)) for i in range(2)]
    assert [sample.extra["functions"] for sample in samples] == [["add"], []]


def test_a_turn_asks_for_no_more_than_there_is_room_for() -> None:
    asked = servers(Policy(), max_tokens=6)
    asyncio.run(run_program(with_a_tool, PROMPT, asked, TOOLS))
    assert [ask.sampling.max_new_tokens for ask in asked.asks] == [6, 3]
    asked = servers(Policy(), max_tokens=4)
    asyncio.run(run_program(with_a_tool, PROMPT, asked, TOOLS))
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
    whole = asyncio.run(run_program(with_a_tool, PROMPT, first, TOOLS))
    record = first.record()
    cut = GenerateOutput("r", 0, [9], [-1.0], "abort", 4)
    policy = Policy()
    again = servers(policy, [record[0], Ask(record[1].input_ids, record[1].sampling, cut)])
    trajectory = asyncio.run(run_program(with_a_tool, PROMPT, again, TOOLS))
    assert policy.asked == [(1, [1, 2, 2, 50, 51], 1)]
    assert trajectory.token_ids == whole.token_ids
    # Interrupted before it came to the second turn, it keeps what it has of that.
    early = servers(Policy(), record)
    asyncio.run(run_program(single_turn, PROMPT, early, TOOLS))
    assert early.record() == record


def test_a_turn_asks_for_the_experts_that_no_turn_before_it_has() -> None:
    """The first for all, the second from the last token of the first on: two of the prompt, and none of token 2."""
    routing = RoutingShape((True,), 8, 2)

    async def policy(sample: Servers, number: int, ask: Ask) -> GenerateOutput:
        rows = routing.unknown(len(ask.input_ids) - ask.routed_from)
        return GenerateOutput("r", 0, [9], [-0.5], "stop", 4, routed_experts=rows)

    first = servers(policy)  # pyright: ignore[reportArgumentType]
    trajectory = asyncio.run(run_program(with_a_tool, PROMPT, first, TOOLS))
    assert [ask.routed_from for ask in first.asks] == [0, 2] and trajectory.num_routed == 5
    again = servers(Policy(), first.record())
    assert asyncio.run(run_program(with_a_tool, PROMPT, again, TOOLS)).num_routed == 5


def test_a_tool_that_answers_otherwise_makes_another_conversation() -> None:
    first = servers(Policy())
    asyncio.run(run_program(with_a_tool, PROMPT, first, TOOLS))
    record = first.record()
    other = [
        Ask([1, 2], record[0].sampling, record[0].output),
        Ask([1, 2, 2, 60], record[1].sampling, record[1].output),
    ]
    policy = Policy()
    again = servers(policy, [*other, Ask([0], record[1].sampling)])
    trajectory = asyncio.run(run_program(with_a_tool, PROMPT, again, TOOLS))
    assert policy.asked == [(1, [1, 2, 2, 50, 51], 0)] and trajectory.token_versions == [4, -1, -1, 5]
    assert len(again.record()) == 2


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

async def broken(prompt, servers, tools):
    return {}["tool"]

async def of_two(prompt, servers):
    pass

def not_async(prompt, servers, tools):
    pass
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "tool.py").write_text(PROGRAMS)
    return str(tmp_path / "tool.py")


def test_a_program_of_a_file(file: str) -> None:
    assert load_program(ProgramConfig()) is single_turn
    program = load_program(ProgramConfig(file))
    assert asyncio.run(run_program(program, PROMPT, servers(Policy()), TOOLS)).token_ids == [2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("not_async", r"program.path=.*tool.py does not define the async function 'not_async' .*no_turn, own_turn"),
        ("brokn", r"does not define .*; set actor_rollout_ref.rollout.program.name=broken"),
        ("of_two", r"program: of_two \(.*tool.py:36\) cannot be called with prompt, servers, tools"),
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
        ("broken", r"broken \(.*\) raised KeyError: 'tool' \(.*tool.py:34: return"),
    ],
)
def test_what_a_program_does_wrong_is_said_with_its_line(file: str, name: str, message: str) -> None:
    program = load_program(ProgramConfig(file, name))
    with pytest.raises(UserCodeError, match=f"^actor_rollout_ref.rollout.program: .*{message}"):
        asyncio.run(run_program(program, PROMPT, servers(Policy()), TOOLS))


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
        asyncio.run(run_program(program, prompt, servers(Policy()), TOOLS))
    assert prompt.extra_info == {"turns": [1]}
