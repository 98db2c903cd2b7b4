"""Objectives on packed micro-batches: composition, invariance to the split, gradients, metrics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.algorithms import losses
from scalerl.algorithms.losses import LOSS_AGG_MODES, register_policy_loss
from scalerl.algorithms.objectives import PolicyObjective, SFTObjective
from scalerl.config import PPOConfig
from scalerl.config.names import REFERENCE_LOSSES
from scalerl.config.roles import uses_reference
from scalerl.config.schema import ActorConfig, PolicyLossConfig

LENGTHS = [5, 2, 7, 1, 4, 3]
CORRECTION = ("loss_mask", "rollout_is_weights")
PER_TOKEN = ("logprobs", "entropy", "old_logprobs", "ref_logprobs", "advantages", "response_mask")


def sequences(seed: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number, length in enumerate(LENGTHS):
        row = {name: -torch.rand(length, generator=generator, dtype=torch.float64) * 3 for name in PER_TOKEN}
        row["advantages"] = torch.randn(1, generator=generator, dtype=torch.float64).expand(length)
        # The last sequence has no token to learn from.
        row["response_mask"] = (torch.rand(length, generator=generator) < 0.7) & (number < len(LENGTHS) - 1)
        row["response_mask"][0] |= number == 0
        rows.append(row)
    return rows


def packed(rows: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    columns = {name: torch.cat([row[name] for row in rows]) for name in PER_TOKEN}
    lengths = torch.tensor([len(row["logprobs"]) for row in rows])
    columns["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    return columns.pop("logprobs"), columns.pop("entropy"), columns


def counts(rows: list[dict[str, torch.Tensor]], mask: str = "response_mask") -> tuple[int, int]:
    masks = [row[mask] for row in rows]
    return sum(int(mask.sum()) for mask in masks), sum(bool(mask.any()) for mask in masks)


def config_of(mode: str) -> ActorConfig:
    return ActorConfig(
        loss_agg_mode=mode,
        loss_scale_factor=9.0,
        entropy_coeff=0.01,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        clip_ratio_c=1.5,
    )


def with_loss(loss_mode: str) -> PPOConfig:
    config = PPOConfig()
    config.actor_rollout_ref.actor.policy_loss.loss_mode = loss_mode
    return config


def run(objective, parts: list[list[dict[str, torch.Tensor]]], pack=None):
    """Sums over micro-batches: (loss, metrics, gradient of each sequence's logprobs and entropy, by sequence)."""
    total, metrics, gradients = 0.0, {}, []
    for rows in parts:
        logprobs_T, entropy_T, columns = (pack or packed)(rows)
        logprobs_T.requires_grad_()
        entropy_T.requires_grad_()
        loss, part_metrics = objective(logprobs_T, entropy_T, columns)
        loss.backward()
        total += loss.item()
        for name, value in part_metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value.item()
        both = torch.stack([logprobs_T.grad, entropy_T.grad])
        pieces = both.split(columns["cu_seqlens"].diff().tolist(), 1)
        gradients += zip([id(row["logprobs"]) for row in rows], pieces, strict=True)
    return total, metrics, dict(gradients)


def test_shares_of_tokens_are_token_means_in_every_mode():
    rows = sequences(4)
    per_token = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl")
    want, *others = (PolicyObjective(config_of(mode), *counts(rows))(*packed(rows))[1] for mode in LOSS_AGG_MODES)
    assert 0 < want["actor/pg_clipfrac"] < 1
    for metrics in others:
        assert [metrics[name].item() for name in per_token] == [want[name].item() for name in per_token]
        assert metrics["actor/pg_loss"] != want["actor/pg_loss"]


def test_parts_that_are_off_have_no_metric():
    rows = sequences(0)
    logprobs_T, entropy_T, columns = packed(rows)
    del columns["ref_logprobs"]
    objective = PolicyObjective(ActorConfig(), *counts(rows))
    loss, metrics = objective(logprobs_T, None, columns)
    shares = {"actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl"}
    assert set(metrics) == {"actor/loss", "actor/pg_loss"} | shares
    # Entropy can be watched without being trained.
    watched, metrics = objective(logprobs_T, entropy_T, columns)
    assert "actor/entropy" in metrics
    assert torch.equal(watched, loss)


def corrected(rows: list[dict[str, torch.Tensor]], seed: int) -> list[dict[str, torch.Tensor]]:
    """With weights on the sampled tokens, of which a mask has lost some and the third sequence all."""
    generator = torch.Generator().manual_seed(seed)
    for number, row in enumerate(rows):
        lost = torch.rand(len(row["logprobs"]), generator=generator) < 0.3
        row["loss_mask"] = row["response_mask"] & ~lost & torch.tensor(number != 2)
        weights = torch.rand(len(row["logprobs"]), generator=generator) * 2
        row["rollout_is_weights"] = torch.where(row["loss_mask"], weights, 0.0)
    rows[0]["loss_mask"][0], rows[0]["rollout_is_weights"][0] = True, 0.5
    return rows


def exact(result) -> tuple[float, dict[str, float], list]:
    """What `run` returned, with gradients in the order of the rows, to compare bit by bit."""
    loss, metrics, gradients = result
    return loss, metrics, [gradient.tolist() for gradient in gradients.values()]


def packed_corrected(rows: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor, dict]:
    logprobs_T, entropy_T, columns = packed(rows)
    del columns["response_mask"]
    return logprobs_T, entropy_T, columns | {name: torch.cat([row[name] for row in rows]) for name in CORRECTION}


@pytest.mark.parametrize("is_corrected", [False, True])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 99),
    part_of=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    order=st.permutations(range(6)),
)
def test_loss_metrics_and_gradient_do_not_depend_on_the_split(mode, is_corrected, seed, part_of, order):
    rows = corrected(sequences(seed), seed) if is_corrected else sequences(seed)
    mask, pack = ("loss_mask", packed_corrected) if is_corrected else ("response_mask", packed)
    objective = PolicyObjective(config_of(mode), *counts(rows, mask), corrected=is_corrected)
    parts = [[rows[row] for row in order if part_of[row] == part] for part in sorted(set(part_of))]
    loss, metrics, gradient = run(objective, parts, pack)
    whole_loss, whole_metrics, whole_gradient = run(objective, [rows], pack)
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    assert metrics == pytest.approx(whole_metrics, rel=1e-6, abs=1e-9)
    for row in rows:
        assert torch.equal(gradient[id(row["logprobs"])], whole_gradient[id(row["logprobs"])])


