"""Whole runs on every kind of layout, of every family: step 1 has the numbers of one process. Embedded engine.

The engine alone is compared more strictly, and on more layouts, in tests/dist; this is about what lies between: plans,
shards, columns, advantages, weight sync.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from scalerl.extras.verify.differences import compare_models, compare_samples, compare_states
from tests.e2e.jobs import Inputs, Record
from tests.e2e.kept import Finished, Kept
from tests.tiny_models import FAMILIES, WITH_EXPERTS, make_tiny_model

STEPS = 2
MEGATRON = "actor_rollout_ref.actor.megatron"
TP, PP, VPP = (f"{MEGATRON}.{name}_model_parallel_size" for name in ("tensor", "pipeline", "virtual_pipeline"))
# Fields of Megatron's own configs that change no number: (section, field, value).
OVERRIDES = (
    (f"{MEGATRON}.override_transformer_config", "moe_deepep_num_sms", 24),
    (f"{MEGATRON}.override_ddp_config", "bucket_size", 100_000),
    ("actor_rollout_ref.actor.optim.override_optimizer_config", "sgd_momentum", 0.5),
)
CP, EP = f"{MEGATRON}.context_parallel_size", f"{MEGATRON}.expert_model_parallel_size"
# Numbers of the batch and of its update; what an update of the weights leads to is step 2's.
SAME = ("actor/", "critic/", "response", "prompt_length", "training/rollout_")
LAYOUTS = {
    "dp2": (2, []),
    "tp2": (2, [f"{TP}=2"]),
    "pp2": (2, [f"{PP}=2"]),
    "cp2": (2, [f"{CP}=2"]),
    "vpp2_pp2": (2, [f"{PP}=2", f"{VPP}=2"]),
    "tp2_dp2": (4, [f"{TP}=2"]),
    "tp2_etp2": (2, [f"{TP}=2"]),
    "one": (1, []),
    "recompute": (1, [f"{MEGATRON}.recompute_granularity=full"]),
    "ep2": (2, [f"{EP}=2"]),
    "tp2_ep2": (4, [f"{EP}=2", f"{TP}=2"]),
}  # fmt: skip
CORE = [("qwen3", name) for name in ("dp2", "tp2", "cp2", "vpp2_pp2")]
FULL = [
    ("qwen3", "recompute"),
    ("qwen3", "pp2"),
    ("qwen3_moe", "ep2"),
    ("qwen3", "tp2_dp2"),
    ("qwen3_moe", "tp2_ep2"),
    ("qwen3_moe", "tp2_etp2"),
    ("qwen2", "tp2"),
    ("llama", "pp2"),
    ("mistral", "cp2"),
    ("mixtral", "ep2"),
    ("deepseek_v3", "tp2_etp2"),
    ("deepseek_v3", "ep2"),
    ("glm4", "tp2"),
    ("seed_oss", "pp2"),
    ("smollm3", "cp2"),
    ("minimax_m2", "tp2_etp2"),
    ("glm4_moe", "ep2"),
    ("glm4_moe_lite", "tp2_etp2"),
    ("qwen3_5_text", "cp2"),
    ("qwen3_5_moe_text", "ep2"),
    ("qwen3_next", "tp2_etp2"),
    ("gpt_oss", "ep2"),
    ("gpt_oss", "tp2_etp2"),
]
assert {family for family, _ in CORE + FULL} == set(FAMILIES)
# As tests/dist/layouts.py names them.
assert not [case for case in CORE + FULL if case[0] in WITH_EXPERTS and case[1] in ("tp2", "tp2_dp2")], (
    "a run splits experts as it splits the rest: tp2_etp2"
)
# What was trained is what samples.
SHOWS = pytest.mark.shows("train step", "log-probs", "sync")
SERVED = pytest.mark.shows("serve", layout="embedded")


@pytest.fixture(scope="module")
def run(inputs: Inputs, kept: Kept, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Record]:
    """(family, number of ranks, overrides) -> what the run logged; each once."""
    models: dict[str, Path] = {}
    done: dict[tuple[str, int, tuple[str, ...]], Record] = {}

    def run(family: str, num_ranks: int, *overrides: str) -> Record:
        if family not in models:
            # Four layers, so that two stages can have two chunks each.
            models[family] = make_tiny_model(tmp_path_factory.mktemp(family), family, num_layers=4)
        key = (family, num_ranks, overrides)
        if key not in done:
            run_dir = tmp_path_factory.mktemp("run")
            finished = kept.train(
                Inputs(models[family], inputs.train, inputs.val).overrides(
                    run_dir,
                    "data.max_prompt_length=64",
                    "actor_rollout_ref.actor.max_tokens_per_micro_batch=160",
                    f"trainer.n_gpus_per_node={num_ranks}",
                    f"trainer.total_training_steps={STEPS}",
                    "trainer.val_before_train=false",
                    "trainer.save_freq=0",
                    "actor_rollout_ref.actor.use_kl_loss=true",
                    *(f"{section}={{{name}: {value}}}" for section, name, value in OVERRIDES),
                    *overrides,
                )
            )
            assert finished.code == 0, finished.tail()
            saved = OmegaConf.load(run_dir / "config.yaml")
            assert [OmegaConf.select(saved, section)[name] for section, name, _ in OVERRIDES] == [24, 100_000, 0.5]
            done[key] = Record.read(run_dir)
        return done[key]

    return run


def assert_same_first_step(record: Record, expected: Record, rel: float) -> None:
    wanted = {key: value for key, value in expected.final[1].items() if key.startswith(SAME)}
    ours = {key: value for key, value in record.final[1].items() if key.startswith(SAME)}
    assert ours.keys() == wanted.keys()
    assert wanted["actor/grad_norm"] > 0 and wanted["critic/score/max"] > wanted["critic/score/min"]
    assert ours == pytest.approx(wanted, rel=rel, abs=1e-6)
    for step in range(1, STEPS + 1):
        # What was trained is what samples.
        assert record.final[step]["training/rollout_probs_diff_max"] < 1e-4


@SHOWS
@SERVED
@pytest.mark.parametrize(("family", "layout"), CORE)
def test_the_numbers_of_one_process(run: Callable[..., Record], family: str, layout: str) -> None:
    num_ranks, overrides = LAYOUTS[layout]
    assert_same_first_step(run(family, num_ranks, *overrides), run(family, 1), rel=1e-5)


@pytest.mark.shows("train step", "log-probs", "sync", family="qwen3", layout="dp2", dtype="bfloat16")
@pytest.mark.shows("serve", family="qwen3", layout="engine", dtype="bfloat16")
@pytest.mark.full
@pytest.mark.parametrize("engine", ["embedded", "sglang"])
def test_a_run_in_bfloat16_updates_and_its_two_log_probs_are_near(run: Callable[..., Record], engine: str) -> None:
    """Of the sampler, whose weights are verified, and of two trainer ranks. The numbers of float32 are others, since
    the samples are."""
    rollout = "actor_rollout_ref.rollout"
    low = ("actor_rollout_ref.actor.megatron.dtype=bfloat16", f"{rollout}.dtype=bfloat16", f"{rollout}.name={engine}")
    metrics_by_step = run("qwen3", 2, *low, f"{rollout}.verify_weights_every=1").final
    for step in range(1, STEPS + 1):
        assert metrics_by_step[step]["actor/grad_norm"] > 0 and metrics_by_step[step]["actor/num_updates"] == 2
        assert metrics_by_step[step]["timing_s/update_weights/verify"] > 0
        # bfloat16 has 8 bits: two roundings of the same log-prob of a likely token differ by some 2^-8 of it.
        assert 0 < metrics_by_step[step]["training/rollout_probs_diff_mean"] < 2**-6


@pytest.mark.shows("sync", family="qwen3", layout="tp2")
@pytest.mark.shows("serve", family="qwen3", layout="sglang tp2")
@pytest.mark.full
def test_a_wide_sglang_server_samples_from_what_two_ranks_train(run: Callable[..., Record]) -> None:
    wide = ("actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    metrics_by_step = run("qwen3", 2, f"{TP}=2", *wide, "actor_rollout_ref.rollout.verify_weights_every=1").final
    for step in range(1, STEPS + 1):
        assert (
            metrics_by_step[step]["actor/grad_norm"] > 0 and metrics_by_step[step]["timing_s/update_weights/verify"] > 0
        )
        assert metrics_by_step[step]["training/rollout_probs_diff_max"] < 1e-4


@SHOWS
@SERVED
@pytest.mark.full
@pytest.mark.parametrize(("family", "layout"), FULL)
def test_the_numbers_of_one_process_of_all_families(run: Callable[..., Record], family: str, layout: str) -> None:
    num_ranks, overrides = LAYOUTS[layout]
    assert_same_first_step(run(family, num_ranks, *overrides), run(family, 1), rel=1e-5)


@pytest.mark.shows("save/load", layout="after")
@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "before", "after"),
    [("qwen3", "tp2", "pp2"), ("qwen3", "dp2", "one"), ("qwen3_moe", "ep2", "tp2_etp2"), ("qwen3", "tp2_dp2", "tp2")],
)
def test_a_run_goes_on_on_another_layout(
    inputs: Inputs, kept: Kept, tmp_path: Path, family: str, before: str, after: str
) -> None:
    """With the prompts, samples and numbers of the layout that it began on. The engine's own are compared to 1e-6 in
    tests/dist/test_checkpoint.py; here samples and updates come between."""
    model = make_tiny_model(tmp_path / "model", family, num_layers=4)
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"

    def train(layout: str, run_dir: Path) -> Finished:
        num_ranks, overrides = LAYOUTS[layout]
        keys = Inputs(model, inputs.train, inputs.val).overrides(
            run_dir,
            "data.max_prompt_length=64",
            "actor_rollout_ref.actor.max_tokens_per_micro_batch=160",
            f"trainer.n_gpus_per_node={num_ranks}",
            f"trainer.total_training_steps={STEPS}",
            "trainer.val_before_train=false",
            "trainer.save_freq=1",
            *overrides,
        )
        finished = kept.train(keys)
        assert finished.code == 0, finished.tail()
        return finished

    train(before, straight)
    shutil.copytree(straight, resumed)
    shutil.rmtree(resumed / "global_step_2")
    (resumed / "latest_checkpointed_iteration.txt").write_text("1")
    said = train(after, resumed).stdout
    assert f"resumed from {resumed / 'global_step_1'}" in said and "changed since that checkpoint: " in said
    ends = [run_dir / "global_step_2" for run_dir in (straight, resumed)]
    parts = [
        compare_states(*ends),
        compare_samples(straight / "rollouts", resumed / "rollouts", [2], ("prompt_uid", "uid", "seed", "input_ids")),
        *compare_models(*ends, tolerance=1e-5),
    ]
    assert [(one.what, one.difference) for one in parts if one.difference is not None] == []
    wanted, ours = (
        {key: value for key, value in Record.read(run_dir).final[2].items() if key.startswith(SAME)}
        for run_dir in (straight, resumed)
    )
    assert ours == pytest.approx(wanted, rel=1e-5, abs=1e-6) and wanted["actor/grad_norm"] > 0
