"""Off-policy correction against loops over sequences in numpy, at extremes, and over splits into ranks."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from scalerl.algorithms import Correction, correct, rollout_corr_metrics
from scalerl.algorithms.sequences import Sequences
from scalerl.config.schema import RolloutCorrectionConfig
from scalerl.tracking.metrics import merge_metrics, to_floats

NAN = math.nan
CASES = {
    "off": {},
    "token TIS": {"rollout_is": "token", "rollout_is_threshold": 1.2},
    "sequence TIS": {"rollout_is": "sequence", "rollout_is_threshold": 1.5},
    "geometric TIS": {"rollout_is": "geometric", "rollout_is_threshold": 1.05},
    "IcePop": {"rollout_is": "token", "rollout_is_threshold": [0.8, 1.2]},
    "sequence MIS": {"rollout_is": "sequence", "rollout_is_threshold": "0.5_1.5"},
    "geometric MIS": {"rollout_is": "geometric", "rollout_is_threshold": [0.95, 1.05]},
    "normalized": {"rollout_is": "token", "rollout_is_threshold": 1.2, "rollout_is_batch_normalize": True},
    "normalized by sequence": {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
    "token test": {"rollout_rs": "token_k1", "rollout_rs_threshold": [0.7, 1.1]},
    "reciprocal": {"rollout_rs": "token_k1", "rollout_rs_threshold": 1.3},
    "token k2": {"rollout_rs": "token_k2", "rollout_rs_threshold": 0.02},
    "token k3": {"rollout_rs": "token_k3", "rollout_rs_threshold": 0.02},
    "by sequence": {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": [0.5, 1.2]},
    "by geometric mean": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": [0.9, 1.03]},
    "sum k2": {"rollout_rs": "seq_sum_k2", "rollout_rs_threshold": 0.1},
    "sum k3": {"rollout_rs": "seq_sum_k3", "rollout_rs_threshold": 0.1},
    "mean k2": {"rollout_rs": "seq_mean_k2", "rollout_rs_threshold": 0.02},
    "mean k3": {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.02},
    "max k2": {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.1},
    "max k3": {"rollout_rs": "seq_max_k3", "rollout_rs_threshold": 0.1},
    "veto": {"rollout_token_veto_threshold": 0.7},
    "all together": {
        "rollout_is": "sequence",
        "rollout_is_threshold": 1.5,
        "rollout_is_batch_normalize": True,
        "rollout_rs": ["token_k1", "seq_mean_k3"],
        "rollout_rs_threshold": [[0.7, 1.4], 0.05],
        "rollout_token_veto_threshold": 0.5,
    },
}
# Written out again, not read from the code: (level, truncate at | (zero below, zero above)).
WEIGHT_OF = {
    "token TIS": ("token", 1.2),
    "sequence TIS": ("sequence", 1.5),
    "geometric TIS": ("geometric", 1.05),
    "IcePop": ("token", (0.8, 1.2)),
    "sequence MIS": ("sequence", (0.5, 1.5)),
    "geometric MIS": ("geometric", (0.95, 1.05)),
    "normalized": ("token", 1.2),
    "normalized by sequence": ("sequence", 2.0),
    "all together": ("sequence", 1.5),
}
# Tests by case: what each looks at, and outside which bounds it rejects. k1: the ratio; k2, k3: the divergence.
TESTS_OF = {
    "token test": {"token_k1": (0.7, 1.1)},
    "reciprocal": {"token_k1": (1 / 1.3, 1.3)},
    "token k2": {"token_k2": (-math.inf, 0.02)},
    "token k3": {"token_k3": (-math.inf, 0.02)},
    "by sequence": {"seq_sum_k1": (0.5, 1.2)},
    "by geometric mean": {"seq_mean_k1": (0.9, 1.03)},
    "sum k2": {"seq_sum_k2": (-math.inf, 0.1)},
    "sum k3": {"seq_sum_k3": (-math.inf, 0.1)},
    "mean k2": {"seq_mean_k2": (-math.inf, 0.02)},
    "mean k3": {"seq_mean_k3": (-math.inf, 0.02)},
    "max k2": {"seq_max_k2": (-math.inf, 0.1)},
    "max k3": {"seq_max_k3": (-math.inf, 0.1)},
    "all together": {"token_k1": (0.7, 1.4), "seq_mean_k3": (-math.inf, 0.05)},
}
VETO_OF = {"veto": 0.7, "all together": 0.5}
LOOKS_AT = {
    "token_k1": lambda r: r,
    "token_k2": lambda r: np.log(r) ** 2 / 2,
    "token_k3": lambda r: r - 1 - np.log(r),
    "seq_sum_k1": lambda r: r.prod(),
    "seq_sum_k2": lambda r: (np.log(r) ** 2 / 2).sum(),
    "seq_sum_k3": lambda r: (r - 1 - np.log(r)).sum(),
    "seq_mean_k1": lambda r: r.prod() ** (1 / len(r)),
    "seq_mean_k2": lambda r: (np.log(r) ** 2 / 2).mean(),
    "seq_mean_k3": lambda r: (r - 1 - np.log(r)).mean(),
    "seq_max_k2": lambda r: (np.log(r) ** 2 / 2).max(),
    "seq_max_k3": lambda r: (r - 1 - np.log(r)).max(),
}
GEOMETRIC = LOOKS_AT["seq_mean_k1"]


def batch(num_sequences: int = 24, *, spread: float = 0.15, padding: int = 3):
    """(rollout_T, old_T, mask_T, cu_seqlens): prompts and gaps in the responses, a response of one token, an empty one.

    Where the mask is 0 the log-probs are NaN.
    """
    generator = np.random.default_rng(0)
    rollout, old, mask, lengths = [], [], [], []
    for row in range(num_sequences):
        num_response = 1 if row % 8 == 2 else 0 if row % 8 == 5 else int(generator.integers(2, 12))
        num_prompt = int(generator.integers(1, 5))
        sampled = np.array([False] * num_prompt + [True] * num_response)
        if num_response > 4:
            sampled[num_prompt + 2] = False
        values = -generator.random(len(sampled)) * 3
        rollout.append(values)
        old.append(values + spread * generator.standard_normal(len(sampled)))
        mask.append(sampled)
        lengths.append(len(sampled))
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    ends = [np.full(padding, NAN), np.full(padding, NAN), np.ones(padding, dtype=bool)]
    columns = [np.concatenate([*column, end]) for column, end in zip((rollout, old, mask), ends, strict=True)]
    for column in columns[:2]:
        column[~columns[2]] = NAN
    return (*(torch.tensor(column) for column in columns), cu_seqlens)


def config(name: str) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig(**CASES[name])


def sampled_ratios(rollout_T, old_T, mask_T, cu_seqlens) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per sequence: (positions of sampled tokens in T, their ratios)."""
    positions_and_ratios = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        at = np.array([t for t in range(start, end) if mask_T[t]], dtype=int)
        positions_and_ratios.append((at, np.exp(old_T.numpy()[at] - rollout_T.numpy()[at])))
    return positions_and_ratios