LOG_2, LOG_10 = math.log(2), math.log(10)


@pytest.mark.parametrize(
    ("mask", "weights", "num_loss_tokens", "pg", "num_clipped", "kl_of_ratios", "entropy"),
    [
        # The ratios are: masked, 2, 0.5, 0.1; a clip holds the first and the second of those that count.
        ([0, 1, 1, 1], None, 4, -1.2 + 0.8 - 0.2, 2, LOG_10, 1 + 2 + 3),
        # Weights are of the policy loss alone; token 2 was rejected.
        ([0, 1, 0, 1], [0.0, 0.5, 0.0, 3.0], 2, 0.5 * -1.2 + 3.0 * -0.2, 1, LOG_10 - LOG_2, 1 + 3),
    ],
    ids=["plain", "corrected"],
)
def test_composition_and_metrics_by_hand(mask, weights, num_loss_tokens, pg, num_clipped, kl_of_ratios, entropy):
    config = ActorConfig(entropy_coeff=0.5, use_kl_loss=True, kl_loss_coef=0.25, kl_loss_type="k2", clip_ratio=0.2)
    objective = PolicyObjective(config, num_loss_tokens, num_sequences=2, corrected=weights is not None)
    columns = {
        "old_logprobs": torch.tensor([0.0, -2 * LOG_2, -LOG_2, 0.0]),
        "advantages": torch.tensor([9.0, 1.0, -1.0, 2.0]),
        # k2 of a gap of 2, at one of the tokens that count.
        "ref_logprobs": torch.tensor([5.0, -LOG_2 - 2, -2 * LOG_2, -LOG_10]),
        "cu_seqlens": torch.tensor([0, 2, 4]),
        "response_mask" if weights is None else "loss_mask": torch.tensor(mask, dtype=torch.bool),
    }
    if weights is not None:
        columns["rollout_is_weights"] = torch.tensor(weights)
    new = torch.tensor([0.0, -LOG_2, -2 * LOG_2, -LOG_10])
    loss, metrics = objective(new, torch.tensor([7.0, 1.0, 2.0, 3.0]), columns)
    pg, entropy, kl = (value / num_loss_tokens for value in (pg, entropy, 2.0))
    want = {
        "actor/loss": pg - 0.5 * entropy + 0.25 * kl,
        "actor/pg_loss": pg,
        "actor/pg_clipfrac": num_clipped / num_loss_tokens,
        "actor/pg_clipfrac_lower": 0.0,
        "actor/ppo_kl": kl_of_ratios / num_loss_tokens,
        "actor/entropy": entropy,
        "actor/kl_loss": kl,
    }
    assert loss.item() == pytest.approx(want["actor/loss"])
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(want)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_weights_of_one_and_a_whole_mask_change_no_bit(mode):
    rows = sequences(5)
    for row in rows:
        row |= {"loss_mask": row["response_mask"], "rollout_is_weights": row["response_mask"].float()}
    plain, same = PolicyObjective(config_of(mode), *counts(rows)), PolicyObjective(config_of(mode), *counts(rows), True)
    assert exact(run(same, [rows], packed_corrected)) == exact(run(plain, [rows]))


