"""An adapter on a server, beside its model: by versions, proven by checksums; transformers with merged weights is the
oracle."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scalerl.models import ModelShape
from scalerl.models.adapters import Adapter, projections
from scalerl.rollout.dispatcher import generate_samples
from scalerl.rollout.servers.checksums import checksum_differences
from scalerl.rollout.servers.client import ClientSettings, GenerateOutput, GenerateRequest, Replica, SamplingParams
from scalerl.rollout.servers.engines.base import Call
from scalerl.rollout.servers.purpose import POLICY
from scalerl.rollout.servers.requests import POLICY_ADAPTER, VERSION_MARK
from tests.gpu.isolated import run_isolated_ranks
from tests.served_adapters import ALPHA, RANK, Version, make_version, sync_adapter
from tests.served_weights import expected_checksums
from tests.sglang.conftest import MAX_MODEL_LEN, PROMPTS, Engine, Model, make_model
from tests.unit.merge.test_merge_adapters import run, save_adapter

TWO_CORES = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="SGLang on CPU binds each rank to a core of its own"
)
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
LONG = replace(GREEDY, max_new_tokens=80)


def merged(version: Version) -> Model:
    return Model.load(version.directory)


def requests_for(adapter: str | None, sampling: SamplingParams = GREEDY, n: int = 1) -> list[GenerateRequest]:
    return [
        GenerateRequest(f"{adapter} {row}", prompt, n, sampling, adapter=adapter) for row, prompt in enumerate(PROMPTS)
    ]


def ask(engine: Engine, adapter: str | None, sampling: SamplingParams = GREEDY, n: int = 1) -> list[GenerateOutput]:
    return engine.generate(requests_for(adapter, sampling, n))


def assert_samples_are_of(model: Model, outputs: list[GenerateOutput]) -> None:
    assert len(outputs) >= len(PROMPTS)
    for output in outputs:
        prompt, ids = PROMPTS[int(str(output.request_id).split()[1])], torch.tensor(output.output_ids)
        logprobs = model.logits([*prompt, *output.output_ids])[len(prompt) - 1 : -1].log_softmax(-1)
        assert logprobs.argmax(-1).tolist() == output.output_ids
        expected = logprobs.gather(1, ids[:, None])[:, 0]
        # As without an adapter (test_cpu_attention): SGLang adds up in another order.
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=2.5e-5, rtol=0)


def differences(
    engine: Engine, model: Model, version: Version, tp_size: int = 1, own: dict[str, int] | None = None
) -> list[str]:
    """Of the checksums: of the model's tensors, and of those of this version."""
    named = [(f"{POLICY_ADAPTER}-{version.number}/{name}", tensor) for name, tensor in version.tensors.items()]
    config, kwargs = model.hf.config.to_dict(), {"sglang": own or {}}
    weights = [*model.weights(), *named]
    expected = expected_checksums(weights, config, tp_size, "sglang", torch.float32, engine_kwargs=kwargs)
    return checksum_differences(expected, engine.client.checksums())


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.load(make_model(tmp_path_factory.mktemp("dense"), "qwen3", seed=0))


@pytest.fixture(scope="module")
def engine(start_engine: Callable[..., Engine], dense: Model) -> Iterator[Engine]:
    shape = ModelShape.from_hf(dense.path)
    engine = start_engine("sglang", dense.path, adapter=Adapter(RANK, ALPHA, projections(shape)))
    yield engine
    engine.server.stop()


def test_versions_follow_each_other_beside_the_model(engine: Engine, dense: Model, tmp_path: Path) -> None:
    first, second, third = (make_version(tmp_path / str(number), dense.path, number) for number in (1, 2, 3))
    assert_samples_are_of(dense, ask(engine, None))
    first.load(engine.client)
    assert_samples_are_of(merged(first), ask(engine, POLICY_ADAPTER))
    assert_samples_are_of(dense, ask(engine, None))
    # After a request for several samples SGLang's own count of requests is wrong.
    ask(engine, POLICY_ADAPTER, n=3)
    second.load(engine.client, by_value=True)
    assert engine.client.adapters() == ["policy-1", "policy-2"]
    both = engine.generate(requests_for(POLICY_ADAPTER) + requests_for(None))
    assert_samples_are_of(merged(second), both[: len(PROMPTS)])
    assert_samples_are_of(dense, both[len(PROMPTS) :])
    assert differences(engine, dense, second) == []

    third.load(engine.client)
    assert engine.client.adapters() == ["policy-2", "policy-3"]
    assert_samples_are_of(merged(third), ask(engine, POLICY_ADAPTER))
    # The same version once more, as after a save that took the weights off the device.
    replace(second, number=3).load(engine.client)
    assert engine.client.adapters() == ["policy-3"]
    assert_samples_are_of(merged(second), ask(engine, POLICY_ADAPTER))
    # A and B of each layer's joined queries, keys and values, output, joined gate and up, and down.
    lines = differences(engine, dense, third)
    assert len(lines) == 2 * 4 * dense.hf.config.num_hidden_layers
    assert all(line.startswith("rank 0 policy-3/base_model.model.model.layers.") for line in lines)


