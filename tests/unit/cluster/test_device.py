"""trainer.device: never a silent run on the CPU beside a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scalerl.base.nvidia import VISIBLE_DEVICES
from scalerl.cluster.device import DeviceError, device_of, devices_line, resolve_device
from scalerl.config.schema import TrainerConfig

BUILD = "torch 2.13.0+cu130, built for CUDA 13.0"


def decide(root: Path, name: str = "auto", *, sees: bool = False, hidden: bool = False) -> str:
    return device_of(name, torch_sees_one=sees, torch_build=BUILD, hidden=hidden, root=root)


@pytest.fixture
def with_gpu(tmp_path: Path) -> Path:
    """The root of a file system that shows one."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    (tmp_path / "proc" / "driver" / "nvidia").mkdir(parents=True)
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
    (tmp_path / "proc" / "driver" / "nvidia" / "version").write_text(version)
    return tmp_path


def test_auto_takes_what_is_there(tmp_path: Path, with_gpu: Path) -> None:
    assert decide(with_gpu, sees=True) == "cuda"
    assert decide(tmp_path / "nothing") == "cpu"


def test_a_gpu_that_torch_does_not_see_is_an_error(with_gpu: Path) -> None:
    """It names the versions of driver and CUDA, what showed the device, and what to do."""
    for name in ("auto", "cuda"):
        with pytest.raises(DeviceError) as error:
            decide(with_gpu, name)
        message = str(error.value)
        assert message.startswith(f"trainer.device = {name}: ")
        for part in ("driver 535.104.05", "CUDA 13.0", str(with_gpu / "dev" / "nvidia0"), "trainer.device=cpu"):
            assert part in message


def test_gpus_that_the_user_hid_are_not_meant(with_gpu: Path) -> None:
    assert decide(with_gpu, hidden=True) == "cpu"
    with pytest.raises(DeviceError, match=VISIBLE_DEVICES):
        decide(with_gpu, "cuda", hidden=True)


def test_cuda_without_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="nothing on this machine shows an NVIDIA device"):
        decide(tmp_path, "cuda")


def test_cpu_hides_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """From this process and all that it starts."""
    monkeypatch.setenv(VISIBLE_DEVICES, "0,1")
    assert resolve_device("cpu") == "cpu"
    assert os.environ[VISIBLE_DEVICES] == ""


def test_what_a_run_says_of_its_devices() -> None:
    two, many = TrainerConfig(n_gpus_per_node=2), TrainerConfig(nnodes=4, n_gpus_per_node=8, device="cuda")
    assert devices_line(two, "cpu") == "devices: 2 processes on the CPU (trainer.n_gpus_per_node, trainer.device=auto)"
    assert devices_line(many, "cuda").startswith("devices: 4 nodes x 8 GPUs (")
    assert "1 process on the CPU" in devices_line(TrainerConfig(n_gpus_per_node=1), "cpu")
    assert devices_line(many, "cuda", "FA3 (of auto)").endswith("trainer.device=cuda); attention: FA3 (of auto)")
