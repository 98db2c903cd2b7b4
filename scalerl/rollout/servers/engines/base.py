"""`Engine`, the interface of a rollout server's engine: all that differs between engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from scalerl.rollout.servers.engines.protocol import SharedProtocol

if TYPE_CHECKING:
    import torch

    from scalerl.config.schema import ServerConfig
    from scalerl.models import ModelShape
    from scalerl.rollout.servers.checksums import ExpectedChecksums
    from scalerl.rollout.servers.weights import Bucket

Command = tuple[list[str], dict[str, str]]


@dataclass(frozen=True)
class Launch:
    """The settings that a server is started with.

    device: cpu or cuda.  gpu_ids: GPUs of this server; None leaves CUDA_VISIBLE_DEVICES as it is.
    max_model_len: tokens of prompt and response.  seed: seed of the server's own generator, if its engine has one.
    releases_memory: the server frees its device between generations (GPU).
    synced: it serves nothing before a trainer has given it weights.
    openai_name: name of the model for clients of OpenAI's API, which get tokens one by one and, unless they ask for
    others, the sampling parameters of the model's generation_config.json; None: scalerl's own client alone asks.
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
    openai_name: str | None = None
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None


class Engine(SharedProtocol, ABC):
    """One kind of engine; it has no state, as that of a server is in `host` and that of a client in `client`.

    An engine whose servers speak another protocol than SGLang's overrides calls and readers of `SharedProtocol`.
    """

    # Key in `config.servers.ROLLOUT_ENGINES`, and name of the engine's module.
    name: ClassVar[str]
    # Tokens at the end of a server's context that a prompt cannot have.
    prompt_slack: ClassVar[int] = 0
    # Its setting with which a server that has released its memory keeps less of a GPU; None: it has none.
    keep_less: ClassVar[str | None] = None

    @abstractmethod
    def command(self, launch: Launch) -> Command:
        """The server's command, and environment variables to add.

        Raises ValueError for a model that cannot be served with these settings.
        """

    @abstractmethod
    def num_ranks(self, tp_size: int) -> int:
        """Ranks of one server with this tensor_model_parallel_size, each of which takes a copy of each bucket."""

    # --- weights ---

    @abstractmethod
    def serialize(self, bucket: Bucket) -> str:
        """A bucket as text for `RolloutClient.update_weights`; to be called once for each rank of the server."""

    @abstractmethod
    def expected_checksums(
        self,
        model_config: Mapping[str, Any],
        tp_size: int,
        dtype: torch.dtype | None = None,
        ranks: Collection[int] | None = None,
        *,
        engine_kwargs: Mapping[str, Any] | None = None,
    ) -> ExpectedChecksums:
        """The checksums that `RolloutClient.checksums` must return once a stream of tensors is loaded.

        model_config: the model's config.json.  dtype, ranks: as `ExpectedChecksums`.
        engine_kwargs: that of the server's configuration; None: without arguments of its own.
        """

    # --- before anything starts ---

    def has_whole_shared_experts(self, config: ServerConfig) -> bool:
        """Whether every rank of a server has a mixture's shared experts whole, and not a part of them."""
        return False

    def trained_model_violations(
        self, config: ServerConfig, shape: ModelShape, *, section: str, device: str, verify_weights_every: int
    ) -> Iterator[str]:
        """Yields the reasons why a policy cannot be served while it is trained.  section: prefix of config's keys."""
        return iter(())

    def served_model_violations(self, path: str | Path, key: str, tp_size: int) -> Iterator[str]:
        """Yields the reasons why a model, of any family, cannot be served from its files.  key: that of tp_size."""
        return iter(())
