"""Critics and reward models: transformers' values, the same numbers on every layout, and the way there and back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from scalerl.merge import merge
from scalerl.models import ModelShape, value_model_config
from tests.dist.launch import run_ranks
from tests.dist.layouts import LAYOUTS, MIXTURE_LAYOUTS, ONE
from tests.lanes import full, mostly_full
from tests.tiny_models import make_tiny_model

LENGTHS = (9, 17, 1, 12, 30, 8, 3, 21)
NUM_UPDATES, NUM_MICRO_BATCHES = 3, 4
ABSOLUTE = 1e-5
RELATIVE = 1e-5
VOCAB_SIZE = 520


@dataclass
class Found:
    """rows: {row of the batch: ...}, on the last stage."""

    values: dict[int, Tensor]
    scores: dict[int, Tensor]
    initial: dict[str, Tensor]
    updates: list[dict[str, float]]
    weights: dict[str, Tensor]


def batch() -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]


def returns() -> list[Tensor]:
    generator = torch.Generator().manual_seed(12)
    return [torch.randn(length, generator=generator) for length in LENGTHS]


def old_values() -> list[Tensor]:
    """So far from the model's own that the clip holds a few tokens back: with many, gradients that are almost 0 would
    become full steps of Adam's in the direction of their rounding."""
    generator = torch.Generator().manual_seed(13)
    return [0.3 * torch.randn(length, generator=generator) for length in LENGTHS]


def value_objective() -> Any:
    from scalerl.algorithms import ValueObjective
    from scalerl.config.schema import CriticConfig

    config = CriticConfig(loss_agg_mode="token-mean", cliprange_value=0.5)
    return ValueObjective(config, num_loss_tokens=sum(LENGTHS), num_sequences=len(LENGTHS))


def start(sizes: dict[str, int], seed: int = 1) -> Any:
    from scalerl.parallel.layout import Layout, initialize

    return initialize(Layout(**sizes), backend="gloo", timeout_s=60, seed=seed)


def build(model: str, groups: Any, options: dict[str, Any]) -> Any:
    from scalerl.config.schema import MegatronConfig, OptimConfig
    from scalerl.parallel.engine import MegatronEngine

    megatron = MegatronConfig(dtype="float32", sequence_parallel=options.get("sequence_parallel", True))
    engine = MegatronEngine(model, megatron, groups, optim=OptimConfig(lr=1e-3, clip_grad=0.5), head="value")
    if options.get("forget_mark"):
        for parameter in engine.chunks[-1].output_layer.parameters():
            parameter.sequence_parallel = False
    return engine


def place(engine: Any) -> tuple[list[int], Any, list[list[int]]]:
    """(rows, shard, micro-batches) of this rank."""
    from scalerl.batch.data_proto import DataProto, Jagged

    layout = engine.groups.layout
    mine = [row for row in range(len(LENGTHS)) if row % layout.dp_size == engine.groups.coordinates.dp_rank]
    ids, targets, olds = batch(), returns(), old_values()
    shard = DataProto(
        {
            "input_ids": Jagged.from_list([ids[row] for row in mine], torch.int64),
            "returns": Jagged.from_list([targets[row] for row in mine], torch.float32),
            "values": Jagged.from_list([olds[row] for row in mine], torch.float32),
            "response_mask": Jagged.from_list([torch.ones(LENGTHS[row]) for row in mine], torch.bool),
        }
    )
    # Not in the order of the rows.
    size = len(mine) // NUM_MICRO_BATCHES
    order = list(range(len(mine)))[::-1]
    return mine, shard, [order[start : start + size] for start in range(0, len(mine), size)]


def exported(engine: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for bucket in engine.export_buckets(20_000) for name, tensor in bucket}


def train(model: str, sizes: dict[str, int], options: dict[str, Any]) -> Found:
    engine = build(model, start(sizes, options.get("seed", 1)), options)
    mine, shard, micro_batches = place(engine)
    values = engine.values(shard, micro_batches).get("values")
    scores = engine.scores(shard, micro_batches).get("scores")
    initial = exported(engine)
    updates = [engine.update(shard, micro_batches, value_objective()) for _ in range(NUM_UPDATES)]
    by_row = {} if values is None else {row: values[i].clone() for i, row in enumerate(mine)}
    score_of = {} if scores is None else {row: scores[i].clone() for i, row in enumerate(mine)}
    return Found(by_row, score_of, initial, updates, exported(engine))


