"""`Engine`, the interface of a rollout server's engine: all that differs between engines.

A `Call` is one request that a client sends; the methods named read_* turn an answer into what scalerl works with. So
paths, fields and formats of answers are in engines alone, and `client` knows none of them.
"""

from __future__ import annotations

import contextlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from scalerl.models.shape import max_positions, rope_entries
from scalerl.rollout.servers.connection import OPEN_PATH
from scalerl.rollout.servers.requests import (
    FLATTENED,
    GenerateOutput,
    GenerateRequest,
    RolloutError,
    Slot,
    message_of,
    output_of,
    read_events,
)

if TYPE_CHECKING:
    from scalerl.config.schema import ServerConfig
    from scalerl.models import ModelShape
    from scalerl.models.adapters import Adapter
    from scalerl.rollout.servers.buckets import Bucket
    from scalerl.rollout.servers.checksums import Placement

Command = tuple[list[str], dict[str, str]]


@dataclass(frozen=True)
class Launch:
    """The settings that a server is started with.

    device: cpu or cuda.  gpu_ids: GPUs of this server; None leaves CUDA_VISIBLE_DEVICES as it is.
    max_model_len: tokens of prompt and response.  seed: seed of the server's own generator, if its engine has one.
    releases_memory: the server frees its device between generations (GPU).
    synced: it serves nothing before a trainer has given it weights.
    returns_experts: requests may ask for the experts of their tokens (`GenerateRequest.routing`).
    adapter: the size of adapters that it can load; None: it loads none.
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
    returns_experts: bool = False
    adapter: Adapter | None = None
    openai_name: str | None = None
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None


@dataclass(frozen=True)
class Call:
    """One HTTP request to a server.  body: sent as JSON; None: nothing is.

    is_optional: a server that has no such path, and answers 404, need not have it.
    """

    path: str
    body: dict[str, Any] | None = None
    method: Literal["GET", "POST"] = "POST"
    is_optional: bool = False


class Engine(ABC):
    """One kind of engine; it has no state: that of a server is in `host`, that of a client in `client`.

    The calls to a server and the readers of its answers are those of SGLang's HTTP protocol; an engine whose servers
    speak another protocol overrides them.
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

    def num_ranks(self, tp_size: int) -> int:
        """Ranks of one server with this tensor_model_parallel_size, each of which takes a copy of each bucket."""
        return 1

    # --- weights ---

    @abstractmethod
    def serialize(self, bucket: Bucket) -> str:
        """A bucket as text for `RolloutClient.update_weights`; to be called once for each rank of the server."""

    def placement(
        self, model_config: Mapping[str, Any], tp_size: int, engine_kwargs: Mapping[str, Any] | None
    ) -> Placement:
        """The places where the ranks of a server store a model's tensors.

        model_config: the model's config.json.  engine_kwargs: of the server's configuration; None: without arguments
        for the engine.
        """
        from scalerl.rollout.servers.checksums import Placement

        return Placement()

    # --- before anything starts ---

    def has_whole_shared_experts(self, config: ServerConfig) -> bool:
        """Whether every rank of a server has a mixture's shared experts whole, and not a part of them."""
        return False

    def trained_model_violations(
        self, config: ServerConfig, shape: ModelShape, *, section: str, device: str, verify_weights_every: int
    ) -> Iterator[str]:
        """Yields the reasons why a policy cannot be served while it is trained.  section: prefix of config's keys."""
        return iter(())

    # Whether requests may have pictures.
    takes_pictures: ClassVar[bool] = False

    # Adapters that a server has room for on its device.
    adapter_slots: ClassVar[int] = 0

    def served_adapter(self, adapter: Adapter, shape: ModelShape) -> Adapter:
        """The adapter that a server takes in place of this one, zero in what this one has not."""
        return adapter

    def adapter_violations(
        self, config: ServerConfig, shape: ModelShape, *, section: str, device: str
    ) -> Iterator[str]:
        """Yields the reasons why servers cannot have a policy's adapter beside its model.  section: prefix of keys."""
        return iter(())

    def routing_violations(self, config: ServerConfig, *, section: str) -> Iterator[str]:
        """Yields the reasons why servers cannot say which experts each token had.  section: prefix of config's keys."""
        return iter(())

    def served_model_violations(self, path: str | Path, key: str, tp_size: int) -> Iterator[str]:
        """Yields the reasons why a model, of any family, cannot be served from its files.  key: that of tp_size."""
        return iter(())

    # --- requests and answers ---

    # Answers 200 once the server takes requests, also to whoever has no key.
    ready_path: ClassVar[str] = OPEN_PATH

    # --- samples ---

    # Number of tokens at the end of an aborted answer that its continuation draws again.
    undone_by_abort: ClassVar[int] = 0

    def generate(self, request: GenerateRequest, slots: Sequence[Slot]) -> Call:
        """Asks for samples of one request.  slots: those that have room; the answer is read by `read_samples`."""
        body = {
            "input_ids": [request.input_ids + slot.output_ids for slot in slots],
            "sampling_params": [self.sampling_params(request, slot) for slot in slots],
            "return_logprob": True,
            "stream": True,
        }
        return Call("/generate", body)

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

    async def read_samples(
        self, chunks: AsyncIterable[bytes], slots: Sequence[Slot], *, server: str, who: str
    ) -> AsyncGenerator[GenerateOutput, None]:
        """Yields the samples of an answer to `generate`, each as soon as it is finished or aborted.

        chunks: the answer's bytes as they arrive, divided anywhere.  slots: those that were asked for.
        server, who: address and request, for errors. Raises RolloutError for an answer that says that the request is
        refused, or that contradicts it; ServerLostError for one that ends too early.
        """
        # Each sample's first token is an event, too.
        first_s: dict[int, float] = {}
        async with contextlib.aclosing(read_events(chunks, who)) as events:
            async for event in events:
                if "error" in event:
                    raise RolloutError(f"{server} refused {who}: {message_of(json.dumps(event))}")
                # The only sample of a request has no index.
                index = event.get("index", 0)
                if event["meta_info"]["finish_reason"] is None:
                    first_s.setdefault(index, time.time())
                    continue
                if not 0 <= index < len(slots):
                    raise RolloutError(f"{server} gave sample {index} of {who}, which has {len(slots)}")
                output = output_of(slots[index], event, undone_by_abort=self.undone_by_abort)
                output.first_token_s = first_s.get(index)
                yield output

    def separate_reasoning(self, text: str, parser: str) -> Call:
        """Separates thoughts from the rest of an answer.  parser: name of SGLang's."""
        return Call("/separate_reasoning", {"text": text, "reasoning_parser": parser})

    def parse_tool_calls(self, text: str, parser: str, tools: Sequence[Mapping[str, Any]]) -> Call:
        """Parses the tool calls of an answer.  parser: name of SGLang's."""
        return Call("/parse_function_call", {"text": text, "tool_call_parser": parser, "tools": list(tools)})

    def abort_all(self) -> Call:
        """Ends everything that runs; `read_samples` yields what it has so far as aborted."""
        return Call("/abort_request", {"abort_all": True})

    def policy_version(self) -> Call:
        """Asks for the version of the weights; `read_policy_version` reads the answer."""
        return Call("/model_info", method="GET")

    def read_policy_version(self, answer: Any) -> int:
        return int(answer["weight_version"])

    # --- weights ---

    def begin_weight_update(self) -> Call | None:
        """Opens a session in which weights change; None for an engine that needs none."""
        return Call("/begin_weight_update", {}, is_optional=True)

    def end_weight_update(self) -> Call:
        """Closes a session that the server opened."""
        return Call("/end_weight_update", {})

    def update_weights(self, blobs: Sequence[str], *, policy_version: int | None, is_mapped: bool) -> Call:
        """Loads one bucket.  Arguments as those of `RolloutClient.update_weights`."""
        # Cached prefixes were computed with the old weights. SGLang's /flush_cache would also collect garbage, up to a
        # second of every step on a CPU.
        body: dict[str, Any] = {"serialized_named_tensors": list(blobs), "flush_cache": True}
        return Call("/update_weights_from_tensor", body | _version(policy_version))

    def join_update_group(
        self, address: str, port: int, *, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> Call:
        """Joins the server's ranks to a trainer rank's group, by the store at that address; answers when all are in.

        rank_offset: rank in the group of the server's first rank.
        """
        body = {"master_address": address, "master_port": port, "rank_offset": rank_offset, "world_size": world_size}
        return Call("/init_weights_update_group", body | {"group_name": group_name, "backend": backend})

    def update_weights_from_group(
        self,
        layout: Sequence[tuple[str, str, Sequence[int]]],
        *,
        group_name: str,
        policy_version: int | None,
    ) -> Call:
        """Receives one bucket, which `update_group.broadcast` sends.  layout: (name, dtype, shape), as packed."""
        names, dtypes, shapes = (list(column) for column in zip(*layout, strict=True))
        body: dict[str, Any] = {"names": names, "dtypes": dtypes, "shapes": [list(shape) for shape in shapes]}
        body |= {"group_name": group_name, "flush_cache": True, "load_format": FLATTENED}
        return Call("/update_weights_from_distributed", body | _version(policy_version))

    def update_weights_from_disk(self, directory: str, *, policy_version: int) -> Call:
        body = {"model_path": directory, "load_format": "safetensors", "flush_cache": True}
        return Call("/update_weights_from_disk", body | _version(policy_version))

    def adapters(self) -> Call:
        """Asks which adapters the server has; `read_adapters` reads the answer."""
        return Call("/v1/models", method="GET")

    def read_adapters(self, answer: Any) -> list[str]:
        return [model["id"] for model in answer["data"] if model.get("parent")]

    def load_adapter(self, name: str, config: Mapping[str, Any], blobs: Sequence[str]) -> Call:
        """Loads an adapter under a new name.  config: of its adapter_config.json.

        blobs: `serialize` of its tensors by peft's names, once per engine rank.
        """
        body = {"lora_name": name, "config_dict": dict(config), "load_format": FLATTENED}
        return Call("/load_lora_adapter_from_tensors", body | {"serialized_named_tensors": list(blobs)})

    def unload_adapter(self, name: str) -> Call:
        return Call("/unload_lora_adapter", {"lora_name": name})

    def set_policy_version(self, policy_version: int) -> Call:
        return Call("/update_weight_version", {"new_version": str(policy_version), "abort_all_requests": False})

    def checksums(self) -> Call:
        return Call("/weights_checker", {"action": "checksum"})

    def read_checksums(self, answer: Any) -> list[dict[str, str]]:
        """The checksums of each rank, in order of rank; [] for an answer that has none."""
        return [rank["checksums"] for rank in sorted(answer.get("ranks") or [], key=_tp_rank)]

    def flush_cache(self, wait_s: float) -> Call:
        """Forgets cached prefixes.  wait_s: how long the engine may take to be idle."""
        return Call(f"/flush_cache?timeout={wait_s:g}" if wait_s else "/flush_cache", {})

    # --- state ---

    # The parts of device memory that are released and resumed -> the engine's tags of each. A CUDA graph has memory
    # besides that of the weights that it reads.
    memory_tags: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "kv_cache": ("kv_cache",),
        "weights": ("weights", "cuda_graph"),
    }

    def release(self, tags: Sequence[str], *, idle_wait_s: float) -> list[Call]:
        """Gives device memory back, one call after another.  idle_wait_s: how long the engine may take to be idle."""
        calls = [Call("/release_memory_occupation", {"tags": list(tags)})]
        # With its overlapped schedule SGLang is busy for one more iteration after the last sample has come, and a
        # release would end it then.
        return [self.flush_cache(idle_wait_s), *calls] if "kv_cache" in tags else calls

    def resume(self, tags: Sequence[str]) -> Call:
        return Call("/resume_memory_occupation", {"tags": list(tags)})

    def pause(self) -> Call:
        """Ends what runs, as `abort_all`, and lets new requests wait for `continue_generation`."""
        return Call("/pause_generation", {"mode": "abort"})

    def continue_generation(self) -> Call:
        return Call("/continue_generation", {})

    def health(self) -> Call:
        """Answers 200 if the process that makes tokens does its work, also while it is paused or released."""
        return Call("/server_info", method="GET")

    def cache_size(self) -> Call | None:
        """Asks for the size of the KV cache; None for an engine whose cache has no fixed size."""
        return None

    def read_cache_size(self, answer: Any) -> tuple[int, int] | None:
        """The tokens of the KV cache and of a page, in an answer to `cache_size`; None for an answer that has none.

        An engine rounds a configured size down to whole pages.
        """
        raise NotImplementedError(f"{type(self).__name__} asks for the size of its cache and does not read the answer")

    # --- refusals ---

    def read_failure(self, answer: Any) -> str | None:
        """The message of an answer with a success's status that says that nothing was done; else None."""
        if isinstance(answer, dict) and answer.get("success") is False:
            return str(answer.get("message"))
        return None

    def read_error(self, text: str) -> str:
        """The message of an answer with an error's status."""
        return message_of(text)


