"""Programs of several turns on real servers: each token under what was before it, over early ends and lost servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI

from scalerl.data import PromptRow
from scalerl.rollout.gateway.agent import as_program
from scalerl.rollout.gateway.session import Parsers
from scalerl.rollout.program import Ask, Program, Sample, Servers, Tools, Trajectory, single_turn
from scalerl.rollout.samples import SampleRequest, make_samples
from scalerl.rollout.servers.client import RolloutClient, SamplingParams
from tests.sglang.conftest import MAX_MODEL_LEN, PROMPTS, Engine, Model
from tests.sglang.test_recovery import Restart, gone
from tests.tiny_models import tiny_tokenizer

SAMPLING = SamplingParams(max_new_tokens=40, temperature=1.0, ignore_eos=True)
N = 3


TOKENIZER = tiny_tokenizer()


async def with_a_tool(prompt: PromptRow, servers: Servers, tools: Tools) -> Trajectory:
    """What the tool says depends on what the policy wrote."""
    trajectory = servers.begin()
    first = await servers.generate(trajectory, max_new_tokens=7)
    trajectory.observe([300 + first.output_ids[-1] % 100, 301])
    await servers.generate(trajectory, max_new_tokens=9)
    trajectory.observe([302])
    await servers.generate(trajectory)
    return trajectory


async def of_unequal_turns(prompt: PromptRow, servers: Servers, tools: Tools) -> Trajectory:
    """Its length depends on what the policy wrote: those that began together end one by one, over some 50 tokens."""
    trajectory = servers.begin()
    first = await servers.generate(trajectory, max_new_tokens=7)
    trajectory.observe([300] * (1 + first.output_ids[-1] % 16))
    second = await servers.generate(trajectory, max_new_tokens=9)
    trajectory.observe([302])
    await servers.generate(trajectory, max_new_tokens=1 + 7 * (second.output_ids[-1] % 7))
    return trajectory


async def two_calls(base_url: str, api_key: str, row: PromptRow) -> None:
    """A question, and another one after its answer; all of it by a client that knows nothing of tokens."""
    http = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": f"{row.uid}?"}]
    for number in range(2):
        answer = await http.chat.completions.create(model="policy", messages=messages, max_tokens=10 + 9 * number)
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "and?"}]


of_an_agent = as_program(two_calls, Parsers(), None)
# The program of an agent leaves room for what its template writes.
LONG = replace(SAMPLING, max_new_tokens=80)


def requests(
    asks: dict[tuple[int, int], Sequence[Ask]] | None = None, sampling: SamplingParams = SAMPLING
) -> list[SampleRequest]:
    """N samples of each prompt; asks: of those alone, which begin again."""
    prompts = [
        PromptRow(uid, ids, len(ids), "source", "truth", {}, [{"role": "user", "content": "?"}], "rule")
        for uid, ids in enumerate(PROMPTS)
    ]
    return [
        SampleRequest(row.uid, index, row, sampling, 100 * row.uid + index, (asks or {}).get((row.uid, index), ()))
        for row in prompts
        for index in range(N)
        if asks is None or (row.uid, index) in asks
    ]


def client_of(engine: Engine) -> RolloutClient:
    return RolloutClient(
        engine.client.url,
        engine.kind,
        key=engine.server.key,
        max_model_len=MAX_MODEL_LEN,
        timeout_s=120.0,
        max_concurrency=6,
    )


def made(
    clients: Sequence[RolloutClient],
    asked: Sequence[SampleRequest],
    program: Program = with_a_tool,
    stop_when: Callable[[list[Sample]], bool] | None = None,
    **kwargs: Any,
) -> tuple[dict[tuple[int, int], Trajectory], dict[tuple[int, int], list[Ask]]]:
    samples: list[Sample] = []
    stop = None if stop_when is None else lambda: stop_when(samples)
    left = asyncio.run(make_samples(clients, asked, program, TOKENIZER, samples.append, stop_when=stop, **kwargs))
    trajectories = [trajectory for sample in samples for trajectory in sample.trajectories]
    assert len({(t.uid, t.sample_index) for t in trajectories}) == len(trajectories), "a sample came twice"
    return {(t.uid, t.sample_index): t for t in trajectories}, left


def bits(samples: dict[tuple[int, int], Trajectory]) -> dict[tuple[int, int], tuple[Any, ...]]:
    return {key: (t.token_ids, t.response_mask, t.finish_reason) for key, t in samples.items()}


def test_each_token_is_drawn_under_all_that_was_before_it(engine: Engine, model_a: Model) -> None:
    samples, left = made([client_of(engine)], requests())
    assert len(samples) == N * len(PROMPTS) and left == {}
    for (uid, _), trajectory in samples.items():
        ids, mask = trajectory.token_ids, torch.tensor(trajectory.response_mask)
        assert [len(part.output_ids) for part in trajectory.parts] == [7, 2, 9, 1, 21]
        assert ids[7:9] == [300 + ids[6] % 100, 301] and ids[18] == 302
        assert mask.nonzero()[:, 0].tolist() == [*range(7), *range(9, 18), *range(19, 40)]
        expected = model_a.logprobs(PROMPTS[uid], ids, SAMPLING.temperature)
        torch.testing.assert_close(torch.tensor(trajectory.logprobs)[mask], expected[mask], atol=1e-4, rtol=0)
        assert trajectory.token_versions == [0 if is_sampled else -1 for is_sampled in mask.tolist()]
        assert trajectory.finish_reason == "length"
    assert len({tuple(t.token_ids) for t in samples.values()}) == len(samples)


def test_the_first_turns_of_a_group_are_one_request(engine: Engine) -> None:
    class Counting(RolloutClient):
        async def generate(self, request: Any) -> Any:
            sizes.append(request.n)
            async for output in super().generate(request):
                yield output

    sizes: list[int] = []
    client = client_of(engine)
    client.__class__ = Counting
    made([client], requests(), single_turn)
    assert sizes == [N] * len(PROMPTS)


@pytest.mark.parametrize("shared_engine", ["embedded"], indirect=True)
@pytest.mark.parametrize("program", [of_unequal_turns, of_an_agent])
def test_programs_that_an_early_end_leaves_go_on_where_they_were(engine: Engine, program: Program) -> None:
    """Ended again and again, each time after another sample or when a turn is half made."""

    class Counting(RolloutClient):
        async def generate(self, request: Any) -> Any:
            resumed.extend(len(output.output_ids) for output in request.progress)
            async for output in super().generate(request):
                yield output

    def client() -> RolloutClient:
        counting = client_of(engine)
        counting.__class__ = Counting
        return counting

    resumed: list[int] = []
    whole, _ = made([client()], requests(sampling=LONG), program)
    assert resumed == []
    num_kept_turns = num_half_turns = 0
    # A server may make all turns while this process does not get on: as often as it takes until it did not.
    for _ in range(20):
        trajectories: dict[tuple[int, int], Trajectory] = {}
        asks: dict[tuple[int, int], Sequence[Ask]] = {(r.uid, r.sample_index): () for r in requests()}
        while asks:
            asked = requests(asks, LONG)
            came, left = made([client()], asked, program, lambda samples: len(samples) >= 1)
            assert came.keys() | left.keys() == asks.keys() and not came.keys() & left.keys()
            trajectories |= came
            asks = left
            outputs = [ask.output for record in left.values() for ask in record if ask.output is not None]
            num_kept_turns += sum(output.finished for output in outputs)
            num_half_turns += sum(not output.finished and len(output.output_ids) > 0 for output in outputs)
        assert bits(trajectories) == bits(whole)
        for key, trajectory in trajectories.items():
            assert trajectory.logprobs == pytest.approx(whole[key].logprobs, abs=1e-5)
        if num_kept_turns > 0 and num_half_turns > 0:
            break
    assert num_kept_turns > 0 and num_half_turns > 0, "nothing was interrupted"
    assert sum(resumed) > 0, "half a turn was begun again"


@pytest.mark.parametrize("shared_engine", ["embedded"], indirect=True)
@pytest.mark.parametrize("program", [with_a_tool, of_an_agent])
def test_turns_of_a_server_that_is_lost_are_made_by_another(engine: Engine, program: Program) -> None:
    class Never(Restart):
        async def successor(self, *args: object) -> RolloutClient:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    whole, _ = made([client_of(engine)], requests(sampling=LONG), program)
    never = Never(lambda: None)
    samples, _ = made([gone(), client_of(engine)], requests(sampling=LONG), program, replacements=never)
    assert bits(samples) == bits(whole) and never.num_resubmitted > 0


@pytest.mark.parametrize("shared_engine", ["embedded"], indirect=True)
def test_a_program_that_fails_ends_the_generation(engine: Engine) -> None:
    async def failing(prompt: PromptRow, servers: Servers, tools: Tools) -> Trajectory:
        trajectory = await single_turn(prompt, servers, tools)
        if prompt.uid == 2:
            raise LookupError("no such tool")
        return trajectory

    with pytest.raises(LookupError, match="no such tool"):
        made([client_of(engine)], requests(), failing)
    # Nothing is left running, and the server takes requests.
    assert len(made([client_of(engine)], requests(), single_turn)[0]) == N * len(PROMPTS)
