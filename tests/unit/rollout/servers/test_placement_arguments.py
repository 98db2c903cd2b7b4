"""Arguments of SGLang's about experts, and SGLang's own word on which rank has which part of which expert."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from scalerl.config.schema import RolloutConfig
from scalerl.models import read_config
from scalerl.rollout.servers.engines import ENGINES, Launch
from scalerl.rollout.servers.sglang.placement_arguments import (
    ExpertParallel,
    expert_parallel,
    plain_runner,
    unknown_places,
    unknown_rows,
)
from tests.served_weights import expected_checksums
from tests.tiny_models import make_tiny_model


@pytest.mark.parametrize(
    ("own", "experts"),
    [
        ({}, ExpertParallel(1)),
        ({"ep_size": None}, ExpertParallel(1)),
        ({"ep-size": 2}, ExpertParallel(2)),
        ({"expert_parallel_size": "4"}, ExpertParallel(4)),
        ({"moe-a2a-backend": "none", "ep": 2}, ExpertParallel(2)),
        ({"moe_a2a_backend": "deepep", "ep_size": 2}, ExpertParallel(8, whole_shared_experts=True)),
    ],
)
def test_how_experts_are_shared(own: dict[str, Any], experts: ExpertParallel) -> None:
    assert expert_parallel(own, 8) == experts


@pytest.mark.parametrize("ep_size", [0, -1, 1.5, "two", True])
def test_an_ep_size_that_is_no_number_is_refused(ep_size: Any) -> None:
    with pytest.raises(ValueError, match=f"engine_kwargs.sglang.ep_size = {ep_size}: must be a whole number"):
        expert_parallel({"ep_size": ep_size}, 8)


@pytest.mark.parametrize(
    "own",
    [
        {"ep_size": 4, "moe_a2a_backend": "none", "moe_runner_backend": "triton", "ep_dispatch_algorithm": "static"},
        {"moe-a2a-backend": "deepep", "moe-runner-backend": "deep_gemm", "deepep_mode": "normal"},
        {"moe_runner_backend": "deep_gemm", "expert_distribution_recorder_mode": "stat"},
        # SGLang's defaults.
        {"enable_eplb": False, "ep_num_redundant_experts": 0, "init_expert_location": "trivial", "dp_size": 1},
        {"moe_dp_size": "1", "moe_dense_tp_size": None, "elastic_ep_backend": "none"},
        {"disable_shared_experts_fusion": True, "enable_dp_attention": False, "attention_backend": "fa3"},
    ],
)
def test_arguments_that_leave_known_where_experts_are(own: dict[str, Any]) -> None:
    assert list(unknown_places(own, "deepseek_v3")) == []


@pytest.mark.parametrize(
    ("own", "argument", "effect"),
    [
        ({"enable-eplb": True}, "enable_eplb=true", "moves experts between ranks"),
        ({"ep_num_redundant_experts": 2}, "ep_num_redundant_experts=2", "several times"),
        ({"init_expert_location": "a.json"}, "init_expert_location=a.json", "a table"),
        ({"elastic_ep_backend": "mooncake"}, "elastic_ep_backend=mooncake", "come and go"),
        ({"enable_waterfill": True}, "enable_waterfill=true", "among the routed ones"),
        ({"disable_shared_experts_fusion": None}, "disable_shared_experts_fusion=null", "among the routed ones"),
        ({"data-parallel-size": 2}, "dp_size=2", "heads"),
        ({"moe_dense_tp_size": 1}, "moe_dense_tp_size=1", "dense layers"),
        ({"moe_runner_backend": "flashinfer_trtllm"}, "moe_runner_backend=flashinfer_trtllm", "triton, deep_gemm"),
        # Without scalerl's own choice SGLang makes one.
        ({"moe_runner_backend": None}, "moe_runner_backend=null", "triton, deep_gemm"),
        ({"moe_a2a_backend": "mooncake"}, "moe_a2a_backend=mooncake", "deepep for qwen3_moe, deepseek_v3"),
        ({"moe_a2a_backend": "deepep"}, "moe_a2a_backend=deepep", "deepep for qwen3_moe, deepseek_v3"),
        ({"moe_of_tomorrow": 1}, "moe_of_tomorrow=1", "may move"),
    ],
)
def test_arguments_with_which_it_is_not_known(own: dict[str, Any], argument: str, effect: str) -> None:
    ((named, does),) = unknown_places(own, "mixtral")
    assert named == argument and effect in does


def test_arguments_with_which_the_experts_of_tokens_are_not_known() -> None:
    harmless = {"pp_size": 1, "enable_hierarchical_cache": False, "disaggregation_mode": "null", "ep_size": 2}
    assert list(unknown_rows(harmless | {"chunked_prefill_size": 4096, "speculative_algorithm": None})) == []
    own = {"pipeline-parallel-size": 2, "enable-hierarchical-cache": True, "chunked-prefill-size": -1}
    own["speculative_algorithm"] = "EAGLE"
    assert [argument for argument, _ in unknown_rows(own)] == [
        "chunked_prefill_size=-1",
        "enable_hierarchical_cache=true",
        "pp_size=2",
        "speculative_algorithm=EAGLE",
    ]


def test_of_a_dense_model_those_that_cut_its_own_tensors_count() -> None:
    own = {
        "ep_size": 2,
        "enable_eplb": True,
        "moe_runner_backend": "cutlass",
        "data-parallel-size": 2,
    }
    assert [named for named, _ in unknown_places(own, "qwen3", is_mixture=False)] == ["dp_size=2"]
    assert list(unknown_places({"dp_size": 1, "enable_dp_attention": False}, "qwen3", is_mixture=False)) == []


def test_deepep_has_kernels_of_its_own() -> None:
    own = {"moe_a2a_backend": "deepep", "moe_runner_backend": "triton"}
    assert [named for named, _ in unknown_places(own, "qwen3_moe")] == ["moe_runner_backend=triton"]
    assert plain_runner(own) == "deep_gemm" and plain_runner({}) == "triton"


NUM_RANKS = 4
SHARED_IN = ({}, {"ep_size": 2}, {"ep_size": 4}, {"moe_a2a_backend": "deepep"})
# What SGLang's layer of experts has loaded on each rank, its arguments read by SGLang; arguments: a model's directory,
# the number of ranks, and SGLang's own arguments, case by case, as JSON. A CPU has no DeepEP for the layer's tokens.
LOADED_BY_SGLANG = """
import hashlib, json, sys
import torch
from safetensors.torch import load_file
from sglang.srt.layers.moe import MoeA2ABackend, initialize_moe_config
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.runtime_context import SpawnRanks, get_flags, publish, reset_context
from sglang.srt.server_args import prepare_server_args