def test_a_weight_that_is_not_a_number_shows():
    """A NaN log-prob is never rejected: the update must see it."""
    rows = corrected(sequences(6), 6)
    rows[0]["rollout_is_weights"][0] = math.nan
    objective = PolicyObjective(config_of("token-mean"), *counts(rows, "loss_mask"), corrected=True)
    assert math.isnan(run(objective, [rows], packed_corrected)[0])


@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_extreme_log_ratios_stay_finite(gap):
    rows = sequences(2)
    logprobs_T, entropy_T, columns = packed(rows)
    columns["old_logprobs"] = logprobs_T - gap
    columns["ref_logprobs"] = logprobs_T - gap
    logprobs_T = logprobs_T.requires_grad_()
    loss, metrics = PolicyObjective(config_of("token-mean"), *counts(rows))(logprobs_T, entropy_T, columns)
    loss.backward()
    assert logprobs_T.grad.isfinite().all()
    assert all(value.isfinite() for value in (loss, *metrics.values()))


def test_metrics_alias_no_input_and_no_loss():
    rows = sequences(3)
    logprobs_T, entropy_T, columns = packed(rows)
    before = {name: column.clone() for name, column in columns.items()}
    loss, metrics = PolicyObjective(config_of("token-mean"), *counts(rows))(
        logprobs_T.requires_grad_(), entropy_T, columns
    )
    assert all(torch.equal(before[name], column) for name, column in columns.items())
    assert not any(value.requires_grad for value in metrics.values())
    snapshot = {name: value.item() for name, value in metrics.items()}
    with torch.no_grad():
        for tensor in (loss, logprobs_T, entropy_T, *columns.values()):
            tensor.zero_()
    assert {name: value.item() for name, value in metrics.items()} == snapshot
    # The plain policy loss is the loss: the metric must still be a copy.
    plain, metrics = PolicyObjective(ActorConfig(), *counts(rows))(
        *packed(sequences(3))[:1], None, packed(sequences(3))[2]
    )
    want = plain.item()
    plain.mul_(8)
    assert metrics["actor/pg_loss"].item() == want


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ActorConfig(policy_loss=PolicyLossConfig(loss_mode="nope")), "loss_mode='nope'"),
        (ActorConfig(use_kl_loss=True, kl_loss_type="nope"), "kl_loss_type='nope'"),
        (ActorConfig(loss_agg_mode="nope"), "loss_agg_mode='nope'"),
        (ActorConfig(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=0.0), r"actor.loss_scale_factor=0.0"),
    ],
)
def test_refuses_names_before_the_first_forward(config, message):
    with pytest.raises(ValueError, match=message):
        PolicyObjective(config, 1, 1)


@pytest.mark.parametrize("counts", [(0, 1), (1, 0)])
def test_refuses_a_mini_batch_without_loss_tokens(counts):
    with pytest.raises(ValueError, match="has no token to learn from"):
        PolicyObjective(ActorConfig(), *counts)


def test_missing_inputs_are_named():
    logprobs_T, entropy_T, columns = packed(sequences(0))
    del columns["ref_logprobs"]
    with pytest.raises(ValueError, match=r"lacks columns \['ref_logprobs'\]"):
        PolicyObjective(config_of("token-mean"), 5, 2)(logprobs_T, entropy_T, columns)
    with pytest.raises(ValueError, match=r"entropy_coeff=0.1 needs the entropy"):
        PolicyObjective(ActorConfig(entropy_coeff=0.1), 5, 2)(logprobs_T, None, columns)


def test_token_columns_are_what_it_reads():
    rows = corrected(sequences(0), 0)
    logprobs_T, entropy_T, columns = packed_corrected(rows)
    columns |= packed(rows)[2]
    configs = (ActorConfig(), config_of("token-mean"))
    for objective in (PolicyObjective(config, 5, 2, on) for config in configs for on in (False, True)):
        needed = {name: columns[name] for name in (*objective.token_columns, "cu_seqlens")}
        objective(logprobs_T, entropy_T if objective.needs_entropy else None, needed)
        for name in objective.token_columns:
            with pytest.raises(ValueError, match=name):
                objective(logprobs_T, entropy_T, {key: value for key, value in needed.items() if key != name})


