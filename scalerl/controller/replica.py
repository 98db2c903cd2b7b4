"""`ReplicaHost`: a Ray actor on the replica's node that owns one rollout server process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scalerl.config.schema import RolloutConfig
    from scalerl.rollout.server import RolloutServer


class ReplicaHost:
    """The server dies with this actor, and this actor with the driver."""

    def __init__(self, index: int, *, log_path: str) -> None:
        self.index, self.log_path = index, log_path
        self.server: RolloutServer | None = None

    def start(
        self,
        *,
        model_path: str,
        rollout: RolloutConfig,
        device: str,
        gpu_ids: list[int] | None,
        max_model_len: int,
        single_node: bool,
        trust_remote_code: bool,
    ) -> str:
        """Starts the server and returns its URL once it answers.

        single_node: listen on the loopback address only. Raises ServerStartError with the server's own last log lines.
        """
        import ray

        from scalerl.rollout.embedded_launch import embedded_command
        from scalerl.rollout.server import RolloutServer, start_on_free_port
        from scalerl.rollout.sglang_server import sglang_command

        host = "127.0.0.1" if single_node else ray.util.get_node_ip_address()
        common = {
            "model_path": model_path,
            "rollout": rollout,
            "host": host,
            "device": device,
            "max_model_len": max_model_len,
            "trust_remote_code": trust_remote_code,
        }

        def make_server(port: int) -> RolloutServer:
            if rollout.name == "sglang":
                command, env = sglang_command(**common, port=port, gpu_ids=gpu_ids, seed=rollout.seed + self.index)
            else:
                command, env = embedded_command(**common, port=port)
            netloc = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            return RolloutServer(command, env, f"http://{netloc}", self.log_path)

        self.server = start_on_free_port(make_server, host, rollout.start_timeout_s)
        return self.server.url

    def alive(self) -> bool:
        return self.server is not None and self.server.alive()

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()
