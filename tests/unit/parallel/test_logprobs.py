"""`linear_logprobs` on one rank against float64 log_softmax: values, gradients, and what it keeps in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from scalerl.parallel import logprobs
from scalerl.parallel.logprobs import linear_logprobs, linear_top_logprobs
from tests.lanes import full

NUM_TOKENS, HIDDEN, WORDS, ROWS = 23, 12, 70, 96
TEMPERATURES = (1.0, 0.7)


def case(num_tokens: int = NUM_TOKENS, scale: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, labels and what the loss multiplies the two outputs with. Padding rows would win every word."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator)
    weight = scale * torch.randn(ROWS, HIDDEN, generator=generator)
    weight[WORDS:] = 100 * scale * hidden[:1] if num_tokens else 1.0
    labels = torch.randint(0, WORDS, (num_tokens,), generator=generator)
    return hidden, weight, labels, torch.randn(2, num_tokens, generator=generator)


def reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, factors: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logprobs, entropy, gradient of hidden, gradient of weight) in float64."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    distribution = ((hidden @ weight.T)[:, :WORDS] / temperature).log_softmax(-1)
    token_logprobs = distribution.gather(1, labels[:, None])[:, 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    (token_logprobs * factors[0] + entropy * factors[1]).sum().backward()
    return token_logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


def fused(
    hidden: Tensor, weight: Tensor, labels: Tensor, factors: Tensor, temperature: float, chunk_tokens: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    token_logprobs, entropy = linear_logprobs(
        hidden, weight, labels, vocab_size=WORDS, temperature=temperature, chunk_tokens=chunk_tokens
    )
    assert token_logprobs.dtype == entropy.dtype == torch.float32
    (token_logprobs * factors[0] + entropy * factors[1]).sum().backward()
    assert (hidden.grad.dtype, weight.grad.dtype) == (hidden.dtype, weight.dtype)
    return token_logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


def assert_near(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    for name, mine, theirs in zip(("logprobs", "entropy", "hidden", "weight"), actual, expected, strict=True):
        error = (mine.double() - theirs).norm() / theirs.norm().clamp_min(1e-30)
        assert error < tolerance, (name, float(error))


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("chunk_tokens", [1, 5, 22, 23, 1000, None])
def test_equals_log_softmax(temperature: float, chunk_tokens: int | None) -> None:
    inputs = case()
    expected = reference(*inputs, temperature)
    assert_near(fused(*inputs, temperature, chunk_tokens), expected, 1e-6)
    assert (expected[3][WORDS:] == 0).all() and (fused(*inputs, temperature, chunk_tokens)[3][WORDS:] == 0).all()


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_one_output_alone(which: int) -> None:
    hidden, weight, labels, factors = case()
    factors[1 - which] = 0.0
    expected = reference(hidden, weight, labels, factors, 0.7)
    hidden.requires_grad_(), weight.requires_grad_()
    outputs = linear_logprobs(hidden, weight, labels, vocab_size=WORDS, temperature=0.7, chunk_tokens=4)
    (outputs[which] * factors[which]).sum().backward()
    assert_near((outputs[0].detach(), outputs[1].detach(), hidden.grad, weight.grad), expected, 1e-6)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_one_input_alone_has_a_gradient(frozen: str) -> None:
    hidden, weight, labels, factors = case()
    expected = reference(hidden, weight, labels, factors, 1.0)
    wanted = (weight, expected[3]) if frozen == "hidden" else (hidden, expected[2])
    wanted[0].requires_grad_()
    token_logprobs, entropy = linear_logprobs(hidden, weight, labels, vocab_size=WORDS, chunk_tokens=4)
    (token_logprobs * factors[0] + entropy * factors[1]).sum().backward()
    torch.testing.assert_close(wanted[0].grad.double(), wanted[1], rtol=1e-5, atol=1e-5)
    assert (hidden if frozen == "hidden" else weight).grad is None


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("chunk_tokens", [1, 5, None])
def test_several_words_of_a_token(temperature: float, chunk_tokens: int | None) -> None:
    """Their log-probs and gradients are those of as many calls with one word each, also of a word that comes twice."""
    hidden, weight, labels, _ = case()
    generator = torch.Generator().manual_seed(1)
    words = torch.stack([torch.randperm(WORDS, generator=generator)[:4] for _ in range(NUM_TOKENS)])
    words[0, 1] = labels[0]
    all_labels = torch.cat([labels[:, None], words], 1)
    factors = torch.randn(NUM_TOKENS, 6, generator=generator)
    options = {"vocab_size": WORDS, "temperature": temperature, "chunk_tokens": chunk_tokens}
    hidden.requires_grad_(), weight.requires_grad_()
    several, entropy = linear_logprobs(hidden, weight, all_labels, **options)
    (torch.cat([several, entropy[:, None]], 1) * factors).sum().backward()
    mine = (several.detach(), entropy.detach(), hidden.grad, weight.grad)
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    distribution = ((hidden @ weight.T)[:, :WORDS] / temperature).log_softmax(-1)
    expected = distribution.gather(1, all_labels), -(distribution.exp() * distribution).sum(-1)
    (torch.cat([expected[0], expected[1][:, None]], 1) * factors).sum().backward()
    assert_near(mine, (*(x.detach() for x in expected), hidden.grad, weight.grad), 1e-6)


@pytest.mark.parametrize("top_k", [1, 7, WORDS])
@pytest.mark.parametrize("chunk_tokens", [1, 5, None])
def test_likeliest_words(top_k: int, chunk_tokens: int | None) -> None:
    hidden, weight, labels, _ = case()
    options = {"vocab_size": WORDS, "temperature": 0.7, "chunk_tokens": chunk_tokens}
    logprobs_T, entropy_T, values_TK, ids_TK = linear_top_logprobs(hidden, weight, labels, top_k=top_k, **options)
    plain = linear_logprobs(hidden, weight, labels, **options)
    assert torch.equal(logprobs_T, plain[0]) and torch.equal(entropy_T, plain[1])
    distribution = ((hidden.double() @ weight.double().T)[:, :WORDS] / 0.7).log_softmax(-1)
    expected = distribution.topk(top_k, -1)
    assert torch.equal(ids_TK, expected.indices)
    torch.testing.assert_close(values_TK.double(), expected.values, rtol=1e-6, atol=1e-5)


def test_gradcheck() -> None:
    hidden, weight, labels, _ = case(num_tokens=4)
    weight[WORDS:] = 0.0

    def function(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return linear_logprobs(hidden, weight, labels, vocab_size=WORDS, temperature=0.7, chunk_tokens=3)

    assert torch.autograd.gradcheck(function, (hidden.double().requires_grad_(), weight.double().requires_grad_()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Logits and their gradient are rounded to the dtype once, at the matrix multiplications; sums are float32."""
    hidden, weight, labels, factors = case()
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    assert_near(
        fused(hidden, weight, labels, factors, 0.7, 4),
        reference(hidden, weight, labels, factors, 0.7),
        8 * torch.finfo(dtype).eps,
    )


