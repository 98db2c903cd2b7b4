"""What is made of what nodes say; real nodes: tests/slurm/test_preflight.py."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from scalerl.base.nvidia import NvidiaDevice
from scalerl.cluster.probes import Finding
from scalerl.cluster.probes.gpu import Devices
from scalerl.extras.slurm.preflight import (
    Collector,
    Node,
    ProbeConnection,
    bandwidth_probes,
    clock_probe,
    device_probes,
    main,
    rounds,
    verdict,
    version_probes,
)
from scalerl.extras.slurm.probes import Limits, all_probes, check_paths

WELL, SICK = Finding("disk", True, "9 GiB", ""), Finding("disk", False, "1 GiB", "clean up")
# nvidia-smi of a node on which GPU 1 has a memory error and a link is down.
NVIDIA_SMI = """#!/bin/sh
case "$*" in
  --list-gpus) echo 'GPU 0: H100'; echo 'GPU 1: H100' ;;
  *ecc*) echo '0, 0, No, No'; echo '1, 2, No, Yes' ;;
  'nvlink --status') echo 'GPU 0: H100'; echo '  Link 0: 26.562 GB/s'; echo '  Link 1: <inactive>' ;;
  *) exit 1 ;;
esac
"""


def nodes_of(*sick: bool) -> dict[str, Node]:
    return {f"n{i}": Node(f"n{i}", [SICK if one else WELL]) for i, one in enumerate(sick, 1)}


def test_all_well_nodes_are_taken_if_the_head_is_one_and_they_are_enough() -> None:
    """Those that the run does not need wait in its Ray cluster for one that is lost."""
    assert verdict(nodes_of(False, True, False, False), 2, "n1").hosts == ["n1", "n3", "n4"]
    assert verdict(nodes_of(False, False, False), 2, "n3").hosts == ["n1", "n2", "n3"]
    too_few = verdict(nodes_of(False, True), 2, "n1")
    assert (too_few.hosts, too_few.sick) == ([], {"n2": "disk: 1 GiB; clean up"})
    assert too_few.lacking == "1 of 2 nodes are well, the run needs 2"
    assert verdict(nodes_of(True, False), 1, "n1").lacking == "n1, on which the batch script runs, is sick"


@pytest.mark.parametrize("num_hosts", range(2, 8))
def test_every_pair_of_neighbours_meets_once_and_no_node_is_in_two_at_a_time(num_hosts: int) -> None:
    hosts = [f"n{i}" for i in range(num_hosts)]
    for pairs in rounds(hosts):
        busy = [host for pair in pairs for host in pair]
        assert len(busy) == len(set(busy))
    met = {frozenset(pair) for pairs in rounds(hosts) for pair in pairs}
    assert met == {frozenset((hosts[i], hosts[(i + 1) % num_hosts])) for i in range(num_hosts)}
    assert sum(map(len, rounds(hosts))) == len(met)


def test_slow_with_everybody_is_sick_slow_with_one_is_not() -> None:
    nodes = nodes_of(False, False, False)
    for first, second, gbit in (("n1", "n2", 90.0), ("n2", "n3", 5.0), ("n3", "n1", 4.0)):
        nodes[first].bandwidths[second] = nodes[second].bandwidths[first] = gbit
    bandwidth_probes(nodes, 50.0)
    assert [bool(node.sick) for node in nodes.values()] == [False, False, True]


def test_other_versions_than_most() -> None:
    nodes = nodes_of(False, False, False)
    for node, torch in zip(nodes.values(), ("2.13", "2.12", "2.13"), strict=True):
        node.versions = {"torch": torch, "python": "3.11"}
    version_probes(nodes)
    assert [probe.value for probe in nodes["n2"].sick] == ["torch 2.12 (others 2.13)"]
    assert not nodes["n1"].sick and not nodes["n3"].sick


def test_fewer_devices_than_the_head_has() -> None:
    """Ray would wait for them until its deadline; a node with more has enough. One that did not report has its own."""
    nodes = nodes_of(False, False, False, True)
    for node, gpus in zip(nodes.values(), (4, 8, 2), strict=False):
        node.versions, node.gpus = {"python": "3.11"}, gpus
    device_probes(nodes, "n1")
    assert [[probe.name for probe in node.sick] for node in nodes.values()] == [[], [], ["devices offered"], ["disk"]]
    assert nodes["n3"].sick[0].value == "2 GPUs" and "n1, the head, offers 4" in nodes["n3"].sick[0].meaning


def test_clocks() -> None:
    assert clock_probe([0.1, 9.0, 0.2]).ok
    late = clock_probe([-61.0, -60.0, -59.0])
    assert not late.ok and late.value == "-60.000 s" and "chronyd" in late.meaning


def test_paths(tmp_path: Path) -> None:
    needs = tmp_path / "needs.txt"
    assert not check_paths(needs).ok
    needs.write_text(f"{tmp_path}\n{tmp_path / 'two words'}\n")
    assert check_paths(needs).value == f"not readable: {tmp_path / 'two words'}"
    (tmp_path / "two words").touch()
    assert check_paths(needs).ok


def test_this_machine_can_be_probed() -> None:
    assert [probe for probe in all_probes(Limits(min_disk_gib=0, min_shm_gib=0)) if not probe.ok] == []


def test_a_node_with_gpus_is_asked_what_doctor_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nvidia-smi and what torch sees are tables; the probes are those of any node."""
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("scalerl.extras.slurm.probes.find_devices", lambda: Devices("2.13.0", "13.0", ()))
    monkeypatch.setattr("scalerl.base.nvidia.find_nvidia_device", lambda: NvidiaDevice("580.95.05", ("/dev/nvidia0",)))
    failed_probes = {
        each.name: each for each in all_probes(Limits(gpus=4, min_disk_gib=0, min_shm_gib=0)) if not each.ok
    }
    assert failed_probes.keys() == {"devices", "ECC", "NVLink", "driver and CUDA"}
    assert failed_probes["devices"].value == "2 GPUs" and "the job asks for 4" in failed_probes["devices"].meaning
    assert (
        failed_probes["ECC"].value.startswith("GPU 1: 2, No, Yes") and "drain the node" in failed_probes["ECC"].meaning
    )
    assert failed_probes["NVLink"].value == "1 of 2 links inactive"
    assert "sees no GPU" in failed_probes["driver and CUDA"].value


