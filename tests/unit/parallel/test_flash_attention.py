"""Which FlashAttention torch's varlen_attn calls: taken up and given back in torch's dispatcher, and what is refused.

No kernel runs: torch calls them on GPUs alone (tests/gpu/test_packed_attention.py). What stands for an installed one is
a package with the functions that torch looks for (tests/flash_attentions.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import _fa4, current_flash_attention_impl, varlen
from torch.utils._python_dispatch import TorchDispatchMode

from scalerl.config.schema import FLASH_ATTENTION_IMPLS
from scalerl.errors import UserError
from scalerl.parallel.attention import _flash
from scalerl.parallel.flash_attention import (
    IMPLS,
    gpu_refusal,
    head_size_refusal,
    take_up,
    use_flash_attention,
    visible_capabilities,
)
from tests.flash_attentions import forget, install

OPERATORS = ("aten::_flash_attention_forward", "aten::_flash_attention_backward")


class Calls(TorchDispatchMode):
    """Remembers the operators that are called, and their arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
        self.seen.append((func._schema.name, named | (kwargs or {})))
        return func(*args, **kwargs or {})


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(install(tmp_path, *FLASH_ATTENTION_IMPLS))
    yield
    forget()


def on_cuda() -> list[str]:
    """What each of the operators runs on CUDA, as torch's dispatcher shows it; empty where it is torch's own."""
    dumps = [torch._C._dispatch_dump(operator).splitlines() for operator in OPERATORS]
    return [line for lines in dumps for line in lines if line.startswith("CUDA: ") and ".py:" in line]


def test_varlen_attn_calls_what_an_implementation_replaces() -> None:
    """The bodies of torch's two operators, on fake CUDA tensors."""
    with torch.no_grad(), FakeTensorMode(), Calls() as calls:
        query = torch.empty(10, 4, 64, device="cuda", dtype=torch.bfloat16)
        cu_seqlens = torch.empty(3, device="cuda", dtype=torch.int32)
        call = (query, query, query, cu_seqlens, cu_seqlens, 6, 6, True)
        out, lse, state = varlen._varlen_attn._init_fn(*call, window_size=[-1, 0])
        varlen._varlen_attn_backward._init_fn(out, *call[:3], out, lse, *call[3:], state, window_size=[-1, 0])
    assert set(OPERATORS) <= {name for name, _ in calls.seen}


@pytest.mark.parametrize("impl", FLASH_ATTENTION_IMPLS)
def test_forward_and_backward_are_replaced_and_given_back(installed: None, impl: str) -> None:
    assert on_cuda() == []
    use_flash_attention(impl)
    assert current_flash_attention_impl() == impl
    assert len(on_cuda()) == len(OPERATORS) and all(f"_fa{impl[-1]}.py" in line for line in on_cuda())
    # The next run of a kept rank may want another, or none.
    use_flash_attention(None)
    use_flash_attention(None)
    assert current_flash_attention_impl() is None and on_cuda() == []


def test_torch_gets_two_results_of_a_flash_attention_4_that_returns_more(installed: None) -> None:
    use_flash_attention("FA4")
    query = torch.zeros(2)
    out, lse = _fa4._fa4_run_forward(query, query, query, None, None, 6, 6, 0.5, True, -1, 0, None, None, None, 1)
    assert (out.tolist(), lse.tolist()) == ([1.0, 1.0], [2.0, 2.0])
    inputs = (query, query, query, query, query, query)
    assert len(_fa4._fa4_run_backward(*inputs, None, None, 0.5, True, -1, 0)) == 3


def test_a_sequence_is_not_split_by_the_others_of_its_packing(installed: None) -> None:
    with torch.no_grad(), FakeTensorMode(), Calls() as calls:
        query = torch.empty(10, 4, 64, device="cuda", dtype=torch.bfloat16)
        cu_seqlens = torch.empty(3, device="cuda", dtype=torch.int32)
        _flash(query, query, query, cu_seqlens, 6, None)
        use_flash_attention("FA3")
        _flash(query, query, query, cu_seqlens, 6, None)
    splits = [arguments.get("num_splits") for name, arguments in calls.seen if name == "torch_attn::_varlen_attn"]
    assert splits == [None, 1]


