"""The plan of a whole run: what shares a device, what is refused, and what is said to fit does."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from scalerl.base.files import GIB
from scalerl.config import ConfigError, PPOConfig, compose
from scalerl.config.schema import RunConfig
from scalerl.config.value_checks import device_memory_bytes
from scalerl.extras.plan.activations import micro_batches_in_flight
from scalerl.extras.plan.check import checked_plan, known_memory, with_kv_cache
from scalerl.extras.plan.command import main
from scalerl.extras.plan.hardware import HARDWARE
from scalerl.extras.plan.plan import MemoryPlan, memory_plan
from scalerl.extras.plan.report import plan_table, summary
from scalerl.extras.plan.seconds import has_logprob_pass, lengths_of, step_seconds
from scalerl.models import ModelShape
from scalerl.models.adapters import ALL_LINEAR, Adapter, resolve_targets
from scalerl.parallel.layout import Layout
from tests.hub_mirror import Hub
from tests.model_configs import model_directory, read_config

EIGHT = ("trainer.n_gpus_per_node=8", "actor_rollout_ref.rollout.n=8")
MEGATRON = "actor_rollout_ref.actor.megatron"
ROLLOUT = "actor_rollout_ref.rollout"
OFFLOADED = [
    f"{megatron}.{part}_offload=true"
    for megatron in (MEGATRON, "critic.megatron")
    for part in ("param", "grad", "optimizer")
]
H100 = device_memory_bytes("h100")
H100S = HARDWARE["h100"]


@cache
def _composed(*overrides: str) -> PPOConfig:
    needed = ["data.train_files=t", "data.val_files=v", "actor_rollout_ref.model.path=m"]
    return compose("ppo", [*needed, *EIGHT, *overrides])


def config(*overrides: str) -> PPOConfig:
    return copy.deepcopy(_composed(*overrides))


def shapes(name: str = "qwen3-8b") -> dict[str, ModelShape]:
    actor = ModelShape.from_config(read_config(name))
    return {"actor": actor, "ref": actor, "critic": actor.with_head("value")}


def plan(*overrides: str, name: str = "qwen3-8b", memory: int | None = H100) -> MemoryPlan:
    return memory_plan(config(*overrides), shapes(name), memory_bytes=memory)


def phase(planned: MemoryPlan, name: str, device: int = 0) -> dict[str, int]:
    return next(dict(p.parts) for p in planned.devices[device].phases if p.name == name)


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("80GB", 80 * 10**9), ("79.1 GiB", int(79.1 * GIB)), ("H100", int(79.1 * GIB))]
)
def test_memory_of_a_device(text: str, num_bytes: int) -> None:
    assert device_memory_bytes(text) == num_bytes
    assert known_memory(RunConfig(device_memory=text), "cpu") == num_bytes


@pytest.mark.parametrize("text", ["80", "h1000", "0GB", "GB"])
def test_memory_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="80GB"):
        device_memory_bytes(text)


def test_what_is_on_a_device_in_an_update() -> None:
    """Qwen3-8B on 8 devices with full recompute: 8.19e9 parameters, weights 2 B, gradients 4 B, optimizer 12 / 8 B."""
    parts = phase(plan(f"{MEGATRON}.recompute_granularity=full"), "actor update")
    numbers = 8_190_735_360
    assert parts["actor weights"] == pytest.approx(2 * numbers, rel=1e-3)
    assert parts["actor gradients"] == pytest.approx(4 * numbers, rel=1e-3)
    assert parts["actor optimizer"] == pytest.approx(12 * numbers / 8, rel=1e-3)
    # A token's input of each layer, and the end of the last stage.
    assert parts["actor activations"] == pytest.approx(16384 * 2 * 4096 * 38, rel=0.01)
    assert "KV cache" not in parts and "server weights" not in parts, "released"


def test_recompute_keeps_less() -> None:
    kept = [
        phase(plan(f"{MEGATRON}.recompute_granularity={mode}", *more), "actor update")["actor activations"]
        for mode, more in (
            ("null", ()),
            ("selective", ()),
            ("selective", (f"{MEGATRON}.recompute_modules=[core_attn,layernorm,mlp]",)),
            ("full", ()),
        )
    ]
    assert kept == sorted(kept, reverse=True) and kept[-1] < kept[0] / 10


def test_offloaded_parts_are_there_when_they_are_needed() -> None:
    planned = plan(f"{MEGATRON}.param_offload=true", f"{MEGATRON}.optimizer_offload=true", "+recipe=ppo")
    critic = phase(planned, "critic update")
    assert "actor weights" not in critic and "actor optimizer" not in critic and "actor gradients" in critic
    assert {"critic weights", "critic gradients", "critic optimizer"} <= critic.keys()
    assert "actor weights" in phase(planned, "actor log-probs") and "actor optimizer" in phase(planned, "save")
    assert "actor optimizer" not in phase(planned, "weight sync") and "server weights" in phase(planned, "weight sync")


def test_the_largest_model_that_is_saved_is_counted() -> None:
    cfg = config("+recipe=ppo", *OFFLOADED)
    large, small = shapes("qwen3-8b")["critic"], shapes("qwen3-1.7b")["actor"]
    planned = memory_plan(cfg, {"actor": small, "critic": large}, memory_bytes=H100, on_cpu=False)
    saved = phase(planned, "save")
    assert {"critic weights", "critic optimizer"} <= saved.keys() and "actor optimizer" not in saved
    assert "actor optimizer" in phase(plan("+recipe=ppo", *OFFLOADED), "save"), "the critic has no vocabulary's head"


def test_servers_weights_leave_for_a_save_that_has_no_room_beside_them() -> None:
    beside = phase(plan(), "save")
    assert "server weights" in beside and beside["server weights"] > 0
    # A little less than both.
    short = plan(memory=sum(beside.values()) - 1)
    parts = phase(short, "save")
    assert parts == {name: size for name, size in beside.items() if name != "server weights"}
    assert "server weights" in phase(short, "weight sync")
    assert "server weights" in phase(plan(f"{ROLLOUT}.free_cache_engine=false", memory=10**10), "save")


def test_experts_that_are_hashed_are_counted() -> None:
    """Qwen3-30B-A3B: 128 experts of three matrices of 768 x 2048, of which two are joined, for one of 4 ranks."""
    cfg = config(f"{MEGATRON}.expert_model_parallel_size=8", f"{ROLLOUT}.tensor_model_parallel_size=4")
    matrix = 128 * 768 * 2048 * 2
    parts = phase(memory_plan(cfg, shapes("qwen3-30b-a3b"), memory_bytes=H100), "weight sync")
    assert parts["checksums"] == (3 * matrix + 2 * matrix) // 4
    # One trainer rank then makes the checksums of all 4.
    cfg.actor_rollout_ref.rollout.weight_transport = "broadcast"
    parts = phase(memory_plan(cfg, shapes("qwen3-30b-a3b"), memory_bytes=H100), "weight sync")
    assert parts["checksums"] == 3 * matrix + 2 * matrix // 4
    cfg.actor_rollout_ref.rollout.verify_weights_every = 0
    parts = phase(memory_plan(cfg, shapes("qwen3-30b-a3b"), memory_bytes=H100), "weight sync")
    assert "checksums" not in parts
    on_cpu = memory_plan(config(), shapes(), memory_bytes=H100, on_cpu=True)
    assert "checksums" not in phase(plan(), "weight sync") and "checksums" not in phase(on_cpu, "weight sync")


def test_servers_stay_with_what_does_not_release() -> None:
    parts = phase(plan(f"{ROLLOUT}.free_cache_engine=false", f"{ROLLOUT}.kv_cache_tokens=1024"), "actor update")
    assert parts["KV cache"] == 1024 * 147_456 and parts["server weights"] > 0


def test_a_pool_of_its_own_has_its_devices() -> None:
    planned = plan("+recipe=ppo", "critic.resource_pool.nnodes=1", "critic.resource_pool.n_gpus_per_node=8")
    assert [device.name for device in planned.devices] == ["trainer", "critic"]
    assert not any(part.startswith("critic") for part in phase(planned, "actor update"))
    assert phase(planned, "critic update", device=1)["critic weights"] > 0


def test_stages_of_a_pipeline() -> None:
    """The first stage has the embedding and holds the most micro-batches, the last one the vocabulary's end."""
    planned = plan(f"{MEGATRON}.pipeline_model_parallel_size=4", f"{MEGATRON}.tensor_model_parallel_size=2")
    assert [len(device.layers) for device in planned.devices] == [9, 9, 9, 9]
    kept = [phase(planned, "actor update", stage)["actor activations"] for stage in range(4)]
    assert kept[0] == pytest.approx(4 * kept[3], rel=0.1) and kept[0] == 2 * kept[2]
    assert "actor vocabulary" in phase(planned, "actor log-probs", 3) and "actor vocabulary" not in phase(
        planned, "actor log-probs", 0
    )