def test_sft_is_the_cross_entropy():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 5, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(5, (9,), generator=generator)
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 0, 0, 1], dtype=torch.bool)
    want = torch.nn.functional.cross_entropy(logits[mask], labels[mask])
    want_gradient = torch.autograd.grad(want, logits)[0]
    total, metric = 0.0, 0.0
    for part in (slice(0, 4), slice(4, 9)):
        logprobs_T = logits[part].log_softmax(-1).gather(-1, labels[part, None]).squeeze(-1)
        columns = {"response_mask": mask[part], "cu_seqlens": torch.tensor([0, part.stop - part.start])}
        loss, metrics = SFTObjective(num_loss_tokens=5)(logprobs_T, None, columns)
        loss.backward()
        total, metric = total + loss.item(), metric + metrics["train/loss"].item()
    assert total == metric == pytest.approx(want.item(), rel=1e-6)
    torch.testing.assert_close(logits.grad, want_gradient, rtol=1e-6, atol=1e-9)


def test_a_loss_gets_the_columns_that_it_names() -> None:
    """Log-probs of the reference without a KL loss, and a column that no other loss knows, with trailing dimensions."""
    seen = {}

    def towards(logprobs_T, old_logprobs_T, advantages_T, config, *, ref_logprobs, experts):
        seen.update(ref_logprobs=ref_logprobs, experts=experts)
        return ref_logprobs - logprobs_T, {}

    register_policy_loss("towards", needs=("ref_logprobs", "experts"))(towards)
    try:
        config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="towards"))
        objective = PolicyObjective(config, *counts(sequences(0)))
        assert objective.token_columns == ("old_logprobs", "advantages", "response_mask", "ref_logprobs", "experts")
        assert uses_reference(with_loss("towards")) and not uses_reference(with_loss("vanilla"))
        logprobs, _, columns = packed(sequences(0))
        with pytest.raises(ValueError, match=r"lacks columns \['experts'\]"):
            objective(logprobs, None, columns)
        columns["experts"] = torch.arange(1, 1 + 4 * len(logprobs)).view(-1, 2, 2)
        loss, _ = objective(logprobs, None, columns)
    finally:
        losses._REGISTRY._forget("towards")
        REFERENCE_LOSSES.discard("towards")
    kept = columns["response_mask"]
    assert torch.equal(seen["experts"][kept], columns["experts"][kept]) and not seen["experts"][~kept].any()
    mean = (columns["ref_logprobs"] - logprobs)[kept].mean()
    assert loss == pytest.approx(float(mean)) and not seen["ref_logprobs"][~kept].any()


def with_teacher(rows: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Packed, with two words of a teacher for each token; no numbers at tokens without a loss."""
    logprobs_T, entropy_T, columns = packed(rows)
    for name, shift in (("teacher_logprobs", 1.0), ("logprobs_of_teacher_ids", 0.5)):
        column = torch.stack([columns["old_logprobs"] - shift, columns["ref_logprobs"] - 2.0], -1)
        columns[name] = column.masked_fill(columns["response_mask"][:, None] == 0, float("nan"))
    return logprobs_T, entropy_T, columns


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_kl_of_a_teacher_is_divided_by_counts_of_all_ranks(mode: str):
    """The parts' terms add up to that of the whole; a mean of each part's mean would not."""
    rows = sequences(5)
    objective = PolicyObjective(config_of(mode), *counts(rows), distillation_coef=0.5)
    plain = PolicyObjective(config_of(mode), *counts(rows))
    whole, metrics, gradients = run(objective, [rows], with_teacher)
    parts, part_metrics, part_gradients = run(objective, [rows[:2], rows[2:3], rows[3:]], with_teacher)
    assert parts == pytest.approx(whole, rel=1e-6) and part_metrics == pytest.approx(metrics, rel=1e-5)
    term = metrics["actor/distillation_loss"]
    assert whole - run(plain, [rows], packed)[0] == pytest.approx(0.5 * term, rel=1e-5) and term > 0
    for row, gradient in gradients.items():
        torch.testing.assert_close(part_gradients[row], gradient)


def test_kl_of_a_teacher_reaches_its_words_and_no_token_without_a_loss():
    rows = sequences(6)
    logprobs_T, entropy_T, columns = with_teacher(rows)
    words_TK = columns["logprobs_of_teacher_ids"].requires_grad_()
    objective = PolicyObjective(config_of("token-mean"), *counts(rows), distillation_coef=1.0)
    objective(logprobs_T, entropy_T, columns)[0].backward()
    assert torch.equal((words_TK.grad != 0).any(-1), columns["response_mask"] != 0)
    del columns["teacher_logprobs"]
    with pytest.raises(ValueError, match="teacher_logprobs"):
        objective(logprobs_T, entropy_T, columns)
