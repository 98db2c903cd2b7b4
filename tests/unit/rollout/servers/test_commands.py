from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scalerl.base.files import GIB
from scalerl.config.schema import RolloutConfig
from scalerl.extras.plan.servers import server_bytes
from scalerl.extras.sglang_cpu.plugin import ATTENTION_BACKEND, PLUGIN, register
from scalerl.extras.sglang_cpu.server import STAND_INS, import_environment
from scalerl.models import ModelShape
from scalerl.models.adapters import Adapter
from scalerl.rollout.servers.engines import ENGINES, Command, Launch
from scalerl.rollout.servers.engines.base import check_context_length
from scalerl.rollout.servers.engines.sglang import CONTEXT_SLACK, PLAIN_EXPERTS_ENVIRONMENT
from scalerl.rollout.servers.sglang.launch import LOADS_ADAPTERS, RETURNS_EXPERTS
from scalerl.rollout.servers.sglang.placement_arguments import MIXTURES, PLAIN_RUNNERS
from tests.lanes import full
from tests.model_configs import model_directory, read_config
from tests.tiny_models import make_tiny_model


def sglang_command(config: RolloutConfig, device: str, **more: Any) -> Command:
    return ENGINES["sglang"].command(Launch("/models/m", config, device, 1024, port=4000, **more))


