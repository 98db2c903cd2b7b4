"""NVIDIA devices as the file system shows them, their toolkit, and the cores near them."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from scalerl.base import nvidia
from scalerl.base.affinity import cores_near
from scalerl.base.nvidia import (
    VISIBLE_DEVICES,
    are_hidden,
    count_devices,
    find_cuda_home,
    find_ninja,
    find_nvidia_device,
    hide,
    toolkit_environment,
)
from scalerl.cluster.device import device_of

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs@U16)\n"
CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version:  gcc 12\n"
)


def write(root: Path, name: str, text: str = "") -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_no_device(tmp_path: Path) -> None:
    # The control device is there without one.
    for name in ("dev/nvidiactl", "dev/null", "dev/nvidia-uvm", "usr/bin/python3"):
        write(tmp_path, name)
    assert find_nvidia_device(tmp_path) is None


def tool(root: Path, name: str, says: str, code: int = 0) -> Path:
    """A program that says what nvidia-smi --list-gpus says."""
    path = write(root, name, f"#!/bin/sh\n[ \"$1\" = --list-gpus ] || exit 9\nprintf '%s\\n' '{says}'\nexit {code}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", ["dev/nvidia0", "usr/bin/nvidia-smi", "usr/lib/wsl/lib/nvidia-smi"])
def test_one_sign_is_enough(tmp_path: Path, name: str) -> None:
    path = tool(tmp_path, name, "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)")
    device = find_nvidia_device(tmp_path)
    assert device is not None and device.signs == (str(path),) and device.driver is None


@pytest.mark.parametrize(
    ("says", "code"),
    [("No devices were found", 6), ("NVIDIA-SMI has failed", 9), ("", 0)],
    ids=["none", "fails", "mute"],
)
@pytest.mark.parametrize("with_driver", [False, True])
def test_a_login_node_has_the_tool_and_no_device(tmp_path: Path, says: str, code: int, with_driver: bool) -> None:
    tool(tmp_path, "usr/bin/nvidia-smi", says, code)
    if with_driver:
        write(tmp_path, "proc/driver/nvidia/version", OPEN)
        (tmp_path / "proc/driver/nvidia/gpus").mkdir()
    assert find_nvidia_device(tmp_path) is None
    assert device_of("auto", torch_sees_one=False, torch_build="torch", hidden=False, root=tmp_path) == "cpu"


def test_a_tool_that_cannot_run_is_no_device(tmp_path: Path) -> None:
    write(tmp_path, "usr/bin/nvidia-smi")
    assert find_nvidia_device(tmp_path) is None


def test_a_driver_with_a_device_that_is_kept_from_this_process(tmp_path: Path) -> None:
    """As in a container without access to the GPUs: a run on the CPU there would be a mistake."""
    path = write(tmp_path, "proc/driver/nvidia/version", OPEN)
    write(tmp_path, "proc/driver/nvidia/gpus/0000:3b:00.0/information")
    device = find_nvidia_device(tmp_path)
    assert device is not None and device.signs == (str(path),)


@pytest.mark.parametrize(("text", "driver"), [(OPEN, "570.124.06"), (CLOSED, "535.104.05"), ("something else\n", None)])
def test_the_driver(tmp_path: Path, text: str, driver: str | None) -> None:
    path = write(tmp_path, "proc/driver/nvidia/version", text)
    write(tmp_path, "dev/nvidia10")
    device = find_nvidia_device(tmp_path)
    assert device is not None and device.driver == driver
    assert device.signs == (str(tmp_path / "dev/nvidia10"), str(path))


def test_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE_DEVICES, raising=False)
    assert not are_hidden()
    for value, expected in (("0", False), ("-1", True), ("", True)):
        monkeypatch.setenv(VISIBLE_DEVICES, value)
        assert are_hidden() is expected
    monkeypatch.setenv(VISIBLE_DEVICES, "0,1")
    hide()
    assert are_hidden()


def test_devices_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE_DEVICES, raising=False)
    assert count_devices(tmp_path) == 0
    tool(tmp_path, "usr/bin/nvidia-smi", "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)")
    # Its absence was not remembered.
    assert count_devices(tmp_path) == 1
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        write(tmp_path, f"dev/{name}")
    assert count_devices(tmp_path) == 3
    for visible, number in (("0,1", 2), ("GPU-5f", 1), ("", 0), ("-1", 0)):
        monkeypatch.setenv(VISIBLE_DEVICES, visible)
        assert count_devices(tmp_path) == number


def write_program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with no program on its path, whose Python environment is tmp_path."""
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(nvidia.sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setattr(nvidia.sysconfig, "get_path", lambda name: str(tmp_path / "site-packages"))
    for name in ("CUDA_HOME", "CUDA_PATH", "LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_ninja_of_the_environment_is_found_off_the_path(machine: Path) -> None:
    assert find_ninja() is None
    ninja = write_program(machine / "bin" / "ninja")
    assert find_ninja() == ninja
    assert toolkit_environment(machine)["PATH"].split(os.pathsep)[0] == str(machine / "bin")


def test_toolkits_are_looked_for_in_the_order_of_sglang(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = write_program(machine / "path" / "bin" / "nvcc")
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert find_cuda_home() == machine / "path"
    monkeypatch.setenv("CUDA_PATH", "/opt/cuda-13.0")
    assert find_cuda_home() == Path("/opt/cuda-13.0")
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda-13.1")
    assert find_cuda_home() == Path("/opt/cuda-13.1")


def test_linker_finds_the_runtime_of_pips_toolkit(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's wheels have lib/libcudart.so.13 alone; SGLang links by -L$CUDA_HOME/lib64 -lcudart."""
    compiler = shutil.which("c++", path=os.defpath)
    assert compiler is not None
    home = machine / "site-packages" / "nvidia" / "cu13"
    write_program(home / "bin" / "nvcc")
    (home / "lib").mkdir()
    source = machine / "runtime.cpp"
    source.write_text('extern "C" int cudaRuntimeGetVersion() { return 13000; }\n')
    library = home / "lib" / "libcudart.so.13"
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True, env={"PATH": os.defpath})
    monkeypatch.setenv("CUDA_HOME", str(home))
    program = machine / "main.cpp"
    program.write_text('extern "C" int cudaRuntimeGetVersion(); int main() { cudaRuntimeGetVersion(); }\n')
    link = [compiler, program, f"-L{home}/lib64", "-lcudart", "-o", machine / "main"]
    assert subprocess.run(link, capture_output=True, env={"PATH": os.defpath}).returncode != 0
    env = toolkit_environment(machine / "cache") | {"PATH": os.defpath}
    # A second process of the node.
    assert toolkit_environment(machine / "cache")["LIBRARY_PATH"] == env["LIBRARY_PATH"]
    assert subprocess.run(link, capture_output=True, env=env).returncode == 0


def test_whole_toolkit_needs_no_link(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = machine / "cuda"
    (home / "lib64").mkdir(parents=True)
    (home / "lib64" / "libcudart.so").touch()
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert toolkit_environment(machine) == {"CUDA_HOME": str(home)}


ADDRESS = "0000:1b:00.0"
# A node of two sockets with 32 cores each, which have two threads each.
ALL = set(range(128))


@pytest.fixture
def bus(tmp_path: Path) -> Path:
    """The root of a file system that shows a device on the second socket."""
    device = tmp_path / "sys" / "bus" / "pci" / "devices" / ADDRESS
    device.mkdir(parents=True)
    (device / "local_cpulist").write_text("32-63,96-127\n")
    return tmp_path


def run(program: str, *arguments: str) -> list[str]:
    """The lines that it prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_cores_of_the_same_socket(bus: Path) -> None:
    assert cores_near(ADDRESS, ALL, bus) == {*range(32, 64), *range(96, 128)}


def test_a_jobs_cores_stay_its_own(bus: Path) -> None:
    """Of a job that has part of a node only what is near is left; perhaps nothing is."""
    assert cores_near(ADDRESS, set(range(24, 40)), bus) == set(range(32, 40))
    assert cores_near(ADDRESS, set(range(16)), bus) == set()


def test_a_system_that_does_not_tell(bus: Path) -> None:
    assert cores_near("0000:00:00.0", ALL, bus) == set()
    (bus / "sys" / "bus" / "pci" / "devices" / ADDRESS / "local_cpulist").write_text("\n")
    assert cores_near(ADDRESS, ALL, bus) == set()


RANK = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
import torch
from scalerl.base.affinity import run_near_gpu

torch.cuda.get_device_properties = lambda index: SimpleNamespace(pci_domain_id=0, pci_bus_id=27, pci_device_id=0)
for num_threads in (2, 1):
    torch.set_num_threads(num_threads)
    run_near_gpu(0, Path(sys.argv[1]))
    print(*os.sched_getaffinity(0))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one of two cores is near")
def test_a_rank_keeps_its_cores_where_few_are_near(bus: Path) -> None:
    """One core is near the GPU: too few for two threads. The GPU's place on the bus is stood in for."""
    cores = sorted(os.sched_getaffinity(0))
    (bus / "sys" / "bus" / "pci" / "devices" / ADDRESS / "local_cpulist").write_text(f"{cores[0]}\n")
    assert run(RANK, str(bus)) == [" ".join(map(str, cores)), str(cores[0])]


MOVES = """
import os, threading
from scalerl.base.affinity import run_on

cores = os.sched_getaffinity(0)
first, *others = sorted(cores)
ready, moved, placed = threading.Barrier(3), threading.Event(), {}

def wait(name, own):
    if own:
        os.sched_setaffinity(0, own)
    ready.wait()
    moved.wait()
    placed[name] = os.sched_getaffinity(0)

threads = [threading.Thread(target=wait, args=arguments) for arguments in (("free", None), ("bound", set(others)))]
[thread.start() for thread in threads]
ready.wait()
run_on({first})
moved.set()
[thread.join() for thread in threads]
later = threading.Thread(target=wait, args=("later", None))
ready = threading.Barrier(1)
later.start()
later.join()
print(placed["free"] == {first}, placed["bound"] == set(others), placed["later"] == {first})
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="threads move from one core to another")
def test_all_threads_move_but_those_with_a_place_of_their_own() -> None:
    """Threads of the process that ran already, such as Ray's, and those that come."""
    assert run(MOVES) == ["True True True"]
