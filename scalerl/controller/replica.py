"""`ReplicaHost`: a Ray actor on the replica's node that owns one rollout server process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalerl.config.schema import RolloutConfig


class ReplicaHost:
    """The server dies with this actor, and this actor with the driver."""

    def __init__(self, index: int, *, log_path: str) -> None:
        self.index, self.log_path = index, log_path
        self.server: Any = None

    def start(
        self, *, model_path: str, rollout: RolloutConfig, device: str, gpu_ids: list[int], max_model_len: int, local: bool, trust_remote_code: bool
    ) -> str:
        """Starts the server and returns its URL once it answers. Raises ServerStartError with the server's own last lines."""
        import ray

        from scalerl.rollout.server import launch_server

        self.server = launch_server(
            model_path=model_path,
            rollout=rollout,
            host="127.0.0.1" if local else ray.util.get_node_ip_address(),
            device=device,
            gpu_ids=gpu_ids,
            max_model_len=max_model_len,
            seed=rollout.seed + self.index,
            log_path=self.log_path,
            trust_remote_code=trust_remote_code,
        )
        return self.server.url

    def alive(self) -> bool:
        return self.server is not None and self.server.alive()

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()