def rejected(name: str, ratio: np.ndarray) -> dict[str, np.ndarray]:
    """By test and veto, the tokens of one sequence that leave the mask."""
    rejections = {}
    for option, (low, high) in TESTS_OF.get(name, {}).items():
        seen = LOOKS_AT[option](ratio)
        rejections[option] = np.broadcast_to((seen < low) | (seen > high), len(ratio))
    if name in VETO_OF:
        rejections["veto"] = np.full(len(ratio), (ratio < VETO_OF[name]).any())
    return rejections


def oracle(name: str, columns) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """(weights [T], mask [T], the weights before rejection and normalization of each sequence that has a token)."""
    num_tokens = len(columns[0])
    weights, mask, units = np.zeros(num_tokens), np.zeros(num_tokens, dtype=bool), []
    level, bound = WEIGHT_OF.get(name, ("none", math.inf))
    for at, ratio in sampled_ratios(*columns):
        if not len(at):
            continue
        raw = {"token": ratio, "sequence": ratio.prod(), "geometric": GEOMETRIC(ratio), "none": 1.0}[level]
        raw = np.broadcast_to(raw, len(at))
        inside = (raw >= bound[0]) & (raw <= bound[1]) if type(bound) is tuple else None
        weights[at] = raw.clip(0, bound) if inside is None else np.where(inside, raw, 0)
        units.append(weights[at])
        mask[at] = ~np.any([np.zeros(len(at), dtype=bool), *rejected(name, ratio).values()], axis=0)
    if CASES[name].get("rollout_is_batch_normalize"):
        weights /= (np.concatenate(units) if level == "token" else np.array([unit[0] for unit in units])).mean()
    return np.where(mask, weights, 0), mask, units


