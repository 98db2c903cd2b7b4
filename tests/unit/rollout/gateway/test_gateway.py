"""Agents on OpenAI's client: what they get, and the tokens that their samples are made of."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import AsyncOpenAI, AuthenticationError, BadRequestError, OpenAI

from scalerl.base.user_code import UserCodeError
from scalerl.config.schema import ProgramConfig
from scalerl.data import PromptRow
from scalerl.data.chat import encode, render
from scalerl.models.routing import RoutingShape
from scalerl.rewards import ScoreResult
from scalerl.rollout.gateway.agent import as_program
from scalerl.rollout.gateway.session import Parsers
from scalerl.rollout.load_program import load_program
from scalerl.rollout.program import Ask, Sample, Servers, Tools, Trajectory, run_program
from scalerl.rollout.sampling.sample_columns import to_batch
from scalerl.rollout.servers.requests import GenerateOutput, RolloutError, SamplingParams
from tests.tiny_models import tiny_tokenizer

END = 2
TOKENIZER = tiny_tokenizer()
USER = {"role": "user", "content": "2+2?"}
PROMPT = PromptRow(3, [1, 2], 2, "source", "truth", {"split": "train"}, [USER], "rule")
Agent = Callable[[str, str, Any], Awaitable[Any]]


class Policy:
    """Answers a0, a1, ... in the order of the requests. waiting: requests that wait, if it is held."""

    def __init__(self) -> None:
        self.inputs: list[list[int]] = []
        self.held = asyncio.Event()
        self.held.set()
        self.error: Exception | None = None

    async def __call__(self, sample: Servers, number: int, ask: Ask) -> GenerateOutput:
        if self.error is not None:
            raise self.error
        self.inputs.append(ask.input_ids)
        mine = len(self.inputs) - 1
        await self.held.wait()
        ids = [*encode(TOKENIZER, [f"a{mine}"])[0], END][: ask.sampling.max_new_tokens]
        reason = "stop" if ids[-1] == END else "length"
        return GenerateOutput("r", 0, ids, [-0.5] * len(ids), reason, 4)


def sample_of(agent: Any, policy: Policy | None = None, max_tokens: int = 200, **kwargs: Any) -> Sample:
    servers = Servers(
        policy or Policy(),
        PROMPT.input_ids,
        SamplingParams(max_tokens),
        uid=7,
        sample_index=1,
        seed=5,
        max_prompt_length=100,
        **kwargs,
    )
    program = as_program(agent, Parsers(), None)

    async def made() -> Sample:
        try:
            return await asyncio.wait_for(run_program(program, PROMPT, servers, Tools(TOKENIZER, 0)), 60)
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            assert not [task for task in others if not task.done()] or await asyncio.wait(others, timeout=5)

    return asyncio.run(made())


def client(base_url: str, api_key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)


async def said(http: AsyncOpenAI, *messages: Any, **kwargs: Any) -> str:
    answer = await http.chat.completions.create(model="policy", messages=list(messages), **kwargs)
    return answer.choices[0].message.content or ""


def answered(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def of(trajectory: Trajectory) -> tuple[str, list[tuple[str, bool]]]:
    """Prompt, and each part as text and whether it is trained."""
    parts = [(TOKENIZER.decode(part.output_ids), isinstance(part, GenerateOutput)) for part in trajectory.parts]
    return str(TOKENIZER.decode(trajectory.prompt_ids)), parts


def test_turns_of_a_conversation_are_one_trajectory() -> None:
    async def agent(base_url: str, api_key: str, row: PromptRow) -> float:
        http = client(base_url, api_key)
        messages: list[Any] = list(row.messages)
        for question in ("why?", "sure?", None):
            answer = await http.chat.completions.create(model="policy", messages=messages)
            choice, usage = answer.choices[0], answer.usage
            assert choice.finish_reason == "stop" and usage is not None and usage.completion_tokens == 3
            messages += [choice.message.model_dump(), {"role": "user", "content": question}]
        assert usage.prompt_tokens == len(policy.inputs[-1])
        assert [model.id async for model in http.models.list()] == ["policy"]
        return 0.5

    policy = Policy()
    (trajectory,) = sample_of(agent, policy).trajectories
    prompt, parts = of(trajectory)
    assert prompt == render(TOKENIZER, [USER], add_generation_prompt=True)
    observed = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert parts == [
        ("a0<|im_end|>", True),
        (observed.format("why?"), False),
        ("a1<|im_end|>", True),
        (observed.format("sure?"), False),
        ("a2<|im_end|>", True),
    ]
    assert policy.inputs[-1] == trajectory.prompt_ids + trajectory.token_ids[:-3] and trajectory.reward == 0.5


def test_what_differs_is_a_branch_and_nothing_is_trained_twice() -> None:
    """Two ends of one conversation, a third by other words of the policy's own, and a sub-agent in between."""

    async def agent(base_url: str, api_key: str, row: PromptRow) -> dict[str, Any]:
        http = client(base_url, api_key)
        first = await said(http, USER)
        sub = await said(http, {"role": "system", "content": "check"}, USER)
        ends = [await said(http, USER, answered(first), {"role": "user", "content": end}) for end in ("x", "y")]
        await said(http, USER, answered("other"), {"role": "user", "content": "z"})
        return {"sub": sub, "ends": ends}

    sample = sample_of(agent)
    trained = [[text for text, is_trained in of(t)[1] if is_trained] for t in sample.trajectories]
    assert trained == [["a1<|im_end|>"], ["a0<|im_end|>", "a2<|im_end|>"], ["a3<|im_end|>"], ["a4<|im_end|>"]]
    branch = sample.trajectories[2]
    assert branch.token_ids[:3] == sample.trajectories[1].token_ids[:3] and not any(branch.response_mask[:3])
    assert sample.trajectories[-1].extra == {"sub": "a1", "ends": ["a2", "a3"]} and branch.reward is None


