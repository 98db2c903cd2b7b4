"""Ranking of layouts: those that are shown fit and start, none that was left out is faster, and none is lost."""

from __future__ import annotations

from collections import Counter

import pytest

from scalerl.config import violations_of
from scalerl.config.value_checks import device_memory_bytes
from scalerl.errors import UserError
from scalerl.extras.plan import tune as tuning
from scalerl.extras.plan.hardware import HARDWARE
from scalerl.extras.plan.plan import memory_plan
from scalerl.extras.plan.seconds import lengths_of, step_seconds
from scalerl.trainer.checks.models import layouts_violations
from tests.unit.extras.plan.test_plan import OFFLOADED, config, shapes

H100, GB80 = HARDWARE["h100"], device_memory_bytes("h100")
BATCH = ("data.train_batch_size=256", "actor_rollout_ref.actor.ppo_mini_batch_size=256", "trainer.device_memory=h100")
# Where the trainer's part of the memory decides how many samples a server has at a time, not all layouts are as fast as
# they could be at best.
LONG = (
    *("data.max_response_length=8000", "actor_rollout_ref.actor.max_tokens_per_micro_batch=16384"),
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.35",
)
OWN = (
    *("actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.rollout.resource_pool.nnodes=1"),
    *("trainer.max_staleness=1", "algorithm.rollout_correction.rollout_is=token"),
)


@pytest.mark.parametrize(
    ("name", "devices", "more"), [("qwen3-8b", 8, LONG), ("qwen3-30b-a3b", 16, OFFLOADED), ("qwen3-8b", 16, OWN)]
)
def test_what_is_shown_is_the_fastest_that_fits(name: str, devices: int, more: tuple[str, ...]) -> None:
    cfg, models, fell_out = config(*BATCH, *more), shapes(name), Counter()
    found = tuning.tuned(cfg, models, devices, H100, GB80)
    candidates = tuning._candidates(cfg, models, devices, H100, GB80, None, fell_out)
    assert sum(found.fell_out.values()) + len(found.best) == len(candidates) + sum(fell_out.values())
    rates = []
    for candidate in candidates:
        plan = memory_plan(candidate.config, models, memory_bytes=GB80)
        if not plan.problems() and not violations_of(candidate.config, device="cuda"):
            assert plan.server is not None
            step = step_seconds(candidate.config, models, plan.server, H100, lengths_of(cfg))
            assert step.tokens_per_s <= candidate.least.tokens_per_s * (1 + 1e-9), "the least is a bound"
            rates.append(step.tokens_per_s)
    rates.sort(reverse=True)
    assert [one.step.tokens_per_s for one in found.best] == pytest.approx(rates[:10])
    for one in found.best:
        assert not memory_plan(one.config, models, memory_bytes=GB80).problems()
        assert not violations_of(one.config, device="cuda") and not layouts_violations(one.config, models)
        assert one.step.num_devices == devices


def test_the_table_says_why_others_fell_out() -> None:
    text = tuning.tune(config(*BATCH), shapes(), 8, H100)
    assert text.startswith("8 H100 devices of 75.1 GiB, responses of ") and "fell out: " in text
    assert "actor update takes more than 75.1 GiB" in text and "the first: " in text
    none = tuning.tune(config(*BATCH), shapes("deepseek-v3"), 8, H100)
    assert "no layout fits" in none and "rollout servers" in none


def test_devices_that_cannot_be() -> None:
    with pytest.raises(
        UserError, match=r"--devices 12: must be a multiple of trainer\.n_gpus_per_node = 8; give --dev"
    ):
        tuning.tune(config(*BATCH), shapes(), 12, H100)
    with pytest.raises(UserError, match="give --device-memory"):
        tuning.tune(config(), shapes(), 8, H100)
    with pytest.raises(UserError, match=r"set actor_rollout_ref\.hybrid_engine=true"):
        tuning.tune(config(*BATCH, *OWN), shapes(), 8, H100)


@pytest.mark.parametrize("layers", [61, 94, 36, 28, 40, 64, 63])
def test_layers_of_the_ends_are_whole(layers: int) -> None:
    for stages in (2, 4, 8, 16):
        first, last = tuning._ends(layers, stages)
        if first is None:
            assert layers % stages == 0
            continue
        assert last is not None and first > 0 and last > 0
        assert stages == 2 or (layers - first - last) % (stages - 2) == 0