def weight_oracle(name: str, ratios: list[np.ndarray], units: list[np.ndarray]) -> dict[str, float]:
    level, bound = WEIGHT_OF[name]
    lower, upper = bound if type(bound) is tuple else (1 / bound, bound)
    if level == "token":
        ratio, weight = np.concatenate(ratios), np.concatenate(units)
    else:
        of_sequence = GEOMETRIC if level == "geometric" else np.prod
        ratio, weight = np.array([of_sequence(r) for r in ratios]), np.array([unit[0] for unit in units])
    high, low = ratio > upper, ratio < lower
    means = np.array([unit.mean() for unit in units])
    want = {
        "rollout_is_mean": weight.mean(),
        "rollout_is_max": weight.max(),
        "rollout_is_min": weight.min(),
        "rollout_is_std": weight.std(),
        "rollout_is_eff_sample_size": weight.sum() ** 2 / len(weight) / (weight**2).sum(),
        "rollout_is_ratio_fraction_high": high.mean(),
        "rollout_is_ratio_fraction_low": low.mean(),
        "rollout_is_oob_ratio": (high | low).mean() if type(bound) is tuple else high.mean(),
        "rollout_is_seq_mean": means.mean(),
        "rollout_is_seq_max": means.max(),
        "rollout_is_seq_min": means.min(),
        "rollout_is_seq_std": means.std(),
        "rollout_is_seq_max_deviation": np.abs(means - 1).max(),
    }
    normalized = CASES[name].get("rollout_is_batch_normalize")
    return want | ({"rollout_is_batch_norm_factor": weight.mean()} if normalized else {})


def rejection_oracle(name: str, ratios: list[np.ndarray]) -> dict[str, float]:
    rejects = [rejected(name, ratio) for ratio in ratios]
    want = {}

    def masked(prefix: str, reject: list[np.ndarray]) -> None:
        want[f"{prefix}_masked_fraction"] = np.concatenate(reject).mean()
        want[f"{prefix}_seq_masked_fraction"] = np.mean([r.any() for r in reject])

    for option, (low, high) in TESTS_OF.get(name, {}).items():
        seen = np.concatenate([np.atleast_1d(LOOKS_AT[option](ratio)) for ratio in ratios])
        # What is reported of k1 is the divergence: -log of the ratio, or of its product or geometric mean.
        reported = -np.log(seen) if option.endswith("k1") else seen
        for key, value in (("mean", reported.mean()), ("max", reported.max()), ("min", reported.min())):
            want[f"rollout_rs_{option}_{key}"] = value
        want[f"rollout_rs_{option}_fraction_high"] = (seen > high).mean()
        want[f"rollout_rs_{option}_fraction_low"] = (seen < low).mean()
        masked(f"rollout_rs_{option}", [reject[option] for reject in rejects])
    if name in VETO_OF:
        want["rollout_is_veto_fraction"] = np.mean([reject["veto"].any() for reject in rejects])
        want["rollout_is_catastrophic_token_fraction"] = (np.concatenate(ratios) < VETO_OF[name]).mean()
    if any(rejects):
        together = [np.any(list(reject.values()), axis=0) for reject in rejects]
        masked("rollout_rs", together)
        want["rollout_rs_num_dropped"] = sum(reject.all() for reject in together)
    return want


