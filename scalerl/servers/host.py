"""`ReplicaHost`, a Ray actor on the replica's node that owns one rollout server process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl.cluster.pools import Reusable
from scalerl.servers.engines import ENGINES, Command, Launch
from scalerl.servers.purpose import Purpose

if TYPE_CHECKING:
    from scalerl.servers.process import RolloutServer


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

    def command(self, *, host: str, port: int, seed: int, gpu_ids: Sequence[int | str] | None) -> Command:
        """The server's command, and environment variables to add."""
        launch = replace(self.launch, host=host, port=port, seed=seed, gpu_ids=gpu_ids)
        return ENGINES[launch.config.name].command(launch)

    def of_process(self) -> str:
        """A text that is equal for runs that can use the same process; its weights are those of the next sync."""
        host = "127.0.0.1" if self.single_node else ""
        started_with = self.command(host=host, port=0, seed=0, gpu_ids=self.launch.gpu_ids)
        # Included because another model may have been written to the path.
        model = Path(self.launch.model_path, "config.json").read_text(encoding="utf-8")
        return json.dumps([started_with, model])


class ReplicaHost(Reusable):
    """Owns one server process, which ends with this actor, which ends with the driver."""

    def __init__(self, index: int, settings: ServerSettings, *, log_dir: str, first_step: int = 0) -> None:
        """Prepares the host; `start` starts the server.

        log_dir: directory for rollout-{index}.log, and rollout-{index}.restart-{k}.log of each restart.
        first_step: as `server_seed`.
        """
        self.first_step = first_step
        self.index, self.settings, self.log_dir = index, settings, log_dir
        self.server: RolloutServer | None = None
        self.num_starts = 0

    def enter(self, index: int, settings: ServerSettings, *, log_dir: str, first_step: int = 0) -> None:
        """Joins a run with the server that is running; its process must suit the settings."""
        server = self.server
        super().enter(index, settings, log_dir=log_dir, first_step=first_step)
        self.server = server

    def leave(self) -> None:
        """Removes the run's requests, cached prefixes and policy version from the server.  Raises RolloutError."""
        from scalerl.servers.client import RolloutClient

        assert self.server is not None
        launch = self.settings.launch
        client = RolloutClient(
            self.server.url,
            launch.config.name,
            key=self.server.key,
            max_model_len=launch.max_model_len,
            purpose=self.settings.purpose,
        )
        client.pause()
        client.continue_generation()
        client.flush_cache()
        client.set_policy_version(0)

    def start(self, entered: object = None) -> tuple[str, str]:
        """Starts the server, or starts it again after `end`; returns its URL and key once it answers.

        entered: the result of `enter`, if that call has to come first.
        A server that another run left is returned at once. Raises ServerStartError with the server's last log lines.
        """
        # Each start has its own log, since that of a lost server tells why it was lost.
        name = f"rollout-{self.index}.restart-{self.num_starts}.log" if self.num_starts else f"rollout-{self.index}.log"
        self.num_starts += 1
        if self.server is not None and self.server.alive():
            # The server continues to write to its first log, which is in this directory if the run began with it.
            log, written = Path(self.log_dir, name), self.server.log_path.resolve()
            if written.parent != log.parent.resolve():
                log.parent.mkdir(parents=True, exist_ok=True)
                log.unlink(missing_ok=True)
                log.symlink_to(written)
            return self.server.url, self.server.key
        import ray

        from scalerl.servers.process import RolloutServer, start_on_free_port

        launch = self.settings.launch
        gpu_ids = launch.gpu_ids
        if gpu_ids is None and launch.device == "cuda":
            gpu_ids = in_device_order(ray.get_gpu_ids())
        host = "127.0.0.1" if self.settings.single_node else ray.util.get_node_ip_address()
        seed = server_seed(
            launch.config.seed,
            index=self.index,
            first_step=self.first_step,
            num_restarts=self.num_starts - 1,
        )

        def make_server(port: int) -> RolloutServer:
            command, env = self.settings.command(host=host, port=port, seed=seed, gpu_ids=gpu_ids)
            netloc = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            log = f"{self.log_dir}/{name}"
            return RolloutServer(command, env, f"http://{netloc}", log, purpose=self.settings.purpose)

        self.server = start_on_free_port(make_server, host, launch.config.start_timeout_s)
        return self.server.url, self.server.key

    def end(self) -> str:
        """Kills what remains of the server; returns how it ended, with its last log lines."""
        assert self.server is not None
        return self.server.end()

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()
