"""The two log-probs on real ranks: what is compared, corrected, counted and left out, on every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from scalerl.algorithms import correct, rollout_corr_metrics
from scalerl.batch import Alignment, plan_step
from scalerl.batch.data_proto import DataProto, Jagged, cu_seqlens_of
from scalerl.cluster.batch import PlacedBatch
from scalerl.cluster.worker_group import WorkerGroup
from scalerl.config.schema import ActorConfig, MegatronConfig, OptimConfig, PolicyLossConfig, RolloutCorrectionConfig
from scalerl.parallel.layout import Layout
from scalerl.tracking.metrics import mismatch_metrics, to_floats, worst_samples
from scalerl.trainer.ranks.rl_worker import RLWorker
from scalerl.trainer.ranks.roles import TOKENS, MegatronActor, Metrics
from scalerl.trainer.ranks.worker import MegatronWorker
from tests.lanes import full
from tests.tiny_models import make_tiny_model

LAYOUTS = {"dp2": Layout(2), "pp2": Layout(2, 1, 2), "cp2": Layout(2, 1, 1, 2)}
PROMPT = 3
LENGTHS = [12, 7, 20, 9, 14, 5, 10, 8]
# Rows of the two updates of a step.
MINI_BATCHES = [range(4), range(4, 8)]
EVERYTHING_ON = RolloutCorrectionConfig(
    rollout_is="sequence",
    rollout_is_batch_normalize=True,
    rollout_rs=["token_k1", "seq_mean_k3"],
    rollout_rs_threshold=[2.0, 0.5],
    rollout_token_veto_threshold=1e-3,
)
# One nat is a ratio of 2.7.
REJECTION = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold=2.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, "qwen3", seed=0)
    return path


@pytest.fixture(scope="module", params=LAYOUTS)
def group(request: pytest.FixtureRequest, start_group: Callable[..., WorkerGroup]) -> Iterator[WorkerGroup]:
    group = start_group(RLWorker, LAYOUTS[request.param], device="cpu", collective_timeout_s=60.0, seed=1)
    yield group
    start_group.stop(group)


@dataclass
class Trainer:
    """Fresh weights and optimizer on the group's ranks."""

    group: WorkerGroup
    model: Path
    correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)

    def __post_init__(self) -> None:
        self.group.call(
            MegatronWorker.build_engine, "actor", str(self.model), MegatronConfig(dtype="float32"), OptimConfig(lr=1e-2)
        )
        self.actor = MegatronActor(self.group, ActorConfig(), 1.0, self.correction)

    def batch(self, rollout_logprobs: list[torch.Tensor], rows: range = range(8)) -> PlacedBatch:
        """rollout_logprobs: of each of the 8 rows. rows: those that the batch has, in their mini-batches."""
        generator = torch.Generator().manual_seed(5)
        ids = [torch.randint(3, 500, (length,), generator=generator) for length in LENGTHS]
        layout = self.group.layout
        plan = plan_step(
            [LENGTHS[row] for row in rows],
            dp_size=layout.dp_size,
            mini_batches=[
                [row - rows.start for row in mini if row in rows] for mini in MINI_BATCHES if mini[0] in rows
            ],
            max_tokens_per_micro_batch=48,
            alignment=Alignment.of_layout(tp_size=1, cp_size=layout.cp_size, sequence_parallel=False),
        )

        def shard(dp_rank: int) -> DataProto:
            held = [rows[row] for row in plan.rows(dp_rank)]
            return DataProto(
                {
                    "input_ids": Jagged.from_list([ids[row] for row in held], torch.int64),
                    "response_mask": Jagged.from_list([mask_of(row) for row in held], torch.bool),
                    "rollout_logprobs": Jagged.from_list([rollout_logprobs[row] for row in held], torch.float32),
                }
            )

        samples = {
            "num_sampled_tokens": np.array([LENGTHS[row] - PROMPT for row in rows]),
            "advantages": np.array([1.0, -1.0, 0.5, -0.5, 0.25, 1.5, -0.75, -1.25], dtype=np.float32)[list(rows)],
        }
        shards = [ray.put(shard(dp_rank)) for dp_rank in range(layout.dp_size)]
        return PlacedBatch(samples, {"actor": plan}).with_column(TOKENS, "actor", shards)

    def step(self, rollout_logprobs: list[torch.Tensor], rows: range = range(8)) -> tuple[PlacedBatch, Metrics]:
        given = self.batch(rollout_logprobs, rows)
        batch, metrics = self.actor.begin_logprobs(given).add_to(given)
        return batch, metrics | self.actor.update(batch)

    def logprobs(self) -> list[torch.Tensor]:
        """Of each row, by the weights as they are."""
        plain = MegatronActor(self.group, ActorConfig(), 1.0)
        given = self.batch(ZEROS)
        batch, _ = plain.begin_logprobs(given).add_to(given)
        return columns_of(batch, "old_logprobs")["old_logprobs"]