def test_weight_gradient_is_summed_over_chunks_in_float32() -> None:
    """Each of 4,096 chunks adds less than bfloat16 could still add to the sum of those before."""
    num_tokens = 4096
    hidden, labels = torch.ones(num_tokens, 1), torch.zeros(num_tokens, dtype=torch.int64)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    token_logprobs, _ = linear_logprobs(hidden.bfloat16(), weight, labels, vocab_size=2, chunk_tokens=1)
    token_logprobs.sum().backward()
    assert weight.grad[:, 0].tolist() == [num_tokens / 2, -num_tokens / 2]


def test_block_of_rows_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels, factors = case()
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    expected = fused(hidden, weight, labels, factors, 0.7, 4)
    monkeypatch.setattr(logprobs, "_GRADIENT_BLOCK_ROWS", 9)
    assert_near(fused(hidden, weight, labels, factors, 0.7, 4), tuple(x.double() for x in expected), 1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.01])
def test_extreme_logits_stay_finite(temperature: float) -> None:
    hidden, weight, labels, factors = case(scale=1e4)
    actual = fused(hidden, weight, labels, factors, temperature, 4)
    assert all(tensor.isfinite().all() for tensor in actual)
    assert float(actual[0].min()) < -1e4 / temperature
    # float32 holds a logit of 1e5 to within 0.01 only: compare where the distribution is certain.
    expected = reference(hidden, weight, labels, factors, temperature)
    assert_near(actual[:1] * 4, expected[:1] * 4, 1e-5)
    assert float(expected[1].abs().max()) < 1e-3 and float(actual[1].abs().max()) < 1e-3


