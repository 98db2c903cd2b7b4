"""A policy learns from a teacher's likeliest words: on every layout as on one process, and as transformers does."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.dist.launch import run_ranks
from tests.dist.layouts import LAYOUTS, ONE
from tests.lanes import mostly_full
from tests.tiny_models import load_tiny_model, make_tiny_model

LENGTHS = (9, 17, 1, 12, 31, 8, 2, 21)
# The first tokens are a prompt.
PROMPT = 2
# Not a multiple of the padding on any layout: the last tp rank has rows that are no words.
VOCAB_SIZE, TEMPERATURE, COEF = 520, 0.7, 0.5
TOP_KS = (5, VOCAB_SIZE)
RELATIVE = 1e-5
TOKENS_OF_MICRO_BATCH = 48


@dataclass
class Taught:
    """What one rank has of a teacher's words, by row, and of the update that learns from them, by K."""

    words: dict[int, dict[str, dict[int, Tensor]]]
    updates: dict[int, dict[str, float]]
    gradients: dict[int, dict[str, Tensor]]


def batch() -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]


def is_loss_token(length: int) -> Tensor:
    return torch.arange(length) >= min(PROMPT, max(1, length - 1))


NUM_LOSS_TOKENS = sum(int(is_loss_token(length).sum()) for length in LENGTHS)