def test_micro_batches_in_flight_by_hand() -> None:
    plain, interleaved = Layout(4, pp_size=4), Layout(4, pp_size=4, vpp_size=2)
    assert [micro_batches_in_flight(plain, stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [micro_batches_in_flight(plain, stage, 2) for stage in range(4)] == [2, 2, 2, 1]
    # megatron's warm-up: 2 (stages - stage - 1) + (chunks - 1) stages, and the one under way; each half a stage.
    assert [micro_batches_in_flight(interleaved, stage, 8) for stage in range(4)] == [5.5, 4.5, 3.5, 2.5]


def test_what_does_not_fit_is_refused_with_what_does() -> None:
    cfg = config("data.max_response_length=2048", f"{MEGATRON}.tensor_model_parallel_size=2")
    planned, violations = checked_plan(cfg, shapes(), H100)
    assert planned.problems() and len(violations) == 1
    advice = violations[0].split("set ")[1].replace("\n  or ", "\n").splitlines()
    assert advice[0] == "actor_rollout_ref.actor.max_tokens_per_micro_batch=8192"
    for line in advice:
        changed = config("data.max_response_length=2048", f"{MEGATRON}.tensor_model_parallel_size=2", *line.split(" "))
        assert checked_plan(changed, shapes(), H100)[1] == [], line


def test_several_changes_where_one_is_not_enough() -> None:
    cfg = config(f"{ROLLOUT}.tensor_model_parallel_size=8")
    _, violations = checked_plan(cfg, shapes("qwen3-32b"), H100)
    (line,) = violations[0].split("set ")[1].splitlines()
    changes = line.split(" ")
    assert len(changes) > 1
    assert checked_plan(config(f"{ROLLOUT}.tensor_model_parallel_size=8", *changes), shapes("qwen3-32b"), H100)[1] == []


def test_without_memory_nothing_is_refused() -> None:
    planned, violations = checked_plan(config(), shapes(), None)
    assert violations == [] and planned.server is not None and planned.server.kv_tokens is None
    assert "needs the device's memory" in summary(planned)


def test_a_cache_that_holds_no_sample_is_refused() -> None:
    planned = plan(f"{ROLLOUT}.kv_cache_tokens=1000", "data.max_response_length=2048")
    assert planned.concurrency == 0 and "1000 tokens" in planned.problems()[-1]


def test_every_replica_gets_the_cache_of_the_plan() -> None:
    """Also one that starts later beside a trainer: the number does not depend on what is free then."""
    cfg = config(f"{MEGATRON}.tensor_model_parallel_size=4")
    planned = memory_plan(cfg, shapes(), memory_bytes=H100)
    with_kv_cache(cfg, planned)
    assert planned.server is not None and planned.server.kv_tokens and planned.server.kv_tokens > 50_000
    assert cfg.actor_rollout_ref.rollout.kv_cache_tokens == planned.server.kv_tokens
    again = memory_plan(cfg, shapes(), memory_bytes=H100)
    assert again.server == planned.server
    mine = config(f"{ROLLOUT}.kv_cache_tokens=4096")
    with_kv_cache(mine, memory_plan(mine, shapes(), memory_bytes=H100))
    assert mine.actor_rollout_ref.rollout.kv_cache_tokens == 4096


LORA = (
    "actor_rollout_ref.model.lora_rank=32",
    "actor_rollout_ref.model.lora.merge=true",
    "actor_rollout_ref.actor.use_kl_loss=true",
)


def adapted(*overrides: str, name: str = "qwen3-8b", more: dict[str, ModelShape] | None = None) -> MemoryPlan:
    """The plan of a run that trains an adapter of rank 32 of all projections."""
    cfg, shape = config(*LORA, *overrides), shapes(name)["actor"]
    adapter = Adapter(32, 16.0, resolve_targets(shape, ALL_LINEAR))
    models = {"actor": replace(shape, adapter=adapter), "ref": shape} | (more or {})
    return memory_plan(cfg, models, memory_bytes=H100)


def test_an_adapter_is_what_is_trained() -> None:
    """Qwen3-8B, rank 32: (4096 + 4096) of q and o, (4096 + 1024) of k and v, (4096 + 12288) of gate, up and down."""
    numbers = 36 * 32 * (2 * 8192 + 2 * 5120 + 3 * 16384)
    planned, whole = adapted(), plan("actor_rollout_ref.actor.use_kl_loss=true")
    parts = phase(planned, "actor update")
    assert parts["actor gradients"] == 4 * numbers and parts["actor optimizer"] == 12 * numbers / 8
    assert parts["actor weights"] == 2 * (8_190_735_360 + numbers) == phase(planned, "ref log-probs")["actor weights"]
    assert planned.checkpoint_bytes == 14 * numbers
    assert f", of adapters {numbers / 1e9:.3f} billion; checkpoint 1.1 GiB; a weight sync sends 15.3" in summary(
        planned
    )
    # W + B A of gate and up together, in float32, twice.
    assert phase(planned, "weight sync")["actor merged weight"] == 8 * 2 * 12288 * 4096
    assert "of adapters" not in summary(whole) and "actor merged weight" not in phase(whole, "weight sync")


def test_the_reference_of_an_adapter_is_the_actor_without_it() -> None:
    planned, whole = adapted(), plan("actor_rollout_ref.actor.use_kl_loss=true")
    assert not any("ref weights" in part.parts for part in planned.devices[0].phases)
    assert phase(whole, "actor update")["ref weights"] == 2 * 8_190_735_360
    assert phase(planned, "ref log-probs")["ref layer"] == phase(whole, "ref log-probs")["ref layer"]
    offloaded = adapted(f"{MEGATRON}.param_offload=true")
    assert "actor weights" in phase(offloaded, "ref log-probs") and "actor weights" not in phase(offloaded, "rollout")
    # Another model, or other devices: weights of its own.
    other = adapted("actor_rollout_ref.ref.model_path=other")
    apart = adapted(
        "actor_rollout_ref.ref.resource_pool.nnodes=1", "actor_rollout_ref.ref.resource_pool.n_gpus_per_node=8"
    )
    assert (
        phase(other, "actor update")["ref weights"]
        == phase(apart, "ref forward", 1)["ref weights"]
        == 2 * 8_190_735_360
    )


def test_servers_that_get_the_adapter_alone_have_room_for_two() -> None:
    """Qwen3-8B over two devices of a server: each has A of what is split over rows, and of the rest its half."""
    merged = adapted(f"{ROLLOUT}.tensor_model_parallel_size=2")
    alone = adapted(f"{ROLLOUT}.tensor_model_parallel_size=2", "actor_rollout_ref.model.lora.merge=false")
    # q, k, v, gate, up; then o and down.
    by_rows = 5 * 4096 + (4096 + 2 * 1024 + 2 * 12288) // 2
    by_columns = (4096 + 12288) // 2 + 2 * 4096
    room = 2 * 2 * 36 * 32 * (by_rows + by_columns)
    assert phase(alone, "rollout")["server adapters"] == phase(alone, "actor update")["server adapters"] == room
    assert not any("server adapters" in part.parts for part in merged.devices[0].phases)
    assert "actor merged weight" in phase(merged, "weight sync")
    assert "actor merged weight" not in phase(alone, "weight sync")
    assert alone.num_trained is not None and alone.server is not None and merged.server is not None
    assert alone.sync_bytes == 2 * alone.num_trained and merged.sync_bytes == 2 * 8_190_735_360
    assert alone.server.weights == merged.server.weights == alone.backup_bytes and merged.backup_bytes == 0
    assert alone.server.kv_tokens and merged.server.kv_tokens and alone.server.kv_tokens < merged.server.kv_tokens
    node = f"{8 * alone.backup_bytes / GIB:.1f} GiB on its node"
    assert node in summary(alone) and "host memory of servers" not in summary(merged)


def test_experts_have_adapters_on_their_ranks() -> None:
    """Qwen3-30B-A3B over 8 ranks: each has 16 experts of 48 layers, three pairs of (2048 + 768) each."""
    name, ep8 = "qwen3-30b-a3b", f"{MEGATRON}.expert_model_parallel_size=8"
    attention = (2048 + 4096) * 2 + (2048 + 512) * 2
    numbers = 48 * 32 * (16 * 3 * (2048 + 768) + attention)
    assert phase(adapted(ep8, name=name), "actor update")["actor gradients"] == 4 * numbers


def test_an_update_of_an_adapter_takes_a_pass_less() -> None:
    """That of the weights' gradients, less what adapters and attention have too: full recompute takes a whole one."""
    planned, shape = adapted(f"{MEGATRON}.param_offload=true"), shapes()["actor"]
    server = planned.server
    assert server is not None
    adapter = Adapter(32, 16.0, resolve_targets(shape, ALL_LINEAR))

    def seconds(own: Adapter | None, granularity: str) -> float:
        cfg = config(*LORA, f"{MEGATRON}.recompute_granularity={granularity}")
        models = {"actor": replace(shape, adapter=own), "ref": shape}
        return step_seconds(cfg, models, server, H100S, lengths_of(cfg)).total

    a_pass = seconds(None, "full") - seconds(None, "null")
    assert 0.8 * a_pass < seconds(None, "full") - seconds(adapter, "full") < a_pass


def test_host_memory_of_saves_in_the_background() -> None:
    """Qwen3-8B on 8 data-parallel devices: 14 B of each of 8.19e9 parameters, an eighth of them for each rank."""
    waiting, beside = plan("+recipe=ppo"), plan("+recipe=ppo", "trainer.async_save=true")
    assert [device.save_copy_bytes for device in waiting.devices] == [0]
    (trainer,) = beside.devices
    # The critic's too, with a head of one row in the place of the vocabulary's.
    actor, critic = 8_190_735_360, 8_190_735_360 - (151_936 - 1) * 4096
    assert trainer.save_copy_bytes == pytest.approx(14 * (actor + critic) / 8, rel=1e-3)
    assert beside.devices[0].phases == waiting.devices[0].phases, "none of it is on a GPU"
    size = trainer.save_copy_bytes / GIB
    assert f"host memory of saves (trainer.async_save): {size:.1f} GiB for a rank of trainer" in summary(beside)
    assert f"{8 * size:.1f} GiB on its node" in summary(beside) and "host memory" not in summary(waiting)
    # Eight pieces of 64 MiB.
    assert "a save that is waited for, and of a load: at most 0.06 GiB for a rank, 0.50 GiB on its" in plan_table(
        waiting
    )


def test_host_memory_of_routed_experts() -> None:
    """Qwen3-235B-A22B: 94 layers of 8 experts, a byte for each; SGLang has four, for each token of its cache."""
    sizes = ("data.max_prompt_length=1000", "data.max_response_length=3000", "data.train_batch_size=16")
    run = (*sizes, f"{ROLLOUT}.kv_cache_tokens=1000000", f"{ROLLOUT}.tensor_model_parallel_size=8")
    without = plan(*run, name="qwen3-235b-a22b")
    assert without.routed is None and "routed experts" not in summary(without)
    planned = plan(*run, "algorithm.routing_replay=rollout", name="qwen3-235b-a22b")
    assert planned.routed is not None
    assert (planned.routed.token, planned.routed.step) == (752, 16 * 8 * 4000 * 752)
    assert planned.routed.server == 4 * 752 * 10**6
    (line,) = (line for line in summary(planned).splitlines() if "routed experts" in line)
    assert "752 bytes per token" in line and "2.8 GiB for a rank of a server" in line
    # DeepSeek-V3's dense layers are rows, too: 256 experts of 61 layers.
    deepseek = plan(*run, "algorithm.routing_replay=rollout", name="deepseek-v3")
    assert deepseek.routed is not None and deepseek.routed.token == 488


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A YAML file is taken by its path; what does not fit is refused; no weights and no data are there."""
    model = model_directory("qwen3-0.6b", tmp_path / "model")
    file = tmp_path / "mine.yaml"
    file.write_text(f"actor_rollout_ref: {{model: {{path: {model}}}, rollout: {{n: 8}}}}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCALERL_CACHE_DIR", str(tmp_path / "cache"))
    assert main([file.name, "trainer.n_gpus_per_node=1", "--device-memory", "80GB"]) == 0
    shown = capsys.readouterr().out
    assert "actor update" in shown and "where the numbers come from" in shown and "KV cache" in shown
    assert " of 74.5 GiB, in " in shown and shown.endswith("the run fits devices of 74.5 GiB\n")
    assert main([file.name, "trainer.n_gpus_per_node=1"]) == 0
    assert main([file.name, "trainer.n_gpus_per_node=1", f"actor_rollout_ref.model.path=file://{model}"]) == 0
    assert "the device's memory is not known" in capsys.readouterr().out.splitlines()[-1]
    with pytest.raises(ConfigError, match="does not fit"):
        main([str(file), "trainer.n_gpus_per_node=1", "--device-memory=8GB", "--summary"])
    shown = capsys.readouterr().out
    assert "where the numbers" not in shown and shown.endswith("the run does not fit devices of 7.5 GiB\n")
    for path in ("nowhere", "models/Qwen3-8B"):
        with pytest.raises(ConfigError, match=f"actor_rollout_ref.model.path = {path}: there is no such dir") as caught:
            main([file.name, f"actor_rollout_ref.model.path={path}", "actor_rollout_ref.actor.use_kl_loss=true"])
        assert len(caught.value.violations) == 1 and "hf download" not in str(caught.value)
    tp, pp = (f"actor_rollout_ref.actor.megatron.{name}_model_parallel_size" for name in ("tensor", "pipeline"))
    with pytest.raises(ConfigError) as caught:
        main([file.name, "trainer.n_gpus_per_node=80", f"{tp}=16", f"{pp}=5"])
    of_heads, of_layers = caught.value.violations[:2]
    assert of_heads.startswith(f"{tp} = 16: must divide") and of_layers.startswith(f"{pp} = 5: must divide")


def test_plan_of_a_model_on_the_hub_fetches_its_config_alone(tmp_path: Path) -> None:
    files = {"config.json": json.dumps(read_config("qwen3-0.6b")).encode(), "model.safetensors": b"many"}
    with Hub("makers/model", files).serving() as hub:
        command = [sys.executable, "-m", "scalerl.cli", "plan", "sft", "model.path=makers/model", "--summary"]
        env = hub.environment(tmp_path)
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "parameters: 0.60 billion" in done.stdout
    assert not any(path.endswith(".safetensors") for _, path, _ in hub.requests)


def test_sft_has_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_directory("qwen3-8b", tmp_path)
    arguments = ["sft", f"model.path={model}", "data.train_files=t", "trainer.n_gpus_per_node=8"]
    with pytest.raises(ConfigError, match=r"set megatron|set data\.max_token"):
        main([*arguments, "--device-memory=h100"])
    assert main([*arguments, "megatron.recompute_granularity=full", "--device-memory=h100"]) == 0
    assert "KV cache" not in capsys.readouterr().out.split("Adam")[-1]


def test_fused_adam_has_no_temporaries() -> None:
    """On a CPU the square root of the second moment: 4 B of each of the 8.19e9 / 8 parameters whose state is here."""
    assert "actor optimizer step" not in phase(plan(), "actor step")
    on_cpu = memory_plan(config(), shapes(), memory_bytes=H100, on_cpu=True)
    assert phase(on_cpu, "actor step")["actor optimizer step"] == pytest.approx(4 * 8_190_735_360 / 8, rel=1e-3)


def test_seconds_count_the_passes_that_a_step_makes() -> None:
    """One update a step computes the old log-probs itself: 3 forward passes instead of 4."""
    more = (f"{MEGATRON}.tensor_model_parallel_size=4", "data.train_batch_size=64")
    two = config(*more, "actor_rollout_ref.actor.ppo_mini_batch_size=32")
    one = config(*more, "actor_rollout_ref.actor.ppo_mini_batch_size=64")
    planned = memory_plan(one, shapes(), memory_bytes=H100)
    assert has_logprob_pass(two) and not has_logprob_pass(one)
    assert planned.server is not None
    phases = [step_seconds(cfg, shapes(), planned.server, H100S, lengths_of(cfg)).phases for cfg in (two, one)]
    assert phases[0].keys() - phases[1].keys() == {"old_log_prob"}
    two.algorithm.rollout_correction.bypass_mode = True
    assert step_seconds(two, shapes(), planned.server, H100S, lengths_of(two)).phases.keys() == phases[1].keys()


# --- a model that sees pictures ---

TOWER_OVERRIDES = (f"{MEGATRON}.pipeline_model_parallel_size=2",)


def seeing(*overrides: str, frozen: bool = False) -> MemoryPlan:
    """Qwen3-8B with Qwen3-VL's tower, on two stages."""
    config_json = {"model_type": "qwen3_vl", "text_config": read_config("qwen3-8b")}
    shape = ModelShape.from_config(config_json | {"vision_config": {"out_hidden_size": 4096}})
    actor = replace(shape, frozen_tower=frozen)
    return memory_plan(config(*TOWER_OVERRIDES, *overrides), {"actor": actor, "ref": shape}, memory_bytes=H100)


def test_a_vision_tower_is_on_the_first_stage() -> None:
    blind, planned = plan(*TOWER_OVERRIDES), seeing()
    sizes = [[phase(p, "actor update", stage) for stage in (0, 1)] for p in (blind, planned)]
    # Qwen3-VL's towers have 0.58 billion parameters.
    tower = (sizes[1][0]["actor weights"] - sizes[0][0]["actor weights"]) / 2
    assert tower == pytest.approx(0.577e9, rel=0.01)
    assert sizes[1][0]["actor gradients"] - sizes[0][0]["actor gradients"] == 4 * tower
    assert sizes[1][1] == sizes[0][1]
    assert planned.num_parameters - blind.num_parameters == tower
    assert planned.checkpoint_bytes - blind.checkpoint_bytes == 14 * tower
    assert planned.sync_bytes - blind.sync_bytes == 2 * tower
    # A patch keeps 27 blocks' tensors; with recompute their inputs.
    kept = sizes[1][0]["actor vision tower"]
    assert 0 < phase(seeing(f"{MEGATRON}.recompute_granularity=full"), "actor update")["actor vision tower"] < kept / 5
    assert 0 < phase(planned, "actor log-probs")["actor vision tower"] < kept / 20


def test_a_frozen_tower_has_no_gradient() -> None:
    trained, frozen = seeing(), seeing(frozen=True)
    trains, keeps = phase(trained, "actor update"), phase(frozen, "actor update")
    assert keeps["actor weights"] == trains["actor weights"]
    assert keeps["actor gradients"] < trains["actor gradients"] and keeps["actor optimizer"] < trains["actor optimizer"]
    assert keeps["actor vision tower"] < trains["actor vision tower"] / 20
    # It is saved, without an optimizer's state.
    tower = (trains["actor gradients"] - keeps["actor gradients"]) // 4
    assert trained.checkpoint_bytes - frozen.checkpoint_bytes == 12 * tower