def run(model: Path, sizes: dict[str, int], **options: Any) -> Found:
    ranks = run_ranks(sizes["world_size"], train, str(model), sizes, options)
    first = ranks[0]
    for rank in ranks[1:]:
        assert rank.weights.keys() == first.weights.keys()
        assert all(torch.equal(rank.weights[name], first.weights[name]) for name in first.weights)
    values = {row: value for rank in ranks for row, value in rank.values.items()}
    scores = {row: score for rank in ranks for row, score in rank.scores.items()}
    updates = next(rank.updates for rank in ranks if "critic/vf_loss" in rank.updates[0])
    assert all(len({rank.updates[step]["grad_norm"] for rank in ranks}) == 1 for step in range(NUM_UPDATES))
    return Found(values, scores, first.initial, updates, first.weights)


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def assert_same(actual: Found, expected: Found) -> None:
    for name in ("values", "scores"):
        mine, theirs = getattr(actual, name), getattr(expected, name)
        assert mine.keys() == theirs.keys() == set(range(len(LENGTHS)))
        assert all(torch.allclose(mine[row], theirs[row], rtol=RELATIVE, atol=ABSOLUTE) for row in mine), name
    for mine, theirs in zip(actual.updates, expected.updates, strict=True):
        assert mine.keys() == theirs.keys()
        assert mine == pytest.approx(theirs, rel=RELATIVE)
    assert actual.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        assert relative(actual.weights[name], weight) < RELATIVE, name


def value_model(path: Path, family: str, **options: Any) -> Path:
    """A language model with a score.weight in the place of its head, as transformers stores a classifier."""
    make_tiny_model(path, family, vocab_size=VOCAB_SIZE, num_layers=4, initializer_range=0.1, **options)
    tensors = load_file(path / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    # Values of about 1, as returns are.
    tensors["score.weight"] = torch.randn(1, 64, generator=torch.Generator().manual_seed(5)) / 8
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(value_model_config(config)))
    return path


