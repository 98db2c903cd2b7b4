"""`ServerHost`, a Ray actor that owns the process of a rollout server on one node."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from scalerl.cluster.pools import Reusable
from scalerl.rollout.servers.client import ClientSettings, Replica, RolloutClient
from scalerl.rollout.servers.connection import new_key
from scalerl.rollout.servers.engines import ENGINES, Launch
from scalerl.rollout.servers.process import (
    POLL_INTERVAL_S,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    RolloutServer,
    free_port,
    netloc,
    start_on_free_port,
    url_of,
)
from scalerl.rollout.servers.purpose import Purpose


def in_device_order(gpu_ids: Sequence[int | str]) -> list[str]:
    """Ray's GPU ids sorted by number, so that 10 is after 9; names (UUID, MIG) follow, sorted as text."""
    return sorted(map(str, gpu_ids), key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))


def server_seed(seed: int, *, index: int, first_step: int, num_restarts: int) -> int:
    """The seed of a server's generator, different for all servers, restarts and resumptions of a run.

    seed: the configured one.  index: index of the replica.  first_step: step that the run starts or resumes after.
    """
    digest = hashlib.blake2s(f"{seed} {index} {first_step} {num_restarts}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def process_key(launch: Launch, *, single_node: bool) -> str:
    """A text that is equal for runs that can use the same process; its weights are those of the next sync.

    The configured seed counts where the engine has a generator, which a running server cannot seed anew.
    """
    like = replace(launch, host="127.0.0.1" if single_node else "", seed=launch.config.seed)
    # config.json is included because another model may have been written to the path.
    model = Path(launch.model_path, "config.json").read_text(encoding="utf-8")
    files = []
    if launch.adapter is not None:
        # Below adapters the process keeps the weights that it has read.
        paths = sorted(Path(launch.model_path).glob("*.safetensors"))
        files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return json.dumps([ENGINES[launch.config.name].command(like), model, files])


def start_timeout_s(launch: Launch) -> float:
    """Seconds that the server may take to start."""
    configured = launch.config.start_timeout_s
    return START_TIMEOUT_S[launch.device] if configured is None else configured


class ServerHost(Reusable):
    """Owns the process of a server on this node, which ends with the actor, which ends with the driver.

    Of a server on several nodes each node has a host; that of the first node directs the others: `start`, `leave` and
    `end` are calls to a first host, `begin`, `ended` and `end_begun` to the others.
    """

    def __init__(
        self,
        index: int,
        launch: Launch,
        purpose: Purpose,
        *,
        single_node: bool,
        log_dir: str,
        first_step: int = 0,
        others: Sequence[ActorHandle] = (),
    ) -> None:
        """Prepares the process of replica `index`, with logs in log_dir.

        launch: what all starts of the process have in common; its host, port and seed are of no use. gpu_ids: None on a
        GPU: those that Ray assigned to this actor.  single_node: listen on the loopback only.
        first_step: as `server_seed`.  others: the hosts of the server's further nodes, by node rank.
        """
        self.index, self.launch, self.purpose = index, launch, purpose
        self.single_node, self.log_dir = single_node, log_dir
        self.first_step, self.others = first_step, list(others)
        self.server: RolloutServer | None = None
        self.num_starts = 0
        # How the process on a further node ended, once somebody has asked.
        self.how_it_ended: str | None = None

    def enter(self, *args: Any, **kwargs: Any) -> None:
        """Joins a run with the process that is running, which must suit the launch settings."""
        server = self.server
        super().enter(*args, **kwargs)
        self.server = server

    def leave(self) -> None:
        """Removes the run's requests, cached prefixes and policy version from the server.  Raises RolloutError."""
        if self.launch.node_rank:
            return
        client = self._client()
        client.pause()
        client.continue_generation()
        client.flush_cache()
        client.set_policy_version(0)

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()

    def show_log(self, num_restarts: int) -> None:
        """Links the log of a process that an earlier run started, and that still writes there, to this run's name."""
        assert self.server is not None
        log = self.log_path(num_restarts)
        written = self.server.log_path.resolve()
        # In this directory if this run began with the process.
        if written.parent != log.parent.resolve():
            log.parent.mkdir(parents=True, exist_ok=True)
            log.unlink(missing_ok=True)
            log.symlink_to(written)

    def log_path(self, num_restarts: int) -> Path:
        """The log of one start of this process: each has its own, since that of a lost server tells why it was lost."""
        node = f".node-{self.launch.node_rank}" if self.launch.node_rank else ""
        restart = f".restart-{num_restarts}" if num_restarts else ""
        return Path(self.log_dir, f"rollout-{self.index}{node}{restart}.log")

    @property
    def _address(self) -> str:
        """The address of this node at which the server listens."""
        return "127.0.0.1" if self.single_node else ray.util.get_node_ip_address()

    @property
    def _gpu_ids(self) -> Sequence[int | str] | None:
        """The GPUs of this node that the server has; None on a CPU."""
        if self.launch.gpu_ids is None and self.launch.device == "cuda":
            return in_device_order(ray.get_gpu_ids())
        return self.launch.gpu_ids

    def _make_server(
        self, port: int, *, seed: int, num_restarts: int, dist_init_addr: str | None = None, key: str | None = None
    ) -> RolloutServer:
        """The process of the server on this node, not started yet.

        dist_init_addr, key: as the first node has them; None: this is the first node.
        """
        host = self._address
        if self.others:
            # Where the ranks of all nodes meet.
            dist_init_addr = netloc(host, free_port(host))
        launch = replace(
            self.launch, host=host, port=port, seed=seed, gpu_ids=self._gpu_ids, dist_init_addr=dist_init_addr
        )
        engine = ENGINES[launch.config.name]
        command, env = engine.command(launch)
        made: dict[str, Any] = {
            "command": command,
            "env": env,
            "url": url_of(host, port),
            "log_path": self.log_path(num_restarts),
            "start_timeout_s": start_timeout_s(launch),
            "purpose": self.purpose,
            "key": key or new_key(),
            "ready_path": engine.ready_path,
        }
        if not self.others:
            return RolloutServer(**made)
        begun_with = {"seed": seed, "dist_init_addr": dist_init_addr, "num_restarts": num_restarts}
        return MultiNodeServer(**made, others=self.others, begun_with=begun_with)

    # --- of the first node ---

    def _client(self) -> RolloutClient:
        assert self.server is not None
        launch, config = self.launch, self.launch.config
        tp_size = ENGINES[config.name].num_ranks(config.tensor_model_parallel_size)
        clients = ClientSettings(self.purpose, launch.max_model_len, config.request_timeout_s, config.max_num_seqs)
        return clients.client(Replica(self.server.url, config.name, tp_size, self.server.key))

    def start(self, *entered: object) -> tuple[str, str]:
        """Starts the server, or starts it again after `end`; returns its URL and key once it answers.

        entered: the results of `enter`, of this actor and of `others`, if those calls have to come first.
        A server that another run left is returned at once. Raises ServerStartError with the server's last log lines.
        """
        num_restarts = self.num_starts
        self.num_starts += 1
        if self.server is not None and self.server.alive() and self._has_others(self.server):
            self.show_log(num_restarts)
            ray.get([node.show_log.remote(num_restarts) for node in self.others])
            return self.server.url, self.server.key
        self.stop()
        seed = server_seed(
            self.launch.config.seed, index=self.index, first_step=self.first_step, num_restarts=num_restarts
        )
        self.server = start_on_free_port(
            lambda port: self._make_server(port, seed=seed, num_restarts=num_restarts), self._address
        )
        return self.server.url, self.server.key

    def _has_others(self, server: RolloutServer) -> bool:
        """Whether the other processes of a running server are those of this run's actors."""
        return not self.others or (isinstance(server, MultiNodeServer) and server.others == self.others)

    def end(self) -> str:
        """Kills what remains of the server; returns how it ended, with its last log lines."""
        assert self.server is not None
        return self.server.end()

    # --- of a further node ---

    def begin(self, *, key: str, seed: int, dist_init_addr: str, num_restarts: int) -> None:
        """Starts the process; it has joined the others when the first node answers.  Arguments: as of that node's."""
        self.stop()
        self.server = self._make_server(
            free_port(self._address), seed=seed, num_restarts=num_restarts, dist_init_addr=dist_init_addr, key=key
        )
        self.how_it_ended = None
        self.server.start()

    def ended(self, key: str) -> None:
        """Returns when the process that was begun with that key has ended."""
        if self.server is not None and self.server.key == key:
            self.server.wait_end()

    def end_begun(self, key: str) -> str:
        """Kills what remains of the process that was begun with that key; returns how it ended, with its last lines."""
        if self.server is None or self.server.key != key:
            return "It is gone."
        if self.how_it_ended is None:
            self.how_it_ended = self.server.end()
        return self.how_it_ended


@dataclass(eq=False, kw_only=True)
class MultiNodeServer(RolloutServer):
    """A server whose first process, the one that answers, is on this node; actors on other nodes have the others.

    When one process ends, all are ended: whoever asks the server finds it gone, as a server of a single process.
    others: the `ServerHost` of each further node, by node rank.  begun_with: arguments of `begin` other than the key.
    """

    others: list[ActorHandle]
    begun_with: Mapping[str, Any]
    # Node rank of the process that ended before anybody stopped the server; None: none, or the first node's.
    ended_first: int | None = field(default=None, init=False)
    # How the process on each other node ended, once the server was stopped.
    accounts: list[str] = field(default_factory=list, init=False)

    def start(self) -> None:
        """Starts the processes of all nodes and returns.  Raises WorkerError when the actor of a node is gone."""
        # Not at the top: it imports torch, which no host of a server on one node needs.
        from scalerl.cluster.failures import values_of

        super().start()
        try:
            values_of(
                f"{self.purpose.who} on its further nodes",
                [node.begin.remote(key=self.key, **self.begun_with) for node in self.others],
                self.start_timeout_s,
                key=self.purpose.key("start_timeout_s"),
            )
        except BaseException:
            self.stop()
            raise
        threading.Thread(target=self._end_together, name="end of a server on several nodes", daemon=True).start()

    def _end_together(self) -> None:
        """Ends the processes of all nodes as soon as one of them has ended."""
        waiting: list[ray.ObjectRef] = [node.ended.remote(self.key) for node in self.others]
        while self.alive():
            # A call to an actor that is gone is done too.
            done, _ = ray.wait(waiting, timeout=POLL_INTERVAL_S)
            if done:
                self.ended_first = 1 + waiting.index(done[0]) if self.alive() else None
                break
        self.stop()

    def stop(self) -> None:
        super().stop()
        ending = [node.end_begun.remote(self.key) for node in self.others]
        self.accounts = [f"Its process on node {rank}: {_answer(call)}" for rank, call in enumerate(ending, 1)]

    def _shown_tail(self) -> str:
        # For the accounts of the others: one of them may be the reason.
        self.stop()
        first = [] if self.ended_first is None else [f"Its process on node {self.ended_first} ended first."]
        return "\n".join([*first, super()._shown_tail(), *self.accounts])


def _answer(ending: ray.ObjectRef) -> str:
    try:
        return ray.get(ending, timeout=STOP_TIMEOUT_S)
    except RayError as error:
        return f"its actor does not answer: {str(error).splitlines()[0]}"
