"""Memory for other processes is asked for outside of expandable segments, and all else of the user's settings stays.

torch reads and keeps these settings on a CPU, too; that a GPU's allocator follows them is in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from scalerl.base.device_allocator import outside_of_expandable_segments

settings: Callable[[], str] = torch._C._accelerator_getAllocatorSettings


@pytest.fixture(autouse=True)
def settings_of_this_process() -> Iterator[None]:
    given = settings()
    yield
    # A call that leaves them out does not switch them off.
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    torch._C._accelerator_setAllocatorSettings(given)


@pytest.mark.parametrize(
    ("given", "inside"),
    [
        ("", ""),
        ("max_split_size_mb:128", "max_split_size_mb:128"),
        ("expandable_segments:True", "expandable_segments:False"),
        ("expandable_segments:True,max_split_size_mb:128", "max_split_size_mb:128,expandable_segments:False"),
        (
            "garbage_collection_threshold:0.8, expandable_segments : True,roundup_power2_divisions:[256:1,512:2]",
            "garbage_collection_threshold:0.8,roundup_power2_divisions:[256:1,512:2],expandable_segments:False",
        ),
    ],
)
def test_all_other_settings_stay(given: str, inside: str) -> None:
    torch._C._accelerator_setAllocatorSettings(given)
    with outside_of_expandable_segments():
        assert settings() == inside
    assert settings() == given


@pytest.mark.parametrize("names", [("PYTORCH_CUDA_ALLOC_CONF",), ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")])
def test_a_torch_that_does_not_tell_its_settings_has_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    """torch 2.11 can be told them, but does not tell them."""
    given = "expandable_segments:True,max_split_size_mb:128"
    for name, value in zip(names, (given, "max_split_size_mb:64"), strict=False):
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as patched:
        patched.delattr(torch._C, "_accelerator_getAllocatorSettings")
        with outside_of_expandable_segments():
            inside = settings()
    assert inside == "max_split_size_mb:128,expandable_segments:False" and settings() == given


def test_they_are_the_users_again_after_an_error() -> None:
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    with pytest.raises(torch.OutOfMemoryError), outside_of_expandable_segments():
        raise torch.OutOfMemoryError
    assert settings() == "expandable_segments:True"