def test_no_tokens() -> None:
    actual = fused(*case(num_tokens=0), 0.7)
    assert [tuple(tensor.shape) for tensor in actual] == [(0,), (0,), (0, HIDDEN), (ROWS, HIDDEN)]
    assert (actual[3] == 0).all()


@pytest.mark.parametrize("label", [-1, WORDS])
def test_a_label_outside_the_vocabulary(label: int) -> None:
    hidden, weight, labels, _ = case()
    labels[5] = label
    with pytest.raises(ValueError, match=f"token 5: id {label} is outside the vocabulary of {WORDS} words"):
        linear_logprobs(hidden, weight, labels, vocab_size=WORDS)


@pytest.mark.parametrize("is_embedding_too", [False, True])
def test_main_grad_takes_the_gradient(is_embedding_too: bool) -> None:
    """As megatron's DDP leaves it: on top of what is there, in float32 for a bfloat16 weight, once."""
    hidden, weight, labels, factors = case()
    hidden = hidden.bfloat16()
    weight = torch.nn.Parameter(weight.bfloat16())
    expected = reference(hidden, weight, labels, factors, 1.0)[3]
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(ROWS, HIDDEN), False
    weight.zero_out_wgrad = is_embedding_too
    token_logprobs, entropy = linear_logprobs(hidden, weight, labels, vocab_size=WORDS, chunk_tokens=4)
    (token_logprobs * factors[0] + entropy * factors[1]).sum().backward()
    assert weight.grad_added_to_main_grad and (weight.grad is None) == is_embedding_too
    assert (weight.main_grad - 1 - expected).norm() / expected.norm() < 0.02


# --- memory ---

MEMORY_WORDS, MEMORY_HIDDEN = 151_936, 16
# The naive version's memory is proportional to tokens, so it runs on fewer and is scaled up: of 8192 it needs 23 GiB.
NAIVE_TOKENS = 256
PROBE = """
import json, sys
import torch
from scalerl.parallel.logprobs import linear_logprobs, linear_top_logprobs

torch.set_num_threads(1)
version, num_tokens, num_words, num_hidden = sys.argv[1], *map(int, sys.argv[2:])

def high_water_mark():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

def logprobs(hidden, weight, labels):
    if version == "fused":
        return linear_logprobs(hidden, weight, labels, vocab_size=num_words, temperature=0.7)
    distribution = (torch.nn.functional.linear(hidden, weight).float() / 0.7).log_softmax(-1)
    return distribution.gather(1, labels[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)

def step(hidden, weight, labels):
    token_logprobs, entropy = logprobs(hidden, weight, labels)
    forward = high_water_mark()
    (token_logprobs + 0.01 * entropy).sum().backward()
    return forward

def inputs(num_tokens, num_words):
    hidden = torch.randn(num_tokens, num_hidden, requires_grad=True)
    weight = torch.randn(num_words, num_hidden, requires_grad=True)
    # Gradients are there already: they are no extra.
    hidden.grad, weight.grad = torch.ones_like(hidden), torch.ones_like(weight)
    return hidden, weight, torch.randint(0, num_words, (num_tokens,))

# Threads, autograd and kernels take what they need once.
vocabulary, num_words = num_words, 64
step(*inputs(8, num_words))
num_words = vocabulary
ready = inputs(num_tokens, num_words)
open("/proc/self/clear_refs", "w").write("5")
before = high_water_mark()
forward = step(*ready)
print(json.dumps({"forward": forward - before, "both": high_water_mark() - before}))
"""


def extra_bytes(version: str, num_tokens: int) -> dict[str, int]:
    """Peak resident memory above inputs and their gradients: of the forward pass, and of both passes."""
    arguments = [str(number) for number in (num_tokens, MEMORY_WORDS, MEMORY_HIDDEN)]
    # Freed memory goes back at once, so that the peak is what lives and not what the allocator keeps.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    completed = subprocess.run(
        [sys.executable, "-c", PROBE, version, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout.splitlines()[-1])


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux tells a process's peak memory")
@pytest.mark.parametrize("num_tokens", [1024, full(8192)])
def test_memory_is_a_tenth_of_the_naive_version(num_tokens: int) -> None:
    naive = extra_bytes("naive", NAIVE_TOKENS)
    mine = extra_bytes("fused", num_tokens)
    one_tensor = NAIVE_TOKENS * MEMORY_WORDS * 4
    # Else the scaling below would be of something else than logits.
    assert 2 * one_tensor < naive["forward"] <= naive["both"] < 8 * one_tensor, naive
    for phase, num_bytes in mine.items():
        assert num_bytes < 0.1 * naive[phase] * num_tokens / NAIVE_TOKENS, (phase, mine, naive)