@pytest.mark.parametrize("impl", FLASH_ATTENTION_IMPLS)
def test_a_torch_whose_call_cannot_fix_the_splits_is_refused(
    installed: None, impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch 2.11's, with whose registration an implementation ends the first forward pass."""

    def varlen_attn(query: Any, key: Any, value: Any, *, window_size: Any = (-1, -1)) -> None: ...

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    with pytest.raises(UserError, match=rf"flash_attention_impl = {impl}: torch .* install torch 2\.13"):
        use_flash_attention(impl)
    assert current_flash_attention_impl() is None


@pytest.mark.parametrize("impl", FLASH_ATTENTION_IMPLS)
def test_one_that_is_not_installed_is_refused_with_what_to_install(impl: str) -> None:
    with pytest.raises(UserError) as error:
        use_flash_attention(impl)
    message = str(error.value)
    assert message.startswith(f"trainer.flash_attention_impl = {impl}: {IMPLS[impl].module} cannot be imported (No mod")
    assert f"install {IMPLS[impl].package}, or set trainer.flash_attention_impl=null" in message
    assert current_flash_attention_impl() is None and on_cuda() == []


@pytest.mark.parametrize(
    ("impl", "capabilities", "named"),
    [
        ("FA3", [(9, 0)], None),
        ("FA3", [(8, 0)], "9.x, and here is 8.0"),
        ("FA3", [(10, 0)], "9.x, and here is 10.0"),
        ("FA4", [(9, 0)], None),
        ("FA4", [(10, 0), (10, 3)], None),
        ("FA4", [(12, 0), (9, 0)], "9.x or 10.x, and here is 12.0"),
        ("FA4", [(8, 9), (8, 0)], "9.x or 10.x, and here is 8.0, 8.9"),
    ],
)
def test_gpus_of_each_implementation(impl: str, capabilities: list[tuple[int, int]], named: str | None) -> None:
    refusal = gpu_refusal(impl, capabilities)
    assert (refusal is None) == (named is None)
    if refusal is not None and named is not None:
        error = refusal.error(impl)
        assert error.startswith(f"trainer.flash_attention_impl = {impl}: torch runs it on GPUs of compute capability")
        assert named in error and "; set trainer.flash_attention_impl=null" in error
        # Nothing that is installed changes it.
        assert refusal.remedy is None


def test_one_that_is_not_for_a_gpu_is_not_taken_up_there(installed: None) -> None:
    assert visible_capabilities() == [], "this test is for a machine without a GPU"
    assert take_up("FA3", [(10, 0)]) == gpu_refusal("FA3", [(10, 0)])
    assert current_flash_attention_impl() is None
    # The next one replaces it.
    assert [take_up("FA3", [(9, 0)]), take_up("FA4", [(9, 0)])] == [None, None]
    assert current_flash_attention_impl() == "FA4" and len(on_cuda()) == len(OPERATORS)


def test_one_whose_import_fails_in_whatever_way_is_refused_and_torchs_own_is_called(
    installed: None, tmp_path: Path
) -> None:
    use_flash_attention("FA3")
    (tmp_path / "flash_attn" / "cute" / "interface.py").write_text("raise TypeError('of another version')\n")
    refusal = take_up("FA4", [(9, 0)])
    assert refusal is not None
    assert refusal.reason == "flash_attn.cute.interface cannot be imported (of another version)"
    assert current_flash_attention_impl() is None and on_cuda() == []


def test_the_table_is_that_of_torch() -> None:
    """The domain of the key and the modules that torch would import itself."""
    assert tuple(IMPLS) == FLASH_ATTENTION_IMPLS == tuple(torch.nn.attention.list_flash_attention_impls())
    for impl in IMPLS:
        module = importlib.import_module(f"torch.nn.attention._fa{impl[-1]}")
        register = getattr(module, f"register_flash_attention_fa{impl[-1]}")
        assert register.__defaults__ == (IMPLS[impl].module,)


def test_heads_without_a_kernel_on_every_gpu_are_refused() -> None:
    assert [head_size_refusal("FA4", size, "m") for size in (64, 80, 128, 256)] == [None] * 4
    assert [head_size_refusal("FA3", size, "m") for size in (64, 192, 256)] == [None] * 3
    refusal, neither = head_size_refusal("FA4", 192, "models/deepseek"), head_size_refusal("FA3", 100, "m")
    assert refusal is not None and "heads of models/deepseek have size 192" in refusal.reason
    assert "set trainer.flash_attention_impl=FA3, or set trainer.flash_attention_impl=null" in refusal.error("FA4")
    assert neither is not None and "; set trainer.flash_attention_impl=null" in neither.error("FA3")