def value_of(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_cpu_command_caps_the_cache_and_binds_each_rank_to_a_core() -> None:
    rollout = RolloutConfig(dtype="float32", tensor_model_parallel_size=2, max_num_seqs=8)
    command, env = sglang_command(rollout, "cpu")
    assert value_of(command, "--tp-size") == "2"
    assert value_of(command, "--attention-backend") == ATTENTION_BACKEND
    assert value_of(command, "--max-total-tokens") == str(8 * (1024 + CONTEXT_SLACK))
    assert len(env["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2
    assert env["CUDA_VISIBLE_DEVICES"] == ""


def test_gpu_command_leaves_the_device_memory_to_the_configured_share() -> None:
    rollout = RolloutConfig(gpu_memory_utilization=0.4)
    command, env = sglang_command(rollout, "cuda", gpu_ids=[2, 3], releases_memory=True)
    assert value_of(command, "--mem-fraction-static") == "0.4"
    assert "--enable-memory-saver" in command
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert not {"--max-total-tokens", "--device", "--trust-remote-code"} & set(command)


def test_clients_of_openais_api_get_single_tokens_and_the_models_own_sampling() -> None:
    flags = ("--stream-interval", "--sampling-defaults")
    command, _ = sglang_command(RolloutConfig(), "cpu", openai_name="m")
    assert value_of(command, "--served-model-name") == "m"
    assert [value_of(command, flag) for flag in flags] == ["1", "model"]
    command, _ = sglang_command(RolloutConfig(), "cpu")
    assert "--served-model-name" not in command
    assert [value_of(command, flag) for flag in flags] == [str(2**30), "openai"]


def test_a_server_that_says_its_experts_has_the_argument_for_it() -> None:
    for device in ("cpu", "cuda"):
        assert RETURNS_EXPERTS in sglang_command(RolloutConfig(), device, returns_experts=True)[0]
        assert RETURNS_EXPERTS not in sglang_command(RolloutConfig(), device)[0]


def test_a_server_with_adapters_has_the_arguments_for_them() -> None:
    adapter = Adapter(8, 16, ("q_proj", "k_proj", "v_proj"))
    for device, backup in (("cpu", False), ("cuda", True)):
        command, _ = sglang_command(RolloutConfig(), device, adapter=adapter, releases_memory=True)
        assert LOADS_ADAPTERS in command and value_of(command, "--max-lora-rank") == "8"
        targets = command.index("--lora-target-modules") + 1
        assert tuple(command[targets : targets + 4]) == (*adapter.targets, "--max-loras-per-batch")
        assert ("--lora-backend" in command) == (device == "cpu")
        # The model below the adapter is not sent: a server that releases its memory keeps it.
        assert ("--enable-weights-cpu-backup" in command) == backup
        assert not any("lora" in argument for argument in sglang_command(RolloutConfig(), device)[0])


@pytest.mark.parametrize("arguments", [[RETURNS_EXPERTS], [LOADS_ADAPTERS]])
def test_processes_that_sglang_spawns_have_the_hooks_of_their_arguments(arguments: list[str]) -> None:
    """As multiprocessing starts them: they run the server's module again, under another name, before anything else."""
    program = f"""
import runpy, sys
sys.argv = ["launch", *{arguments}]
runpy.run_module("scalerl.rollout.servers.sglang.launch", run_name="__mp_main__", alter_sys=True)
from sglang.srt.plugins.hook_registry import HookRegistry
for hook in ("init_routed_experts_capturer", "check_weights"):
    print(any(hook in target for target in HookRegistry._hooks))
"""
    environment = {**os.environ, **import_environment()}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    assert result.stdout.split()[-2:] == [str(argument in arguments) for argument in (RETURNS_EXPERTS, LOADS_ADAPTERS)]


def test_commands_of_a_server_on_two_nodes_differ_in_rank_and_address_alone() -> None:
    commands = [
        sglang_command(
            RolloutConfig(tensor_model_parallel_size=16),
            "cuda",
            host=f"10.0.0.{1 + rank}",
            gpu_ids=range(8),
            nnodes=2,
            node_rank=rank,
            dist_init_addr="10.0.0.1:29500",
        )
        for rank in range(2)
    ]
    for rank, (command, env) in enumerate(commands):
        assert value_of(command, "--nnodes") == "2" and value_of(command, "--node-rank") == str(rank)
        assert value_of(command, "--dist-init-addr") == "10.0.0.1:29500"
        assert value_of(command, "--tp-size") == "16" and env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
        assert value_of(command, "--host") == env["SGLANG_HOST_IP"] == f"10.0.0.{1 + rank}"
    (first, _), (second, _) = commands
    assert len([1 for one, other in zip(first, second, strict=True) if one != other]) == 2
    alone, env = sglang_command(RolloutConfig(), "cuda")
    assert not {"--nnodes", "--node-rank", "--dist-init-addr"} & set(alone) and "SGLANG_HOST_IP" not in env


def test_a_cache_of_a_given_size_is_the_same_in_every_server() -> None:
    """On a GPU beside a share of the memory that is not less; on a CPU in the place of its own number."""
    config = RolloutConfig(kv_cache_tokens=123_456, gpu_memory_utilization=0.5)
    for device in ("cuda", "cpu"):
        arguments, _ = sglang_command(config, device)
        assert arguments[arguments.index("--max-total-tokens") + 1] == "123456"
        assert arguments.count("--max-total-tokens") == 1
    alone = sglang_command(RolloutConfig(gpu_memory_utilization=0.5), "cuda")[0]
    assert "--max-total-tokens" not in alone and value_of(alone, "--mem-fraction-static") == "0.5"


@pytest.mark.parametrize("share", [0.4, 0.5, 0.85, 0.95, 0.97])
@pytest.mark.parametrize("context_gib", [0.3, 1.0, 1.5])
def test_sglang_takes_the_plans_cache_and_not_what_its_share_leaves(share: float, context_gib: float) -> None:
    """By what `KVCacheConfigurator` computes: share x what is free before the weights, less the weights."""
    config = RolloutConfig(gpu_memory_utilization=share)
    free = 50 * GIB
    plan = server_bytes(ModelShape.from_config(read_config("qwen3-8b")), config, free)
    assert plan.kv_tokens and plan.kv_tokens > 0
    command, _ = sglang_command(replace(config, kv_cache_tokens=plan.kv_tokens), "cuda")
    fraction = float(value_of(command, "--mem-fraction-static"))
    before_weights = free - context_gib * GIB
    slack = before_weights * (1 - fraction)
    profiled = int(before_weights - plan.weights - slack) // plan.kv_token_bytes
    assert min(profiled, int(value_of(command, "--max-total-tokens"))) == plan.kv_tokens


def test_what_sglang_needs_of_a_latent_models_config_is_given_where_it_is_absent(tmp_path: Path) -> None:
    def given(device: str, **config: Any) -> dict[str, Any]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"} | config))
        command, _ = ENGINES["sglang"].command(Launch(str(tmp_path), RolloutConfig(), device, 64, port=4000))
        flag = "--json-model-override-args"
        return json.loads(value_of(command, flag)) if flag in command else {}

    needed = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    plain = {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 512, "rope_theta": 5e5}
    assert given("cuda") == needed
    assert given("cuda", **needed) == given("cpu", **needed, rope_scaling=yarn) == {}
    assert given("cpu", **needed, max_position_embeddings=512, rope_theta=5e5) == {"rope_parameters": plain}
    version_5 = {"rope_type": "default", "rope_theta": 5e5}
    assert given("cpu", max_position_embeddings=512, rope_parameters=version_5) == needed | {"rope_parameters": plain}
    assert given("cpu", model_type="qwen3_moe") == {}


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5"])
def test_sglang_is_told_what_it_does_not_read_of_gated_delta_nets(tmp_path: Path, family: str) -> None:
    """Which layers attend and what turns of a head, as transformers writes it; and that Qwen3.5's tower feeds none."""
    text = {"layer_types": ["linear_attention", "full_attention"] * 2, "partial_rotary_factor": 0.25}
    text["rope_parameters"] = {"partial_rotary_factor": 0.5}
    config = {"model_type": family} | (text if family == "qwen3_5_text" else {"text_config": text})
    (tmp_path / "config.json").write_text(json.dumps(config))
    command, _ = ENGINES["sglang"].command(Launch(str(tmp_path), RolloutConfig(), "cuda", 64, port=4000))
    changes: dict[str, Any] = {"full_attention_interval": 2, "partial_rotary_factor": 0.5}
    if family == "qwen3_5":
        changes = {"text_config": changes, "vision_config": {"deepstack_visual_indexes": []}}
    assert json.loads(value_of(command, "--json-model-override-args")) == changes


def test_a_runs_server_takes_no_weights_of_files_in_fp8_and_a_server_for_itself_does(tmp_path: Path) -> None:
    """DeepSeek-V3's config.json: the trainer sends weights that are not quantized."""

    def started(synced: bool) -> tuple[bool, bool]:
        model = model_directory("deepseek-v3", tmp_path)
        launch = Launch(str(model), RolloutConfig(), "cuda", 64, port=4000, synced=synced)
        command, _ = ENGINES["sglang"].command(launch)
        flag = "--json-model-override-args"
        changes = json.loads(value_of(command, flag)) if flag in command else {}
        is_dummy = "--load-format" in command and value_of(command, "--load-format") == "dummy"
        return changes == {"quantization_config": None}, is_dummy

    assert started(synced=True) == (True, True)
    assert started(synced=False) == (False, False)


def test_a_server_in_fp8_begins_without_weights(tmp_path: Path) -> None:
    """The files are not in fp8: SGLang would read them into tensors of 8 bits."""
    make_tiny_model(tmp_path, "qwen3")
    config = RolloutConfig(quantization="fp8")
    command, _ = ENGINES["sglang"].command(Launch(str(tmp_path), config, "cuda", 64, port=4000, synced=True))
    quantization = json.loads(value_of(command, "--json-model-override-args"))["quantization_config"]
    assert quantization["weight_block_size"] == [128, 128] and "kv_b_proj" in quantization["ignored_layers"]
    assert value_of(command, "--load-format") == "dummy"


# Of Qwen3-30B-A3B: experts of 768 columns, 4 key and value heads of 128.
@pytest.mark.parametrize(
    ("tp_size", "own", "wrong"),
    [
        (2, {}, ""),
        (4, {"ep_size": 4}, ""),
        # One key and value head for every two ranks.
        (8, {"ep_size": 8}, ""),
        (4, {}, "gate_proj [192 x 2048], up_proj [192 x 2048], down_proj [2048 x 192]"),
        (4, {"ep_size": 2}, ""),
        (8, {"ep_size": 2}, "gate_proj [192 x 2048], up_proj [192 x 2048], down_proj [2048 x 192]"),
    ],
)
def test_a_rank_in_fp8_has_whole_blocks(tp_size: int, own: dict[str, Any], wrong: str, tmp_path: Path) -> None:
    config = RolloutConfig(quantization="fp8", tensor_model_parallel_size=tp_size, engine_kwargs={"sglang": own})
    shape = ModelShape.from_hf(model_directory("qwen3-30b-a3b", tmp_path))
    found = list(
        ENGINES["sglang"].trained_model_violations(config, shape, section="r", device="cuda", verify_weights_every=10)
    )
    assert len(found) == (1 if wrong else 0), found
    assert all(
        f"r.quantization = fp8: blocks of 128 x 128 do not divide what a rank has of {wrong};" in f for f in found
    )


@pytest.mark.parametrize(
    "own",
    [{"quantization": "fp8"}, {"json-model-override-args": '{"quantization_config": {"quant_method": "fp8"}}'}],
)
@pytest.mark.parametrize("every", [0, 10])
def test_a_server_that_would_take_a_trainers_weights_for_quantized_ones_is_refused(
    own: dict[str, Any], every: int, tmp_path: Path
) -> None:
    make_tiny_model(tmp_path, "qwen3")
    config = RolloutConfig(engine_kwargs={"sglang": own})
    (found,) = ENGINES["sglang"].trained_model_violations(
        config, ModelShape.from_hf(tmp_path), section="r", device="cuda", verify_weights_every=every
    )
    assert found.startswith("r.engine_kwargs.sglang.") and found.endswith("set r.quantization=fp8")


def test_an_override_of_the_users_does_not_take_fp8_away(tmp_path: Path) -> None:
    """The user's argument replaces scalerl's, and the server would take fp8 weights for plain ones."""
    make_tiny_model(tmp_path, "qwen3")
    own = {"json_model_override_args": '{"rope_theta": 1000.0}'}
    for quantization, refused in ((None, 0), ("fp8", 1)):
        config = RolloutConfig(quantization=quantization, engine_kwargs={"sglang": own})
        shape = replace(ModelShape.from_hf(tmp_path), hidden_size=256, ffn_hidden_size=512, head_dim=128)
        found = list(
            ENGINES["sglang"].trained_model_violations(
                config, shape, section="r", device="cuda", verify_weights_every=0
            )
        )
        assert len(found) == refused and all("json_model_override_args" in text for text in found), found


def test_a_gpu_server_whose_experts_are_checked_keeps_them_as_they_are_loaded(tmp_path: Path) -> None:
    def started(
        model_type: str, device: str = "cuda", synced: bool = True, every: int = 10, **own: Any
    ) -> tuple[str | None, str | None, bool]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        config = RolloutConfig(verify_weights_every=every, engine_kwargs={"sglang": own})
        launch = Launch(str(tmp_path), config, device, 1024, port=4000, synced=synced)
        command, env = ENGINES["sglang"].command(launch)
        pinned = value_of(command, "--moe-runner-backend") if "--moe-runner-backend" in command else None
        apart = "--disable-shared-experts-fusion" in command
        return pinned, env.get("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"), apart

    with_shared_experts = {"deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_next"}
    with_shared_experts |= {"qwen3_5_moe", "qwen3_5_moe_text"}
    for family in MIXTURES:
        assert started(family) == ("triton", "0", family in with_shared_experts)
    assert started("qwen3_moe", moe_a2a_backend="deepep") == ("deep_gemm", "0", False)
    not_pinned = (None, None, False)
    assert started("qwen3") == started("mixtral", device="cpu") == not_pinned
    assert started("mixtral", synced=False) == started("mixtral", every=0) == not_pinned


# What SGLang does with the experts of a layer once they are loaded, as on a GPU; arguments: the kernels of experts.
EXPERTS_ON_A_GPU = """
import sys
from types import SimpleNamespace
import torch
from sglang.srt.layers.quantization import unquant
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.utils import MoeA2ABackend, MoeRunnerBackend
unquant._is_cuda, unquant._is_cpu = True, False
unquant.get_lora = lambda: SimpleNamespace(enable_lora=False, lora_paths=None)
unquant.get_exec = lambda: SimpleNamespace(moe=SimpleNamespace(enable_eplb=False))
for runner, exchange in zip(sys.argv[1:], ("none", "deepep")):
    unquant.get_moe_a2a_backend = lambda: MoeA2ABackend(exchange)
    method = unquant.UnquantizedFusedMoEMethod(use_deep_gemm=runner == "deep_gemm")
    config = MoeRunnerConfig(num_local_experts=2, activation="silu", is_gated=True)
    layer = torch.nn.Module()
    layer.moe_runner_config = config
    layer.dispatcher = SimpleNamespace(set_quant_config=lambda config: None)
    method.create_weights(layer, 2, 8, 4, torch.bfloat16)
    method._aiter_runner, method.runner = None, SimpleNamespace(runner_backend=MoeRunnerBackend(runner))
    loaded = {}
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(torch.randn(parameter.shape))
        loaded[name] = parameter.data.clone()
    method.process_weights_after_loading(layer)
    for name, parameter in layer.named_parameters():
        print(runner, name, tuple(parameter.shape), torch.equal(parameter.data, loaded[name]))
"""


@pytest.mark.parametrize("fused", ["0", full("1")])
def test_sglang_leaves_checked_experts_as_they_are(fused: str) -> None:
    """And would not with the activation fused into Triton's kernel, which is why that is set."""
    _, env = sglang_command(RolloutConfig(), "cpu")
    environment = os.environ | env | PLAIN_EXPERTS_ENVIRONMENT
    if fused == "1":
        environment |= dict.fromkeys(PLAIN_EXPERTS_ENVIRONMENT, fused)
    ran = subprocess.run(
        [sys.executable, "-c", EXPERTS_ON_A_GPU, *PLAIN_RUNNERS],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-4:] == [
        f"triton w13_weight (2, 8, 8) {fused == '0'}",
        "triton w2_weight (2, 8, 4) True",
        "deep_gemm w13_weight (2, 8, 8) True",
        "deep_gemm w2_weight (2, 8, 4) True",
    ]


def test_engine_kwargs_have_the_last_word() -> None:
    kwargs = {"attention_backend": "fa3", "skip_server_warmup": None, "enable-metrics": True, "cuda_graph_bs": [1, 2]}
    rollout = RolloutConfig(engine_kwargs={"sglang": kwargs})
    command, _ = sglang_command(rollout, "cpu")
    assert value_of(command, "--attention-backend") == "fa3"
    assert command.count("--attention-backend") == 1
    assert "--skip-server-warmup" not in command
    assert "--enable-metrics" in command
    start = command.index("--cuda-graph-bs")
    assert command[start + 1 : start + 3] == ["1", "2"]


def test_trust_remote_code_is_passed_only_when_asked_for() -> None:
    command, _ = sglang_command(RolloutConfig(), "cpu", trust_remote_code=True)
    assert "--trust-remote-code" in command


def test_a_context_beyond_the_models_positions_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    check_context_length(tmp_path, 512)
    with pytest.raises(ValueError, match="max_position_embeddings=512"):
        check_context_length(tmp_path, 513)
    (tmp_path / "config.json").write_text(
        json.dumps({"max_position_embeddings": 512, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}})
    )
    check_context_length(tmp_path, 2048)
    with pytest.raises(ValueError, match=r"max_position_embeddings=2048, extended by rope_scaling,"):
        check_context_length(tmp_path, 2049)


def run_python(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_the_supervisor_imports_the_standard_library_only() -> None:
    heavy = run_python(
        "import sys, scalerl.rollout.servers.supervise, scalerl.rollout.servers.process\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy', 'aiohttp', 'transformers', 'sglang')])"
    )
    assert heavy.strip() == "[]"


def test_the_stand_ins_are_only_where_a_server_without_a_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        assert importlib.util.find_spec("sgl_kernel") is None
    monkeypatch.setenv("PYTHONPATH", "mine")
    _, env = sglang_command(RolloutConfig(), "cpu")
    stand_ins, *others = env["PYTHONPATH"].split(os.pathsep)
    assert env["SGLANG_USE_CPU_ENGINE"] == "1" and Path(stand_ins, "sgl_kernel").exists() and others == ["mine"]
    _, env = sglang_command(RolloutConfig(), "cuda")
    assert not {"SGLANG_USE_CPU_ENGINE", "PYTHONPATH"} & env.keys()


def test_a_server_without_a_gpu_does_not_import_megatron() -> None:
    program = "try:\n    from megatron.core import parallel_state\nexcept ImportError as error:\n    print(error)"
    env = os.environ | import_environment()
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env).stdout
    assert "a rollout server has no trainer" in output


def test_sglang_finds_the_plugin_among_the_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    (distribution,) = importlib.metadata.distributions(path=[STAND_INS])
    (entry_point,) = distribution.entry_points.select(group="sglang.srt.plugins")
    assert (entry_point.name, entry_point.load()) == (PLUGIN, register)
    # A user's list of what SGLang may load does not take the attention backend away.
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    assert "SGLANG_PLUGINS" not in sglang_command(RolloutConfig(), "cpu")[1]
    monkeypatch.setenv("SGLANG_PLUGINS", "mine")
    _, env = sglang_command(RolloutConfig(), "cpu")
    assert env["SGLANG_PLUGINS"].split(",") == ["mine", PLUGIN]