def test_a_node_with_gpus_has_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def compilers(gpus: int) -> list[bool]:
        limits = Limits(gpus=gpus, min_disk_gib=0, min_shm_gib=0)
        return [each.ok for each in all_probes(limits) if each.name == "C++ compiler"]

    assert (compilers(0), compilers(1)) == ([], [True])
    monkeypatch.setenv("CXX", "false")
    assert compilers(1) == [False]


def test_the_file_system_of_the_run_is_looked_at_too(tmp_path: Path) -> None:
    def disks(limits: Limits) -> dict[str, bool]:
        return {
            each.name: each.ok for each in all_probes(limits) if each.name in (tempfile.gettempdir(), str(tmp_path))
        }

    ok_by_disk = disks(Limits(min_disk_gib=1e9, min_shm_gib=0, run_dir=tmp_path))
    assert ok_by_disk == {tempfile.gettempdir(): False, str(tmp_path): False}
    assert disks(Limits(min_disk_gib=0, min_shm_gib=0, run_dir=tmp_path / "gone")) == {tempfile.gettempdir(): True}


def test_a_pair_is_measured_by_the_backend_of_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL where both nodes have GPUs that torch sees; what they are asked is looked at, there are none here."""
    asked: list[str] = []

    class Asked(ProbeConnection):
        def __init__(self) -> None:
            self.connection: Any = self

        def getpeername(self) -> tuple[str, int]:
            return ("127.0.0.1", 1)

        def send(self, message: Mapping[str, Any]) -> None:
            asked.append(message["backend"])

        def receive(self) -> dict[str, Any]:
            return {"gbit": 90.0}

        def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
            if "listen" in question:
                return {"address": ("127.0.0.1", 1)}
            asked.append(question["backend"])
            return {"gbit": 80.0}

    nodes = nodes_of(False, False)
    collector = Collector(tmp_path, "127.0.0.1", list(nodes), timeout_s=5.0)
    collector.channels = {host: Asked() for host in nodes}
    for backends, expected in ((("nccl", "nccl"), "nccl"), (("nccl", "gloo"), "gloo")):
        for node, backend in zip(nodes.values(), backends, strict=True):
            node.backend = backend
        asked.clear()
        collector.measure(nodes)
        assert asked == [expected] * 2 and nodes["n1"].bandwidths == {"n2": 80.0}
    collector.listener.close()


def test_a_node_that_does_not_report_is_named_at_the_deadline(tmp_path: Path) -> None:
    collector = Collector(tmp_path, "127.0.0.1", ["n1", "n2"], timeout_s=5.0)
    head = f"127.0.0.1:{(tmp_path / 'port').read_text()}"
    limits = ["--min-disk-gib=0", "--min-shm-gib=0"]
    node = threading.Thread(
        target=main, args=(["--directory", str(tmp_path), "probe", "--head", head, "--host", "n1", *limits],)
    )
    node.start()
    began, nodes = time.monotonic(), collector.collect()
    collector.end()
    node.join(30)
    assert time.monotonic() - began >= 5 and not node.is_alive()
    assert not nodes["n1"].sick and {"shared directory", "clock"} <= {probe.name for probe in nodes["n1"].probes}
    assert [probe.value for probe in nodes["n2"].sick] == ["no answer within 5 s"]


def test_nodes_whose_probes_have_ended_are_not_waited_for(tmp_path: Path) -> None:
    """One of them with words, one without; the deadline is far away."""
    collector = Collector(tmp_path, "127.0.0.1", ["n1", "n2"], timeout_s=3600.0)
    (tmp_path / "node-n1.log").write_text("Traceback:\n  here\n\n  there\nOSError: libcuda.so is torn\n")
    for host in ("n1", "n2"):
        (tmp_path / f"ended-{host}").touch()
    nodes = collector.collect()
    collector.end()
    assert [probe.value for node in nodes.values() for probe in node.sick] == [
        "its probe ended: here | there | OSError: libcuda.so is torn",
        "its probe ended without a word",
    ]
    assert "job's output" in nodes["n2"].sick[0].meaning
