"""`linear_logprobs` over a split and padded vocabulary equals float64 log_softmax of the whole, gradients too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.launch import run_ranks

TEMPERATURES = (1.0, 0.7)
NUM_TOKENS, HIDDEN = 13, 8
# (words, rows per rank, tp_size): none, some and all of the last rank's rows are padding.
VOCABULARIES = [(128, 64, 2), (100, 64, 2), (60, 64, 2), (100, 128, 1), (128, 128, 1), (90, 32, 4)]


def case(words: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits up to +-60 with the largest in the padding, so that a padding row that counted would take it all."""
    generator = torch.Generator().manual_seed(words)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
    # So that one row of the weight can win every token.
    hidden[:, 0] = 1.0
    weight = 8 * torch.randn(rows, HIDDEN, generator=generator)
    weight[words:] = 0.0
    weight[words:, 0] = 500.0
    labels = torch.randint(0, words, (NUM_TOKENS,), generator=generator)
    labels[0], labels[1] = 0, words - 1
    return hidden, weight, labels, torch.randn(2, NUM_TOKENS, generator=generator)


def on_ranks(words: int, rows: int, tp_size: int, temperature: float, chunk_tokens: int) -> dict[str, Any]:
    """Outputs, this rank's gradients, and the collectives that the forward pass ran."""
    import torch.distributed as dist

    from scalerl.parallel.logprobs import linear_logprobs

    dist.init_process_group("gloo")
    hidden, weight, labels, factors = case(words, rows * tp_size)
    rank = dist.get_rank()
    hidden = hidden.requires_grad_()
    mine = weight[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    sizes: list[int] = []
    original = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counted
    outputs = linear_logprobs(
        hidden,
        mine,
        labels,
        vocab_size=words,
        temperature=temperature,
        tp_rank=rank,
        tp_group=dist.group.WORLD,
        chunk_tokens=chunk_tokens,
    )
    (outputs[0] * factors[0] + outputs[1] * factors[1]).sum().backward()
    dist.all_reduce = original
    return {
        "outputs": [output.detach() for output in outputs],
        "hidden": hidden.grad,
        "weight": mine.grad,
        "reduced": sizes,
    }


def near(actual: Tensor, expected: Tensor) -> None:
    assert (actual.double() - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(("words", "rows", "tp_size"), VOCABULARIES)
def test_split_vocabulary(words: int, rows: int, tp_size: int, temperature: float) -> None:
    hidden, weight, labels, factors = case(words, rows * tp_size)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    distribution = ((hidden @ weight.T)[:, :words] / temperature).log_softmax(-1)
    expected = distribution.gather(1, labels[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)
    (expected[0] * factors[0] + expected[1] * factors[1]).sum().backward()
    for chunk_tokens in (4, 100):
        ranks = run_ranks(tp_size, on_ranks, words, rows, tp_size, temperature, chunk_tokens)
        for rank in ranks:
            for output, wanted in zip(rank["outputs"], expected, strict=True):
                torch.testing.assert_close(output.double(), wanted.detach(), rtol=1e-6, atol=1e-5)
            # One maximum and one sum for all chunks, and nothing on the way back.
            assert rank["reduced"] == ([NUM_TOKENS, 3 * NUM_TOKENS] if tp_size > 1 else [])
        # A rank's gradient of hidden is its vocabulary's share: the caller's region sums.
        near(torch.stack([rank["hidden"].double() for rank in ranks]).sum(0), hidden.grad)
        near(torch.cat([rank["weight"] for rank in ranks]), weight.grad)
        assert all(torch.equal(rank["outputs"][0], ranks[0]["outputs"][0]) for rank in ranks)


TOP_K = 40


def words_on_ranks(words: int, rows: int, tp_size: int) -> dict[str, Tensor]:
    """The likeliest words, then log-probs and this rank's gradients of them and a label."""
    import torch.distributed as dist

    from scalerl.parallel.logprobs import linear_logprobs, linear_top_logprobs

    dist.init_process_group("gloo")
    hidden, weight, labels, _ = case(words, rows * tp_size)
    rank = dist.get_rank()
    mine = weight[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    split = {"vocab_size": words, "tp_rank": rank, "tp_group": dist.group.WORLD, "chunk_tokens": 4}
    *_, top_logprobs, top_ids = linear_top_logprobs(hidden, mine, labels, top_k=TOP_K, **split)
    several, _ = linear_logprobs(hidden.requires_grad_(), mine, torch.cat([labels[:, None], top_ids], 1), **split)
    (several * factors_of_words()).sum().backward()
    return {
        "top_logprobs": top_logprobs,
        "top_ids": top_ids,
        "several": several.detach(),
        "hidden": hidden.grad,
        "weight": mine.grad,
    }


def factors_of_words() -> Tensor:
    return torch.randn(NUM_TOKENS, 1 + TOP_K, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("words", "rows", "tp_size"), VOCABULARIES)
def test_words_of_a_split_vocabulary(words: int, rows: int, tp_size: int) -> None:
    """More words than a rank may have. All ranks agree on them, bit for bit."""
    hidden, weight, labels, _ = case(words, rows * tp_size)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    distribution = (hidden @ weight.T)[:, :words].log_softmax(-1)
    values, ids = distribution.topk(TOP_K, -1)
    several = distribution.gather(1, torch.cat([labels[:, None], ids], 1))
    (several * factors_of_words()).sum().backward()
    ranks = run_ranks(tp_size, words_on_ranks, words, rows, tp_size)
    for rank in ranks:
        assert torch.equal(rank["top_ids"], ids)
        torch.testing.assert_close(rank["top_logprobs"].double(), values.detach(), rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(rank["several"].double(), several.detach(), rtol=1e-6, atol=1e-5)
        assert torch.equal(rank["top_logprobs"], ranks[0]["top_logprobs"])
    near(torch.stack([rank["hidden"].double() for rank in ranks]).sum(0), hidden.grad)
    near(torch.cat([rank["weight"] for rank in ranks]), weight.grad)
