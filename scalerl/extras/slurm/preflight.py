"""Probes every node before Ray starts: sick nodes are left out of this attempt, or of the job's next one.

`python -m scalerl.extras.slurm.preflight collect` runs where the batch script does; `... probe` runs on each node and
connects to it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scalerl.cluster.probes import Finding
from scalerl.errors import EXIT_FAILED
from scalerl.extras.slurm.probes import Limits, all_probes, collective_backend, versions

MAX_SKEW_S = 5.0
CLOCK_QUESTIONS = 5
# Seconds after which a node tries again to connect: the collector may start later.
CONNECT_EVERY_S = 0.2
# Seconds between two looks which probes have ended, and for which the last lines of an ended one are on their way.
LOOK_FOR_ENDED_EVERY_S = 2.0
LAST_LINES = 3
CANARY, PORT, HOSTS, SICK, REPORT = "canary", "port", "hosts", "sick", "report.json"
# Before the name of a host: its probe has ended, while the collector has not told it to (ray.sbatch, ray_node.sh).
ENDED = "ended-"


@dataclass
class Node:
    """A node, with what it reported of itself.

    bandwidths: to each peer that it was measured with, in Gbit/s.  backend: of its ranks' collectives.
    gpus: that it offers to Ray.
    """

    host: str
    probes: list[Finding]
    versions: dict[str, str] = field(default_factory=dict)
    bandwidths: dict[str, float] = field(default_factory=dict)
    backend: str = "gloo"
    gpus: int = 0

    @property
    def sick(self) -> list[Finding]:
        """The probes that are not ok."""
        return [probe for probe in self.probes if not probe.ok]


# --- on a node ---


def probe(arguments: argparse.Namespace) -> int:
    """Probes this node, reports to the collector and answers its questions until it ends. Returns 0."""
    wanted = max(arguments.gpus, arguments.min_gpus)
    limits = Limits(wanted, arguments.min_disk_gib, arguments.min_shm_gib, arguments.needs, arguments.directory)
    with _connected(arguments.directory, arguments.head, arguments.timeout_s) as channel:
        report = {
            "probes": [asdict(result) for result in all_probes(limits)],
            "versions": versions(),
            "backend": collective_backend(limits.gpus),
            "gpus": arguments.gpus,
        }
        channel.send({"host": arguments.host, "canary": _digest(arguments.directory / CANARY), **report})
        while (question := channel.receive()) is not None:
            if "end" in question:
                break
            channel.send({"time": time.time()} if "time" in question else _measure(question, arguments.timeout_s))
    return 0


def _digest(path: Path) -> str:
    """The digest of the file that the head wrote: a node that reads the same file sees the same directory."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return f"{type(error).__name__}: {error}"