ZEROS = [torch.zeros(length) for length in LENGTHS]


def mask_of(row: int) -> torch.Tensor:
    return torch.arange(LENGTHS[row]) >= PROMPT


def columns_of(batch: PlacedBatch, name: str) -> dict[str, list[torch.Tensor]]:
    """Column -> rows in the batch's order."""
    column, rows_by_key = batch.columns[name], {}
    for dp_rank, part in enumerate(ray.get(list(column.shards))):
        for key, values in part.tokens.items():
            for at, row in enumerate(column.plan.rows(dp_rank)):
                rows_by_key.setdefault(key, {})[row] = values[at]
    return {key: [rows[row] for row in range(len(rows))] for key, rows in rows_by_key.items()}


def values(metrics: Metrics, *but: str) -> dict[str, float]:
    return {key: value for key, value in to_floats(metrics).items() if not key.startswith(("perf/", *but))}


def test_without_a_mismatch_a_correction_changes_no_bit(group: WorkerGroup, model: Path) -> None:
    plain = Trainer(group, model)
    agreeing = plain.logprobs()
    _, expected = plain.step(agreeing)
    after = plain.logprobs()
    corrected = Trainer(group, model, EVERYTHING_ON)
    batch, metrics = corrected.step(agreeing)
    assert batch.samples["num_loss_tokens"].tolist() == batch.samples["num_sampled_tokens"].tolist()
    assert metrics["rollout_corr/rollout_is_min"].value == metrics["rollout_corr/rollout_is_max"].value == 1.0
    assert values(metrics).items() >= values(expected).items()
    assert metrics["actor/num_updates"].value == 2 and metrics["actor/rejected_updates"].value == 0
    assert all(map(torch.equal, corrected.logprobs(), after))


def test_columns_and_metrics_are_those_of_all_rows_in_one_place(group: WorkerGroup, model: Path) -> None:
    trainer = Trainer(group, model, EVERYTHING_ON)
    old = trainer.logprobs()
    generator = torch.Generator().manual_seed(1)
    rollout = [row + 0.3 * torch.randn(len(row), generator=generator) for row in old]
    # One token of the third row leaves the loss alone; one of the fourth is vetoed, and with it the row.
    rollout[2][5] = old[2][5] + 1.0
    rollout[3][-1] = old[3][-1] + 8.0
    batch, metrics = trainer.step(rollout)
    packed = (
        torch.cat(rollout),
        torch.cat(old),
        torch.cat([mask_of(row) for row in range(8)]),
        cu_seqlens_of(LENGTHS),
    )
    whole = correct(*packed, EVERYTHING_ON)
    assert 0 == whole.num_loss_tokens_S[3] < whole.num_loss_tokens_S[2] < LENGTHS[2] - PROMPT, "not every case is there"
    columns = columns_of(batch, "old_logprobs")
    assert torch.equal(torch.cat(columns["loss_mask"]), whole.mask_T)
    torch.testing.assert_close(torch.cat(columns["rollout_is_weights"]), whole.weights_T, rtol=1e-6, atol=0)
    assert batch.samples["num_loss_tokens"].tolist() == whole.num_loss_tokens_S.tolist()
    merged = values(rollout_corr_metrics(metrics))
    expected = values(rollout_corr_metrics(mismatch_metrics(*packed) | whole.metrics))
    assert {key: merged[key] for key in expected} == pytest.approx(expected, rel=1e-9)
    # Counts are sums: ranks that share sequences must not count them again.
    assert metrics["rollout_corr/rollout_rs_num_dropped"].value == 1
    assert metrics["rollout_diff_partial/num"].value == sum(LENGTHS) - 8 * PROMPT
    # The mean over the tokens that are left, all of them under the old weights in the first update.
    assert metrics["actor/ppo_kl_first_update"].value == pytest.approx(0.0, abs=1e-7)
    assert metrics["actor/num_updates"].value == 2

    worst = trainer.actor.worst_tokens(batch)
    assert worst_samples(worst["difference"], 1).tolist() == [3]
    assert worst["position"][3] == LENGTHS[3] - 1
    for row in range(8):
        at = worst["position"][row]
        differences = (old[row] - rollout[row]).abs()[PROMPT:]
        assert worst["difference"][row] == pytest.approx(float(differences.max()), rel=1e-6)
        assert (worst["rollout_logprob"][row], worst["old_logprob"][row]) == (rollout[row][at], old[row][at])