# qwen2 is tied.
@pytest.fixture(scope="module", params=["qwen3", "qwen2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return value_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def one_process(model: Path) -> Found:
    return run(model, ONE)


@torch.no_grad()
def test_equals_transformers(model: Path, one_process: Found) -> None:
    """Values are the outputs of the token before; the score is the output of the last token.

    In float64: transformers' own float32 is as far from it as the tolerance.
    """
    tokens = AutoModelForTokenClassification.from_pretrained(model, dtype=torch.float64).eval()
    # A classifier of tokens has a bias besides, which these files do not hold.
    tokens.score.bias.zero_()
    sequences = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float64).eval()
    spread = []
    for row, ids in enumerate(batch()):
        outputs = tokens(ids[None]).logits[0, :, 0]
        expected = torch.cat([torch.zeros(1, dtype=torch.float64), outputs[:-1]])
        torch.testing.assert_close(one_process.values[row].double(), expected, rtol=0, atol=ABSOLUTE)
        score = sequences(ids[None]).logits[0, 0]
        torch.testing.assert_close(one_process.scores[row].double(), score, rtol=0, atol=ABSOLUTE)
        spread.append(score)
    assert torch.stack(spread).std() > 0.1


MAIN = ("tp2_pp2", "cp2_dp2", "vpp2_pp2")


@pytest.mark.parametrize("layout", mostly_full(LAYOUTS, MAIN.__contains__))
def test_layout(model: Path, one_process: Found, layout: str) -> None:
    assert_same(run(model, LAYOUTS[layout]), one_process)


@pytest.mark.parametrize("layout", ["ep2", "tp2_ep2_etp1"])
@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_beside_a_mixture(model: Path, one_process: Found, layout: str) -> None:
    """A dense critic in the processes of an actor with experts: its ranks have groups that it does not use."""
    assert_same(run(model, MIXTURE_LAYOUTS[layout]), one_process)


@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_without_sequence_parallel(model: Path, one_process: Found) -> None:
    assert_same(run(model, LAYOUTS["tp2"], sequence_parallel=False), one_process)


@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_the_comparison_sees_a_gradient_that_is_not_summed(model: Path, one_process: Found) -> None:
    with pytest.raises(AssertionError):
        assert_same(run(model, LAYOUTS["tp2"], forget_mark=True), one_process)


def test_training_learns(one_process: Found, model: Path) -> None:
    losses = [update["critic/vf_loss"] for update in one_process.updates]
    assert losses[0] > losses[1] > losses[2]
    assert 0 < one_process.updates[0]["critic/vf_clipfrac"] < 0.3
    assert relative(one_process.weights["score.weight"], one_process.initial["score.weight"]) > 1e-3


def test_export_is_what_was_loaded(model: Path, one_process: Found) -> None:
    original = load_file(model / "model.safetensors")
    assert one_process.initial.keys() == original.keys()
    assert all(torch.equal(one_process.initial[name], original[name]) for name in original)
    assert ModelShape.from_hf(model).head == "value"


# --- a critic that starts from a language model ---


@pytest.mark.parametrize("family", ["qwen3", full("qwen2"), full("qwen3_moe")])
def test_from_a_language_model(family: str, tmp_path: Path) -> None:
    """All but the head is the language model's; the head is the same on every layout and for every seed."""
    path = make_tiny_model(tmp_path, family, vocab_size=VOCAB_SIZE, num_layers=4, initializer_range=0.1)
    expected = run(path, ONE)
    original = load_file(path / "model.safetensors")
    assert expected.initial.keys() == (original.keys() - {"lm_head.weight"}) | {"score.weight"}
    assert all(torch.equal(expected.initial[name], original[name]) for name in original if name != "lm_head.weight")
    head = expected.initial["score.weight"]
    assert head.shape == (1, 64) and 0 < float(head.abs().max()) < 0.1
    assert all(value.abs().max() < 1.0 for value in expected.values.values())
    assert_same(run(path, LAYOUTS["tp2_pp2"], seed=7), expected)


# --- checkpoint and merge ---


def train_save_and_load(model: str, sizes: dict[str, int], directory: str) -> tuple[dict, dict, dict]:
    """Weights when saved; of another engine that loaded them; and its next update beside the first one's."""
    from scalerl.parallel.checkpoint import save_engine
    from scalerl.parallel.restore import load_engine

    groups = start(sizes)
    engine = build(model, groups, {})
    _, shard, micro_batches = place(engine)
    engine.update(shard, micro_batches, value_objective())
    save_engine(engine, directory)
    saved = exported(engine)
    other = build(model, groups, {})
    load_engine(other, directory)
    loaded = exported(other)
    updates = [each.update(shard, micro_batches, value_objective()) for each in (engine, other)]
    return saved, loaded, {"expected": updates[0], "found": updates[1]}


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_checkpoint_and_merge(layout: str, tmp_path: Path) -> None:
    """A critic from a language model -> checkpoint -> transformers' classifier with the same values."""
    base = make_tiny_model(tmp_path / "lm", "qwen3", vocab_size=VOCAB_SIZE, num_layers=4, initializer_range=0.1)
    sizes = LAYOUTS[layout]
    critic = tmp_path / "critic"
    ranks = run_ranks(sizes["world_size"], train_save_and_load, str(base), sizes, str(critic))
    for saved, loaded, updates in ranks:
        assert all(torch.equal(saved[name], loaded[name]) for name in saved)
        assert updates["found"] == updates["expected"]
    hf = critic / "huggingface"
    hf.mkdir()
    config = json.loads((base / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(value_model_config(config)))
    merge(critic, tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == ranks[0][0].keys()
    assert all(torch.equal(merged[name], ranks[0][0][name]) for name in merged)
    _, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    check_token_classifier(tmp_path / "merged")


def check_token_classifier(path: Path) -> None:
    """The logits of transformers' token classification are the value of every token: the bias that it adds is zero."""
    model, info = AutoModelForTokenClassification.from_pretrained(path, output_loading_info=True)
    assert info["missing_keys"] == {"score.bias"} and not info["unexpected_keys"]
    assert not model.score.bias.any()
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        values = load_file(path / "model.safetensors")["score.weight"] @ model.model(ids).last_hidden_state[0].T
        assert torch.allclose(model.eval()(ids).logits[0, :, 0], values[0], rtol=0, atol=1e-6)


# --- refusals ---


def error_of(model: str, head: str, trainable: bool) -> str:
    from scalerl.config.schema import MegatronConfig, OptimConfig
    from scalerl.parallel.engine import MegatronEngine

    groups = start(ONE)
    optim = OptimConfig() if trainable else None
    with pytest.raises(ValueError) as error:
        MegatronEngine(model, MegatronConfig(dtype="float32"), groups, optim=optim, head=head)
    return str(error.value)


def test_a_value_model_is_no_policy(tmp_path: Path) -> None:
    path = value_model(tmp_path, "qwen3")
    [message] = run_ranks(1, error_of, str(path), "lm", True)
    assert "predicts no words" in message


def test_a_lost_head_is_missed(tmp_path: Path) -> None:
    path = value_model(tmp_path, "qwen3")
    tensors = load_file(path / "model.safetensors")
    tensors.pop("score.weight")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    [message] = run_ranks(1, error_of, str(path), "value", True)
    assert "missing score.weight" in message


def test_more_labels_than_one(tmp_path: Path) -> None:
    path = value_model(tmp_path, "qwen3")
    config = json.loads((path / "config.json").read_text())
    config["id2label"] = {"0": "BAD", "1": "GOOD"}
    (path / "config.json").write_text(json.dumps(config))
    [message] = run_ranks(1, error_of, str(path), "value", False)
    assert "a value model with 2 labels is not supported" in message
