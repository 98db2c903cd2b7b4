"""A real Slurm of several nodes on one machine; a node has its own address, host name, processes, /tmp/ray, /dev/shm.

Root only. Everything lives in one outer PID + network + mount namespace, the "site": ending its first process ends all
(bridge, munged, slurmctld, slurmd, job steps, Ray). Nothing is added to the host's network.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

BINARIES = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "nsenter", "setpriv", "ip", "ss", "ps", "gcc")
POLL_S = 0.1

SITE_SH = r"""
set -e
root=$1 nodes=$2
hostname login
ip link set lo up
# With loopback alone getaddrinfo answers nothing, so the login node gets an address too.
ip link add br0 type bridge; ip link set br0 up; ip addr add 10.99.0.1/24 dev br0
mount --bind "$root/etc/hosts" /etc/hosts
# munged refuses a socket below a directory that others cannot enter, as the test's own is.
mkdir -p /run/munge; mount -t tmpfs -o mode=755 tmpfs /run/munge
munged --socket=/run/munge/munge.socket.2 --key-file="$root/munge/munge.key" --pid-file="$root/munge/munged.pid" \
  --log-file="$root/munge/munged.log" --seed-file="$root/munge/munged.seed"
export SLURM_CONF=$root/etc/slurm.conf
slurmctld -D >"$root/log/slurmctld.out" 2>&1 &
boot() {
  local n=n$1 i=$1 outer init
  mkdir -p "$root/nodes/$n"; rm -f "$root/nodes/$n/go"; mkfifo "$root/nodes/$n/go"
  unshare --fork --pid --mount-proc --net --uts --mount --ipc --kill-child=KILL \
    bash "$root/etc/node.sh" $n "$root" 10.99.0.$((10 + i)) 8<>"$root/nodes/$n/go" &
  outer=$!
  for _ in $(seq 500); do
    init=$(cut -d' ' -f1 "/proc/$outer/task/$outer/children" 2>/dev/null || true)
    [ -n "$init" ] && [ "$(readlink "/proc/$init/ns/net")" != "$(readlink /proc/self/ns/net)" ] && break
    sleep 0.01
  done
  echo "$init" >"$root/nodes/$n/init.pid"
  ip link add v$n type veth peer name eth0 netns "$init"; ip link set v$n master br0 up
  echo go >"$root/nodes/$n/go"
}
for i in $(seq "$nodes"); do boot "$i"; done
# Slurm lets a requeued job wait for twice cred_expire. Here it waits until it is seen a second time.
while sleep 3; do
  waiting=$(squeue --noheader --states=PENDING --format='%i %r' 2>/dev/null | sed -n 's/ BeginTime$//p') || true
  for job in $waiting; do
    [[ " ${seen:-} " != *" $job "* ]] || scontrol update "JobId=$job" StartTime=now || true
  done
  seen=${waiting//$'\n'/ }
done >"$root/log/hurry.out" 2>&1 &
touch "$root/state/booted"
exec 9<>"$root/state/boot" # numbers of nodes that are to be switched on again
begun= # of a line whose end had not come within the second
while :; do # first process of the namespace: bash reaps orphans
  if read -r -t 1 i <&9; then boot "$begun$i"; begun=; else begun+=$i; fi
done
"""

NODE_SH = r"""
set -e
n=$1 root=$2 ip=$3
hostname "$n"
read -r _ <&8 # until the site has moved our network interface in
ip link set lo up; ip link set eth0 up; ip addr add "$ip/24" dev eth0
mount -t tmpfs -o size=2g tmpfs /dev/shm
mkdir -p "$root/nodes/$n/ray" /tmp/ray; mount --bind "$root/nodes/$n/ray" /tmp/ray
mount --bind "$root/etc/hosts" /etc/hosts
export SLURM_CONF=$root/etc/slurm.conf
slurmd -D -N "$n" >"$root/log/slurmd.$n.out" 2>&1 8<&- &
while :; do wait || true; sleep 0.2; done
"""

SLURM_CONF = """\
ClusterName=mini
SlurmctldHost=login(10.99.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# By default 120 s. A launch that takes longer, on a busy machine, fails.
AuthInfo=cred_expire=60
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/nodes/%n/spool
SlurmctldPidFile={root}/state/slurmctld.pid
SlurmdPidFile={root}/nodes/%n/slurmd.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
# 30 s by default; where other tests run beside it, a command that saves and Ray that ends may take longer.
KillWait=60
MinJobAge=3600
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
EnforcePartLimits=ALL
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PlugStackConfig={root}/etc/plugstack.conf
{more}
{node_lines}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10
PartitionName=low Nodes=ALL MaxTime=60 State=UP PriorityTier=1 GraceTime=60 PreemptMode=REQUEUE
"""


def why_not() -> str | None:
    """Why no Slurm can run here, or None."""
    if os.geteuid() != 0:
        return "Slurm tests need root (they make namespaces)"
    missing = [name for name in BINARIES if not shutil.which(name)]
    if missing:
        packages = "slurm-wlm libslurm-dev munge iproute2 util-linux procps gcc libc6-dev"
        return f"no {', '.join(missing)}: apt-get install -y --no-install-recommends {packages}"
    return None


class MiniSlurm:
    """`root` is a path without spaces, on a file system that allows device nodes; it also holds the logs.

    gpus: 0 for a site that does not count devices.  options: further lines of slurm.conf.  files: name -> text of other
    files beside it.
    """

    def __init__(
        self,
        root: Path,
        num_nodes: int = 4,
        cpus: int = 16,
        gpus: int = 8,
        options: Sequence[str] = (),
        files: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.root, self.num_nodes, self.cpus, self.gpus = root, num_nodes, cpus, gpus
        self.options, self.files = list(options), files
        self.hosts = [f"n{i}" for i in range(1, num_nodes + 1)]
        self.process: subprocess.Popen[bytes] | None = None
        self.init_pid = 0

    def _write_files(self) -> None:
        root = self.root
        for name in ("etc", "state", "log", "munge", "dev", "nodes"):
            (root / name).mkdir(parents=True)
        key = root / "munge/munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        # Slurm counts GPUs by their device files, so each needs one of its own: here a null device.
        for i in range(self.gpus):
            os.mknod(root / f"dev/nvidia{i}", 0o20666, os.makedev(1, 3))
        addresses = {host: f"10.99.0.{10 + i}" for i, host in enumerate(self.hosts, 1)}
        hosts_lines = ["127.0.0.1 localhost", "10.99.0.1 login", *(f"{ip} {host}" for host, ip in addresses.items())]
        (root / "etc/hosts").write_text("\n".join(hosts_lines) + "\n")
        more, gres = self.options, ""
        if self.gpus:
            device_files = f"{root}/dev/nvidia[0-{self.gpus - 1}]"
            devices = f"NodeName=n[1-{self.num_nodes}] Name=gpu Type=h100 File={device_files}\n"
            (root / "etc/gres.conf").write_text(devices)
            more, gres = [*more, "GresTypes=gpu"], f" Gres=gpu:h100:{self.gpus}"
        for name, text in self.files.items():
            (root / "etc" / name).write_text(text)
        self.plugins.write_text("")
        os.mkfifo(root / "state/boot")
        node_lines = "\n".join(
            f"NodeName={host} NodeAddr={ip} CPUs={self.cpus} RealMemory=16000{gres} Features=rack{i // 2} State=UNKNOWN"
            for i, (host, ip) in enumerate(addresses.items(), 2)
        )
        conf = SLURM_CONF.format(root=root, node_lines=node_lines, more="\n".join(more))
        (root / "etc/slurm.conf").write_text(conf)
        (root / "etc/site.sh").write_text(SITE_SH)
        (root / "etc/node.sh").write_text(NODE_SH)

    @property
    def plugins(self) -> Path:
        """The list of SPANK plugins, which every command and every step of a job reads anew."""
        return self.root / "etc/plugstack.conf"

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.root / "etc/slurm.conf")}

    def start(self, timeout_s: float = 180) -> MiniSlurm:
        self._write_files()
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--pid", "--mount-proc", "--net", "--uts"]
        command += ["--mount", "--ipc", "--kill-child=KILL", "bash", str(self.root / "etc/site.sh")]
        command += [str(self.root), str(self.num_nodes)]
        with open(self.root / "log/site.log", "ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=self.env
            )
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError("Slurm ended at start: " + (self.root / "log/site.log").read_text())
            if not self.init_pid:
                children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
                self.init_pid = int(children[0]) if children else 0
            elif (self.root / "state/booted").exists():
                # While it starts it may not answer at all.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    sinfo = self.run("sinfo", "-h", "-t", "idle", "-o", "%D", check=False)
                    if sinfo.returncode == 0 and sinfo.stdout.split() == [str(self.num_nodes)]:
                        return self
            time.sleep(POLL_S)
        logs = "".join(path.read_text()[-800:] for path in sorted((self.root / "log").iterdir()))
        self.stop()
        raise TimeoutError(f"Slurm not up after {timeout_s} s:\n{logs}")

    def stop(self) -> None:
        if self.process and self.process.poll() is None:
            # The first process of the site's namespace: the kernel ends every process in it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.init_pid or self.process.pid, 9)
            self.process.wait(20)

    def run(
        self, *command: str, host: str | None = None, cwd: Path | None = None, check: bool = True, timeout_s: float = 30
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node, or on `host`."""
        where = ["-m", "-n", "-u", "-i", "-p", f"--wd={cwd or os.getcwd()}"]
        argv = ["nsenter", "-t", str(self.init_pid), *where]
        if host:
            argv += ["nsenter", "-t", (self.root / f"nodes/{host}/init.pid").read_text().strip(), *where]
        done = subprocess.run(
            [*argv, *command], timeout=timeout_s, text=True, capture_output=True, env=self.env, stdin=subprocess.DEVNULL
        )
        if check and done.returncode:
            raise RuntimeError(f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def power_off(self, host: str) -> None:
        """As if its plug were pulled: nothing on it ends in order, and it answers no more."""
        # First: of processes that are killed the kernel would still end the connections.
        self.run("ip", "link", "del", f"v{host}")
        self.run("kill", "-KILL", (self.root / f"nodes/{host}/init.pid").read_text().strip())

    def power_on(self, host: str, timeout_s: float = 180) -> None:
        """Until Slurm has it back, its /tmp/ray empty."""
        for left in (self.root / f"nodes/{host}/ray").iterdir():
            left.unlink() if left.is_symlink() or left.is_file() else shutil.rmtree(left)
        with (self.root / "state/boot").open("w") as boot:
            boot.write(f"{self.hosts.index(host) + 1}\n")
        deadline = time.monotonic() + timeout_s
        # A job may wait for it.
        ready = ("idle", "mixed", "allocated")
        while (state := self.run("sinfo", "-h", "-n", host, "-p", "main", "-o", "%T").stdout.strip()) not in ready:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{host} is {state} {timeout_s} s after it was switched on")
            time.sleep(POLL_S)

    @contextlib.contextmanager
    def without_controller(self) -> Iterator[None]:
        """As in an upgrade of Slurm: jobs run on, and nobody answers their questions."""
        self.run("kill", self.run("cat", str(self.root / "state/slurmctld.pid")).stdout.strip())
        self._wait_for_controller(is_up=False)
        try:
            yield
        finally:
            self.run("bash", "-c", f'setsid slurmctld -D >>"{self.root}/log/slurmctld.out" 2>&1 &')
            self._wait_for_controller(is_up=True)

    def _wait_for_controller(self, *, is_up: bool, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while (self.run("scontrol", "ping", check=False).returncode == 0) != is_up:
            if time.monotonic() > deadline:
                raise TimeoutError(f"slurmctld {'does not answer' if is_up else 'still answers'} after {timeout_s} s")
            time.sleep(POLL_S)

    def occupy(self, port: int, host: str) -> str:
        """The number, on the host, of a process that listens there on the port."""
        listen = f"import socket, time; s = socket.create_server(('', {port})); time.sleep(3600)"
        started = f'setsid python3 -c "{listen}" >/dev/null 2>&1 & echo $!'
        pid = self.run("bash", "-c", started, host=host).stdout.strip()
        deadline = time.monotonic() + 20
        while not self.run("ss", "-Hltn", f"sport = :{port}", host=host).stdout:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing listens on port {port} of {host}")
            time.sleep(POLL_S)
        return pid

    def sbatch(self, *arguments: str, cwd: Path) -> str:
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd).stdout.strip().split(";")[0]

    def job(self, job_id: str) -> dict[str, str]:
        out = self.run("scontrol", "-o", "show", "job", job_id).stdout
        return dict(word.split("=", 1) for word in out.split() if "=" in word)

    def nodes_of(self, job_id: str) -> list[str]:
        """Of its newest attempt."""
        return self.run("scontrol", "show", "hostnames", self.job(job_id)["NodeList"]).stdout.split()

    def wait(self, job_id: str, timeout_s: float = 300) -> dict[str, str]:
        """The job's record once it has ended."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            job = self.job(job_id)
            if job["JobState"] in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL"):
                return job
            time.sleep(POLL_S)
        raise TimeoutError(f"job {job_id} is {job['JobState']} ({job['Reason']}) after {timeout_s} s")

    def processes(self, host: str) -> list[tuple[int, str]]:
        """(pid, command line) of everything on the node that is not the node itself."""
        rows = []
        for line in self.run("ps", "-ww", "-eo", "pid=,stat=,args=", host=host).stdout.splitlines():
            pid, stat, args = line.split(None, 2)
            own = any(name in args for name in ("etc/node.sh", "slurmd -D", "ps -ww")) or args == "sleep 0.2"
            if not own and not stat.startswith("Z"):
                rows.append((int(pid), args))
        return rows
