from __future__ import annotations

from pathlib import Path

import pytest

from scalerl.base.nvidia import NvidiaDevice
from scalerl.cluster.probes import Finding, gpu, host, side_by_side
from scalerl.cluster.probes.gpu import Devices
from scalerl.parallel.flash_attention import Refusal
from tests.flash_attentions import install

H100 = ("NVIDIA H100 80GB HBM3", 80 << 30)
# What the meta package of Transformer Engine does without its compiled parts.
EMPTY_PACKAGE = 'raise RuntimeError("Found empty `transformer-engine` meta package installed.")\n'


def driver(version: str | None) -> NvidiaDevice:
    return NvidiaDevice(version, ("/dev/nvidia0",))


def test_driver_too_old_for_torchs_cuda_names_the_first_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    finding = gpu.check_driver(Devices("2.13.0", "13.0", ()), driver("570.133.20"))
    assert finding.ends_a_run and "needs driver 580.65.06 or newer" in finding.meaning and "570.133.20" in finding.value
    # CUDA 12 runs with it: something else is wrong.
    assert "nvidia-smi" in gpu.check_driver(Devices("2.8.0", "12.8", ()), driver("570.133.20")).meaning
    assert "nvidia-smi" in gpu.check_driver(Devices("2.13.0", "13.0", ()), driver(None)).meaning


def test_what_hides_a_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "unset it" in gpu.check_driver(Devices("2.13.0", "13.0", ()), driver("580.95.05")).meaning
    assert "built for CUDA" in gpu.check_driver(Devices("2.13.0+cpu", None, ()), driver("580.95.05")).meaning
    assert gpu.check_driver(Devices("2.13.0", "13.0", (H100,)), driver("580.95.05")).ok
    assert "torch does not import" in gpu.check_driver(Devices(None, None, (), error="ImportError"), None).value


def test_gpus_that_do_not_reach_each_other_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "count_nvlinks", lambda: (36, 0))
    pair = Devices("2.13.0", "13.0", (H100, H100))
    assert gpu.check_links(pair).ok and "36 active NVLinks" in gpu.check_links(pair).value
    apart = gpu.check_links(Devices("2.13.0", "13.0", (H100, H100), apart=((0, 1), (1, 0))))
    assert not apart.ok and "2 pairs" in apart.value and "0-1" in apart.value
    monkeypatch.setattr(gpu, "count_nvlinks", lambda: (0, 0))
    assert not gpu.check_links(pair).ok
    assert gpu.check_links(Devices("2.13.0", "13.0", (H100,))).value == "1 GPU(s)"


@pytest.fixture
def empty_transformer_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine as `pip install --no-deps` leaves it: metadata, and a package that cannot be imported."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text(EMPTY_PACKAGE)
    info = tmp_path / "transformer_engine-2.20.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.20.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")


def test_empty_transformer_engine_is_found_out(empty_transformer_engine: None) -> None:
    finding = gpu.check_transformer_engine()
    assert finding.ends_a_run
    assert "2.20.2" in finding.value and "empty `transformer-engine` meta package" in finding.value
    # On a CPU too, as megatron imports it in every rank.
    (violation,) = gpu.start_violations("cpu", serves=False)
    assert "none starts" in violation and "docs/gpu.md" in violation


def test_run_on_gpus_needs_what_compiles_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "check_ninja", lambda: Finding("ninja", False, "none", "pip install ninja"))
    monkeypatch.setattr(gpu, "check_nvcc", lambda cuda: Finding("nvcc", True, "13.0", ""))
    assert list(gpu.start_violations("cuda", serves=True)) == ["ninja: none; pip install ninja"]
    # Fine-tuning starts no server, a run on a CPU compiles nothing.
    assert list(gpu.start_violations("cuda", serves=False)) == []
    assert list(gpu.start_violations("cpu", serves=True)) == []