def test_experts_of_branches_are_known_from_the_first_token_on() -> None:
    """Each token's are its position here. A conversation, a branch of it that goes on, and a branch of the branch."""
    routing = RoutingShape((True,), 256, 1)

    class Routed(Policy):
        async def __call__(self, sample: Servers, number: int, ask: Ask) -> GenerateOutput:
            output = await super().__call__(sample, number, ask)
            positions = torch.arange(ask.routed_from, len(ask.input_ids) + len(output.output_ids) - 1)
            return replace(output, routed_experts=positions.view(-1, 1, 1).to(torch.uint8))

    async def agent(base_url: str, api_key: str, row: PromptRow) -> None:
        http = client(base_url, api_key)

        async def more(said_before: list[Any], question: str) -> list[Any]:
            messages = [*said_before, {"role": "user", "content": question}]
            return [*messages, answered(await said(http, *messages))]

        first = await more([], "2+2?")
        await more(await more(first, "x"), "y")
        branch = await more(await more(first, "z"), "u")
        await more(branch, "v")
        await more(branch, "w")

    trajectories = sample_of(agent, Routed(), routing=routing).trajectories
    columns = to_batch(trajectories, [PROMPT] * 3, [ScoreResult(0.0)] * 3, [0] * 3, routing=routing)
    assert [sum(row.tolist()) for row in map(columns.tokens["response_mask"].__getitem__, range(3))] == [9, 9, 3]
    for row in range(3):
        experts = columns.tokens["routed_experts"][row].flatten().tolist()
        assert experts[:-1] == list(range(len(experts) - 1))


def test_a_request_whose_client_went_away_leaves_nothing() -> None:
    async def agent(base_url: str, api_key: str, row: PromptRow) -> None:
        policy.held.clear()
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}) as http:
            with pytest.raises(httpx.ReadTimeout):
                await http.post(f"{base_url}/chat/completions", json={"messages": [USER]}, timeout=0.2)
        # The end of a connection comes to the other side.
        await asyncio.sleep(0.2)
        policy.held.set()
        await said(client(base_url, api_key), USER)

    policy = Policy()
    (trajectory,) = sample_of(agent, policy).trajectories
    assert len(policy.inputs) == 2 and of(trajectory)[1] == [("a1<|im_end|>", True)]