def test_a_running_request_keeps_its_version(engine: Engine, dense: Model, tmp_path: Path) -> None:
    old, new = (make_version(tmp_path / str(number), dense.path, number) for number in (11, 12))
    old.load(engine.client)
    # All requests of this client have the adapter.
    replica = Replica(engine.client.url, "sglang", 1, engine.client.key, adapter=POLICY_ADAPTER)
    client = ClientSettings(POLICY, MAX_MODEL_LEN, 120.0, 16).client(replica)
    running: list[GenerateOutput] = []
    long = requests_for(None, LONG)
    thread = threading.Thread(target=lambda: running.extend(asyncio.run(generate_samples([client], long))))
    thread.start()
    ask(engine, POLICY_ADAPTER, replace(GREEDY, max_new_tokens=1))
    new.load(engine.client)
    assert_samples_are_of(merged(new), ask(engine, POLICY_ADAPTER))
    thread.join()
    assert_samples_are_of(merged(old), running)


def test_an_adapter_of_some_projections(engine: Engine, dense: Model, tmp_path: Path) -> None:
    version = make_version(tmp_path / "some", dense.path, 21, ("k_proj", "o_proj", "up_proj"))
    version.load(engine.client)
    assert_samples_are_of(merged(version), ask(engine, POLICY_ADAPTER))


def check_merged(engine: Engine, model: Model, directory: Path) -> None:
    """What `scalerl merge` makes of a run's checkpoint: SGLang's answers with the directory of peft on its disk are
    those of transformers with the whole model."""
    actor, *_ = save_adapter(directory / "run", model.path)
    assert run(actor, directory / "peft") == 0 == run(actor, directory / "whole", "--merge-adapters")
    name = {"lora_name": f"merged{VERSION_MARK}1"}
    engine.client.ask(Call("/load_lora_adapter", name | {"lora_path": str(directory / "peft")}))
    assert_samples_are_of(Model.load(directory / "whole"), ask(engine, "merged"))
    # What a server holds is compared as a whole.
    engine.client.ask(Call("/unload_lora_adapter", name))


def test_a_merged_directory_of_peft_is_read(engine: Engine, dense: Model, tmp_path: Path) -> None:
    check_merged(engine, dense, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("family", "tp_size", "own"), [
    ("qwen2", 1, {}),
    ("llama", 1, {}),
    ("mistral", 1, {}),
    pytest.param("qwen3", 2, {}, marks=TWO_CORES),
    ("qwen3_moe", 1, {}),
    pytest.param("qwen3_moe", 2, {}, marks=TWO_CORES),
    pytest.param("qwen3_moe", 2, {"ep_size": 2}, marks=TWO_CORES),
])  # fmt: skip
def test_an_adapter_of_every_family(
    start_engine: Callable[..., Engine], tmp_path: Path, family: str, tp_size: int, own: dict[str, int]
) -> None:
    widths = {"moe_intermediate_size": 128} if family == "qwen3_moe" else {}
    model = Model.load(make_model(tmp_path / "model", family, 0, **widths))
    old, new = (make_version(tmp_path / str(number), model.path, number) for number in (1, 2))
    engine = start_engine("sglang", model.path, tp_size=tp_size, adapter=old.adapter, **own)
    try:
        old.load(engine.client, tp_size)
        assert_samples_are_of(merged(old), ask(engine, POLICY_ADAPTER))
        new.load(engine.client, tp_size)
        both = engine.generate(requests_for(POLICY_ADAPTER) + requests_for(None))
        assert_samples_are_of(merged(new), both[: len(PROMPTS)])
        assert_samples_are_of(model, both[len(PROMPTS) :])
        assert differences(engine, model, new, tp_size, own) == []
        check_merged(engine, model, tmp_path)
    finally:
        engine.server.stop()


def check_sync(engine: Engine, version: Version, model: Model, targets: tuple[str, ...], num_ranks: int = 1) -> None:
    """targets: those that the trainer has."""
    replica = Replica(engine.client.url, "sglang", num_ranks, engine.client.key)
    adapter, directory = replace(version.adapter, targets=targets), str(version.directory / "adapter")
    arguments = str(model.path), directory, adapter, replica, "float32"
    answers = run_isolated_ranks(num_ranks, sync_adapter, *arguments, device="cpu")
    assert {num_bytes for num_bytes, _ in answers} == {4 * sum(x.numel() for x in version.tensors.values())}
    outputs = ask(engine, POLICY_ADAPTER)
    assert_samples_are_of(merged(version), outputs)
    assert {output.policy_version for output in outputs} == {42 if num_ranks == 1 else 41}
    for _, error in answers if num_ranks == 1 else ():
        assert "does not serve policy version 42: 1 tensors differ" in error
        assert "rank 0 model.layers.1.input_layernorm.weight: trainer" in error


def test_a_trainer_sends_its_adapter_and_proves_the_model_below_it(
    engine: Engine, dense: Model, tmp_path: Path
) -> None:
    targets = ("k_proj", "o_proj", "up_proj")
    check_sync(engine, make_version(tmp_path / "sent", dense.path, 31, targets), dense, targets)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@TWO_CORES
def test_two_ranks_send_an_adapter_to_two(start_engine: Callable[..., Engine], tmp_path: Path, family: str) -> None:
    widths = {"moe_intermediate_size": 128} if family == "qwen3_moe" else {}
    model = Model.load(make_model(tmp_path / "model", family, 0, **widths))
    version = make_version(tmp_path / "sent", model.path, 1)
    engine = start_engine("sglang", model.path, tp_size=2, adapter=version.adapter)
    try:
        check_sync(engine, version, model, version.adapter.targets, 2)
    finally:
        engine.server.stop()
