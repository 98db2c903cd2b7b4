"""`ReplicaHost`: a Ray actor on the replica's node that owns one rollout server process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from scalerl.controller.pools import Reusable

if TYPE_CHECKING:
    from scalerl.config.schema import RolloutConfig
    from scalerl.rollout.server import RolloutServer
    from scalerl.rollout.weights import EngineKind


Command = tuple[list[str], dict[str, str]]


def in_device_order(gpu_ids: Sequence[int | str]) -> list[str]:
    """Ray's ids by number, so that 10 comes after 9; names (UUID, MIG) by text, after the numbers."""
    return sorted(map(str, gpu_ids), key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))


def server_seed(seed: int, *, index: int, first_step: int, num_restarts: int) -> int:
    """Of SGLang's generator: no two servers of a run draw the same, nor does a successor or a resumed run draw again
    what was drawn before it.

    seed: rollout.seed.  index: of the replica.  first_step: that the run begins or goes on after.
    """
    digest = hashlib.blake2s(f"{seed} {index} {first_step} {num_restarts}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


@dataclass(frozen=True)
class ServerSettings:
    """What a rollout server is started with.

    gpu_ids: None on a GPU: those that Ray gave the host.  single_node: listen on the loopback address only.
    """

    model_path: str
    rollout: RolloutConfig
    device: str
    gpu_ids: tuple[str, ...] | None
    max_model_len: int
    single_node: bool
    trust_remote_code: bool

    def command(self, *, host: str, port: int, seed: int, gpu_ids: Sequence[str] | None) -> Command:
        """-> (command, environment variables to add)."""
        from scalerl.rollout.embedded_launch import embedded_command
        from scalerl.rollout.sglang_server import sglang_command

        common = {
            "model_path": self.model_path,
            "rollout": self.rollout,
            "host": host,
            "port": port,
            "device": self.device,
            "max_model_len": self.max_model_len,
            "trust_remote_code": self.trust_remote_code,
        }
        if self.rollout.name == "sglang":
            return sglang_command(**common, gpu_ids=gpu_ids, seed=seed)
        command, env = embedded_command(**common)
        return command, env | ({} if gpu_ids is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpu_ids)})

    def of_process(self) -> str:
        """The same text for runs that can use the same process; which weights it has is the next sync's."""
        started_with = self.command(host="127.0.0.1" if self.single_node else "", port=0, seed=0, gpu_ids=self.gpu_ids)
        # Another model may have been written to the path.
        model = (Path(self.model_path) / "config.json").read_text(encoding="utf-8")
        return json.dumps([started_with, model])


class ReplicaHost(Reusable):
    """The server dies with this actor, and this actor with the driver."""

    def __init__(self, index: int, settings: ServerSettings, *, log_dir: str, first_step: int = 0) -> None:
        """log_dir: gets rollout-{index}.log, and rollout-{index}.restart-{k}.log of each restart.

        first_step: as `server_seed`.
        """
        self.first_step = first_step
        self.index, self.settings, self.log_dir = index, settings, log_dir
        self.server: RolloutServer | None = None
        self.num_starts = 0

    def enter(self, index: int, settings: ServerSettings, *, log_dir: str, first_step: int = 0) -> None:
        """settings: those of the server that runs here, as far as they are its process's."""
        server = self.server
        super().enter(index, settings, log_dir=log_dir, first_step=first_step)
        self.server = server

    def leave(self) -> None:
        """The server has no request, no cached prefix and no version of the run any more. Raises RolloutError."""
        from scalerl.rollout.client import RolloutClient

        assert self.server is not None
        settings = self.settings
        client = RolloutClient(
            self.server.url,
            cast("EngineKind", settings.rollout.name),
            key=self.server.key,
            max_model_len=settings.max_model_len,
        )
        client.pause()
        client.continue_generation()
        client.flush_cache()
        client.set_policy_version(0)

    def start(self) -> tuple[str, str]:
        """Starts the server, again if it was `end`ed, and returns its URL and its key once it answers; at once for one
        that another run left.

        Raises ServerStartError with the server's own last log lines.
        """
        # Each has a log of its own: the one that was lost said why.
        name = f"rollout-{self.index}.restart-{self.num_starts}.log" if self.num_starts else f"rollout-{self.index}.log"
        self.num_starts += 1
        if self.server is not None and self.server.alive():
            # It goes on writing where it began.
            log = Path(self.log_dir, name)
            log.parent.mkdir(parents=True, exist_ok=True)
            log.unlink(missing_ok=True)
            log.symlink_to(self.server.log_path.resolve())
            return self.server.url, self.server.key
        import ray

        from scalerl.rollout.server import RolloutServer, start_on_free_port

        gpu_ids = self.settings.gpu_ids
        if gpu_ids is None and self.settings.device == "cuda":
            gpu_ids = in_device_order(ray.get_gpu_ids())
        host = "127.0.0.1" if self.settings.single_node else ray.util.get_node_ip_address()
        seed = server_seed(
            self.settings.rollout.seed,
            index=self.index,
            first_step=self.first_step,
            num_restarts=self.num_starts - 1,
        )

        def make_server(port: int) -> RolloutServer:
            command, env = self.settings.command(host=host, port=port, seed=seed, gpu_ids=gpu_ids)
            netloc = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            return RolloutServer(command, env, f"http://{netloc}", f"{self.log_dir}/{name}")

        self.server = start_on_free_port(make_server, host, self.settings.rollout.start_timeout_s)
        return self.server.url, self.server.key

    def end(self) -> str:
        """Kills what is left of the server. -> how it ended, and its last log lines."""
        assert self.server is not None
        return self.server.end()

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()