def test_streams_are_what_clients_expect() -> None:
    async def agent(base_url: str, api_key: str, row: PromptRow) -> None:
        create = client(base_url, api_key).chat.completions.create
        options: Any = {"include_usage": True}
        chunks = [
            chunk
            async for chunk in await create(model="m", messages=[USER], stream=True, stream_options=options)  # type: ignore[arg-type]
        ]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
        assert text == "a0" and reasons[-1] == "stop" and set(reasons[:-1]) == {None}
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 3

    (trajectory,) = sample_of(agent).trajectories
    assert of(trajectory)[1] == [("a0<|im_end|>", True)]


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"temperature": 0.5},
        {"logit_bias": {"5": 1}},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"regex": "a"}},
        {"logprobs": True},
    ],
)
def test_what_would_be_drawn_otherwise_is_refused_by_name(more: dict[str, Any]) -> None:
    async def agent(base_url: str, api_key: str, row: PromptRow) -> None:
        http = client(base_url, api_key)
        (name,) = more.get("extra_body", more)
        with pytest.raises(BadRequestError) as refused:
            await said(http, USER, **more)
        assert refused.value.code == "unsupported_parameter" and refused.value.param == name
        await said(http, USER, n=1, temperature=1.0, top_p=1.0, tool_choice="auto")

    assert len(sample_of(agent).trajectories) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"no json",
        b"[]",
        b"{}",
        b'{"messages": []}',
        b'{"messages": [{"content": "2+2?"}]}',
        b'{"messages": [{"role": "user", "content": 5}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]}',
        b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]}',
        b'{"messages": [{"role": "user", "content": "2+2?"}], "stop": [5]}',
        b'{"messages": [{"role": "user", "content": "2+2?"}], "stream": true, "stream_options": ["include_usage"]}',
        b'{"messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 0}',
    ],
)
def test_a_request_that_is_wrong_is_the_clients_fault(body: bytes) -> None:
    async def agent(base_url: str, api_key: str, row: PromptRow) -> None:
        await said(client(base_url, api_key), USER)
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}) as http:
            answer = await http.post(f"{base_url}/chat/completions", content=body)
            assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"

    assert len(sample_of(agent).trajectories) == 1


def test_a_conversation_without_room_ends_as_frameworks_know_it() -> None:
    async def agent(base_url: str, api_key: str, row: PromptRow) -> None:
        http = client(base_url, api_key)
        answer = await http.chat.completions.create(model="policy", messages=[USER], max_tokens=2)  # type: ignore[list-item]
        assert answer.choices[0].finish_reason == "length"
        for messages in (
            [USER, answered("a0"), {"role": "user", "content": "x" * 40}],
            [{"role": "user", "content": "x" * 200}],
        ):
            with pytest.raises(BadRequestError) as refused:
                await said(http, *messages)
            assert refused.value.code == "context_length_exceeded"

    (trajectory,) = sample_of(agent, max_tokens=50).trajectories
    assert of(trajectory)[1] == [("a0", True)] and trajectory.finish_reason == "length"


def test_the_score_may_be_posted() -> None:
    async def agent(base_url: str, api_key: str, row: PromptRow) -> None:
        await said(client(base_url, api_key), USER)
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}) as http:
            wrong = await http.post(f"{base_url}/reward", json={"reward": "good"})
            assert wrong.status_code == 400 and "must be a finite number" in wrong.text
            wrong = await http.post(f"{base_url}/reward", json={"reward": 2, "extra": [3]})
            assert wrong.status_code == 400 and "extra is [3]" in wrong.text
            assert (await http.post(f"{base_url}/reward", content=b" " * (2**26 + 1))).status_code == 413
            posted = await http.post(f"{base_url}/reward", json={"reward": 2, "extra": {"tests": 3}})
            assert posted.status_code == 200

    (trajectory,) = sample_of(agent).trajectories
    assert (trajectory.reward, trajectory.extra) == (2.0, {"tests": 3})


async def post_reward(http: AsyncOpenAI, **body: Any) -> None:
    await http.post("/reward", cast_to=object, body=body)


