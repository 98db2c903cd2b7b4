"""Nodes that are sick before Ray starts, each in a real way: left out where there are spare ones, else excluded."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scalerl.extras.slurm.script import SCRIPTS, SbatchFile
from tests.slurm.jobs import (
    DRIVER,
    WAIT_ONCE,
    assert_came_back,
    assert_nothing_left,
    hidden,
    little_shared_memory,
    second_network,
    wait_for_driver,
    wait_until,
)
from tests.slurm.minislurm import MiniSlurm

# As of a node whose time synchronisation is down: the C library tells programs a time that is ahead.
CLOCK_AHEAD = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
  int (*real)(clockid_t, struct timespec *) = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec += 90;
  return code;
}
"""
# Of nodes with two GPUs each: n2 has lost one, a memory of n3 fails, a link of n4 is down.
NVIDIA_SMI = """#!/bin/sh
gpus() { echo 'GPU 0: H100'; }
case "$(hostname) $*" in
  "n2 --list-gpus") gpus ;;
  *" --list-gpus") gpus; echo 'GPU 1: H100' ;;
  "n3 "*ecc*) echo '0, 0, No, No'; echo '1, 2, No, No' ;;
  *ecc*) echo '0, 0, No, No'; echo '1, 0, No, No' ;;
  "n4 nvlink --status") gpus; echo '  Link 0: 26.562 GB/s'; echo '  Link 1: <inactive>' ;;
  *" nvlink --status") gpus; echo '  Link 0: 26.562 GB/s' ;;
  *driver_version*) echo 580.95.05 ;;
  *) exit 1 ;;
esac
"""


def probed(directory: Path) -> dict[str, list[str]]:
    """Node -> names of its probes that are not ok."""
    nodes = json.loads((directory / "preflight/report.json").read_text())
    return {node["host"]: [probe["name"] for probe in node["probes"] if not probe["ok"]] for node in nodes}


def test_a_sick_node_is_left_out_for_a_spare_one(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCALERL_NUM_NODES", "2")
    with little_shared_memory(slurm, "n2"):
        job_id = submit(3, "python", DRIVER, "report", "2", "0", "0")
        job = slurm.wait(job_id)
    out = (tmp_path / f"out-{job_id}.txt").read_text()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "0"), out
    assert "sick: n2: /dev/shm: 0.1 GiB free; less than 1 GiB: " in out
    report = json.loads(next(line for line in out.splitlines() if line.startswith("REPORT")).removeprefix("REPORT"))
    assert sorted(report["nodes"]) == ["n1", "n3"]
    assert probed(tmp_path / f"logs/{job_id}/attempt_0") == {"n1": [], "n2": ["/dev/shm"], "n3": []}
    assert (tmp_path / f"logs/{job_id}/sick_nodes.txt").read_text().startswith("attempt 0: n2 /dev/shm: ")
    assert_nothing_left(slurm)


@pytest.mark.full
@pytest.mark.parametrize(("num_nodes", "host"), [(2, "n2"), (2, "n1")])
def test_without_a_spare_one_the_job_comes_back_on_other_nodes(
    slurm: MiniSlurm,
    submit: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_nodes: int,
    host: str,
) -> None:
    """n1 would be the head. An attempt that excludes a node is none of those that may fail."""
    monkeypatch.setenv("SCALERL_MAX_FAILURES", "1")
    monkeypatch.setenv("SCALERL_MAX_RESTARTS", "1")
    needed = tmp_path / "needed"
    needed.mkdir()
    (needed / "model").touch()
    (tmp_path / "needs.txt").write_text(f"{needed / 'model'}\n")
    monkeypatch.setenv("SCALERL_NEEDS", str(tmp_path / "needs.txt"))
    with hidden(slurm, host, needed):
        job_id = submit(num_nodes, "true")
        out = tmp_path / f"out-{job_id}.txt"
        assert_came_back(slurm, job_id, out, because="70")
    text = out.read_text()
    assert f"sick: {host}: paths: not readable: {needed / 'model'}; put it on a file system" in text
    assert f"excluded from the next attempt: {host}\n" in text
    (taken,) = re.findall(r"\] nodes: (.+)", text)
    assert len(taken.split()) == num_nodes and host not in taken.split()
    assert probed(tmp_path / f"logs/{job_id}/attempt_0")[host] == ["paths"]