@pytest.fixture
def products_in_float32(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """torch's products of half-precision matrices in float32, which exist on GPUs, on the CPU; -> which were asked."""
    asked: list[str] = []

    def mm(left: Tensor, right: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
        asked.append("mm")
        return out.copy_(left.to(dtype) @ right.to(dtype))

    def addmm(
        start: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype, *, beta: Any = 1, alpha: Any = 1, out: Tensor
    ) -> Tensor:
        asked.append("addmm")
        return out.copy_(beta * start + alpha * (left.to(dtype) @ right.to(dtype)))

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype_out", mm, "CPU")
    library.impl("addmm.dtype_out", addmm, "CPU")
    monkeypatch.setattr(logprobs, "_multiplies_into_float32", lambda operand: True)
    yield asked
    library._destroy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_half_precision_as_on_a_gpu(products_in_float32: list[str], temperature: float) -> None:
    """Logits that nothing rounds are those of float64; the gradient is added where it stays, without a temporary."""
    generator = torch.Generator().manual_seed(11)
    hidden = (2 * torch.randn(37, 16, generator=generator)).bfloat16().requires_grad_()
    weight = torch.randn(WORDS, 16, generator=generator).bfloat16().requires_grad_()
    labels = torch.randint(0, WORDS, (37,), generator=generator)
    weight.main_grad = torch.ones(WORDS, 16)  # pyright: ignore[reportAttributeAccessIssue]
    weight.grad_added_to_main_grad = False  # pyright: ignore[reportAttributeAccessIssue]
    token_logprobs, _ = linear_logprobs(
        hidden, weight, labels, vocab_size=WORDS, temperature=temperature, chunk_tokens=5
    )
    logits = (hidden.double() @ weight.double().t()) / temperature
    expected = logits.log_softmax(-1)[torch.arange(37), labels]
    torch.testing.assert_close(token_logprobs.double(), expected, rtol=5e-7, atol=2e-6)
    # What rounding logits to bfloat16 costs.
    rounded = (hidden @ weight.t()).double() / temperature
    assert (rounded.log_softmax(-1)[torch.arange(37), labels] - expected).abs().max() > 1e-3
    token_logprobs.sum().backward()
    grad = torch.zeros(37, WORDS, dtype=torch.float64)
    grad[torch.arange(37), labels] = 1.0
    grad = ((grad - logits.detach().softmax(-1)) / temperature).bfloat16().double()
    added = weight.main_grad.double() - 1.0  # pyright: ignore[reportAttributeAccessIssue]
    # A probability between two bfloat16 may be rounded either way: by 1/256 of it, times a hidden value of some units.
    torch.testing.assert_close(added, grad.t() @ hidden.detach().double(), rtol=0, atol=2e-2)
    assert products_in_float32 == ["mm"] * 8 + ["mm", "addmm"] * 8


@pytest.mark.parametrize(
    ("device", "num_words", "tokens"),
    [("cpu", 152_000, 110), ("cuda", 152_000, 1766), ("cuda", 32_000, 4096), ("cuda", 0, 4096), ("cpu", 2**30, 1)],
)
def test_tokens_of_a_chunk(device: str, num_words: int, tokens: int) -> None:
    assert logprobs.tokens_of_chunk(device, num_words) == tokens


def test_a_chunk_of_a_gpu_computes_longer_than_it_waits_for_memory() -> None:
    """At what an H100 reaches: 600 TFLOP/s, 3.35 TB/s."""
    for num_words, hidden in [(152_000, 4096), (152_000, 1536), (128_000, 8192), (32_000, 4096)]:
        cost = logprobs.chunk_cost(logprobs.tokens_of_chunk("cuda", num_words), num_words, hidden)
        ratio = cost["flops"] / 600e12 / (cost["bytes"] / 3.35e12)
        # The passes over the logits do not shrink with the hidden size.
        assert ratio > (2.0 if hidden >= 4096 else 0.7), (num_words, hidden, ratio)