@pytest.mark.parametrize(("returned", "of_third"), [(None, None), (0.5, 0.5), ({"score": 0.5, "moves": 3}, 0.5)])
def test_agents_that_models_name_have_scores_of_their_own(returned: Any, of_third: float | None) -> None:
    """What one says is another's prompt, even where their messages are the same."""

    async def agent(base_url: str, api_key: str, row: PromptRow) -> Any:
        http = client(base_url, api_key)

        async def say(who: str, *messages: Any) -> str:
            answer = await http.chat.completions.create(model=f"policy:{who}", messages=list(messages))
            assert answer.model == f"policy:{who}"
            return answer.choices[0].message.content or ""

        white = await say("white", USER)
        black = await say("black", USER)
        assert (white, black) == ("a0", "a1")
        # The conversation of white, which black has seen.
        await say("black", USER, answered(white), {"role": "user", "content": "and you?"})
        await say("white", USER, answered(white), {"role": "user", "content": "and you?"})
        await said(http, {"role": "user", "content": "who has won?"})
        with pytest.raises(BadRequestError, match=r"agent is 'with', which has no answer yet: .* policy:with; those"):
            await post_reward(http, reward=1.0, agent="with")
        await post_reward(http, reward=1.0, agent="white", extra={"pieces": 2})
        await post_reward(http, reward=-1.0, agent="black")
        return returned

    sample = sample_of(agent)
    extra = {"moves": 3} if isinstance(returned, dict) else {}
    of_agent = {
        episode[0].agent: (len(episode), {t.reward for t in episode if t is not episode[-1]}, episode[-1])
        for episode in sample.episodes
    }
    assert [(n, rest, t.reward, t.extra) for n, rest, t in of_agent.values()] == [
        (2, {None}, -1.0, extra),
        (1, set(), 1.0, extra | {"pieces": 2}),
        (1, set(), of_third, extra),
    ]
    assert list(of_agent) == ["black", "white", ""]
    trained = {name: [text for text, is_trained in of(t)[1] if is_trained] for name, (*_, t) in of_agent.items()}
    assert trained == {
        "black": ["a2<|im_end|>"],
        "white": ["a0<|im_end|>", "a3<|im_end|>"],
        "": ["a4<|im_end|>"],
    }


def test_a_posted_score_is_that_of_every_agent_that_has_none() -> None:
    async def agent(base_url: str, api_key: str, row: PromptRow) -> None:
        http = client(base_url, api_key)
        for who in ("policy:white", "policy:black", "gpt-4o"):
            await http.chat.completions.create(model=who, messages=[USER])  # type: ignore[list-item]
        await post_reward(http, reward=0.25, extra={"moves": 3})
        await post_reward(http, reward=0.5, agent="")

    episodes = sample_of(agent).episodes
    assert {(e[-1].agent, e[-1].reward, e[-1].extra["moves"]) for e in episodes} == {
        ("white", 0.25, 3),
        ("black", 0.25, 3),
        ("", 0.5, 3),
    }


@pytest.mark.parametrize("is_posted", [False, True])
def test_turns_are_rewarded_by_the_ids_of_their_answers(is_posted: bool) -> None:
    """Also the turn that two conversations have in common, which counts once."""

    async def agent(base_url: str, api_key: str, row: PromptRow) -> Any:
        http, ids = client(base_url, api_key), []
        for question in (None, USER, {"role": "user", "content": "2"}):
            messages: list[Any] = [USER, answered("a0"), question] if question else [USER]
            ids.append((await http.chat.completions.create(model="policy", messages=messages)).id)
        rewards = dict(zip(ids, (0.25, -1, 2.5), strict=True))
        if not is_posted:
            return {"turn_rewards": rewards, "tests": 3}
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}) as post:
            for wrong_rewards in (rewards | {"x": 1}, {ids[0]: "good"}, [1]):
                wrong = await post.post(f"{base_url}/reward", json={"turn_rewards": wrong_rewards})
                assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "turn_rewards"
            assert (await post.post(f"{base_url}/reward", json={"turn_rewards": rewards})).status_code == 200
        return {"tests": 3}

    first, second = sample_of(agent).trajectories
    assert [turn.reward for turn in first.turns] == [0.25, -1.0] and [turn.reward for turn in second.turns] == [2.5]
    assert (second.reward, second.extra) == (None, {"tests": 3})


