"""What the engines say of themselves, and that nobody else asks which one it is; a third: tests/sglang."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import scalerl
from scalerl.commands import serve
from scalerl.config.schema import RolloutConfig
from scalerl.config.schema.devices import DevicesConfig
from scalerl.config.servers import ROLLOUT_ENGINES
from scalerl.models import ModelShape
from scalerl.models.adapters import Adapter
from scalerl.rollout.servers.engines import ENGINES, Launch
from scalerl.rollout.servers.host import ServerHost, start_timeout_s
from scalerl.rollout.servers.process import RolloutServer
from scalerl.rollout.servers.purpose import POLICY
from scalerl.rollout.servers.requests import GenerateRequest, SamplingParams, slots_of
from tests.model_configs import read_config

SCALERL = Path(scalerl.__file__).parent
REQUEST = GenerateRequest("p", [5, 6], 2, SamplingParams(max_new_tokens=4), seeds=[7, 8])


def test_the_configuration_knows_their_names() -> None:
    assert set(ROLLOUT_ENGINES) == set(ENGINES)
    assert all(engine.name == name for name, engine in ENGINES.items())


def test_sglang_computes_the_prompt_of_equal_samples_once() -> None:
    body = ENGINES["sglang"].generate(REQUEST, slots_of(REQUEST, 100)).body
    assert (body["input_ids"], body["sampling_params"]["n"]) == ([5, 6], 2)
    assert body["sampling_params"]["skip_special_tokens"] is False and "sampling_seed" not in body["sampling_params"]


def test_the_embedded_engine_draws_each_sample_from_its_own_seed() -> None:
    body = ENGINES["embedded"].generate(REQUEST, slots_of(REQUEST, 100)).body
    assert body["input_ids"] == [[5, 6], [5, 6]]
    assert [sampling["sampling_seed"] for sampling in body["sampling_params"]] == [7, 8]
    with pytest.raises(ValueError, match="needs seeds, one per sample"):
        unseeded = GenerateRequest("p", [5, 6], 1, SamplingParams(max_new_tokens=4))
        ENGINES["embedded"].generate(unseeded, slots_of(unseeded, 100))


def test_requests_for_an_adapter_name_it() -> None:
    assert "lora_path" not in (ENGINES["sglang"].generate(REQUEST, slots_of(REQUEST, 100)).body or {})
    request = replace(REQUEST, adapter="policy")
    assert ENGINES["sglang"].generate(request, slots_of(request, 100)).body["lora_path"] == "policy"


@pytest.mark.parametrize(("targets", "served"), [
    (("o_proj",), ("o_proj",)),
    (("v_proj",), ("q_proj", "k_proj", "v_proj")),
    (("o_proj", "up_proj"), ("o_proj", "gate_proj", "up_proj", "down_proj")),
])  # fmt: skip
def test_sglang_takes_adapters_of_all_projections_that_it_joins(
    targets: tuple[str, ...], served: tuple[str, ...]
) -> None:
    shape = ModelShape.from_config(read_config("qwen3-8b"))
    assert ENGINES["sglang"].served_adapter(Adapter(4, 8, targets), shape) == Adapter(4, 8, served)


def test_adapters_that_sglang_would_compute_wrongly_are_refused() -> None:
    def violations(model: str, device: str, **config: Any) -> list[str]:
        shape, rollout = ModelShape.from_config(read_config(model)), RolloutConfig(**config)
        return list(ENGINES["sglang"].adapter_violations(rollout, shape, section="rollout", device=device))

    assert violations("qwen3-8b", "cuda") == violations("qwen3-8b", "cpu") == []
    (unknown,) = violations("glm-4-32b", "cuda")
    assert "not known to compute with adapters of a glm4 model" in unknown
    (rounded,) = violations("qwen3-8b", "cuda", quantization="fp8")
    assert rounded.startswith("rollout.quantization = fp8: ")
    # 12,288 / 32 = 384 = 3 * 128.
    assert violations("qwen3-8b", "cpu", tensor_model_parallel_size=128) == []
    (padded,) = violations("qwen3-8b", "cpu", tensor_model_parallel_size=256)
    assert "pads intermediate_size = 12288 to a multiple of 8192" in padded
    assert all(text.endswith("set actor_rollout_ref.model.lora.merge=true") for text in (unknown, rounded, padded))


def test_engines_that_can_serve_openais_api_are_found_by_their_trait() -> None:
    assert [name for name, traits in ROLLOUT_ENGINES.items() if traits.answers_openai] == ["sglang"]
    assert serve.ENGINE is ENGINES["sglang"]


def test_ranks_of_a_server() -> None:
    assert (ENGINES["sglang"].num_ranks(4), ENGINES["embedded"].num_ranks(4)) == (4, 1)
    assert {name for name, engine in ENGINES.items() if engine.num_ranks(4) > 1} == {
        name for name, traits in ROLLOUT_ENGINES.items() if traits.spans_nodes
    }


def test_the_size_of_sglangs_cache_is_read() -> None:
    assert ENGINES["sglang"].read_cache_size({"max_total_num_tokens": 48, "page_size": 16}) == (48, 16)
    # Without pages every token counts.
    assert ENGINES["sglang"].read_cache_size({"max_total_num_tokens": 48, "page_size": None}) == (48, 1)
    assert ENGINES["sglang"].read_cache_size({}) is None


def test_an_engine_whose_cache_has_no_fixed_size_is_not_asked_for_it() -> None:
    assert ENGINES["embedded"].cache_size() is None


def test_each_process_has_a_log_of_each_start() -> None:
    launches = [Launch("/m", RolloutConfig(), "cpu", 64, nnodes=2, node_rank=rank) for rank in range(2)]
    first, second = (ServerHost(3, launch, POLICY, single_node=False, log_dir="/logs") for launch in launches)
    assert [each.log_path(0).name for each in (first, second)] == ["rollout-3.log", "rollout-3.node-1.log"]
    assert second.log_path(2) == Path("/logs/rollout-3.node-1.restart-2.log")


@pytest.mark.parametrize(("device", "configured", "limit_s"), [
    ("cpu", None, 600.0), ("cuda", None, 1500.0), ("cuda", 40.0, 40.0),
])  # fmt: skip
def test_a_start_on_a_gpu_may_take_longer(device: str, configured: float | None, limit_s: float) -> None:
    launch = Launch("/m", RolloutConfig(start_timeout_s=configured), device, 64)
    assert start_timeout_s(launch) == limit_s
    assert limit_s < DevicesConfig().timeout_s, "else the run ends first, and no log is shown"


def test_the_host_of_a_server_asks_it_within_the_configured_time() -> None:
    config = RolloutConfig(name="embedded", request_timeout_s=7.0)
    host = ServerHost(0, Launch("/m", config, "cpu", 64), POLICY, single_node=True, log_dir="/logs")
    host.server = RolloutServer(["true"], {}, "http://127.0.0.1:9", Path("/logs/a.log"))
    client = host._client()
    assert (client.timeout_s, client.max_model_len, client.key) == (7.0, 64, host.server.key)


def test_no_other_file_asks_which_engine_it_is() -> None:
    """What differs is a method of `Engine`, or a trait in `ROLLOUT_ENGINES`."""
    places = [
        f"{path.relative_to(SCALERL)}:{line}"
        for path in SCALERL.rglob("*.py")
        if path != SCALERL / "config" / "servers.py" and path.parent != SCALERL / "rollout" / "servers" / "engines"
        for line in names_compared(path.read_text(encoding="utf-8"))
    ]
    assert places == []


@pytest.mark.parametrize(
    "code",
    ['x.name == "sglang"', '"embedded" != name', 'name in ("sglang", "x")', 'match name:\n    case "sglang": pass'],
)
def test_a_comparison_with_an_engines_name_is_found(code: str) -> None:
    assert list(names_compared(code)) and not list(names_compared(code.replace("sglang", "a").replace("embedded", "b")))


def names_compared(code: str) -> Iterator[int]:
    """The lines where something is compared with, or matched against, an engine's name."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Compare | ast.MatchValue):
            constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            if any(isinstance(value, str) and value in ROLLOUT_ENGINES for value in constants):
                yield node.lineno


