"""Policy losses that look at whole sequences, or at all tokens of a mini-batch, do not see how ranks share the batch.

One chain of updates, each with another loss, so that a difference anywhere shows in the weights at the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.launch import run_ranks
from tests.dist.layouts import LAYOUTS, ONE
from tests.dist.test_layout_invariance import LENGTHS, RELATIVE, TEMPERATURE, make_model, relative

# Loss and how it is aggregated.
CHAIN = (
    ("gspo", "seq-mean-token-mean"),
    ("geo_mean", "token-mean"),
    ("geo_mean", "seq-mean-token-mean"),
    ("cispo", "token-mean"),
    ("sapo", "seq-mean-token-sum"),
    ("kl_cov", "token-mean"),
    ("clip_cov", "seq-mean-token-mean"),
    ("dro", "seq-mean-token-sum-norm"),
    ("gpg", "token-sum"),
)
SELECTING = ("kl_cov", "clip_cov")


def train(model_path: str, sizes: dict[str, int], max_tokens_per_micro_batch: int, own_counts: bool) -> Any:
    """On every rank: the chain on one batch; metrics of each update, tokens that were selected, weights at the end.

    own_counts: each rank believes that its tokens are all there are.
    """
    from scalerl.algorithms import PolicyObjective
    from scalerl.batch import plan_step
    from scalerl.batch.columns import RESPONSE_MASK
    from scalerl.batch.data_proto import DataProto, Jagged
    from scalerl.config.schema import ActorConfig, MegatronConfig, OptimConfig, PolicyLossConfig
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize
    from scalerl.trainer.ranks.run_estimators import selected_tokens_column

    layout = Layout(**sizes)
    groups = initialize(layout, backend="gloo", timeout_s=60, seed=1)
    engine = MegatronEngine(
        model_path, MegatronConfig(dtype="float32"), groups, optim=OptimConfig(lr=1e-4, clip_grad=0.5)
    )
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 500, (length,), generator=generator) for length in LENGTHS]
    noise = [torch.randn(length, generator=generator) * 0.3 for length in LENGTHS]
    # Every third token of a response is a tool's.
    masks = [(torch.arange(length) >= 2) & (torch.arange(length) % 3 != 1) for length in LENGTHS]
    plan = plan_step(
        LENGTHS,
        dp_size=layout.dp_size,
        mini_batches=[range(len(LENGTHS))],
        max_tokens_per_micro_batch=max_tokens_per_micro_batch,
        micro_batch_multiple=1,
    )
    mine = plan.rows(groups.coordinates.dp_rank)
    micro_batches = plan.local_micro_batches(groups.coordinates.dp_rank)[0]
    shard = DataProto(
        {
            "input_ids": Jagged.from_list([rows[row] for row in mine], torch.int64),
            "response_mask": Jagged.from_list([masks[row] for row in mine], torch.bool),
            "advantages": Jagged.from_list(
                [torch.full((LENGTHS[row],), (-1.0) ** row * (1 + row / 10)) for row in mine], torch.float32
            ),
        },
        {name: torch.tensor(mine).numpy() for name in ("uid", "prompt_uid", "sample_index")}
        | {"trajectory_index": torch.zeros(len(mine), dtype=torch.int64).numpy()},
    )
    logprobs = engine.logprobs(shard, micro_batches, temperature=TEMPERATURE)["logprobs"]
    moved = logprobs.values + torch.cat([noise[row] for row in mine])
    shard = shard.union(DataProto({"old_logprobs": Jagged(moved, logprobs.cu_seqlens)}))
    counted = [masks[row] for row in mine] if own_counts else masks
    total = {
        "num_loss_tokens": sum(int(mask.sum()) for mask in counted),
        "num_sequences": sum(bool(mask.any()) for mask in counted),
    }
    updates, selected = [], {}
    for name, mode in CHAIN:
        config = ActorConfig(
            clip_ratio_low=0.1,
            clip_ratio_high=0.15,
            loss_agg_mode=mode,
            loss_scale_factor=32.0,
            policy_loss=PolicyLossConfig(name, 0.3, 0.0, 1.0, kl_cov_ratio=0.2, ppo_kl_coef=0.5, dro_beta=0.5),
        )
        given = shard
        if name in SELECTING:
            column = selected_tokens_column(
                shard, [micro_batches], config.policy_loss, [total], mask=RESPONSE_MASK, group=groups.dp, device="cpu"
            )
            selected[name] = {row: column[at].tolist() for at, row in enumerate(mine)}
            given = shard.union(DataProto({"selected": column}))
        updates.append(engine.update(given, micro_batches, PolicyObjective(config, **total), temperature=TEMPERATURE))
    weights = {name: tensor.clone() for bucket in engine.export_buckets(20_000) for name, tensor in bucket}
    return updates, selected, weights


def run(model_path: Path, sizes: dict[str, int], *, max_tokens_per_micro_batch: int = 40, own_counts: bool = False):
    ranks = run_ranks(sizes["world_size"], train, str(model_path), sizes, max_tokens_per_micro_batch, own_counts)
    selected = {name: {row: on for rank in ranks for row, on in rank[1][name].items()} for name in SELECTING}
    return ranks[0][0], selected, ranks[0][2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def expected(model: Path):
    return run(model, ONE)


def assert_same(trained, expected) -> None:
    assert trained[1] == expected[1], "other tokens were selected"
    for (name, mode), mine, theirs in zip(CHAIN, trained[0], expected[0], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert mine[key] == pytest.approx(value, rel=RELATIVE, abs=RELATIVE), (name, mode, key)
    for name, weight in expected[2].items():
        assert relative(trained[2][name], weight) < RELATIVE, name


@pytest.mark.parametrize(("layout", "max_tokens_per_micro_batch"), [("dp2", 31), ("cp2", 48), ("cp2_dp2", 40)])
def test_layout(model: Path, expected, layout: str, max_tokens_per_micro_batch: int) -> None:
    assert_same(run(model, LAYOUTS[layout], max_tokens_per_micro_batch=max_tokens_per_micro_batch), expected)


def test_one_micro_batch(model: Path, expected) -> None:
    assert_same(run(model, ONE, max_tokens_per_micro_batch=200), expected)


def test_the_comparison_sees_counts_of_one_rank(model: Path, expected) -> None:
    with pytest.raises(AssertionError):
        assert_same(run(model, LAYOUTS["dp2"], own_counts=True), expected)


def test_the_losses_are_at_work(expected) -> None:
    """Else all layouts would agree on nothing."""
    updates, selected, _ = expected
    by_loss = {name: update for (name, _), update in zip(CHAIN, updates, strict=True)}
    for name in ("gspo", "geo_mean", "cispo", "clip_cov"):
        assert 0 < by_loss[name]["actor/pg_clipfrac"] < 1
    for name in SELECTING:
        num_selected = sum(on for row in selected[name].values() for on in row)
        num_tokens = sum(sum(position >= 2 and position % 3 != 1 for position in range(length)) for length in LENGTHS)
        assert 1 < num_selected <= int({"kl_cov": 0.2, "clip_cov": 0.3}[name] * num_tokens)
        assert by_loss[name]["actor/cov_selected_frac"] == pytest.approx(num_selected / num_tokens)
    assert all(update["grad_norm"] > 0 for update in updates)
