"""An adapter on a server, beside its model: by versions, proven by checksums; transformers with merged weights is the
oracle."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scalerl.models import ModelShape
from scalerl.models.adapters import PEFT_PREFIX, Adapter, adapter_config, adapter_shapes, projections, write_peft
from scalerl.rollout.dispatcher import generate_samples
from scalerl.rollout.servers.buckets import Bucket
from scalerl.rollout.servers.checksums import checksum_differences
from scalerl.rollout.servers.client import ClientSettings, GenerateOutput, GenerateRequest, Replica, SamplingParams
from scalerl.rollout.servers.engines import ENGINES
from scalerl.rollout.servers.purpose import POLICY
from scalerl.rollout.servers.requests import POLICY_ADAPTER
from tests.gpu.isolated import run_isolated_ranks
from tests.served_weights import expected_checksums
from tests.sglang.conftest import MAX_MODEL_LEN, PROMPTS, Engine, Model, make_model

TWO_CORES = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="SGLang on CPU binds each rank to a core of its own"
)
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
LONG = replace(GREEDY, max_new_tokens=80)
RANK, ALPHA = 4, 8


@dataclass
class Version:
    """A version of an adapter of a model, and the model with it added to its weights."""

    number: int
    adapter: Adapter
    tensors: dict[str, Tensor]
    merged: Model

    def load(self, engine: Engine, tp_size: int, *, by_value: bool = False) -> None:
        bucket = Bucket(list(self.tensors.items()), by_value=by_value)
        blobs = [ENGINES["sglang"].serialize(bucket) for _ in range(tp_size)]
        engine.client.load_adapter(POLICY_ADAPTER, self.number, adapter_config(self.adapter), blobs)


def make_version(path: Path, model: Model, number: int, targets: tuple[str, ...] | None = None) -> Version:
    """Random A and B, so large that they change every token; those that are not of these targets are zero."""
    shape = ModelShape.from_hf(model.path)
    adapter = Adapter(RANK, ALPHA, targets or projections(shape))
    served = ENGINES["sglang"].served_adapter(adapter, shape)
    generator, mine = torch.Generator().manual_seed(number), adapter_shapes(shape, adapter)
    tensors = {
        name: 0.2 * torch.randn(size, generator=generator) if name in mine else torch.zeros(size)
        for name, size in adapter_shapes(shape, served).items()
    }
    weights = load_file(model.path / "model.safetensors")
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            matrix = name.removeprefix(PEFT_PREFIX).replace(".lora_A.", ".")
            weights[matrix] += served.scale * tensors[name.replace(".lora_A.", ".lora_B.")] @ a
    path.mkdir()
    for file in model.path.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return Version(number, served, tensors, Model.load(path))


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
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-5, rtol=0)


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
    first, second, third = (make_version(tmp_path / str(number), dense, number) for number in (1, 2, 3))
    assert_samples_are_of(dense, ask(engine, None))
    first.load(engine, 1)
    assert_samples_are_of(first.merged, ask(engine, POLICY_ADAPTER))
    assert_samples_are_of(dense, ask(engine, None))
    # After a request for several samples SGLang's own count of requests is wrong.
    ask(engine, POLICY_ADAPTER, n=3)
    second.load(engine, 1, by_value=True)
    assert engine.client.adapters() == ["policy-1", "policy-2"]
    both = engine.generate(requests_for(POLICY_ADAPTER) + requests_for(None))
    assert_samples_are_of(second.merged, both[: len(PROMPTS)])
    assert_samples_are_of(dense, both[len(PROMPTS) :])
    assert differences(engine, dense, second) == []

    third.load(engine, 1)
    assert engine.client.adapters() == ["policy-2", "policy-3"]
    assert_samples_are_of(third.merged, ask(engine, POLICY_ADAPTER))
    # The same version once more, as after a save that took the weights off the device.
    replace(second, number=3).load(engine, 1)
    assert engine.client.adapters() == ["policy-3"]
    assert_samples_are_of(second.merged, ask(engine, POLICY_ADAPTER))
    # A and B of each layer's joined queries, keys and values, output, joined gate and up, and down.
    lines = differences(engine, dense, third)
    assert len(lines) == 2 * 4 * dense.hf.config.num_hidden_layers
    assert all(line.startswith("rank 0 policy-3/base_model.model.model.layers.") for line in lines)


def test_a_running_request_keeps_its_version(engine: Engine, dense: Model, tmp_path: Path) -> None:
    old, new = (make_version(tmp_path / str(number), dense, number) for number in (11, 12))
    old.load(engine, 1)
    # All requests of this client have the adapter.
    replica = Replica(engine.client.url, "sglang", 1, engine.client.key, adapter=POLICY_ADAPTER)
    client = ClientSettings(POLICY, MAX_MODEL_LEN, 120.0, 16).client(replica)
    running: list[GenerateOutput] = []
    long = requests_for(None, LONG)
    thread = threading.Thread(target=lambda: running.extend(asyncio.run(generate_samples([client], long))))
    thread.start()
    ask(engine, POLICY_ADAPTER, replace(GREEDY, max_new_tokens=1))
    new.load(engine, 1)
    assert thread.is_alive()
    assert_samples_are_of(new.merged, ask(engine, POLICY_ADAPTER))
    thread.join()
    assert_samples_are_of(old.merged, running)


def test_an_adapter_of_some_projections(engine: Engine, dense: Model, tmp_path: Path) -> None:
    version = make_version(tmp_path / "some", dense, 21, targets=("k_proj", "o_proj", "up_proj"))
    version.load(engine, 1)
    assert_samples_are_of(version.merged, ask(engine, POLICY_ADAPTER))


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
    old, new = (make_version(tmp_path / str(number), model, number) for number in (1, 2))
    engine = start_engine("sglang", model.path, tp_size=tp_size, adapter=old.adapter, **own)
    try:
        old.load(engine, tp_size)
        assert_samples_are_of(old.merged, ask(engine, POLICY_ADAPTER))
        new.load(engine, tp_size)
        both = engine.generate(requests_for(POLICY_ADAPTER) + requests_for(None))
        assert_samples_are_of(new.merged, both[: len(PROMPTS)])
        assert_samples_are_of(model, both[len(PROMPTS) :])
        assert differences(engine, model, new, tp_size, own) == []
    finally:
        engine.server.stop()


def sync_adapter(
    model_path: str, adapter: Adapter, adapter_path: str, replica: Replica, own_tp_size: int
) -> tuple[int, str]:
    """Runs on each rank: sends an adapter as version 41; then again, once a weight of the model below it differs.

    Returns how many bytes were sent, and the error of the second time.
    """
    from scalerl.config.schema import MegatronConfig
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize
    from scalerl.rollout.sync.weight_sync import WeightSync, WeightSyncError

    layout = Layout(int(os.environ["WORLD_SIZE"]), tp_size=own_tp_size)
    groups = initialize(layout, backend="gloo", timeout_s=120, seed=1)
    config = MegatronConfig(dtype="float32", tensor_model_parallel_size=own_tp_size)
    engine = MegatronEngine(model_path, config, groups, optim=None, adapter=adapter, adapter_path=adapter_path)
    served = ENGINES["sglang"].served_adapter(adapter, engine.shape)
    model_config = json.loads((Path(model_path) / "config.json").read_text())
    sync = WeightSync(engine, [replica], model_config, bucket_bytes=100_000, timeout_s=120.0, adapter=served)
    report = sync.sync(41, verify=True)
    with torch.no_grad():
        dict(engine.chunks[0].named_parameters())["decoder.layers.1.input_layernorm.weight"][3] += 1e-3
    try:
        sync.sync(42, verify=True)
    except WeightSyncError as error:
        return report.num_bytes, str(error)
    return report.num_bytes, ""


def check_sync(
    engine: Engine, version: Version, path: Path, targets: tuple[str, ...], tp_size: int, world: int
) -> None:
    """targets: those that the trainer has; the server has others too, which are zero."""
    shape = ModelShape.from_hf(path)
    adapter = replace(version.adapter, targets=targets)
    mine = adapter_shapes(shape, adapter)
    write_peft(version.merged.path / "adapter", adapter, {name: version.tensors[name] for name in mine})
    replica = Replica(engine.client.url, "sglang", tp_size, engine.client.key)
    directory = str(version.merged.path / "adapter")
    answers = run_isolated_ranks(world, sync_adapter, str(path), adapter, directory, replica, world, device="cpu")
    sizes = {num_bytes for num_bytes, _ in answers}
    assert sum(4 * tensor.numel() for tensor in version.tensors.values()) in sizes
    (error,) = {error for _, error in answers if error}
    assert f"does not serve policy version 42: {tp_size} tensors differ" in error
    assert "model.layers.1.input_layernorm.weight: trainer" in error
    outputs = ask(engine, POLICY_ADAPTER)
    assert_samples_are_of(version.merged, outputs)
    assert {output.policy_version for output in outputs} == {42}


def test_a_trainer_sends_its_adapter_and_proves_the_model_below_it(
    engine: Engine, dense: Model, tmp_path: Path
) -> None:
    targets = ("k_proj", "o_proj", "up_proj")
    version = make_version(tmp_path / "sent", dense, 31, targets=targets)
    check_sync(engine, version, dense.path, targets, 1, 1)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@TWO_CORES
def test_two_ranks_send_an_adapter_to_two(start_engine: Callable[..., Engine], tmp_path: Path, family: str) -> None:
    widths = {"moe_intermediate_size": 128} if family == "qwen3_moe" else {}
    model = Model.load(make_model(tmp_path / "model", family, 0, **widths))
    version = make_version(tmp_path / "sent", model, 1)
    engine = start_engine("sglang", model.path, tp_size=2, adapter=version.adapter)
    try:
        check_sync(engine, version, model.path, version.adapter.targets, 2, 2)
    finally:
        engine.server.stop()