@pytest.mark.parametrize("name", CASES)
def test_equals_a_loop_over_sequences(name):
    columns = batch()
    correction = correct(*columns, config(name))
    weights, mask, _ = oracle(name, columns)
    assert correction.weights_T.dtype == torch.float32
    np.testing.assert_allclose(correction.weights_T.numpy(), weights, rtol=1e-6, atol=0)
    np.testing.assert_array_equal(correction.mask_T.numpy(), mask)
    ends = zip(columns[3][:-1].tolist(), columns[3][1:].tolist(), strict=True)
    assert correction.num_loss_tokens_S.tolist() == [mask[start:end].sum() for start, end in ends]
    # The case is worth its name only if something is cut, and something is left.
    if name in WEIGHT_OF:
        assert len(np.unique(weights)) > 2
    if name in TESTS_OF or name in VETO_OF:
        assert 0 < mask.sum() < columns[2][: columns[3][-1]].sum()


@pytest.mark.parametrize("name", CASES)
def test_metrics_equal_a_loop_over_sequences(name):
    columns = batch()
    ratios = [ratio for at, ratio in sampled_ratios(*columns) if len(at)]
    want = weight_oracle(name, ratios, oracle(name, columns)[2]) if name in WEIGHT_OF else {}
    want |= rejection_oracle(name, ratios)
    metrics = to_floats(rollout_corr_metrics(merge_metrics([correct(*columns, config(name)).metrics])))
    assert metrics == pytest.approx({f"rollout_corr/{key}": value for key, value in want.items()}, rel=1e-9, abs=1e-12)


def test_sums_by_sequence():
    """Sequences of 3, 0 and 2 tokens, the last with none selected; one token of padding."""
    sequences = Sequences(torch.tensor([1, 0, 1, 0, 0, 1]), torch.tensor([0, 3, 3, 5]))
    values_N = sequences.select(torch.tensor([-2.0, NAN, -4.0, NAN, NAN, NAN]))
    assert values_N.tolist() == [-2.0, -4.0] and sequences.counts_S.tolist() == [2, 0, 0]
    assert sequences.sum(values_N).tolist() == [-6.0, 0.0, 0.0]
    assert sequences.mean(values_N).tolist() == [-3.0, 0.0, 0.0]
    assert sequences.max(values_N).tolist() == [-2.0, 0.0, 0.0]
    assert sequences.any(values_N < -3).tolist() == [True, False, False]
    assert sequences.nonempty(torch.tensor([7, 8, 9])).tolist() == [7]
    assert sequences.of_tokens(torch.tensor([7, 8, 9])).tolist() == [7, 7]
    assert sequences.scatter(values_N).tolist() == [-2.0, 0.0, -4.0, 0.0, 0.0, 0.0]


def rows_of(columns, rows: list[int]):
    """The columns of some sequences, packed again, without padding."""
    *tokens, cu_seqlens = columns
    at = torch.cat([torch.arange(cu_seqlens[row], cu_seqlens[row + 1]) for row in rows] or [torch.arange(0)])
    lengths = cu_seqlens.diff()[rows]
    return (*(column[at] for column in tokens), torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))