def test_an_agent_that_rewards_what_it_did_not_ask_for_is_told() -> None:
    async def agent(base_url: str, api_key: str, row: PromptRow) -> Any:
        await said(client(base_url, api_key), USER)
        return {"score": 1.0, "turn_rewards": {"chatcmpl-1": 0.5}}

    with pytest.raises(UserCodeError, match=r"turn_rewards has 'chatcmpl-1': 0.5; it must have ids of this sample's"):
        sample_of(agent)


def test_an_agent_may_be_a_plain_function() -> None:
    """It waits in a thread, while others of the same loop get their answers."""

    def agent(base_url: str, api_key: str, row: PromptRow) -> float:
        assert threading.current_thread() is not threading.main_thread()
        http = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        answer = http.chat.completions.create(model="policy", messages=[USER])  # type: ignore[list-item]
        return float(answer.choices[0].message.content == "a0")

    assert sample_of(agent).trajectories[0].reward == 1.0


@pytest.mark.parametrize("sent", ["a", "a0"])
def test_an_answer_may_come_back_with_the_text_that_ended_it(sent: str) -> None:
    """As frameworks do that stop at a closing tag, and write the tag into what they remember."""

    async def agent(base_url: str, api_key: str, row: PromptRow) -> None:
        http = client(base_url, api_key)
        assert await said(http, USER, stop=["0"]) == "a"
        await said(http, USER, answered(sent), USER)

    (trajectory,) = sample_of(agent).trajectories
    assert [text for text, is_trained in of(trajectory)[1] if is_trained] == ["a0<|im_end|>", "a1<|im_end|>"]


def test_a_key_is_one_samples_alone() -> None:
    keys: list[tuple[str, str]] = []

    async def agent(base_url: str, api_key: str, row: PromptRow) -> None:
        keys.append((base_url, api_key))
        await said(client(base_url, api_key), USER)
        with pytest.raises(AuthenticationError):
            await said(client(base_url, "guessed"), USER)

    for _ in range(2):
        sample_of(agent)
    assert keys[0][1] != keys[1][1] and keys[0][0].startswith("http://127.0.0.1:")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{keys[1][0]}/models")


def test_what_servers_raise_ends_the_run_whatever_the_agent_makes_of_it() -> None:
    async def agent(base_url: str, api_key: str, row: PromptRow) -> float:
        while True:
            try:
                await said(client(base_url, api_key), USER)
            except Exception:
                await asyncio.sleep(0.01)

    policy = Policy()
    policy.error = RolloutError("the server is gone")
    with pytest.raises(RolloutError, match="the server is gone"):
        sample_of(agent, policy)


FILE = """
async def agent(base_url, api_key, row):
    from openai import AsyncOpenAI
    http = AsyncOpenAI(base_url=base_url, api_key=api_key)
    await http.chat.completions.create(model="policy", messages=row.messages)
    return {"agent": 1.0, "broken": float("nan"), "silent": None}["agent"]

def silent(base_url, api_key, row):
    return 1.0

def no_number(base_url, api_key, row):
    from openai import OpenAI
    OpenAI(base_url=base_url, api_key=api_key).chat.completions.create(model="policy", messages=row.messages)
    return "good"

async def broken(base_url, api_key, row):
    return row.extra_info["level"]
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("agent", None),
        ("silent", r"silent \(.*agents.py:8\) ended without an answer of the policy, on prompt 3 sample 1"),
        ("no_number", r"no_number \(.*\) returned 'good'; return a finite number, a dict with `score`"),
        ("broken", r"broken \(.*\) raised KeyError: 'level' \(.*agents.py:17: return.*, on prompt 3 sample 1"),
    ],
)
def test_agents_of_a_file(tmp_path: Path, name: str, message: str | None) -> None:
    (tmp_path / "agents.py").write_text(FILE)
    program = load_program(ProgramConfig(str(tmp_path / "agents.py"), name))
    servers = Servers(Policy(), PROMPT.input_ids, SamplingParams(200), uid=7, sample_index=1, seed=5)
    if message is None:
        sample = asyncio.run(run_program(program, PROMPT, servers, Tools(TOKENIZER, 0)))
        assert sample.trajectories[0].reward == 1.0
        return
    with pytest.raises(UserCodeError, match=f"^actor_rollout_ref.rollout.program: {message}"):
        asyncio.run(run_program(program, PROMPT, servers, Tools(TOKENIZER, 0)))