def teach(student: str, teacher: str, sizes: dict[str, Any], options: dict[str, Any]) -> Taught:
    """Runs on every rank: the teacher's pass, and one update of the student for each K, without a policy loss."""
    from scalerl.algorithms import PolicyObjective
    from scalerl.batch import plan_step
    from scalerl.batch.data_proto import DataProto, Jagged
    from scalerl.config.schema import ActorConfig, MegatronConfig, OptimConfig
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize

    layout = Layout(**sizes)
    groups = initialize(layout, backend="gloo", timeout_s=60, seed=1)
    # Without the distributed optimizer every rank has the whole sum of the gradients.
    megatron = MegatronConfig(
        dtype="float32", use_distributed_optimizer=False, sequence_parallel=options.get("sequence_parallel", True)
    )
    plan = plan_step(
        LENGTHS,
        dp_size=layout.dp_size,
        mini_batches=[range(len(LENGTHS))],
        max_tokens_per_micro_batch=TOKENS_OF_MICRO_BATCH,
        micro_batch_multiple=layout.pp_size if layout.vpp_size > 1 else 1,
    )
    mine = plan.rows(groups.coordinates.dp_rank)
    micro_batches = plan.local_micro_batches(groups.coordinates.dp_rank)[0]
    rows = [batch()[row] for row in mine]
    zeros = Jagged.from_list([torch.zeros(len(row)) for row in rows], torch.float32)
    shard = DataProto(
        {
            "input_ids": Jagged.from_list(rows, torch.int64),
            "response_mask": Jagged.from_list([is_loss_token(len(row)) for row in rows], torch.bool),
            "advantages": zeros,
            "old_logprobs": zeros,
        }
    )
    teaching = MegatronEngine(teacher, megatron, groups, optim=None)
    result = Taught({}, {}, {})
    for top_k in TOP_KS:
        made = teaching.logprobs(shard, micro_batches, temperature=TEMPERATURE, top_k=top_k)
        result.words[top_k] = {
            name: {row: column[i].clone() for i, row in enumerate(mine)} for name, column in made.items()
        }
        # Other stages make no columns, and need the shapes of none.
        empty = Jagged(torch.zeros(len(zeros.values), top_k), zeros.cu_seqlens)
        words = {name: made.get(name, empty) for name in ("teacher_ids", "teacher_logprobs")}
        if top_k < VOCAB_SIZE:
            # One more, which the student lacks: as if the teacher had not named it.
            more = {"teacher_ids": VOCAB_SIZE + 7, "teacher_logprobs": -1.0}
            words = {
                name: Jagged(torch.nn.functional.pad(column.values, (0, 1), value=more[name]), column.cu_seqlens)
                for name, column in words.items()
            }
        engine = MegatronEngine(student, megatron, groups, optim=OptimConfig(lr=1e-3, clip_grad=1e9))
        objective = PolicyObjective(
            ActorConfig(), num_loss_tokens=NUM_LOSS_TOKENS, num_sequences=len(LENGTHS), distillation_coef=COEF
        )
        result.updates[top_k] = engine.update(
            shard.union(DataProto(words)), micro_batches, objective, temperature=TEMPERATURE
        )
        # In the place of the weights, gradients leave the engine under the names that transformers knows.
        with torch.no_grad():
            parameters: Any = itertools.chain(*(chunk.parameters() for chunk in engine.chunks))
            for parameter in parameters:
                parameter.copy_(parameter.main_grad)
        result.gradients[top_k] = {
            name: tensor.clone() for bucket in engine.export_buckets(20_000) for name, tensor in bucket
        }
    return result


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student, and a teacher of another family."""
    options = {"vocab_size": VOCAB_SIZE, "initializer_range": 0.1}
    directory = tmp_path_factory.mktemp("models")
    student = make_tiny_model(directory / "student", "qwen3", num_layers=4, **options)
    return student, make_tiny_model(directory / "teacher", "llama", num_layers=4, seed=1, **options)


@pytest.fixture(scope="module")
def taught_on(models: tuple[Path, Path]) -> Callable[..., list[Taught]]:
    @functools.cache
    def run(layout: str, **options: Any) -> list[Taught]:
        sizes = (LAYOUTS | {"one": ONE})[layout]
        return run_ranks(sizes["world_size"], teach, str(models[0]), str(models[1]), sizes, options)

    return run


def joined(ranks: list[Taught], top_k: int) -> dict[str, dict[int, Tensor]]:
    columns: dict[str, dict[int, Tensor]] = {}
    for rank in ranks:
        for name, rows in rank.words[top_k].items():
            columns.setdefault(name, {}).update(rows)
    return columns


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def assert_same(ranks: list[Taught], expected: Taught) -> None:
    for top_k in TOP_KS:
        mine, theirs = joined(ranks, top_k), expected.words[top_k]
        assert mine.keys() == theirs.keys() == {"logprobs", "entropy", "teacher_ids", "teacher_logprobs"}
        for name, row in itertools.product(("logprobs", "teacher_logprobs"), range(len(LENGTHS))):
            assert relative(mine[name][row], theirs[name][row]) < RELATIVE, (name, row)
        if top_k < VOCAB_SIZE:
            # Of all words, two that are alike may change places.
            assert all(torch.equal(mine["teacher_ids"][row], theirs["teacher_ids"][row]) for row in mine["teacher_ids"])
        updates = [rank.updates[top_k] for rank in ranks if "actor/loss" in rank.updates[top_k]]
        for update in updates:
            for key in ("actor/loss", "actor/distillation_loss", "grad_norm"):
                assert update[key] == pytest.approx(expected.updates[top_k][key], rel=RELATIVE), (top_k, key)
        for rank in ranks:
            for name, gradient in expected.gradients[top_k].items():
                assert relative(rank.gradients[top_k][name], gradient) < RELATIVE, (top_k, name)


@pytest.mark.parametrize("layout", mostly_full(list(LAYOUTS), lambda layout: layout in ("tp2_pp2", "cp2_dp2")))
def test_layout(taught_on: Callable[..., list[Taught]], layout: str) -> None:
    assert_same(taught_on(layout), taught_on("one")[0])


@pytest.mark.full
def test_without_sequence_parallel(taught_on: Callable[..., list[Taught]]) -> None:
    assert_same(taught_on("tp2_dp2", sequence_parallel=False), taught_on("one")[0])


@pytest.mark.parametrize("top_k", TOP_KS)
def test_as_transformers(models: tuple[Path, Path], taught_on: Callable[..., list[Taught]], top_k: int) -> None:
    """Words, loss and gradient; with K the vocabulary the loss is the whole forward KL."""
    (mine,) = taught_on("one")
    student, teacher = (
        load_tiny_model(path, family, attn_implementation="eager")
        for path, family in zip(models, ("qwen3", "llama"), strict=True)
    )
    total = torch.zeros((), dtype=torch.float64)
    for row, ids in enumerate(batch()):
        if len(ids) == 1:
            continue
        policy_TV = (student(ids[None]).logits[0] / TEMPERATURE).double().log_softmax(-1)[:-1]
        with torch.no_grad():
            teacher_TV = (teacher(ids[None]).logits[0] / TEMPERATURE).double().log_softmax(-1)[:-1]
        words = {name: columns[row][1:] for name, columns in mine.words[top_k].items()}
        values, top_ids = teacher_TV.topk(top_k, -1)
        torch.testing.assert_close(words["teacher_logprobs"].double(), values, rtol=0, atol=1e-5)
        if top_k == VOCAB_SIZE:
            kl_T = (teacher_TV.exp() * (teacher_TV - policy_TV)).sum(-1)
        else:
            assert torch.equal(words["teacher_ids"].long(), top_ids)
            is_top_TV = torch.zeros_like(teacher_TV, dtype=torch.bool).scatter(1, top_ids, True)
            p, q = (
                torch.cat([x.gather(1, top_ids).exp(), x.exp().masked_fill(is_top_TV, 0).sum(-1, keepdim=True)], -1)
                for x in (teacher_TV, policy_TV)
            )
            kl_T = (p * (p.log() - q.log())).sum(-1)
        total = total + kl_T[is_loss_token(len(ids))[1:]].sum() / NUM_LOSS_TOKENS
    (COEF * total).backward()
    assert mine.updates[top_k]["actor/distillation_loss"] == pytest.approx(total.item(), rel=RELATIVE)
    assert mine.updates[top_k]["actor/loss"] == pytest.approx(COEF * total.item(), rel=RELATIVE)
    assert mine.gradients[top_k].keys() == load_file(models[0] / "model.safetensors").keys()
    for name, parameter in student.named_parameters():
        assert parameter.grad is not None
        assert relative(mine.gradients[top_k][name], parameter.grad) < RELATIVE, name