# File -> why it writes the name of an engine.
NAMING = {
    "config/servers.py": "the table of engines",
    "config/schema/rollout.py": "the default of a key",
    "commands/doctor/packages.py": "a package of this name",
    "extras/slurm/probes.py": "a package of this name",
    "rollout/servers/embedded/server.py": "what the server of this engine says of itself",
}


def test_no_other_file_names_an_engine() -> None:
    """Who needs one with a property asks for the trait, and whoever has its name looks it up in `ENGINES`."""
    servers = Path("rollout/servers")
    engines = {servers / "engines", *(servers / name for name in ROLLOUT_ENGINES)}
    naming = {
        str(path.relative_to(SCALERL))
        for path in SCALERL.rglob("*.py")
        if names_written(code := path.read_text(encoding="utf-8"))
        or (modules_imported(code) and path.relative_to(SCALERL).parent not in engines)
        if path.parent != SCALERL / "rollout" / "servers" / "engines"
    }
    assert naming == set(NAMING)


@pytest.mark.parametrize(
    "code",
    [
        'ENGINES["sglang"].command(x)',
        'f(engine_kwargs={"sglang": 1})',
        "from scalerl.rollout.servers.engines.sglang import A",
    ],
)
def test_a_name_of_an_engine_is_found(code: str) -> None:
    other = code.replace("sglang", "a")
    assert names_written(code) or modules_imported(code)
    assert not names_written(other) and not modules_imported(other)


def names_written(code: str) -> bool:
    constants = (node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant))
    return any(isinstance(value, str) and value in ROLLOUT_ENGINES for value in constants)


def modules_imported(code: str) -> bool:
    """Whether the code imports from an engine's own module."""
    modules = {f"scalerl.rollout.servers.engines.{name}" for name in ROLLOUT_ENGINES}
    return any(isinstance(node, ast.ImportFrom) and node.module in modules for node in ast.walk(ast.parse(code)))