@pytest.mark.full
@pytest.mark.usefixtures("submit")
@pytest.mark.parametrize(("num_nodes", "lost"), [(1, "secrets"), (2, "launcher")])
def test_a_node_that_has_lost_what_the_first_attempt_had_is_left_out(
    slurm: MiniSlurm, tmp_path: Path, num_nodes: int, lost: str
) -> None:
    """Before anything of the launcher's runs there, or its preflight. In the first attempt it is the user's mistake."""
    shutil.copytree(SCRIPTS, tmp_path / "launcher")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/env").touch(mode=0o600)
    out = tmp_path / "out.txt"
    script = SbatchFile(
        options={"nodes": str(num_nodes), "output": str(out), "time": "10"},
        variables={
            "SCALERL_LAUNCHER": str(tmp_path / "launcher"),
            "SCALERL_VENV": sys.prefix,
            "SCALERL_LOG_DIR": str(tmp_path / "logs"),
            "SCALERL_ENV_FILE": str(tmp_path / "secrets/env"),
        },
        command=WAIT_ONCE,
    )
    (tmp_path / "job.sbatch").write_text(script.text())
    job_id = slurm.sbatch(str(tmp_path / "job.sbatch"), cwd=tmp_path)
    wait_for_driver(slurm, job_id, out)
    host = slurm.job(job_id)["BatchHost"]
    slurm.run("scancel", "--signal=USR1", "--batch", job_id)
    wait_until("the requeue", lambda: slurm.job(job_id)["JobState"] == "PENDING", 120, shown=out)
    with hidden(slurm, host, tmp_path / lost):
        job = slurm.wait(job_id)
    text = out.read_text()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "2"), text
    what = {"secrets": f"SCALERL_ENV_FILE={tmp_path}/secrets/env is not readable on {host}",
            "launcher": f"error: no {tmp_path}/launcher/ray.sbatch on {host}"}  # fmt: skip
    assert what[lost] in text and job["ExcNodeList"] == host and job["BatchHost"] != host
    assert sorted(path.name for path in (tmp_path / f"logs/{job_id}").glob("attempt_*")) == ["attempt_0", "attempt_2"]
    assert_nothing_left(slurm)


@pytest.mark.full
def test_a_sick_node_is_not_excluded_where_slurm_has_no_other_of_its_kind(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partition has others. Slurm would hold the job for ever."""
    monkeypatch.setenv("SCALERL_MAX_FAILURES", "1")
    with little_shared_memory(slurm, "n2"):
        job_id = submit(2, "true", options=("--constraint=rack1", "--gpus-per-node=8"))
        job = slurm.wait(job_id)
    out = (tmp_path / f"out-{job_id}.txt").read_text()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "70:0", "0"), out
    assert "sick: n2: /dev/shm: " in out
    assert "sick nodes are not excluded: Slurm has no 2 others of the kind that the job asks for\n" in out
    assert_nothing_left(slurm)


@pytest.mark.full
def test_a_node_that_sees_another_directory_in_the_place_of_the_shared_one_is_sick(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a mount failed: the folders are there, so that its step can write its log, but not the head's file."""
    monkeypatch.setenv("SCALERL_NUM_NODES", "1")
    monkeypatch.setenv("SCALERL_LOG_DIR", str(tmp_path / "shared/logs"))
    # What is mounted there is small.
    monkeypatch.setenv("SCALERL_MIN_DISK_GIB", "0")
    (tmp_path / "shared").mkdir()
    job_id = submit(2, "true", options=("--hold",))
    with hidden(slurm, "n2", tmp_path / "shared"):
        slurm.run("mkdir", "-p", str(tmp_path / f"shared/logs/{job_id}/attempt_0/preflight"), host="n2")
        slurm.run("scontrol", "release", job_id)
        job = slurm.wait(job_id)
    out = (tmp_path / f"out-{job_id}.txt").read_text()
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), out
    assert "sick: n2: shared directory: not the head's file (" in out and "nodes: n1\n" in out
    assert probed(tmp_path / f"shared/logs/{job_id}/attempt_0") == {"n1": [], "n2": ["shared directory"]}