def same(metrics: dict, want: dict) -> None:
    """Extremes and counts to the last bit; means within what adding in another order changes."""
    assert metrics.keys() == want.keys()
    for key, value in want.items():
        exact = key.endswith(("_max", "_min", "_num_dropped"))
        assert metrics[key] == (value if exact else pytest.approx(value, rel=1e-13, abs=1e-15)), key


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("normalized")])
@pytest.mark.parametrize("cuts", [[12], [1, 2, 3, 3, 20], [5, 6], list(range(1, 24))])
def test_any_split_of_the_sequences_gives_the_whole(name, cuts):
    """5, 6: a part without a sampled token.  3, 3: a part without a sequence."""
    columns, settings = batch(), dataclasses.replace(config(name), rollout_is_batch_normalize=False)
    pieces = [correct(*rows_of(columns, rows.tolist()), settings) for rows in np.split(np.arange(24), cuts)]
    whole = correct(*rows_of(columns, list(range(24))), settings)
    assert torch.equal(torch.cat([piece.weights_T for piece in pieces]), whole.weights_T)
    assert torch.equal(torch.cat([piece.mask_T for piece in pieces]), whole.mask_T)
    merged = merge_metrics(piece.metrics for piece in pieces)
    same(to_floats(rollout_corr_metrics(merged)), to_floats(rollout_corr_metrics(whole.metrics)))


def test_off_changes_nothing():
    columns = batch()
    correction = correct(*columns, RolloutCorrectionConfig())
    inside = columns[2] & (torch.arange(len(columns[2])) < columns[3][-1])
    assert torch.equal(correction.mask_T, inside)
    assert torch.equal(correction.weights_T, inside.float())
    assert torch.equal(correction.old_logprobs_T[inside], columns[1][inside])
    assert correction.metrics == {}


def test_equal_log_probs_weigh_exactly_1_in_every_mode():
    rollout, _, mask, cu_seqlens = batch()
    for name in CASES:
        correction = correct(rollout, rollout.clone(), mask, cu_seqlens, config(name))
        inside = correct(rollout, rollout, mask, cu_seqlens, RolloutCorrectionConfig()).mask_T
        assert torch.equal(correction.weights_T, inside.float()) and torch.equal(correction.mask_T, inside), name


def test_bypass_takes_the_samplers_log_probs():
    rollout, _, mask, cu_seqlens = batch()
    correction = correct(rollout, None, mask, cu_seqlens, RolloutCorrectionConfig(bypass_mode=True))
    assert torch.equal(correction.old_logprobs_T, torch.where(correction.mask_T, rollout, 0.0))
    assert torch.equal(correction.weights_T, correction.mask_T.float())
    assert correction.mask_T.sum() == mask[: cu_seqlens[-1]].sum()


def row(*log_ratios: float, gap_first: bool = True) -> tuple:
    """One sequence whose first token is not sampled."""
    rollout = torch.zeros(len(log_ratios) + 1)
    old = torch.tensor([NAN, *log_ratios])
    return rollout, old, torch.tensor([0] + [1] * len(log_ratios)), torch.tensor([0, len(old)])


@pytest.mark.parametrize("gap", [1e4, -1e4, 1e30, -1e30])
@pytest.mark.parametrize("name", CASES)
def test_finite_for_any_gap(name, gap):
    correction = correct(*row(gap, -0.1, gap, 0.1), config(name))
    assert correction.weights_T.isfinite().all()
    metrics = to_floats(rollout_corr_metrics(merge_metrics([correction.metrics, correction.metrics])))
    assert all(math.isfinite(value) for key, value in metrics.items()), metrics


@pytest.mark.parametrize(
    ("name", "gap", "want"),
    [
        ("token TIS", 1e4, 1.2),
        ("token TIS", -1e4, 0.0),
        ("sequence TIS", 1e4, 1.5),
        ("geometric TIS", -1e4, 0.0),
        ("IcePop", 1e4, 0.0),
        ("IcePop", -1e4, 0.0),
        ("sequence MIS", 1e4, 0.0),
        # Opposite gaps cancel in a product.
        ("off", 1e4, 1.0),
    ],
)
def test_weight_of_a_hopeless_token(name, gap, want):
    assert correct(*row(gap), config(name)).weights_T.tolist() == pytest.approx([0.0, want])


def test_opposite_gaps_of_a_sequence_cancel():
    correction = correct(*row(1e4, -1e4), config("sequence TIS"))
    assert correction.weights_T.tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("name", [name for name in CASES if name in TESTS_OF])
