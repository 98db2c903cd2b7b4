"""Operations in blocks of rows against torch's, one by one: forward in float32, gradients in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from scalerl.parallel.cpu_kernels import _BLOCK, rms_norm, rotate_in_blocks, swiglu
from scalerl.parallel.rotary import rotate_pairs

EPS = 1e-6
WIDTH, NUM_HEADS = 64, 4
# More than two blocks, the last one in part.
NUM_ROWS = 2 * _BLOCK // WIDTH + 3


def plain_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def plain_rotation(x: Tensor, cos_sin: Tensor) -> Tensor:
    """`rotate_pairs` without its step to float32."""
    (first, second), (cos, sin) = x.chunk(2, dim=-1), cos_sin[:, :, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def part_of_wider(num_rows: int) -> Tensor:
    """[num_rows, NUM_HEADS, WIDTH], strided, as the keys in the product that gives queries, keys and values."""
    return drawn(num_rows, NUM_HEADS, 3 * WIDTH)[..., WIDTH : 2 * WIDTH]


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], Sequence[Tensor]]] = {
    "swiglu": (swiglu, plain_swiglu, [drawn(NUM_ROWS, 1, WIDTH)]),
    "swiglu of no token": (swiglu, plain_swiglu, [drawn(0, 1, WIDTH)]),
    "norm": (lambda x, weight: rms_norm(x, weight, EPS), plain_norm, [drawn(NUM_ROWS, 1, WIDTH), drawn(WIDTH)]),
    "norm of a part": (
        lambda x, weight: rms_norm(x, weight, EPS), plain_norm, [part_of_wider(NUM_ROWS), drawn(WIDTH)]
    ),
    "norm of no token": (lambda x, weight: rms_norm(x, weight, EPS), plain_norm, [drawn(0, 1, WIDTH), drawn(WIDTH)]),
    "rotation": (rotate_in_blocks, plain_rotation, [drawn(NUM_ROWS, NUM_HEADS, WIDTH), drawn(2, NUM_ROWS, WIDTH // 2)]),
    "rotation of a part": (rotate_in_blocks, plain_rotation, [part_of_wider(NUM_ROWS), drawn(2, NUM_ROWS, WIDTH // 2)]),
}  # fmt: skip


def with_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], name: str) -> list[Tensor]:
    """The output, and the gradients of all inputs but rotary tables; that of the output is strided."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    weights = drawn(*output.shape[:-1], 2 * output.shape[-1])[..., ::2].to(output.dtype)
    wanted = leaves[:1] if name.startswith("rotation") else leaves
    return [output.detach(), *torch.autograd.grad(output, wanted, weights)]


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_torch(name: str) -> None:
    ours, plain, inputs = CASES[name]
    output, *gradients = with_gradients(ours, inputs, name)
    expected, *expected_gradients = with_gradients(plain, [tensor.double() for tensor in inputs], name)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    assert [gradient.dtype for gradient in gradients] == [torch.float32] * len(gradients)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        # A weight's is a sum over all rows.
        scale = wanted.abs().max().item() if wanted.numel() else 1.0
        torch.testing.assert_close(gradient.double(), wanted, rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.parametrize("name", ["swiglu", "norm", "norm of a part"])
def test_outputs_have_the_bits_of_torch(name: str) -> None:
    ours, plain, inputs = CASES[name]
    assert torch.equal(ours(*inputs), plain(*inputs))


def test_a_rotation_differs_from_pairs_in_the_last_bit_at_most() -> None:
    ours, _, inputs = CASES["rotation"]
    torch.testing.assert_close(ours(*inputs), rotate_pairs(*inputs), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "numbers_of_a_row"),
    [("swiglu", WIDTH), ("norm", WIDTH + 1), ("rotation", WIDTH)],
)
def test_what_is_kept_for_the_backward_pass(name: str, numbers_of_a_row: int) -> None:
    """SwiGLU keeps its input, a norm its own and a number, a rotation the tables."""
    ours, _, inputs = CASES[name]
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    weight_bytes = WIDTH * 4 if name.startswith("norm") else 0
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ours(*leaves)
    assert sum(kept.values()) == 4 * NUM_ROWS * numbers_of_a_row + weight_bytes
