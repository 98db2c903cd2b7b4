"""`Engine`, the interface of a rollout server's engine: all that differs between engines of SGLang's HTTP protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from scalerl.servers.requests import GenerateRequest

if TYPE_CHECKING:
    import torch

    from scalerl.config.schema import ServerConfig
    from scalerl.families import ModelShape
    from scalerl.servers.checksums import ExpectedChecksums
    from scalerl.servers.weights import Bucket
    from scalerl.servers.wire import Slot

Command = tuple[list[str], dict[str, str]]
# SGLang's name for the format of `weights.serialize_bucket`.
FLATTENED = "flattened_bucket"


@dataclass(frozen=True)
class Launch:
    """The settings that a server is started with.

    device: cpu or cuda.  gpu_ids: GPUs of this server; None leaves CUDA_VISIBLE_DEVICES as it is.
    max_model_len: tokens of prompt and response.  seed: seed of the server's own generator, if its engine has one.
    releases_memory: the server frees its device between generations (GPU).
    synced: it serves nothing before a trainer has given it weights.
    nnodes, node_rank: of a server with a process on each of several nodes, how many and which one this is; gpu_ids are
    those of this node. dist_init_addr: HOST:PORT of the first node, where their ranks meet.
    """

    model_path: str
    config: ServerConfig
    device: str
    max_model_len: int
    host: str = "127.0.0.1"
    port: int = 0
    gpu_ids: Sequence[int | str] | None = None
    seed: int = 0
    trust_remote_code: bool = False
    releases_memory: bool = False
    synced: bool = False
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None


class Engine(ABC):
    """One kind of engine; it has no state, as that of a server is in `host` and that of a client in `client`."""

    name: ClassVar[str]

    @abstractmethod
    def command(self, launch: Launch) -> Command:
        """The server's command, and environment variables to add.

        Raises ValueError for a model that cannot be served with these settings.
        """

    @abstractmethod
    def num_ranks(self, tp_size: int) -> int:
        """Ranks of one server with this tensor_model_parallel_size, each of which takes a copy of each bucket."""

    # --- requests ---

    def generate_body(self, request: GenerateRequest, slots: Sequence[Slot]) -> dict[str, Any]:
        """The body of /generate.  slots: the request's slots that have room."""
        return {
            "input_ids": [request.input_ids + slot.output_ids for slot in slots],
            "sampling_params": [self.sampling_params(request, slot) for slot in slots],
            "return_logprob": True,
            "stream": True,
        }

    def sampling_params(self, request: GenerateRequest, slot: Slot) -> dict[str, Any]:
        sampling = request.sampling
        return {
            "max_new_tokens": slot.room,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "ignore_eos": sampling.ignore_eos,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
        }

    # Number of tokens at the end of an aborted answer that its continuation draws again.
    undone_by_abort: ClassVar[int] = 0

    # --- weights ---

    @abstractmethod
    def serialize(self, bucket: Bucket) -> str:
        """A bucket as text for `RolloutClient.update_weights`; to be called once for each rank of the server."""

    def update_fields(self, load_format: str) -> dict[str, Any]:
        """The further fields of /update_weights_from_tensor.  load_format: `Bucket.load_format`."""
        return {}

    @abstractmethod
    def expected_checksums(
        self, model_config: Mapping[str, Any], tp_size: int, dtype: torch.dtype | None = None
    ) -> ExpectedChecksums:
        """The checksums that `RolloutClient.checksums` must return once a stream of tensors is loaded.

        model_config: the model's config.json.  dtype: the dtype that the engine stores; None: that of the tensors.
        """

    # --- before anything starts ---

    def trained_model_violations(
        self, config: ServerConfig, shape: ModelShape, *, section: str, device: str, verify_weights_every: int
    ) -> Iterator[str]:
        """Yields the reasons why a policy cannot be served while it is trained.  section: prefix of config's keys."""
        return iter(())

    def served_model_violations(self, path: str | Path, key: str, tp_size: int) -> Iterator[str]:
        """Yields the reasons why a model, of any family, cannot be served from its files.  key: that of tp_size."""
        return iter(())