def test_weights_reach_the_policy_loss(group: WorkerGroup, model: Path) -> None:
    """One update from the weights of old_logprobs: every ratio is 1, the loss of a token is -advantage x weight."""
    trainer = Trainer(
        group, model, RolloutCorrectionConfig(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold=4.0)
    )
    old = trainer.logprobs()
    rollout = [row + torch.linspace(-2.0, 2.0, len(row)) for row in old]
    batch, metrics = trainer.step(rollout, range(4))
    losses = []
    for row in range(4):
        ratio = (old[row] - rollout[row]).double().exp()[PROMPT:]
        kept = ratio[(ratio >= 0.25) & (ratio <= 4.0)]
        losses.append(-float(batch.samples["advantages"][row]) * kept.clamp(max=2.0))
    expected = torch.cat(losses)
    assert 0 < len(expected) < sum(LENGTHS[:4]) - 4 * PROMPT and float(expected.abs().max()) == 2.0
    assert metrics["actor/pg_loss"].value == pytest.approx(float(expected.mean()), rel=1e-5)


def test_a_mini_batch_that_is_rejected_is_left_out_on_all_ranks(group: WorkerGroup, model: Path) -> None:
    agreeing = Trainer(group, model).logprobs()
    second_is_off = [row + (number >= 4) for number, row in enumerate(agreeing)]
    trainer = Trainer(group, model, REJECTION)
    batch, metrics = trainer.step(second_is_off)
    after = trainer.logprobs()
    assert batch.samples["num_loss_tokens"].tolist() == [length - PROMPT for length in LENGTHS[:4]] + [0] * 4
    assert (metrics["actor/num_updates"].value, metrics["actor/rejected_updates"].value) == (1, 1)
    assert metrics["actor/skipped_updates"].value == 0
    # What would have come of a step that has the first mini-batch alone.
    alone = Trainer(group, model)
    _, expected = alone.step(agreeing, range(4))
    assert metrics["actor/grad_norm"].value == expected["actor/grad_norm"].value
    assert all(map(torch.equal, after, alone.logprobs()))


def test_a_step_that_is_rejected_changes_nothing_and_the_next_one_does(group: WorkerGroup, model: Path) -> None:
    trainer = Trainer(group, model, REJECTION)
    before = trainer.logprobs()
    _, metrics = trainer.step([row + 1.0 for row in before])
    assert (metrics["actor/num_updates"].value, metrics["actor/rejected_updates"].value) == (0, 2)
    assert "actor/pg_loss" not in metrics and metrics["actor/skipped_updates"].value == 0
    assert all(map(torch.equal, trainer.logprobs(), before))
    _, metrics = trainer.step(before)
    assert (metrics["actor/num_updates"].value, metrics["actor/rejected_updates"].value) == (2, 0)
    assert not all(map(torch.equal, trainer.logprobs(), before))