@pytest.mark.full
@pytest.mark.parametrize(("failing", "how"), [("n1 n2", "kill -KILL $PPID; exit 1"), ("n2", "exit 1")])
def test_nodes_whose_probes_cannot_run_are_not_waited_for(
    slurm: MiniSlurm,
    submit: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: str,
    how: str,
) -> None:
    """All of them, with what would have told of it, or one beside a well one.

    The deadline of the reports is longer than the test waits. The job goes on elsewhere, though no attempt may fail.
    """
    programs = tmp_path / "venv/bin"
    programs.mkdir(parents=True)
    (programs / "ray").symlink_to(Path(sys.prefix, "bin/ray"))
    (programs / "python").write_text(
        f'#!/bin/bash\nif [[ "$*" == *" probe "* && " {failing} " == *" $SLURMD_NODENAME "* ]]; then\n'
        f'  echo "libc is torn on $SLURMD_NODENAME" >&2; {how}\nfi\nexec "{sys.executable}" "$@"\n'
    )
    (programs / "python").chmod(0o755)
    monkeypatch.setenv("SCALERL_VENV", str(tmp_path / "venv"))
    monkeypatch.setenv("SCALERL_PREFLIGHT_TIMEOUT_S", "3600")
    monkeypatch.setenv("SCALERL_MAX_FAILURES", "1")
    job_id = submit(2, "true")
    job = slurm.wait(job_id)
    out = (tmp_path / f"out-{job_id}.txt").read_text()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1"), out
    assert f"excluded from the next attempt: {failing.replace(' ', ',')}\n" in out
    directory = tmp_path / f"logs/{job_id}/attempt_0"
    for host in failing.split():
        log = directory / f"preflight/node-{host}.log"
        assert f"sick: {host}: reports: its probe ended: libc is torn on {host}; see {log}" in out
    assert probed(directory) == {host: ["reports"] if host in failing.split() else [] for host in ("n1", "n2")}
    assert not list(directory.glob("preflight/ended-*"))
    assert_nothing_left(slurm)


@pytest.mark.full
@pytest.mark.parametrize("interface", [None, "ib0"])
def test_the_bandwidth_between_nodes_has_a_floor(
    slurm: MiniSlurm,
    submit: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    interface: str | None,
) -> None:
    """n3's link is made slow: with both neighbours it is far below, and they are well with each other.

    interface: of the network that the ranks are to take, whose other one is fast.
    """
    monkeypatch.setenv("SCALERL_NUM_NODES", "2")
    monkeypatch.setenv("SCALERL_MIN_BANDWIDTH_GBIT", "0.1")
    slow = ("rate", "50mbit", "burst", "256kb", "latency", "400ms")
    with second_network(slurm, ("n1", "n2", "n3")):
        if interface is not None:
            monkeypatch.setenv("SCALERL_INTERFACE", interface)
        device = ("dev", interface or "eth0", "root")
        slurm.run("tc", "qdisc", "add", *device, "tbf", *slow, host="n3")
        try:
            job_id = submit(3, "true")
            job = slurm.wait(job_id, timeout_s=300)
        finally:
            slurm.run("tc", "qdisc", "del", *device, host="n3")
    out = (tmp_path / f"out-{job_id}.txt").read_text()
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), out
    assert probed(tmp_path / f"logs/{job_id}/attempt_0") == {"n1": [], "n2": [], "n3": ["all-reduce"]}
    assert "below 0.1 Gbit/s with every peer" in out and "nodes: n1 n2\n" in out


