"""`ReplicaHost`: a Ray actor on the replica's node that owns one rollout server process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scalerl.config.schema import RolloutConfig
    from scalerl.rollout.server import RolloutServer


def in_device_order(gpu_ids: Sequence[int | str]) -> list[str]:
    """Ray's ids by number, so that 10 comes after 9; names (UUID, MIG) by text, after the numbers."""
    return sorted(map(str, gpu_ids), key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))


# A restarted SGLang does not draw again what it drew when the run began.
RESTART_SEED = 1_000_003


class ReplicaHost:
    """The server dies with this actor, and this actor with the driver."""

    def __init__(
        self,
        index: int,
        *,
        log_dir: str,
        model_path: str,
        rollout: RolloutConfig,
        device: str,
        gpu_ids: list[str] | None,
        max_model_len: int,
        single_node: bool,
        trust_remote_code: bool,
    ) -> None:
        """gpu_ids: None on a GPU: those that Ray gave this actor.

        log_dir: gets rollout-{index}.log, and rollout-{index}.restart-{k}.log of each restart.

        single_node: listen on the loopback address only.
        """
        self.index, self.log_dir = index, log_dir
        self.model_path, self.rollout, self.max_model_len = model_path, rollout, max_model_len
        self.device, self.gpu_ids, self.single_node = device, gpu_ids, single_node
        self.trust_remote_code = trust_remote_code
        self.server: RolloutServer | None = None
        self.num_starts = 0

    def start(self) -> str:
        """Starts the server, again if it was `end`ed, and returns its URL once it answers.

        Raises ServerStartError with the server's own last log lines.
        """
        import ray

        from scalerl.rollout.embedded_launch import embedded_command
        from scalerl.rollout.server import RolloutServer, start_on_free_port
        from scalerl.rollout.sglang_server import sglang_command

        rollout = self.rollout
        gpu_ids = self.gpu_ids
        if gpu_ids is None and self.device == "cuda":
            gpu_ids = in_device_order(ray.get_gpu_ids())
        host = "127.0.0.1" if self.single_node else ray.util.get_node_ip_address()
        common = {
            "model_path": self.model_path,
            "rollout": rollout,
            "host": host,
            "device": self.device,
            "max_model_len": self.max_model_len,
            "trust_remote_code": self.trust_remote_code,
        }
        # Each has a log of its own: the one that was lost said why.
        name = f"rollout-{self.index}.restart-{self.num_starts}.log" if self.num_starts else f"rollout-{self.index}.log"
        self.num_starts += 1

        def make_server(port: int) -> RolloutServer:
            if rollout.name == "sglang":
                seed = rollout.seed + self.index + RESTART_SEED * (self.num_starts - 1)
                command, env = sglang_command(**common, port=port, gpu_ids=gpu_ids, seed=seed)
            else:
                command, env = embedded_command(**common, port=port)
                env |= {} if gpu_ids is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpu_ids)}
            netloc = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            return RolloutServer(command, env, f"http://{netloc}", f"{self.log_dir}/{name}")

        self.server = start_on_free_port(make_server, host, rollout.start_timeout_s)
        return self.server.url

    def end(self) -> str:
        """Kills what is left of the server. -> how it ended, and its last log lines."""
        assert self.server is not None
        return self.server.end()

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()
