"""`Engine`: all that differs between the engines of a rollout server, behind SGLang's HTTP protocol."""

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


@dataclass(frozen=True)
class Launch:
    """What a server is started with.

    device: cpu or cuda.  gpu_ids: of this server; None leaves CUDA_VISIBLE_DEVICES.
    max_model_len: tokens of prompt and response.  seed: of the server's own generator, if its engine has one.
    releases_memory: it gives its device back between generations (GPU).
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


class Engine(ABC):
    """One engine. It has no state: a server's is in `host`, a client's in `client`."""

    name: ClassVar[str]

    @abstractmethod
    def command(self, launch: Launch) -> Command:
        """-> (command, environment variables to add). Raises ValueError for a model that cannot be served so."""

    @abstractmethod
    def num_ranks(self, tp_size: int) -> int:
        """Of one server with this tensor_model_parallel_size: each takes its own copy of a bucket of weights."""

    # --- requests ---

    def generate_body(self, request: GenerateRequest, slots: Sequence[Slot]) -> dict[str, Any]:
        """The body of /generate. slots: those of the request that have room."""
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

    # Tokens at the end of an aborted answer that whoever goes on draws again.
    undone_by_abort: ClassVar[int] = 0

    # --- weights ---

    @abstractmethod
    def serialize(self, bucket: Bucket) -> str:
        """Text for `RolloutClient.update_weights`; call it once for each rank of the server."""

    def update_fields(self, load_format: str) -> dict[str, Any]:
        """What /update_weights_from_tensor needs beside the tensors. load_format: `Bucket.load_format`."""
        return {}

    @abstractmethod
    def expected_checksums(
        self, model_config: Mapping[str, Any], tp_size: int, dtype: torch.dtype | None = None
    ) -> ExpectedChecksums:
        """What `RolloutClient.checksums` must answer once a stream of Hugging Face tensors is loaded.

        model_config: the model's config.json.  dtype: what the engine stores; None: as the tensors come.
        """

    # --- before anything starts ---

    def trained_model_violations(
        self, config: ServerConfig, shape: ModelShape, *, section: str, device: str, verify_weights_every: int
    ) -> Iterator[str]:
        """Of a policy that a server gets from the trainer. section: the keys of config."""
        return iter(())

    def served_model_violations(self, path: str | Path, key: str, tp_size: int) -> Iterator[str]:
        """Of a model that a server alone reads, of any family. key: of tp_size, the ranks of a server."""
        return iter(())