def test_run_on_gpus_compares_as_doctor_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """nvcc with torch's version of CUDA, and the space of /dev/shm."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(host, "find_cuda_home", lambda: tmp_path)
    monkeypatch.setattr(gpu, "check_ninja", lambda: Finding("ninja", True, "here", ""))
    monkeypatch.setattr("torch.version.cuda", "13.0")
    (violation,) = gpu.start_violations("cuda", serves=True)
    assert violation.startswith("nvcc: 12.4 in ") and "13" in violation
    monkeypatch.setattr("torch.version.cuda", "12.6")
    assert list(gpu.start_violations("cuda", serves=True)) == []
    monkeypatch.setattr(gpu, "check_shared_memory", lambda: host.check_shared_memory(tmp_path, min_gib=10**6))
    (violation,) = gpu.start_violations("cuda", serves=False)
    assert "NCCL and weight updates fail" in violation
    assert list(gpu.start_violations("cpu", serves=True)) == []


@pytest.mark.full
def test_a_flash_attention_is_tried_as_a_rank_would_take_it_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a process of its own, so that one that crashes takes no other with it."""
    refusals = gpu.try_flash_attention("FA3", "FA4")
    assert [list(refusals), *(refusal and refusal.remedy for refusal in refusals.values())] == [
        ["FA3", "FA4"],
        "install FlashAttention 3 from the folder `hopper` of its sources",
        "install flash-attn-4",
    ]
    assert refusals["FA3"] and refusals["FA3"].reason.startswith("flash_attn_interface cannot be imported (No module")
    monkeypatch.setenv("PYTHONPATH", str(install(tmp_path, "FA3", "FA4")), prepend=":")
    (tmp_path / "flash_attn_interface.py").write_text("import os\nos.abort()\n")
    crashed = gpu.try_flash_attention("FA3", "FA4")
    assert crashed["FA4"] is None and crashed["FA3"] is not None and "killed by signal 6" in crashed["FA3"].reason


def test_the_flash_attentions_of_a_machine_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "try_flash_attention", lambda *impls: dict.fromkeys(impls, Refusal("no")))
    finding = gpu.check_flash_attention(Devices("2.13.0", "13.0", (H100,)))
    assert finding.ok and finding.value == "torch's own"
    assert finding.meaning == "trainer.flash_attention_impl=auto takes torch's own"
    monkeypatch.setattr(gpu, "try_flash_attention", lambda *impls: dict.fromkeys(impls) | {"FA3": Refusal("no")})
    finding = gpu.check_flash_attention(Devices("2.13.0", "13.0", (H100,)))
    assert (finding.value, finding.meaning) == ("torch's own, FA4", "trainer.flash_attention_impl=auto takes FA4")
    assert gpu.check_flash_attention(Devices("2.13.0", "13.0", ())).value == "not tried: no GPU"


def test_sum_over_processes_is_checked() -> None:
    finding = gpu.check_collective("cpu", num_ranks=2)
    assert finding.ok and finding.value.startswith("right on 2 rank(s), ") and finding.value.endswith("GB/s")


def test_memory_handed_to_another_process_is_seen_by_both() -> None:
    assert gpu.check_ipc("cpu").value == "4 MiB, seen by both"


def test_program_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gpu, "run_probe_program", lambda *arguments, **options: ("", "NCCL error: unhandled system error")
    )
    one = Devices("2.13.0", "13.0", (H100,))
    for finding in (gpu.check_collective("cuda", 8), gpu.check_ipc("cuda"), gpu.check_kernel(one)):
        assert finding.ends_a_run and finding.value == "NCCL error: unhandled system error" and finding.meaning


def test_findings_keep_their_order_and_name_what_ends_a_run() -> None:
    findings = side_by_side([lambda i=i: Finding(f"probe {i}", i != 1, "", "", needed=i == 1) for i in range(5)])
    assert [finding.name for finding in findings] == [f"probe {i}" for i in range(5)]
    assert [finding.ends_a_run for finding in findings] == [False, True, False, False, False]
    assert findings[1] == Finding("probe 1", False, "", "", True)
