"""Loss, gradient norm, log-probs and updated weights do not depend on how the model is spread over ranks."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from scalerl.config import PPOConfig, compose
from tests.dist.launch import run_ranks
from tests.dist.layouts import LAYOUTS, MIXTURE_LAYOUTS, ONE
from tests.lanes import full, mostly_full
from tests.model_configs import FILES
from tests.tiny_models import FAMILIES, WITH_DELTA_NETS, WITH_EXPERTS, make_tiny_model

CASES = [(family, layout) for family in FAMILIES for layout in LAYOUTS]
CASES += [(family, layout) for family in WITH_EXPERTS for layout in MIXTURE_LAYOUTS]
# Of `make test`: every layout of up to four ranks with one family, every family on one and more.
MAIN = {
    "tp2": "qwen3",
    "pp2": "qwen2",
    "vpp2_pp2": "deepseek_v3",
    "uneven_pp2": "mixtral",
    "cp2": "llama",
    "cp4": "qwen3",
    "dp2": "qwen2",
    "tp2_pp2": "llama",
    "tp2_dp2": "qwen3_moe",
    "tp2_cp2": "qwen3_5_text",
    "pp2_dp2": "mistral",
    "cp2_dp2": "qwen3_moe",
} | dict.fromkeys(MIXTURE_LAYOUTS, "qwen3_moe")
MAIN |= {"ep2_cp2": "qwen3_next"}
# Response lengths and packing differ on purpose; the last prompt is long and its response short.
LENGTHS = (9, 17, 5, 12, 30, 8, 3, 21)
TEMPERATURE = 0.7
NUM_UPDATES = 3
RELATIVE = 1e-5


@dataclass(frozen=True)
class Outcome:
    logprobs: dict[int, torch.Tensor]
    entropy: dict[int, torch.Tensor]
    updates: list[dict[str, float]]
    weights: dict[str, torch.Tensor]


def train(model_path: str, sizes: dict[str, int], options: dict[str, Any]) -> Any:
    """Runs on every rank: log-probs of the batch, then NUM_UPDATES PPO updates on it, then the exported weights."""
    from scalerl.algorithms import PolicyObjective
    from scalerl.batch import plan_step
    from scalerl.batch.data_proto import DataProto, Jagged
    from scalerl.config.schema import ActorConfig, MegatronConfig, OptimConfig
    from scalerl.parallel import platform
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize

    layout = Layout(**sizes)
    groups = initialize(layout, backend=platform.backend(), timeout_s=60, seed=1)
    if options.get("break_qk_norm"):
        # By its full name: the package's attribute of this name is the function, not the module.
        finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
        finalize._allreduce_non_tensor_model_parallel_grads = lambda *args, **kwargs: None
    megatron = MegatronConfig(
        dtype="float32",
        sequence_parallel=options.get("sequence_parallel", True),
        use_distributed_optimizer=options.get("use_distributed_optimizer", True),
        override_ddp_config=options.get("ddp", {}),
        override_transformer_config=options.get("transformer", {}),
        recompute_granularity=options.get("recompute_granularity"),
    )
    optim = OptimConfig(lr=1e-3, clip_grad=0.5, override_optimizer_config=options.get("optimizer", {}))
    engine = MegatronEngine(model_path, megatron, groups, optim=optim, **options.get("adapter", {}))
    for config, given in (
        (engine.config, megatron.override_transformer_config),
        (engine._forward_chunks[0].ddp_config, megatron.override_ddp_config),
        (engine.optimizer.chained_optimizers[0].config, optim.override_optimizer_config),
    ):
        assert {name: getattr(config, name) for name in given} == given, "what the user set does not reach megatron"
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 500, (length,), generator=generator) for length in LENGTHS]
    masks = [torch.arange(length) >= min(2, length - 1) for length in LENGTHS]
    advantages = [torch.full((length,), (-1.0) ** i * (1 + i / 10)) for i, length in enumerate(LENGTHS)]
    plan = plan_step(
        LENGTHS,
        dp_size=layout.dp_size,
        mini_batches=[options.get("order", range(len(LENGTHS)))],
        max_tokens_per_micro_batch=options.get("max_tokens_per_micro_batch", 40),
        micro_batch_multiple=layout.pp_size if layout.vpp_size > 1 else 1,
    )
    mine = plan.rows(groups.coordinates.dp_rank)
    shard = DataProto(
        {
            "input_ids": Jagged.from_list([rows[row] for row in mine], torch.int64),
            "response_mask": Jagged.from_list([masks[row] for row in mine], torch.bool),
            "advantages": Jagged.from_list([advantages[row] for row in mine], torch.float32),
        }
    )
    micro_batches = plan.local_micro_batches(groups.coordinates.dp_rank)[0]
    outputs = engine.logprobs(shard, micro_batches, temperature=TEMPERATURE)
    old = outputs.get("logprobs", shard.tokens["advantages"])
    shard = shard.union(DataProto({"old_logprobs": old, "ref_logprobs": Jagged(old.values * 0.9, old.cu_seqlens)}))
    config = ActorConfig(
        entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1, loss_agg_mode=options.get("loss_agg_mode", "token-mean")
    )
    num_loss_tokens = sum(int(mask.sum()) for mask in masks)
    objective = PolicyObjective(config, num_loss_tokens=num_loss_tokens, num_sequences=len(LENGTHS))
    updates = [engine.update(shard, micro_batches, objective, temperature=TEMPERATURE) for _ in range(NUM_UPDATES)]
    weights = {name: tensor.clone().cpu() for bucket in engine.export_buckets(20_000) for name, tensor in bucket}
    if options.get("adapter"):
        weights |= {name: tensor.clone().cpu() for name, tensor in engine.export_adapter()}
    per_row = {name: {row: column[i].clone() for i, row in enumerate(mine)} for name, column in outputs.items()}
    return per_row, updates, weights


def run(model_path: Path, sizes: dict[str, int], **options: Any) -> Outcome:
    # A function of megatron is replaced for good.
    fresh = "break_qk_norm" in options
    return joined(run_ranks(sizes["world_size"], train, str(model_path), sizes, options, fresh=fresh))


def joined(ranks: list[Any]) -> Outcome:
    """What all ranks of a layout have together."""
    collected: dict[str, dict[int, torch.Tensor]] = {"logprobs": {}, "entropy": {}}
    for per_row, _, _ in ranks:
        for name, rows in per_row.items():
            collected[name].update(rows)
    updates = next(updates for _, updates, _ in ranks if "actor/pg_loss" in updates[0])
    whole = ranks[0][2]
    for _, _, weights in ranks[1:]:
        assert all(torch.equal(tensor, whole[name]) for name, tensor in weights.items()), "ranks export other weights"
    return Outcome(collected["logprobs"], collected["entropy"], updates, whole)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def assert_same(actual: Outcome, expected: Outcome) -> None:
    for name in ("logprobs", "entropy"):
        mine, theirs = getattr(actual, name), getattr(expected, name)
        assert mine.keys() == theirs.keys() == set(range(len(LENGTHS)))
        for row in mine:
            assert relative(mine[row], theirs[row]) < RELATIVE, (name, row)
    for step, (mine, theirs) in enumerate(zip(actual.updates, expected.updates, strict=True)):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            # Means of signed terms may be near 0: compare with the size of the loss itself.
            assert mine[key] == pytest.approx(value, rel=RELATIVE, abs=RELATIVE), (step, key)
    for name, theirs in expected.weights.items():
        assert relative(actual.weights[name], theirs) < RELATIVE, name


def make_model(directory: Path, family: str) -> Path:
    """A key bias that turns slowly shifts all scores of a query alike: its gradient is almost 0, and Adam makes a step
    of full size out of the rounding of such an element. So every pair of a head turns fast here. Of the models of
    glm4_moe_lite, qwen3_5_moe_text and smollm3 with seed 0 one element of all has a gradient of that size: of smollm3
    it makes 0.96 of the squared difference of its tensor. The output norm of a gated delta net divides what is nearly 0
    for many tokens of a random model, and multiplies rounding: eps is larger.
    """
    seed = {"glm4_moe_lite": 2, "qwen3_5_moe_text": 1, "smollm3": 1}.get(family, 0)
    path = make_tiny_model(directory, family, num_layers=4, initializer_range=0.1, seed=seed)
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 10.0
    if family == "glm4":
        # Else a half of each head does not turn at all.
        config["rope_parameters"]["partial_rotary_factor"] = 1.0
    if family in WITH_DELTA_NETS:
        config["rms_norm_eps"] = 1e-2
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(lambda family: make_model(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="module")
def one_process(models: Callable[[str], Path]) -> Callable[[str], Outcome]:
    return functools.cache(lambda family: run(models(family), ONE))


@pytest.mark.shows("log-probs", "train step")
@pytest.mark.parametrize(("family", "layout"), mostly_full(CASES, lambda case: MAIN.get(case[1]) == case[0]))
def test_layout(models: Callable[[str], Path], one_process: Callable[[str], Outcome], family: str, layout: str) -> None:
    assert_same(run(models(family), (LAYOUTS | MIXTURE_LAYOUTS)[layout]), one_process(family))


@pytest.mark.parametrize(
    "family", mostly_full(FAMILIES, lambda family: family not in ("mistral", "mixtral", "deepseek_v3"))
)
def test_training_moves_the_weights(one_process: Callable[[str], Outcome], family: str) -> None:
    """Else every layout would agree on nothing."""
    updates = one_process(family).updates
    assert updates[0]["actor/ppo_kl"] == 0.0 and updates[-1]["actor/ppo_kl"] != 0.0
    assert len({update["actor/pg_loss"] for update in updates}) == NUM_UPDATES
    assert all(update["grad_norm"] > 0 for update in updates)


@pytest.mark.parametrize("family", mostly_full(FAMILIES, lambda family: family == "qwen2"))
@pytest.mark.parametrize(
    "options",
    [
        {"order": [5, 2, 7, 0, 3, 6, 1, 4]},
        {"max_tokens_per_micro_batch": 31},
        {"max_tokens_per_micro_batch": 200},
    ],
    ids=["shuffled", "small micro-batches", "one micro-batch"],
)
def test_packing(
    models: Callable[[str], Path], one_process: Callable[[str], Outcome], family: str, options: dict[str, Any]
) -> None:
    assert_same(run(models(family), ONE, **options), one_process(family))


@pytest.mark.parametrize("layout", ["pp2", "vpp2_pp2"])
def test_as_many_micro_batches_as_stages(
    models: Callable[[str], Path], one_process: Callable[[str], Outcome], layout: str
) -> None:
    """No steady state: the first stage is done with its forwards when the last begins."""
    assert_same(run(models("qwen3"), LAYOUTS[layout], max_tokens_per_micro_batch=200), one_process("qwen3"))


@pytest.fixture(scope="module")
def qwen3(models: Callable[[str], Path]) -> Path:
    return models("qwen3")


@pytest.mark.parametrize("mode", ["seq-mean-token-sum", "seq-mean-token-mean"])
def test_loss_aggregation(qwen3: Path, mode: str) -> None:
    """Other micro-batches, dp and cp; token-mean is what the other tests use."""
    expected = run(qwen3, ONE, loss_agg_mode=mode)
    assert_same(run(qwen3, LAYOUTS["dp2"], loss_agg_mode=mode, max_tokens_per_micro_batch=31), expected)
    assert_same(run(qwen3, LAYOUTS["cp2"], loss_agg_mode=mode, max_tokens_per_micro_batch=48), expected)


@pytest.mark.parametrize("option", ["sequence_parallel", "use_distributed_optimizer"])
def test_without(qwen3: Path, option: str) -> None:
    expected = run(qwen3, ONE)
    assert_same(run(qwen3, LAYOUTS["tp2_dp2"], **{option: False}), expected)


# Small buckets, so that there are several.
OVERLAPS = [{"overlap_grad_reduce": True, "bucket_size": 5000}]
OVERLAPS += [OVERLAPS[0] | {"overlap_param_gather": True}]


def as_a_run_takes_them(ddp: dict[str, Any]) -> dict[str, Any]:
    """The fields as they come out of the configuration of a run whose command line sets them."""
    actor = "actor_rollout_ref.actor.megatron"
    needed = [
        "data.train_files=a",
        "data.val_files=b",
        "actor_rollout_ref.model.path=m",
        "actor_rollout_ref.rollout.n=4",
    ]
    fields = [f"+{actor}.override_ddp_config.{name}={value}" for name, value in ddp.items()]
    return compose("ppo", [*needed, *fields]).actor_rollout_ref.actor.megatron.override_ddp_config


@pytest.mark.parametrize(
    ("layout", "ddp"),
    [
        ("dp2", OVERLAPS[1]),
        full("dp2", OVERLAPS[0]),
        *(full(layout, OVERLAPS[1]) for layout in ("pp2_dp2", "tp2_dp2", "cp2_dp2")),
    ],
    ids=lambda value: value if isinstance(value, str) else " and ".join(list(value)[::2]),
)
def test_overlap_of_data_parallel_exchange(
    qwen3: Path, one_process: Callable[[str], Outcome], layout: str, ddp: dict[str, Any]
) -> None:
    """With fields of the other two configs that change no number: the ranks check that megatron has them all."""
    others = {"transformer": {"moe_deepep_num_sms": 24}, "optimizer": {"sgd_momentum": 0.5}}
    assert_same(run(qwen3, LAYOUTS[layout], ddp=as_a_run_takes_them(ddp), **others), one_process("qwen3"))


# The runs of configs/ for several nodes, in small: family, and which ranks exchange gradients.
IN_SMALL: dict[str, tuple[str, dict[str, int]]] = {
    "llama-3.1-70b-grpo-64": ("llama", LAYOUTS["pp2_dp2"]),
    "qwen3-32b-grpo-32": ("qwen3", LAYOUTS["tp2_dp2"]),
    "qwen3-8b-128k-grpo-16": ("qwen3", LAYOUTS["cp2"]),
    # Each expert is on two ranks; on one.
    "qwen3-30b-a3b-grpo-32": ("qwen3_moe", dict(world_size=4, tp_size=2, ep_size=2)),
    "qwen3-235b-a22b-grpo-128": ("qwen3_moe", MIXTURE_LAYOUTS["ep2_pp2"]),
    "deepseek-v3-grpo-512": ("deepseek_v3", dict(world_size=4, pp_size=2, first_stage_layers=1, ep_size=2)),
    "qwen3-235b-a22b-lora-32": ("qwen3_moe", MIXTURE_LAYOUTS["ep2_pp2"]),
    "deepseek-v3-lora-128": ("deepseek_v3", dict(world_size=4, pp_size=2, first_stage_layers=1, ep_size=2)),
    "kimi-k2-grpo-512": ("deepseek_v3", dict(world_size=4, pp_size=2, first_stage_layers=1, ep_size=2)),
    "glm-4-32b-grpo-32": ("glm4", dict(world_size=4, tp_size=2, pp_size=2, first_stage_layers=1)),
    "glm-4.6-grpo-256": ("glm4_moe", MIXTURE_LAYOUTS["ep2_pp2"]),
    "minimax-m2-grpo-128": ("minimax_m2", MIXTURE_LAYOUTS["ep2_pp2"]),
    "seed-oss-36b-grpo-32": ("seed_oss", LAYOUTS["tp2_dp2"]),
    "qwen3.5-35b-a3b-grpo-32": ("qwen3_5_moe_text", dict(world_size=4, tp_size=2, ep_size=2)),
    "qwen3.5-397b-a17b-grpo-256": ("qwen3_5_moe_text", MIXTURE_LAYOUTS["ep2_pp2"]),
    "gpt-oss-20b-grpo-16": ("gpt_oss", dict(world_size=2, ep_size=2)),
    "gpt-oss-120b-grpo-64": ("gpt_oss", MIXTURE_LAYOUTS["ep2_pp2"]),
}


@pytest.mark.full
@pytest.mark.parametrize("name", IN_SMALL)
def test_overlap_as_in_the_files_of_configs(
    models: Callable[[str], Path], one_process: Callable[[str], Outcome], tmp_path: Path, name: str
) -> None:
    """With their fields of Megatron's, smaller buckets, and their recompute, which changes when a gradient is there."""
    files = [name for name in FILES if of_file(name).trainer.nnodes > 1]
    assert sorted(files) == sorted(IN_SMALL), "a run for several nodes that is not tried in small"
    megatron, (family, sizes) = of_file(name).actor_rollout_ref.actor.megatron, IN_SMALL[name]
    assert megatron.override_ddp_config == {"overlap_grad_reduce": True}
    options = {"ddp": OVERLAPS[0], "recompute_granularity": megatron.recompute_granularity}
    if not of_file(name).actor_rollout_ref.model.lora_rank:
        assert_same(run(models(family), sizes, **options), one_process(family))
        return
    from tests.dist.test_lora import make_adapted

    path, adapter = make_adapted(tmp_path, family)
    assert_same(run(path, sizes, adapter=adapter, **options), run(path, ONE, adapter=adapter))


def of_file(name: str) -> PPOConfig:
    return compose("ppo", ["--config-dir", str(FILES[name].parent), "--config-name", name], rules=False)


def test_the_comparison_sees_a_lost_all_reduce(qwen3: Path) -> None:
    """Without the sum of the norm gradients over tp ranks, ranks diverge: the test above must notice."""
    expected = run(qwen3, ONE)
    with pytest.raises(AssertionError):
        assert_same(run(qwen3, LAYOUTS["tp2"], break_qk_norm=True), expected)