def _measure(question: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    from scalerl.extras.slurm.bandwidth import listen_for_peer, measured

    if "listen" in question:
        return {"address": listen_for_peer(question["listen"])}
    try:
        return {"gbit": measured(question["rank"], tuple(question["address"]), question["backend"], timeout_s)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


class ProbeConnection:
    """A connection of two machines that send each other lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._file = connection.makefile("r", encoding="utf-8")

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message."""
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Waits for the next message; None when the other side is gone."""
        line = self._file.readline()
        return json.loads(line) if line.endswith("\n") else None

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a question and waits for the answer. Raises ConnectionError when the other side is gone."""
        self.send(question)
        answer = self.receive()
        if answer is None:
            raise ConnectionError("the node went away")
        return answer

    def __enter__(self) -> ProbeConnection:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        self.connection.close()


def _connected(directory: Path, head: str, timeout_s: float) -> ProbeConnection:
    port = int(head.rpartition(":")[2])
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection = socket.create_connection((head.rpartition(":")[0], port), timeout=timeout_s)
            return ProbeConnection(connection)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(CONNECT_EVERY_S)


# --- on the node of the batch script ---


class Collector:
    """Waits until a deadline for the nodes' reports, and asks each node for its clock and its bandwidths.

    A node whose probe has ended without a report is not waited for.
    """

    def __init__(self, directory: Path, address: str, hosts: Sequence[str], timeout_s: float) -> None:
        self.directory, self.address, self.hosts = directory, address, list(hosts)
        self.timeout_s = timeout_s
        self.nodes: dict[str, Node] = {}
        self.channels: dict[str, ProbeConnection] = {}
        self._reported = threading.Condition()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / CANARY).write_text(secrets.token_hex(32), encoding="utf-8")
        self.listener = socket.create_server((address, 0), backlog=max(64, len(self.hosts)))
        partial = directory / f"{PORT}.tmp"
        partial.write_text(str(self.listener.getsockname()[1]), encoding="utf-8")
        os.replace(partial, directory / PORT)

    def collect(self) -> dict[str, Node]:
        """Waits for all nodes or the deadline, and returns host -> node; a node without report has a failed probe."""
        threading.Thread(target=self._accept, daemon=True).start()
        deadline = time.monotonic() + self.timeout_s
        ended: set[str] = set()
        with self._reported:
            while missing := [host for host in self.hosts if host not in self.nodes]:
                if (left_s := deadline - time.monotonic()) <= 0 or ended.issuperset(missing):
                    break
                ended = {path.name.removeprefix(ENDED) for path in self.directory.glob(f"{ENDED}*")}
                self._reported.wait(min(left_s, LOOK_FOR_ENDED_EVERY_S))
            nodes = dict(self.nodes)
        for host in self.hosts:
            if host not in nodes:
                nodes[host] = Node(host, [self._no_report(host, host in ended)])
        return {host: nodes[host] for host in self.hosts}

    def _no_report(self, host: str, ended: bool) -> Finding:
        log = self.directory / f"node-{host}.log"
        if not ended:
            return Finding("reports", False, f"no answer within {self.timeout_s:g} s", f"it did not report: see {log}")
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines:
            meaning = f"what Slurm said of it is in the job's output; its log {log} is empty"
            return Finding("reports", False, "its probe ended without a word", meaning)
        return Finding("reports", False, f"its probe ended: {' | '.join(lines[-LAST_LINES:])}", f"see {log}")

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        connection.settimeout(self.timeout_s)
        try:
            channel = ProbeConnection(connection)
            report = channel.receive()
            if report is None or report.get("host") not in self.hosts:
                return
            probes = [Finding(**result) for result in report["probes"]]
            node = Node(report["host"], probes, report["versions"], backend=report["backend"], gpus=report["gpus"])
            node.probes.append(self._canary(report["canary"]))
            node.probes.append(clock_probe([clock_offset(channel) for _ in range(CLOCK_QUESTIONS)]))
        # A stranger, or a node that went away while it spoke: it is missing at the deadline.
        except (OSError, ValueError, KeyError, TypeError):
            return
        with self._reported:
            self.nodes[node.host], self.channels[node.host] = node, channel
            self._reported.notify()

    def _canary(self, digest: str) -> Finding:
        ok = digest == _digest(self.directory / CANARY)
        value = "the head's file is read" if ok else f"not the head's file ({digest[:200]})"
        meaning = "" if ok else f"{self.directory} must be one directory on all nodes: mend the mount of this node"
        return Finding("shared directory", ok, value, meaning)

    def measure(self, nodes: Mapping[str, Node]) -> None:
        """Measures and notes the bandwidths of neighbours in a ring of the nodes that are well, in rounds of pairs.

        By the backend of their ranks, or gloo where the two have not the same.
        """
        well = [host for host in self.hosts if host in self.channels and not nodes[host].sick]
        for pairs in rounds(well):
            threads = [threading.Thread(target=self._measure_pair, args=(nodes, *pair)) for pair in pairs]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _measure_pair(self, nodes: Mapping[str, Node], first: str, second: str) -> None:
        both = {nodes[first].backend, nodes[second].backend}
        backend = "gloo" if len(both) > 1 else both.pop()
        first_channel, second_channel = self.channels[first], self.channels[second]
        try:
            host = first_channel.connection.getpeername()[0]
            address = first_channel.ask({"listen": host})["address"]
            first_channel.send({"rank": 0, "address": address, "backend": backend})
            answer = second_channel.ask({"rank": 1, "address": address, "backend": backend})
            answers = (first_channel.receive() or {}, answer)
            gbit = min(answer.get("gbit", 0.0) for answer in answers)
        except (OSError, ValueError):
            gbit = 0.0
        nodes[first].bandwidths[second] = nodes[second].bandwidths[first] = gbit

    def end(self) -> None:
        """Tells the nodes that there are no more questions, and stops listening."""
        for channel in self.channels.values():
            try:
                channel.send({"end": True})
            except OSError:
                continue
        self.listener.close()


def clock_offset(channel: ProbeConnection) -> float:
    """Seconds that the node's clock is ahead of this machine's, as of the middle between question and answer."""
    asked = time.time()
    theirs = channel.ask({"time": True})["time"]
    return float(theirs) - (asked + time.time()) / 2


def clock_probe(offsets_s: Sequence[float]) -> Finding:
    """Checks a node's clock by the median of its offsets."""
    offset_s = statistics.median(offsets_s)
    ok = abs(offset_s) <= MAX_SKEW_S
    meaning = "" if ok else f"more than {MAX_SKEW_S:g} s from the head: time synchronisation (chronyd) is down there"
    return Finding("clock", ok, f"{offset_s:+.3f} s", meaning)


def version_probes(nodes: Mapping[str, Node]) -> None:
    """Adds a probe to each node, which fails where its versions are not those of most nodes."""
    reporting = [node for node in nodes.values() if node.versions]
    usual = {
        name: Counter(node.versions.get(name, "none") for node in reporting).most_common(1)[0][0]
        for name in sorted({name for node in reporting for name in node.versions})
    }
    for node in reporting:
        other = [
            f"{name} {node.versions.get(name, 'none')} (others {version})"
            for name, version in usual.items()
            if node.versions.get(name, "none") != version
        ]
        meaning = "ranks of different versions do not understand each other: install them anew there" if other else ""
        node.probes.append(Finding("versions", not other, "; ".join(other) or "as on the others", meaning))


def device_probes(nodes: Mapping[str, Node], head: str) -> None:
    """Adds a probe to each node that reported, which fails where it offers fewer GPUs than the head."""
    for node in nodes.values():
        if not node.versions:
            continue
        ok = node.gpus >= nodes[head].gpus
        meaning = (
            f"{head}, the head, offers {nodes[head].gpus}: a device is missing there, or it is another kind of node; "
            "ask for one kind (slurm.options={constraint:..})"
        )
        node.probes.append(Finding("devices offered", ok, f"{node.gpus} GPUs", "" if ok else meaning))


def rounds(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Pairs the neighbours in a ring of hosts, in rounds in which no host is twice."""
    if len(hosts) < 2:
        return []
    ring = list(zip(hosts, [*hosts[1:], hosts[0]], strict=True))
    if len(hosts) == 2:
        return [ring[:1]]
    last = [ring[-1]] if len(hosts) % 2 else []
    pairs = ring[: len(ring) - len(last)]
    return [round_ for round_ in (pairs[0::2], pairs[1::2], last) if round_]


def bandwidth_probes(nodes: Mapping[str, Node], min_gbit: float) -> None:
    """Adds a probe to each node that was measured, which fails where the node is slow with all its peers."""
    for node in nodes.values():
        if not node.bandwidths:
            continue
        value = ", ".join(f"{gbit:.2f} Gbit/s with {peer}" for peer, gbit in node.bandwidths.items())
        ok = max(node.bandwidths.values()) >= min_gbit
        meaning = (
            "" if ok else f"below {min_gbit:g} Gbit/s with every peer (slurm.min_bandwidth_gbit): look at its links"
        )
        node.probes.append(Finding("all-reduce", ok, value, meaning))


@dataclass(frozen=True)
class Verdict:
    """Which nodes the run gets.

    hosts: the nodes to start Ray on.  sick: host -> why.  lacking: why there are not enough hosts; "" if there are.
    """

    hosts: list[str]
    sick: dict[str, str]
    lacking: str = ""


def verdict(nodes: Mapping[str, Node], num_nodes: int, head: str) -> Verdict:
    """Chooses all nodes that are well: num_nodes at least, the head, where the batch script is, among them."""
    sick = {
        node.host: "; ".join(f"{probe.name}: {probe.value}; {probe.meaning}" for probe in node.sick)
        for node in nodes.values()
        if node.sick
    }
    well = [host for host in nodes if host not in sick]
    if head in sick:
        return Verdict([], sick, f"{head}, on which the batch script runs, is sick")
    if len(well) < num_nodes:
        return Verdict([], sick, f"{len(well)} of {len(nodes)} nodes are well, the run needs {num_nodes}")
    return Verdict(well, sick)


def collect(arguments: argparse.Namespace) -> int:
    """Collects the nodes' reports; returns 0 with the hosts to use in HOSTS, or 70 when there are not enough.

    The sick nodes are written to SICK, all reports to REPORT.
    """
    directory: Path = arguments.directory
    collector = Collector(directory, arguments.address, arguments.hosts.split(","), arguments.timeout_s)
    nodes = collector.collect()
    if arguments.min_bandwidth_gbit > 0:
        collector.measure(nodes)
        bandwidth_probes(nodes, arguments.min_bandwidth_gbit)
    collector.end()
    version_probes(nodes)
    device_probes(nodes, arguments.head)
    result = verdict(nodes, arguments.num_nodes, arguments.head)
    (directory / REPORT).write_text(json.dumps([asdict(node) for node in nodes.values()], indent=1), encoding="utf-8")
    (directory / SICK).write_text("".join(f"{host} {why}\n" for host, why in result.sick.items()), encoding="utf-8")
    (directory / HOSTS).write_text("".join(f"{host}\n" for host in result.hosts), encoding="utf-8")
    for host, why in result.sick.items():
        print(f"sick: {host}: {why}", flush=True)
    if result.lacking:
        print(f"error: {result.lacking}", flush=True)
        return EXIT_FAILED
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `collect` or `probe`, and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--directory", type=Path, required=True, help="directory of this attempt, which all nodes share"
    )
    parser.add_argument("--timeout-s", type=float, default=120.0)
    modes = parser.add_subparsers(required=True)
    on_head = modes.add_parser("collect")
    on_head.add_argument("--address", required=True, help="address of this node, as the others see it")
    on_head.add_argument("--hosts", required=True, help="comma-separated")
    on_head.add_argument("--head", required=True)
    on_head.add_argument("--num-nodes", type=int, required=True, help="nodes that the run needs")
    on_head.add_argument("--min-bandwidth-gbit", type=float, default=0.0, help="0: not measured")
    on_head.set_defaults(mode=collect)
    on_node = modes.add_parser("probe")
    on_node.add_argument("--head", required=True, help="address:port of the collector")
    on_node.add_argument("--host", required=True)
    on_node.add_argument("--gpus", type=int, default=0, help="that this node offers to Ray")
    on_node.add_argument("--min-gpus", type=int, default=0, help="that the run needs on each node")
    on_node.add_argument("--min-disk-gib", type=float, default=Limits.min_disk_gib)
    on_node.add_argument("--min-shm-gib", type=float, default=Limits.min_shm_gib)
    on_node.add_argument("--needs", type=Path)
    on_node.set_defaults(mode=probe)
    arguments = parser.parse_args(argv)
    return arguments.mode(arguments)


if __name__ == "__main__":
    sys.exit(main())