def test_a_hopeless_token_is_rejected_on_either_side(name):
    # k3 of a token that the trainer finds impossible is about the gap, of the opposite e^gap: both are over any bound.
    for gap in (1e4, -1e4):
        correction = correct(*row(gap), config(name))
        assert not correction.mask_T.any() and not correction.weights_T.any()
        assert correction.num_loss_tokens_S.tolist() == [0]
        assert correction.metrics["rollout_corr/rollout_rs_num_dropped"].value == 1


@pytest.mark.parametrize("name", CASES)
def test_nothing_sampled(name):
    rollout, old, mask, cu_seqlens = row(0.1, 0.2)
    for seen in ((rollout, old, mask * 0, cu_seqlens), (rollout[:0], old[:0], mask[:0], cu_seqlens[:1])):
        correction = correct(*seen, config(name))
        assert not correction.weights_T.any() and not correction.mask_T.any()
        # A rank without tokens takes no part in a mean; what it counts is 0.
        counts = {key: metric.value for key, metric in correction.metrics.items() if "batch_norm" not in key}
        assert set(counts) <= {"rollout_corr/rollout_rs_num_dropped"} and not any(counts.values())
        assert "rollout_corr/rollout_is_std" not in rollout_corr_metrics(correction.metrics)


@pytest.mark.parametrize("name", CASES)
def test_a_nan_of_a_sampled_token_is_not_dropped_in_silence(name):
    correction = correct(*row(0.01, NAN), config(name))
    assert correction.mask_T.tolist() == [False, True, True]
    assert correction.weights_T[2].isnan() == (CASES[name].get("rollout_is") is not None)
    assert correction.old_logprobs_T[2].isnan()


def test_all_weights_zero_leave_no_sample_size_and_no_scale():
    settings = dataclasses.replace(config("IcePop"), rollout_is_batch_normalize=True)
    correction = correct(*row(3.0, -3.0), settings)
    metrics = to_floats(rollout_corr_metrics(correction.metrics))
    assert correction.weights_T.tolist() == [0.0, 0.0, 0.0] and correction.mask_T.sum() == 2
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == 1.0
    assert "rollout_corr/rollout_is_eff_sample_size" not in metrics


def test_weights_carry_no_gradient_and_inputs_stay_as_they_are():
    rollout, old, mask, cu_seqlens = batch()
    kept = [column.clone() for column in (rollout, old, mask)]
    old.requires_grad_()
    correction = correct(rollout, old, mask, cu_seqlens, config("all together"))
    tensors = [getattr(correction, field.name) for field in dataclasses.fields(Correction) if field.name != "metrics"]
    assert not any(tensor.requires_grad for tensor in tensors)
    for before, after in zip(kept, (rollout, old.detach(), mask), strict=True):
        assert torch.equal(before.nan_to_num(7), after.nan_to_num(7))


def test_the_bounds_of_a_ratio_are_not_those_of_its_inverse():
    settings = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold=[0.1, 1.2])
    correction = correct(*row(math.log(0.2), math.log(5.0), math.log(1.3), math.log(1.1)), settings)
    assert correction.mask_T.tolist() == [False, True, False, False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old_logprobs_T": None}, "only bypass_mode=true"),
        ({"old_logprobs_T": torch.zeros(3)}, r"old_logprobs \[3\]"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "at most the 5 tokens"),
        ({"cu_seqlens": torch.tensor([1, 5])}, "from 1 to 5"),
        ({"cu_seqlens": torch.tensor([0, 4, 2, 5])}, "must rise"),
        ({"config": RolloutCorrectionConfig(rollout_is="tokens")}, "rollout_is='tokens': no such level"),
    ],
)
def test_bad_input_says_what_is_wrong(change, message):
    given = {
        "rollout_logprobs_T": torch.zeros(5),
        "old_logprobs_T": torch.zeros(5),
        "response_mask_T": torch.ones(5),
        "cu_seqlens": torch.tensor([0, 5]),
        "config": RolloutCorrectionConfig(),
    }
    with pytest.raises(ValueError, match=message):
        correct(**given | change)