def check_context_length(
    model_path: str | Path, max_model_len: int, keys: str = "data.max_prompt_length + data.max_response_length"
) -> None:
    """Raises ValueError when prompt + response (`max_model_len` tokens) exceed the model's positions.

    keys: configuration keys that set max_model_len, for the error.
    """
    path = Path(model_path) / "config.json"
    if not path.exists():
        return  # the server will report what is wrong with the directory
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = rope_entries(config)
    if config.get("max_position_embeddings") is None:
        return
    is_yarn = (rope.get("rope_type") or rope.get("type")) == "yarn"
    limit = max_positions(config)
    # Another factor (linear, dynamic, ...) extends the positions by an amount that the engine decides.
    if (is_yarn or "factor" not in rope) and max_model_len > limit:
        factor = ", extended by rope_scaling," if is_yarn else ""
        raise ValueError(
            f"{keys} = {max_model_len} tokens exceed max_position_embeddings={limit}{factor} of {path}; lower them"
        )


def _version(policy_version: int | None) -> dict[str, str]:
    return {} if policy_version is None else {"weight_version": str(policy_version)}


def _tp_rank(rank: dict[str, Any]) -> int:
    placement = rank.get("parallelism_info") or [{"tp_rank": 0}]
    return (placement[0] if isinstance(placement, list) else placement)["tp_rank"]
