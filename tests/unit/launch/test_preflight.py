"""What is made of what nodes say; real nodes: tests/slurm/test_preflight.py."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from scalerl.launch.preflight import (
    Collector,
    Node,
    bandwidth_probes,
    clock_probe,
    main,
    rounds,
    verdict,
    version_probes,
)
from scalerl.launch.probes import Limits, Probe, all_probes, bad_rows, infiniband, paths, space, xid_lines

WELL, SICK = Probe("disk", True, "9 GiB"), Probe("disk", False, "1 GiB", "clean up")


def nodes_of(*sick: bool) -> dict[str, Node]:
    return {f"n{i}": Node(f"n{i}", [SICK if one else WELL]) for i, one in enumerate(sick, 1)}


def test_the_first_well_nodes_are_taken_and_the_head_among_them() -> None:
    assert verdict(nodes_of(False, True, False, False), 2, "n1").hosts == ["n1", "n3"]
    assert verdict(nodes_of(False, False, False), 2, "n3").hosts == ["n1", "n3"]
    found = verdict(nodes_of(False, True), 2, "n1")
    assert (found.hosts, found.sick) == ([], {"n2": "disk: 1 GiB; clean up"})
    assert found.lacking == "1 of 2 nodes are well, the run needs 2"
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


def test_clocks() -> None:
    assert clock_probe([0.1, 9.0, 0.2]).ok
    late = clock_probe([-61.0, -60.0, -59.0])
    assert not late.ok and late.value == "-60.000 s" and "chronyd" in late.meaning


def test_memory_errors_and_xids_are_read() -> None:
    assert bad_rows("0, 0, No, No\n1, [N/A], [N/A], [N/A]\n") == []
    assert bad_rows("0, 0, 0, 0\n7, 2, No, Yes\n") == ["GPU 7: 2, No, Yes (uncorrected, remapping failed, pending)"]
    log = "[1.0] eth0 up\n[2.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
    assert xid_lines(log) == ["[2.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."]


def test_infiniband_ports(tmp_path: Path) -> None:
    assert infiniband(tmp_path).ok and "not here" in infiniband(tmp_path).value
    for adapter, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        (tmp_path / adapter / "ports/1").mkdir(parents=True)
        (tmp_path / adapter / "ports/1/state").write_text(f"{state}\n")
    assert infiniband(tmp_path).ok and infiniband(tmp_path, "mlx5_0").ok
    down = infiniband(tmp_path, "mlx5_0,mlx5_1")
    assert not down.ok and down.value == "mlx5_0:1 ACTIVE, mlx5_1:1 DOWN"


def test_paths_and_space(tmp_path: Path) -> None:
    needs = tmp_path / "needs.txt"
    assert not paths(needs).ok
    needs.write_text(f"{tmp_path}\n{tmp_path / 'two words'}\n")
    assert paths(needs).value == f"not readable: {tmp_path / 'two words'}"
    (tmp_path / "two words").touch()
    assert paths(needs).ok
    assert space("disk", tmp_path, 0.0, "").ok and not space("disk", tmp_path, 1e9, "").ok


def test_this_machine_can_be_probed() -> None:
    assert [probe for probe in all_probes(Limits(min_disk_gib=0, min_shm_gib=0)) if not probe.ok] == []


def test_a_node_that_does_not_report_is_named_at_the_deadline(tmp_path: Path) -> None:
    collector = Collector(tmp_path, "127.0.0.1", ["n1", "n2"], timeout_s=5.0)
    head = f"127.0.0.1:{(tmp_path / 'port').read_text()}"
    limits = ["--min-disk-gib=0", "--min-shm-gib=0"]
    node = threading.Thread(
        target=main, args=(["--directory", str(tmp_path), "probe", "--head", head, "--host", "n1", *limits],)
    )
    node.start()
    began, found = time.monotonic(), collector.collect()
    collector.end()
    node.join(30)
    assert time.monotonic() - began >= 5 and not node.is_alive()
    assert not found["n1"].sick and {"shared directory", "clock"} <= {probe.name for probe in found["n1"].probes}
    assert [probe.value for probe in found["n2"].sick] == ["no answer within 5 s"]