@pytest.mark.full
def test_each_of_four_nodes_is_probed_for_what_it_has(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n2's clock is ahead, n3 has an older package, n4 a full disk, low limits, and an adapter without a cable."""
    (tmp_path / "clock.c").write_text(CLOCK_AHEAD)
    clock = tmp_path / "clock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(clock), str(tmp_path / "clock.c"), "-ldl"], check=True)
    older = tmp_path / "older/ray-2.9.0.dist-info/METADATA"
    older.parent.mkdir(parents=True)
    older.write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.9.0\n")
    programs = tmp_path / "venv/bin"
    programs.mkdir(parents=True)
    (programs / "ray").symlink_to(Path(sys.prefix, "bin/ray"))
    (programs / "python").write_text(
        "#!/bin/bash\ncase ${SLURMD_NODENAME:-} in\n"
        f'  n2) export LD_PRELOAD="{clock}" ;;\n'
        f'  n3) export PYTHONPATH="{older.parents[1]}:$PYTHONPATH" ;;\n'
        "  n4) ulimit -n 1024; ulimit -l 1024 ;;\n"
        f'esac\nexec "{sys.executable}" "$@"\n'
    )
    (programs / "python").chmod(0o755)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for name, value in {
        "SCALERL_VENV": str(tmp_path / "venv"),
        "SCALERL_NUM_NODES": "1",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "TMPDIR": str(scratch),
        # Its sockets' paths would be too long there.
        "RAY_TMPDIR": "/tmp",
    }.items():
        monkeypatch.setenv(name, value)
    with hidden(slurm, "n4", scratch), adapter_without_cable(slurm, "n4"):
        job_id = submit(4, "true")
        job = slurm.wait(job_id)
    out = (tmp_path / f"out-{job_id}.txt").read_text()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "0"), out
    assert probed(tmp_path / f"logs/{job_id}/attempt_0") == {
        "n1": [],
        "n2": ["clock"],
        "n3": ["versions"],
        "n4": [str(scratch), "InfiniBand", "locked memory", "open files"],
    }
    for found in (
        r"sick: n2: clock: \+(89|90)\.\d+ s; more than 5 s from the head: ",
        r"sick: n3: versions: ray 2\.9\.0 \(others 2\.\d+\.\d+\); ",
        r"sick: n4: .*: 0\.0 GiB free; less than 5 GiB: .*mlx5_0:1 DOWN; .*: 1 MiB; .*: 1024; below 4096: ",
    ):
        assert re.search(found, out), out
    assert "] nodes: n1\n" in out
    assert_nothing_left(slurm)


@contextmanager
def adapter_without_cable(slurm: MiniSlurm, host: str) -> Iterator[None]:
    """An InfiniBand adapter, as the kernel shows it."""
    port = "/sys/class/infiniband/mlx5_0/ports/1"
    slurm.run("mount", "-t", "tmpfs", "tmpfs", "/sys/class", host=host)
    try:
        slurm.run("bash", "-c", f"mkdir -p {port} && echo '1: DOWN' >{port}/state", host=host)
        yield
    finally:
        slurm.run("umount", "/sys/class", host=host)


@pytest.mark.full
def test_what_nvidia_smi_says_of_each_node_decides(
    slurm: MiniSlurm, submit: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices that Slurm does not count. What nvidia-smi says is a table, as there are none here."""
    tool = tmp_path / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(NVIDIA_SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    monkeypatch.setenv("SCALERL_NUM_NODES", "1")
    monkeypatch.setenv("SCALERL_MIN_GPUS", "2")
    job_id = submit(4, "python", DRIVER, "report", "1", "2", "0")
    job = slurm.wait(job_id)
    out = (tmp_path / f"out-{job_id}.txt").read_text()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "0"), out
    assert probed(tmp_path / f"logs/{job_id}/attempt_0") == {
        "n1": [],
        "n2": ["devices", "devices offered"],
        "n3": ["ECC"],
        "n4": ["NVLink"],
    }
    assert "sick: n2: devices: 1 GPUs; the job asks for 2: " in out and "1 GPUs; n1, the head, offers 2: " in out
    assert "sick: n3: ECC: GPU 1: 2, No, No " in out and "sick: n4: NVLink: 1 of 2 links inactive; " in out
    assert_nothing_left(slurm)