model, num_ranks, cases = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
tensors = load_file(model + "/model.safetensors")
config = json.load(open(model + "/config.json"))
num_experts, width = config["num_local_experts"], config["moe_intermediate_size"]
places = FusedMoE.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", num_experts)
loaded = []
for own in cases:
    flags = [text for name, value in own.items() for text in ("--" + name.replace("_", "-"), str(value))]
    command = ["--model-path", model, "--device", "cpu", "--tp-size", str(num_ranks), *flags]
    ranks = []
    for rank in range(num_ranks):
        reset_context()
        publish(prepare_server_args(command), role="scheduler", ranks=SpawnRanks(world_rank=rank))
        initialize_moe_config()
        get_flags().moe.a2a_backend = MoeA2ABackend.NONE
        layer = FusedMoE(num_experts, config["hidden_size"], width, 0, top_k=2, params_dtype=torch.float32)
        prefix = "model.layers.0.mlp."
        for parameter, weight, expert, shard in places:
            target = getattr(layer, parameter.removeprefix("experts.") + "weight")
            name = prefix + weight + "weight"
            layer.weight_loader(target, tensors[name], name, shard_id=shard, expert_id=expert)
        ranks.append({
            prefix + "experts." + name: hashlib.sha256(parameter.data.numpy().tobytes()).hexdigest()[:16]
            for name, parameter in layer.named_parameters()
        })
    loaded.append(ranks)
print(json.dumps(loaded))
"""


@pytest.mark.full
def test_the_places_of_experts_are_those_of_sglangs_own_loader(tmp_path: Path) -> None:
    """Of arguments, ranks and experts; the width of these is one that needs no padding."""
    sizes: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 128, "num_heads": 4, "num_kv_heads": 4}
    model = make_tiny_model(tmp_path / "model", "qwen3_moe", num_layers=1, **sizes)
    _, env = ENGINES["sglang"].command(Launch(str(model), RolloutConfig(), "cpu", 64, port=4000))
    ran = subprocess.run(
        [sys.executable, "-c", LOADED_BY_SGLANG, str(model), str(NUM_RANKS), json.dumps(SHARED_IN)],
        env=os.environ | env, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    experts = {name: tensor for name, tensor in load_file(model / "model.safetensors").items() if ".experts." in name}
    for own, loaded in zip(SHARED_IN, json.loads(ran.stdout.splitlines()[-1]), strict=True):
        kwargs = {"sglang": own}
        ranks = expected_checksums(experts.items(), read_config(model), NUM_RANKS, "sglang", engine_kwargs=kwargs)
        assert ranks == loaded, own
        assert len({tuple(checksums.values()) for checksums in ranks}) == NUM_RANKS
