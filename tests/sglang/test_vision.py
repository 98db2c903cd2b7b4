"""Prompts with pictures on SGLang: the answers of transformers, after a change of the tower too."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from scalerl.config.schema import DataConfig
from scalerl.data import PromptRow, load_tokenizer
from scalerl.data.pictures import Picture, PictureProcessor, load_processor
from scalerl.rollout.program import Observation, Sample, Servers, Tools, Trajectory
from scalerl.rollout.samples import SampleRequest, make_samples
from scalerl.rollout.servers.checksums import checksum_differences
from scalerl.rollout.servers.client import GenerateRequest, RolloutError, SamplingParams
from scalerl.rollout.servers.requests import ABORTED
from tests.pictures import content, noise, write_processor
from tests.served_weights import expected_checksums
from tests.sglang.conftest import Engine
from tests.tiny_vision import IMAGE, load_tiny_vision_model, make_tiny_vision_model, sent_weights

MARK = f"<|vision_start|>{IMAGE}<|vision_end|>"
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
TEXTS = {"no picture": "hi", "one": f"hi {MARK} what", "two": f"a {MARK} b {MARK} c"}
PICTURES = {"no picture": [], "one": [0], "two": [0, 1]}
# Widths that SGLang pads: of the tower's MLPs to 96, on two ranks to 128; of experts (40) to 64 in both cases.
TOWER: dict[str, Any] = {"intermediate_size": 72}
# Of a mixture SGLang feeds three layers.
TOWERS = {"qwen3_vl_moe": TOWER | {"depth": 3, "deepstack_visual_indexes": [0, 1, 2]}}
# One number of a tensor of a changed model, the parameter that has it, and its rank of two where experts are apart.
SPOILED = {
    "qwen2_5_vl": ("visual.blocks.1.mlp.up_proj.weight", "visual.blocks.1.mlp.gate_up_proj.weight"),
    "qwen3_vl": ("model.visual.blocks.1.mlp.linear_fc2.weight", "visual.blocks.1.mlp.linear_fc2.weight"),
    "qwen3_vl_moe": (
        "model.language_model.layers.1.mlp.experts.gate_up_proj",
        "model.layers.1.mlp.experts.w13_weight",
    ),
    "qwen3_5": ("model.visual.blocks.1.mlp.linear_fc2.weight", "visual.blocks.1.mlp.linear_fc2.weight"),
    "qwen3_5_moe": (
        "model.language_model.layers.1.mlp.experts.3.up_proj.weight",
        "model.layers.1.mlp.experts.w13_weight",
    ),
}


def case(family: str, tp_size: int = 1, ep_size: int = 1) -> Any:
    layout = "".join(f"-{name}{size}" for name, size in (("tp", tp_size), ("ep", ep_size)) if size > 1)
    one_core = tp_size > 1 and len(os.sched_getaffinity(0)) < 2
    marks = [pytest.mark.skipif(one_core, reason="SGLang on CPU binds each rank to a core of its own")]
    if (family, tp_size) != ("qwen2_5_vl", 1):
        marks.append(pytest.mark.full)
    return pytest.param((family, tp_size, ep_size), id=family + layout, marks=marks)


CASES = [
    case("qwen2_5_vl"),
    case("qwen3_vl"),
    case("qwen3_vl_moe"),
    case("qwen2_5_vl", tp_size=2),
    case("qwen3_vl", tp_size=2),
    case("qwen3_vl_moe", tp_size=2),
    case("qwen3_vl_moe", tp_size=2, ep_size=2),
    case("qwen3_5"),
    case("qwen3_5_moe"),
    case("qwen3_5_moe", tp_size=2),
]


@dataclass
class Model:
    path: Path
    family: str
    processor: PictureProcessor
    tp_size: int
    own: dict[str, Any]
    hf: PreTrainedModel = field(init=False)

    def __post_init__(self) -> None:
        self.load()

    @property
    def tolerance(self) -> float:
        """Of gated delta nets that of test_sync_delta_net.py: float32 is 1e-5 off in transformers, too."""
        return 1e-4 if self.family.startswith("qwen3_5") else 1e-5

    def pictures(self, numbers: Sequence[int]) -> list[Picture]:
        images = [noise(1, 84, 56), noise(2, 60, 130), noise(3, 56, 84)]
        return [self.processor.read(content(images[number])) for number in numbers]

    def request(self, name: str, n: int = 1, sampling: SamplingParams = GREEDY) -> GenerateRequest:
        pictures = self.pictures(PICTURES[name])
        ids = Tools(load_tokenizer(self.path), 0).encode(TEXTS[name], pictures)
        return GenerateRequest(name, ids, n, sampling, list(range(n)), pictures=tuple(pictures))

    @torch.no_grad()
    def logprobs(self, ids: list[int], pictures: Sequence[Picture]) -> Tensor:
        """[len(ids), V] of one forward pass of transformers."""
        return self.hf.lm_head(self.hidden(ids, pictures)).log_softmax(-1).float()

    def load(self) -> None:
        """Reads transformers' model; of its own rounding a sum of float32 may have more than the server."""
        arguments = {"experts_implementation": "eager"} if self.family.endswith("_moe") else {}
        self.hf = load_tiny_vision_model(self.path, self.family, **arguments).eval().double()

    @torch.no_grad()
    def hidden(self, ids: list[int], pictures: Sequence[Picture]) -> Tensor:
        """[len(ids), hidden size]: what the head takes."""
        inputs = {"input_ids": torch.tensor([ids])}
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == self.processor.vision.image_token_id).int()
        if pictures:
            inputs["pixel_values"] = torch.cat(
                [torch.from_numpy(picture.pixel_values).double() for picture in pictures]
            )
            inputs["image_grid_thw"] = torch.tensor([picture.grid_thw for picture in pictures])
        return self.hf.model(**inputs, use_cache=False).last_hidden_state[0]

    def check(self, request: GenerateRequest, output_ids: list[int], logprobs: list[float]) -> None:
        rows = self.logprobs(request.input_ids + output_ids, request.pictures)[len(request.input_ids) - 1 : -1]
        assert output_ids == rows.argmax(-1).tolist()
        expected = rows.gather(1, torch.tensor(output_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=self.tolerance)


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    family, tp_size, ep_size = request.param
    tower = TOWERS.get(family, TOWER)
    path = make_tiny_vision_model(tmp_path_factory.mktemp("model"), family, num_layers=3, **tower)
    write_processor(path, family)
    processor = load_processor(path, DataConfig())
    assert processor is not None
    own = {"ep_size": ep_size} if ep_size > 1 else {}
    return Model(path, family, processor, tp_size, own)


@pytest.fixture(scope="module")
def engine(model: Model, start_engine: Callable[..., Engine]) -> Iterator[Engine]:
    engine = start_engine("sglang", model.path, model.tp_size, synced=True, **model.own)
    yield engine
    engine.server.stop()


def test_answers_are_those_of_transformers(model: Model, engine: Engine) -> None:
    """Whole ones, several of a prompt, and one that goes on after an interruption."""
    requests = [model.request("no picture"), model.request("one"), model.request("two", n=2)]
    outputs = engine.generate(requests)
    assert [output.finish_reason for output in outputs] == ["length"] * 4
    for request, output in zip([*requests, requests[2]], outputs, strict=True):
        model.check(request, output.output_ids, output.logprobs)
    whole = outputs[-1]
    begun = replace(
        whole, output_ids=whole.output_ids[:5], logprobs=whole.logprobs[:5], finish_reason=ABORTED, version_spans=()
    )
    (again,) = engine.generate([replace(requests[2], n=1, seeds=[1], progress=(begun,))])
    assert again.output_ids == whole.output_ids
    torch.testing.assert_close(torch.tensor(again.logprobs), torch.tensor(whole.logprobs), rtol=0, atol=model.tolerance)
    # The same tokens, and another picture of the same size.
    other = replace(requests[1], request_id="other", pictures=tuple(model.pictures([2])))
    (output,) = engine.generate([other])
    model.check(other, output.output_ids, output.logprobs)


def test_pictures_that_a_server_counts_otherwise_are_an_error(model: Model, engine: Engine) -> None:
    """And such whose placeholders are not there reach no server, which might never answer."""
    request = model.request("one")
    (picture,) = request.pictures
    ids = Tools(load_tokenizer(model.path), 0).encode(TEXTS["one"], [replace(picture, num_tokens=7)])
    wrong = replace(request, input_ids=ids, pictures=(replace(picture, num_tokens=7),))
    with pytest.raises(RolloutError, match=r"'one' sample 0: the server made \d+ tokens of a prompt with pictures"):
        engine.generate([wrong])
    with pytest.raises(ValueError, match=r"request 'one': (7 placeholders for picture 0|1 placeholders more)"):
        engine.generate([replace(request, input_ids=ids)])


def test_a_new_tower_answers_for_pictures_that_the_server_has_seen(model: Model, engine: Engine) -> None:
    """Experts are changed too."""
    request, config = model.request("two"), json.loads((model.path / "config.json").read_text())
    (before,) = engine.generate([request])
    stored, weights = load_file(model.path / "model.safetensors"), sent_weights(model.path, model.family)
    torch.manual_seed(4)
    new = weights | {
        name: tensor + 0.05 * torch.randn_like(tensor)
        for name, tensor in weights.items()
        if "visual" in name or ".experts." in name
    }

    def differences(loaded: dict[str, Tensor], policy_version: int) -> list[str]:
        engine.load(sorted(loaded.items()), policy_version, model.tp_size)
        named, own = sorted(new.items()), {"sglang": model.own}
        expected = expected_checksums(named, config, model.tp_size, "sglang", engine_kwargs=own)
        return checksum_differences(expected, engine.client.checksums())

    save_file(new, model.path / "model.safetensors", metadata={"format": "pt"})
    model.load()
    try:
        assert not differences(new, 1)
        (after,) = engine.generate([replace(request, request_id="again")])
        assert after.policy_version == 1 and after.output_ids != before.output_ids
        model.check(request, after.output_ids, after.logprobs)

        name, parameter = SPOILED[model.family]
        spoiled = new[name].clone()
        spoiled.view(-1)[-1] += 1e-6
        (line,) = differences(new | {name: spoiled}, 2)
        assert line.startswith(f"rank {model.tp_size - 1} {parameter}: trainer ")
    finally:
        engine.load(sorted(weights.items()), 0, model.tp_size)
        save_file(stored, model.path / "model.safetensors", metadata={"format": "pt"})
        model.load()


def test_programs_show_pictures_and_a_sampled_placeholder_ends_the_sample(model: Model, engine: Engine) -> None:
    """A picture in a later turn is seen; a policy that says the placeholder itself gets no picture for it."""
    shown = content(noise(4, 56, 56))

    async def look_twice(prompt: PromptRow, servers: Servers, tools: Tools) -> Trajectory:
        trajectory = servers.begin()
        await servers.generate(trajectory, max_new_tokens=3)
        picture = await tools.picture(shown)
        trajectory.observe(tools.encode(f"look {MARK}", [picture]), [picture])
        await servers.generate(trajectory, max_new_tokens=4)
        return trajectory

    def run(n: int, sampling: SamplingParams) -> list[Sample]:
        begun = model.request("one")
        row = PromptRow(0, begun.input_ids, len(begun.input_ids), "d", "", {}, [], "rule")
        samples: list[Sample] = []

        async def go() -> None:
            pictures = asyncio.ensure_future(asyncio.sleep(0, list(begun.pictures)))
            requests = [SampleRequest(0, i, row, sampling, i, pictures=pictures) for i in range(n)]
            tokenizer = load_tokenizer(model.path)
            await make_samples(
                [engine.client], requests, look_twice, tokenizer, samples.append, processor=model.processor
            )

        asyncio.run(go())
        return samples

    (sample,) = run(1, replace(GREEDY, max_new_tokens=40))
    (trajectory,) = sample.trajectories
    assert [len(turn.output_ids) for turn in trajectory.turns] == [3, 4] and len(trajectory.pictures) == 2
    assert isinstance(trajectory.parts[1], Observation)
    ids = trajectory.prompt_ids + trajectory.token_ids
    rows = model.logprobs(ids, trajectory.pictures)[len(trajectory.prompt_ids) - 1 : -1]
    mask = torch.tensor(trajectory.response_mask)
    expected = rows.gather(1, torch.tensor(trajectory.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(trajectory.logprobs)[mask], expected[mask], rtol=0, atol=model.tolerance)

    # A head that says it first of all.
    placeholder = model.processor.vision.image_token_id
    weights = sent_weights(model.path, model.family)
    direction = model.hidden(trajectory.prompt_ids, trajectory.pictures[:1])[-1]
    head = -direction.float().expand(len(weights["lm_head.weight"]), -1).clone()
    head[placeholder] = direction
    engine.load(sorted((weights | {"lm_head.weight": head}).items()), policy_version=1, tp_size=model.tp_size)
    try:
        (sample,) = run(1, replace(GREEDY, max_new_tokens=40, ignore_eos=False, stop_token_ids=(placeholder,)))
    finally:
        engine.load(sorted(weights.items()), policy_version=0, tp_size=model.tp_size)
    (trajectory,) = sample.trajectories
    assert trajectory.token_ids == [placeholder] and trajectory.response_mask == [True]
    assert len(trajectory.pictures) == 1 and trajectory.finish_reason == "length"
