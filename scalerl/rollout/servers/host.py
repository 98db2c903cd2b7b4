"""`ReplicaHost`, a Ray actor that owns a rollout server, and `ServerNode`, its process on a further node."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.cluster.pools import Reusable
from scalerl.rollout.servers.engines import ENGINES, Command, Launch
from scalerl.rollout.servers.process import START_TIMEOUT_S
from scalerl.rollout.servers.purpose import Purpose
from scalerl.rollout.servers.replica import ClientSettings, Replica

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from scalerl.rollout.servers.client import RolloutClient
    from scalerl.rollout.servers.process import RolloutServer


def in_device_order(gpu_ids: Sequence[int | str]) -> list[str]:
    """Ray's GPU ids sorted by number, so that 10 is after 9; names (UUID, MIG) follow, sorted as text."""
    return sorted(map(str, gpu_ids), key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))


def server_seed(seed: int, *, index: int, first_step: int, num_restarts: int) -> int:
    """The seed of a server's generator, different for all servers, restarts and resumptions of a run.

    seed: the configured one.  index: index of the replica.  first_step: step that the run starts or resumes after.
    """
    digest = hashlib.blake2s(f"{seed} {index} {first_step} {num_restarts}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


@dataclass(frozen=True)
class ServerSettings:
    """The settings of a server that are equal in all its starts; host, port and seed differ.

    launch.gpu_ids: None on a GPU: those that Ray assigned to the host.  single_node: listen on the loopback only.
    """

    launch: Launch
    purpose: Purpose
    single_node: bool

    def command(
        self, *, host: str, port: int, seed: int, gpu_ids: Sequence[int | str] | None, dist_init_addr: str | None = None
    ) -> Command:
        """The server's command, and environment variables to add."""
        launch = replace(self.launch, host=host, port=port, seed=seed, gpu_ids=gpu_ids, dist_init_addr=dist_init_addr)
        return ENGINES[launch.config.name].command(launch)

    def of_process(self) -> str:
        """A text that is equal for runs that can use the same process; its weights are those of the next sync.

        The configured seed counts where the engine has a generator of its own, which a running server cannot seed anew.
        """
        host, seed = "127.0.0.1" if self.single_node else "", self.launch.config.seed
        started_with = self.command(host=host, port=0, seed=seed, gpu_ids=self.launch.gpu_ids)
        # Included because another model may have been written to the path.
        model = Path(self.launch.model_path, "config.json").read_text(encoding="utf-8")
        return json.dumps([started_with, model])

    @property
    def start_timeout_s(self) -> float:
        """Seconds that the server may take to start."""
        configured = self.launch.config.start_timeout_s
        return START_TIMEOUT_S[self.launch.device] if configured is None else configured

    @property
    def ready_path(self) -> str:
        return ENGINES[self.launch.config.name].ready_path

    @property
    def address(self) -> str:
        """The address of this node at which the server listens."""
        import ray

        return "127.0.0.1" if self.single_node else ray.util.get_node_ip_address()

    @property
    def gpu_ids(self) -> Sequence[int | str] | None:
        """The GPUs of this node that the server has; None on a CPU."""
        import ray

        if self.launch.gpu_ids is None and self.launch.device == "cuda":
            return in_device_order(ray.get_gpu_ids())
        return self.launch.gpu_ids

    def log_path(self, log_dir: str, index: int, num_restarts: int) -> Path:
        """The log of one start of this process: each has its own, since that of a lost server tells why it was lost."""
        node = f".node-{self.launch.node_rank}" if self.launch.node_rank else ""
        restart = f".restart-{num_restarts}" if num_restarts else ""
        return Path(log_dir, f"rollout-{index}{node}{restart}.log")


class ServerProcess(Reusable):
    """Base class of actors that own a process of a server, which ends with the actor, which ends with the driver."""

    def __init__(self, index: int, settings: ServerSettings, *, log_dir: str) -> None:
        """Prepares the process of replica `index` on this node, with logs in log_dir."""
        self.index, self.settings, self.log_dir = index, settings, log_dir
        self.server: RolloutServer | None = None

    def enter(self, *args: Any, **kwargs: Any) -> None:
        """Joins a run with the process that is running, which must suit the settings."""
        server = self.server
        super().enter(*args, **kwargs)
        self.server = server

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()

    def show_log(self, num_restarts: int) -> None:
        """Links the log of a process that an earlier run started, and that still writes there, to this run's name."""
        assert self.server is not None
        log = self.settings.log_path(self.log_dir, self.index, num_restarts)
        written = self.server.log_path.resolve()
        # In this directory if this run began with the process.
        if written.parent != log.parent.resolve():
            log.parent.mkdir(parents=True, exist_ok=True)
            log.unlink(missing_ok=True)
            log.symlink_to(written)


class ServerNode(ServerProcess):
    """Owns the process of a server on one of its further nodes; the `MultiNodeServer` of the first one directs it."""

    def __init__(self, index: int, settings: ServerSettings, *, log_dir: str) -> None:
        super().__init__(index, settings, log_dir=log_dir)
        # How the process ended, once somebody has asked.
        self.how_it_ended: str | None = None

    def leave(self) -> None:
        """Does nothing: the run's requests are on the first node."""

    def begin(self, *, key: str, seed: int, dist_init_addr: str, num_restarts: int) -> None:
        """Starts the process; it has joined the others when the first node answers.  Arguments: as of that node's."""
        from scalerl.rollout.servers.process import RolloutServer, free_port, url_of

        self.stop()
        settings, host = self.settings, self.settings.address
        port = free_port(host)
        command, env = settings.command(
            host=host, port=port, seed=seed, gpu_ids=settings.gpu_ids, dist_init_addr=dist_init_addr
        )
        log = settings.log_path(self.log_dir, self.index, num_restarts)
        self.server = RolloutServer(
            command, env, url_of(host, port), log, purpose=settings.purpose, key=key, ready_path=settings.ready_path
        )
        self.how_it_ended = None
        self.server.start()

    def ended(self, key: str) -> None:
        """Returns when the process that was begun with that key has ended."""
        if self.server is not None and self.server.key == key:
            self.server.wait_end()

    def end(self, key: str) -> str:
        """Kills what remains of the process that was begun with that key; returns how it ended, with its last lines."""
        if self.server is None or self.server.key != key:
            return "It is gone."
        if self.how_it_ended is None:
            self.how_it_ended = self.server.end()
        return self.how_it_ended


class ReplicaHost(ServerProcess):
    """Owns one server. Of a server on several nodes this is the first node, and it directs the others."""

    def __init__(
        self,
        index: int,
        settings: ServerSettings,
        *,
        log_dir: str,
        first_step: int = 0,
        others: Sequence[ActorHandle] = (),
    ) -> None:
        """Prepares the host; `start` starts the server.

        first_step: as `server_seed`.  others: the `ServerNode` of each further node, by node rank.
        """
        super().__init__(index, settings, log_dir=log_dir)
        self.first_step, self.others = first_step, list(others)
        self.num_starts = 0

    def leave(self) -> None:
        """Removes the run's requests, cached prefixes and policy version from the server.  Raises RolloutError."""
        client = self._client()
        client.pause()
        client.continue_generation()
        client.flush_cache()
        client.set_policy_version(0)

    def _client(self) -> RolloutClient:
        assert self.server is not None
        launch, config = self.settings.launch, self.settings.launch.config
        tp_size = ENGINES[config.name].num_ranks(config.tensor_model_parallel_size)
        clients = ClientSettings(
            self.settings.purpose, launch.max_model_len, config.request_timeout_s, config.max_num_seqs
        )
        return clients.client(Replica(self.server.url, config.name, tp_size, self.server.key))

    def start(self, *entered: object) -> tuple[str, str]:
        """Starts the server, or starts it again after `end`; returns its URL and key once it answers.

        entered: the results of `enter`, of this actor and of `others`, if those calls have to come first.
        A server that another run left is returned at once. Raises ServerStartError with the server's last log lines.
        """
        num_restarts = self.num_starts
        self.num_starts += 1
        if self.server is not None and self.server.alive() and self._has_others(self.server):
            import ray

            self.show_log(num_restarts)
            ray.get([node.show_log.remote(num_restarts) for node in self.others])
            return self.server.url, self.server.key
        from scalerl.rollout.servers.process import start_on_free_port

        self.stop()
        seed = server_seed(
            self.settings.launch.config.seed,
            index=self.index,
            first_step=self.first_step,
            num_restarts=num_restarts,
        )
        self.server = start_on_free_port(
            lambda port: self._make_server(port, seed=seed, num_restarts=num_restarts),
            self.settings.address,
            self.settings.start_timeout_s,
        )
        return self.server.url, self.server.key

    def _make_server(self, port: int, *, seed: int, num_restarts: int) -> RolloutServer:
        from scalerl.rollout.servers.process import RolloutServer, free_port, netloc, url_of

        settings, host = self.settings, self.settings.address
        log = settings.log_path(self.log_dir, self.index, num_restarts)
        if not self.others:
            command, env = settings.command(host=host, port=port, seed=seed, gpu_ids=settings.gpu_ids)
            return RolloutServer(
                command, env, url_of(host, port), log, purpose=settings.purpose, ready_path=settings.ready_path
            )
        from scalerl.rollout.servers.multi_node import MultiNodeServer

        # Where the ranks of all nodes meet.
        meeting = netloc(host, free_port(host))
        command, env = settings.command(
            host=host, port=port, seed=seed, gpu_ids=settings.gpu_ids, dist_init_addr=meeting
        )
        return MultiNodeServer(
            command,
            env,
            url_of(host, port),
            log,
            settings.start_timeout_s,
            settings.purpose,
            ready_path=settings.ready_path,
            others=self.others,
            begun_with={"seed": seed, "dist_init_addr": meeting, "num_restarts": num_restarts},
        )

    def _has_others(self, server: RolloutServer) -> bool:
        """Whether the other processes of a running server are those of this run's actors."""
        from scalerl.rollout.servers.multi_node import MultiNodeServer

        return not self.others or (isinstance(server, MultiNodeServer) and server.others == self.others)

    def end(self) -> str:
        """Kills what remains of the server; returns how it ended, with its last log lines."""
        assert self.server is not None
        return self.server.end()
