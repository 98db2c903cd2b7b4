"""The experts that SGLang's servers return, against the routers of the trainer on the same tokens and weights."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scalerl.errors import UserError
from scalerl.models import ModelShape
from scalerl.models.routing import RoutingShape, is_known
from scalerl.rollout.dispatcher import generate_samples
from scalerl.rollout.sampling.policy_servers import require_experts
from scalerl.rollout.servers.client import GenerateOutput, GenerateRequest, RolloutClient, SamplingParams
from scalerl.rollout.servers.requests import unfinished_requests
from tests.dist.launch import run_ranks
from tests.sglang.conftest import PROMPTS, Engine, make_model
from tests.tiny_models import make_tiny_model

TWO_CORES = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="SGLang on CPU binds each rank to a core of its own"
)
SAMPLING = SamplingParams(16, temperature=1.0, ignore_eos=True)
LONG = SamplingParams(80, temperature=1.0, ignore_eos=True)


def trainers_choices(model: str, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """[tokens, layers, k] of each row, by the trainer's own routers in float32."""
    from scalerl.batch.data_proto import DataProto, Jagged
    from scalerl.config.schema import MegatronConfig
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize

    groups = initialize(Layout(world_size=1), backend="gloo", timeout_s=60, seed=1)
    engine = MegatronEngine(model, MegatronConfig(dtype="float32"), groups, optim=None)
    shard = DataProto({"input_ids": Jagged.from_list([torch.tensor(row) for row in rows], torch.int64)})
    column = engine.logprobs(shard, [range(len(rows))], temperature=1.0, record_routing=True)["routed_experts"]
    return [column[row].clone() for row in range(len(rows))]


def num_different(model: Path, rows: Sequence[Sequence[int]], routed: Sequence[Tensor]) -> tuple[int, int]:
    """The known choices of `routed`, and how many of them are another set of experts than the trainer's."""
    (theirs,) = run_ranks(1, trainers_choices, str(model), list(rows), fresh=True)
    known = different = 0
    for mine, own in zip(routed, theirs, strict=True):
        own = own[: len(mine)]
        # What has no experts has none here and there.
        assert torch.equal(is_known(mine), is_known(own))
        known += int(is_known(mine).sum())
        different += int((mine.sort(-1).values != own.sort(-1).values).any(-1).sum())
    return known, different


class Served:
    """A server with a mixture that says its experts."""

    def __init__(self, path: Path, engine: Engine) -> None:
        self.path, self.engine = path, engine
        self.routing = RoutingShape.of(ModelShape.from_hf(path))

    def request(self, name: str, ids: list[int], sampling: SamplingParams = SAMPLING, **own: Any) -> GenerateRequest:
        n = own.pop("n", 1)
        return GenerateRequest(name, ids, n, sampling, list(range(n)), routing=self.routing, **own)

    def ask(self, *requests: GenerateRequest) -> list[GenerateOutput]:
        return self.engine.generate(list(requests))


def serve(start_engine: Callable[..., Engine], path: Path, tp_size: int = 1, **own: Any) -> Served:
    return Served(path, start_engine("sglang", path, tp_size=tp_size, enable_return_routed_experts=True, **own))


def round_sinks(path: Path) -> None:
    """To what a server keeps of gpt-oss's sinks, whatever the dtype of the model: bfloat16."""
    tensors = load_file(path / "model.safetensors")
    rounded = {name: tensor.bfloat16().float() for name, tensor in tensors.items() if name.endswith(".sinks")}
    assert rounded and not any(torch.equal(tensors[name], tensor) for name, tensor in rounded.items())
    save_file(tensors | rounded, path / "model.safetensors", metadata={"format": "pt"})


def check(served: Served) -> None:
    """Alone, in a batch, from the cache of prefixes, several samples of a prompt, and what follows a turn."""
    require_experts(served.engine.client, served.routing, str(served.path))
    rows: list[list[int]] = []
    routed: list[Tensor] = []

    def keep(ids: list[int], output: GenerateOutput) -> None:
        assert output.routed_experts is not None and output.routed_experts.dtype == torch.uint8
        assert len(output.routed_experts) == len(ids) + len(output.output_ids) - 1
        rows.append(ids + output.output_ids)
        routed.append(output.routed_experts)

    for number in range(2):
        for ids, output in zip(
            PROMPTS, served.ask(*(served.request(f"{number} {i}", ids) for i, ids in enumerate(PROMPTS))), strict=True
        ):
            keep(ids, output)
    for output in served.ask(served.request("n", PROMPTS[2], n=3)):
        keep(PROMPTS[2], output)
    (first,) = served.ask(served.request("first", PROMPTS[4]))
    assert first.routed_experts is not None
    # A further turn, with tokens of somebody else between: it asks for what is not known.
    context = PROMPTS[4] + first.output_ids + [17, 18, 19]
    (second,) = served.ask(served.request("second", context, routed_from=len(first.routed_experts)))
    assert second.routed_experts is not None
    rows.append(context + second.output_ids)
    routed.append(torch.cat([first.routed_experts, second.routed_experts]))
    known, different = num_different(served.path, rows, routed)
    assert known > 400 and different == 0


