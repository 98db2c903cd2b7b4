"""The column of experts: every choice that a router can make comes back, and what is not known is no choice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalerl.models.routing import RoutingShape, is_known


@given(
    st.sampled_from([(3, 2), (255, 1), (256, 1), (255, 3), (256, 2), (257, 2), (512, 4)]),
    st.lists(st.booleans(), min_size=1, max_size=4),
    st.integers(0, 5),
    st.randoms(use_true_random=False),
)
def test_choices_come_back(size: tuple[int, int], layers: list[bool], num_tokens: int, random: object) -> None:
    num_experts, top_k = size
    routing = RoutingShape(tuple(layers), num_experts, top_k)
    draw = np.random.default_rng(random.randrange(2**32))  # pyright: ignore[reportAttributeAccessIssue]
    chosen = np.stack([draw.permutation(num_experts)[:top_k] for _ in range(num_tokens * len(layers))] or [[]])
    chosen = chosen.reshape(num_tokens, len(layers), top_k).astype(np.int32)
    if num_tokens:
        # The highest numbers, too.
        chosen[0] = np.arange(num_experts - top_k, num_experts)
    column = routing.packed(chosen)
    assert column.dtype == routing.dtype and column.nbytes == num_tokens * routing.token_bytes
    assert is_known(column).tolist() == [layers] * num_tokens
    mixtures = [layer for layer, has_experts in enumerate(layers) if has_experts]
    assert torch.equal(column[:, mixtures].long(), torch.from_numpy(chosen[:, mixtures]).long())
    assert not is_known(routing.unknown(3)).any()


def test_a_byte_for_each_choice_where_it_counts_the_experts() -> None:
    dtypes = {size: RoutingShape((True,), *size).dtype for size in [(255, 1), (256, 1), (256, 8), (257, 8), (512, 10)]}
    assert [dtype == torch.uint8 for dtype in dtypes.values()] == [True, False, True, False, False]
    # Qwen3-30B-A3B and DeepSeek-V3.
    assert RoutingShape((True,) * 48, 128, 8).token_bytes == 384
    assert RoutingShape((False,) * 3 + (True,) * 58, 256, 8).token_bytes == 488


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([[0, 0], [1, 4]], "experts 1 to 4 of 4"),
        ([[0, 0], [-1, 2]], "experts -1 to 3 of 4"),
        # What a buffer holds that nobody has written to.
        ([[0, 0], [0, 0]], r"row 1 of 2: layer 1 has \[0, 0\]"),
    ],
)
def test_what_no_router_chooses_is_refused(row: list[list[int]], message: str) -> None:
    routing = RoutingShape((False, True), 4, 2)
    with pytest.raises(ValueError, match=message):
        routing.packed(np.array([[[0, 0], [3, 1]], row], np.int32))
