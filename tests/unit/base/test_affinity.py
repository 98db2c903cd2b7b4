"""Ranks run on the cores near their GPU. The GPU itself takes part in tests/gpu/test_affinity.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scalerl.base.affinity import cores_near

ADDRESS = "0000:1b:00.0"
# A node of two sockets with 32 cores each, which have two threads each.
ALL = set(range(128))


@pytest.fixture
def machine(tmp_path: Path) -> Path:
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


def test_cores_of_the_same_socket(machine: Path) -> None:
    assert cores_near(ADDRESS, ALL, machine) == {*range(32, 64), *range(96, 128)}


def test_a_jobs_cores_stay_its_own(machine: Path) -> None:
    """Of a job that has part of a node only what is near is left; perhaps nothing is."""
    assert cores_near(ADDRESS, set(range(24, 40)), machine) == set(range(32, 40))
    assert cores_near(ADDRESS, set(range(16)), machine) == set()


def test_a_system_that_does_not_tell(machine: Path) -> None:
    assert cores_near("0000:00:00.0", ALL, machine) == set()
    (machine / "sys" / "bus" / "pci" / "devices" / ADDRESS / "local_cpulist").write_text("\n")
    assert cores_near(ADDRESS, ALL, machine) == set()


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
def test_a_rank_keeps_its_cores_where_few_are_near(machine: Path) -> None:
    """One core is near the GPU: too few for two threads. The GPU's place on the bus is stood in for."""
    cores = sorted(os.sched_getaffinity(0))
    (machine / "sys" / "bus" / "pci" / "devices" / ADDRESS / "local_cpulist").write_text(f"{cores[0]}\n")
    assert run(RANK, str(machine)) == [" ".join(map(str, cores)), str(cores[0])]


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