def test_bypass_takes_the_samplers_log_probs_and_makes_no_pass(group: WorkerGroup, model: Path) -> None:
    trainer = Trainer(group, model, RolloutCorrectionConfig(bypass_mode=True))
    old = trainer.logprobs()
    rollout = [row + 0.125 * (number - 3) for number, row in enumerate(old)]
    given = trainer.batch(rollout)
    batch, metrics = trainer.actor.begin_logprobs(given).add_to(given)
    assert (batch, metrics) == (given, {}) and trainer.actor.worst_tokens(batch) == {}
    metrics = trainer.actor.update(batch)
    differences = torch.cat([(rollout[row] - old[row])[mask_of(row)] for row in MINI_BATCHES[0]])
    assert metrics["actor/ppo_kl_first_update"].value == pytest.approx(float(differences.mean()), rel=1e-5)
    assert metrics["actor/num_updates"].value == 2 and "actor/rejected_updates" not in metrics


# One update of each, from the weights that the one before left.
ONE_PASS_UPDATES = [
    ActorConfig(),
    *(ActorConfig(policy_loss=PolicyLossConfig(name, dro_beta=0.5)) for name in ("gspo", "geo_mean", "dro", "gpg")),
    ActorConfig(loss_agg_mode="seq-mean-token-mean", entropy_coeff=0.01, use_kl_loss=True),
]


@pytest.mark.parametrize("of_tokens", [pytest.param(False, id="grpo"), full(True, id="gae")])
def test_an_update_makes_the_old_log_probs_bit_for_bit(group: WorkerGroup, model: Path, of_tokens: bool) -> None:
    """The same columns, metrics and weights as with a pass before the update, which the first half makes."""

    def train(one_pass: bool) -> tuple[list[list[torch.Tensor]], list[dict[str, float]], list[torch.Tensor]]:
        trainer = Trainer(group, model)
        given = with_token_columns(trainer.batch(ROLLOUT, range(4)), of_tokens)
        columns, metrics = [], []
        for config in ONE_PASS_UPDATES:
            actor = MegatronActor(group, config, 1.0)
            if one_pass:
                batch, step_metrics = actor.evaluate_and_update(given)
            else:
                batch, step_metrics = actor.begin_logprobs(given).add_to(given)
                step_metrics |= actor.update(batch)
            columns.append(columns_of(batch, "old_logprobs")["old_logprobs"])
            metrics.append(values(step_metrics))
        return columns, metrics, trainer.logprobs()

    columns, metrics, after = train(one_pass=False)
    in_one_pass = train(one_pass=True)
    for mine, theirs in zip(in_one_pass[0], columns, strict=True):
        assert all(map(torch.equal, mine, theirs))
    assert in_one_pass[1] == metrics
    assert {"actor/ppo_kl", "actor/entropy_loss", "rollout_corr/kl", "rollout_diff_partial/num"} <= metrics[0].keys()
    assert all(one["actor/num_updates"] == 1 and one["actor/grad_norm"] > 0 for one in metrics)
    assert all(map(torch.equal, in_one_pass[2], after))
    assert not any(map(torch.equal, columns[0], columns[-1])), "the updates changed nothing"


ROLLOUT = [torch.linspace(-3.0, -1.0, length) for length in LENGTHS]


def with_token_columns(batch: PlacedBatch, has_advantages: bool) -> PlacedBatch:
    """With a reference's log-probs; has_advantages: and advantages of tokens."""
    plan, columns = batch.plans["actor"], {"ref_logprobs": ROLLOUT}
    if has_advantages:
        columns["advantages"] = [torch.linspace(-1.0, 2.0, length) for length in LENGTHS]
    for name, rows in columns.items():
        shards = [
            ray.put(DataProto({name: Jagged.from_list([rows[row] for row in plan.rows(rank)], torch.float32)}))
            for rank in range(plan.dp_size)
        ]
        batch = batch.with_column(name, "actor", shards)
    return batch