@pytest.fixture(scope="module")
def served(start_engine: Callable[..., Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = make_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe", seed=0, num_layers=3, num_experts=8)
    served = serve(start_engine, path)
    yield served
    served.engine.server.stop()


def test_experts_are_those_of_the_trainers_routers(served: Served) -> None:
    """Every choice of the sampler, in float32: of prompts, cached prefixes, samples of one prompt and turns."""
    check(served)


def test_a_request_that_does_not_ask_has_none(served: Served) -> None:
    (output,) = served.ask(GenerateRequest("plain", PROMPTS[0], 1, SAMPLING, [0]))
    assert output.routed_experts is None


def test_an_aborted_sample_that_continues_keeps_its_rows(served: Served) -> None:
    """As with a pause for new weights: `generate_samples` continues what somebody aborts."""
    over, num_aborts = threading.Event(), 0
    mine = served.engine.client
    client = RolloutClient(mine.url, "sglang", key=mine.key, max_model_len=mine.max_model_len)

    def disturb() -> None:
        nonlocal num_aborts
        while not over.wait(0.15):
            asyncio.run(client.abort_all())
            num_aborts += 1

    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        requests = [served.request(f"a{row}", ids, LONG, n=2) for row, ids in enumerate(PROMPTS)]
        outputs = asyncio.run(generate_samples([served.engine.client], requests))
    finally:
        over.set()
        disturber.join()
    assert num_aborts > 1
    prompts = {f"a{row}": ids for row, ids in enumerate(PROMPTS)}
    rows = [prompts[str(output.request_id)] + output.output_ids for output in outputs]
    routed = [output.routed_experts for output in outputs if output.routed_experts is not None]
    assert [len(of_row) + 1 for of_row in routed] == [len(row) for row in rows]
    assert num_different(served.path, rows, routed)[1] == 0


def test_rows_of_older_weights_stay(served: Served, tmp_path: Path) -> None:
    """The server computes the whole prefix again, with the new weights: the rows of the old ones are not replaced."""
    other = make_model(tmp_path / "other", "qwen3_moe", seed=5, num_layers=3, num_experts=8)
    request, outputs = served.request("p", PROMPTS[2], LONG), []
    client = served.engine.client

    async def interrupted() -> None:
        async def generate() -> None:
            outputs.extend([output async for output in client.generate(request)])

        task = asyncio.ensure_future(generate())
        await asyncio.sleep(0.1)
        while not task.done():
            await client.abort_all()
            await asyncio.sleep(0.05)
        await task

    asyncio.run(interrupted())
    (before,) = outputs
    assert before.finish_reason == "abort" and before.routed_experts is not None and len(before.output_ids) > 1
    served.engine.load(sorted(load_file(other / "model.safetensors").items()), policy_version=1)
    try:
        (rest,) = unfinished_requests([request], [before])
        (whole,) = served.ask(rest)
    finally:
        served.engine.load(sorted(load_file(served.path / "model.safetensors").items()), policy_version=2)
    assert whole.routed_experts is not None and len(whole.routed_experts) == len(PROMPTS[2]) + 80 - 1
    kept = len(before.routed_experts)
    assert torch.equal(whole.routed_experts[:kept], before.routed_experts)
    row = PROMPTS[2] + whole.output_ids
    (by_old,) = run_ranks(1, trainers_choices, str(served.path), [row], fresh=True)
    (by_new,) = run_ranks(1, trainers_choices, str(other), [row], fresh=True)
    sets = [column[0].sort(-1).values for column in (by_old, by_new)]
    mine = whole.routed_experts.sort(-1).values
    assert torch.equal(mine[:kept], sets[0][:kept])
    assert torch.equal(mine[kept:], sets[1][kept:-1])
    assert not torch.equal(mine[:kept], sets[1][:kept])


@pytest.mark.full
@pytest.mark.parametrize(("family", "tp_size", "ep_size"), [
    ("mixtral", 1, 1),
    ("deepseek_v3", 1, 1),
    ("glm4_moe", 1, 1),
    ("glm4_moe_lite", 1, 1),
    ("qwen3_5_moe_text", 1, 1),
    ("gpt_oss", 1, 1),
    pytest.param("deepseek_v3", 2, 1, marks=TWO_CORES),
    pytest.param("qwen3_moe", 2, 2, marks=TWO_CORES),
    pytest.param("mixtral", 2, 2, marks=TWO_CORES),
    pytest.param("deepseek_v3", 2, 2, marks=TWO_CORES),
    pytest.param("glm4_moe", 2, 2, marks=TWO_CORES),
    pytest.param("glm4_moe_lite", 2, 2, marks=TWO_CORES),
    pytest.param("qwen3_5_moe_text", 2, 2, marks=TWO_CORES),
    pytest.param("gpt_oss", 2, 1, marks=TWO_CORES),
])  # fmt: skip
def test_experts_of_a_family(
    start_engine: Callable[..., Engine], tmp_path: Path, family: str, tp_size: int, ep_size: int
) -> None:
    path = make_tiny_model(tmp_path / family, family, num_layers=3, num_experts=8, initializer_range=0.1)
    if family == "gpt_oss":
        round_sinks(path)
    served = serve(start_engine, path, tp_size, **({"ep_size": ep_size} if ep_size > 1 else {}))
    try:
        check(served)
    finally:
        served.engine.server.stop()


@pytest.mark.full
def test_a_server_that_cannot_say_them_is_refused(start_engine: Callable[..., Engine], tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "qwen3_moe", num_experts=8)
    engine = start_engine("sglang", path)
    with pytest.raises(
        UserError, match=r"routing_replay = rollout: the rollout server does not say .* gave no experts"
    ):
        require_experts(engine.client, RoutingShape.of(ModelShape.from_hf(path)), str(path))
    engine.server.stop()
