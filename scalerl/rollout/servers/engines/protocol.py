"""`SharedProtocol`, SGLang's HTTP protocol, which the other engines have too as far as they do not override it.

A `Call` is what a client sends; the methods named read_* turn an answer into what scalerl works with. So paths, fields
and formats of answers are in engines alone, and `client` knows none of them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from scalerl.rollout.servers.access import OPEN_PATH
from scalerl.rollout.servers.requests import GenerateOutput, GenerateRequest, RolloutError
from scalerl.rollout.servers.slots import Slot
from scalerl.rollout.servers.wire import FLATTENED, message_of, output_of, read_events


@dataclass(frozen=True)
class Call:
    """One HTTP request to a server.  body: sent as JSON; None: nothing is.

    is_optional: a server that has no such path, and answers 404, need not have it.
    """

    path: str
    body: dict[str, Any] | None = None
    method: Literal["GET", "POST"] = "POST"
    is_optional: bool = False


@dataclass(frozen=True)
class CacheSize:
    """The size of a server's KV cache.  page_tokens: an engine rounds the number it is told down to whole pages."""

    num_tokens: int
    page_tokens: int = 1

    def is_below(self, told_tokens: int) -> bool:
        """Whether the server has fewer tokens than it makes of the number that it was told."""
        return self.num_tokens < told_tokens // self.page_tokens * self.page_tokens


class SharedProtocol:
    """The calls by which a client asks a server, and the readers of their answers."""

    # Answers 200 once the server takes requests, also to whoever has no key.
    ready_path: ClassVar[str] = OPEN_PATH

    # --- samples ---

    # Number of tokens at the end of an aborted answer that its continuation draws again.
    undone_by_abort: ClassVar[int] = 0
    # Whether one call asks for several requests, by `generate_several`: requests that begin together share it then.
    answers_several: ClassVar[bool] = False

    def generate(self, request: GenerateRequest, slots: Sequence[Slot]) -> Call:
        """Asks for samples of one request.  slots: those that have room; the answer is read by `read_samples`."""
        return Call("/generate", self.generate_body(request, slots))

    def generate_body(self, request: GenerateRequest, slots: Sequence[Slot]) -> dict[str, Any]:
        return {
            "input_ids": [request.input_ids + slot.output_ids for slot in slots],
            "sampling_params": [self.sampling_params(request, slot) for slot in slots],
            "return_logprob": True,
            "stream": True,
        }

    def generate_several(self, asked: Sequence[tuple[GenerateRequest, Slot]]) -> Call:
        """Asks for samples of several requests by one call, where the engine `answers_several`.

        asked: samples that have room, each with its request; the answer is read by `read_samples`.
        """
        raise NotImplementedError(f"{type(self).__name__} answers several requests at a time and cannot ask for them")

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
        async with contextlib.aclosing(read_events(chunks, who)) as events:
            async for event in events:
                if "error" in event:
                    raise RolloutError(f"{server} refused {who}: {message_of(json.dumps(event))}")
                if event["meta_info"]["finish_reason"] is None:  # SGLang sends the first token too
                    continue
                # The only sample of a request has no index.
                index = event.get("index", 0)
                if not 0 <= index < len(slots):
                    raise RolloutError(f"{server} gave sample {index} of {who}, which has {len(slots)}")
                yield output_of(slots[index], event, undone_by_abort=self.undone_by_abort)

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

    def update_weights(
        self, blobs: Sequence[str], *, flush_cache: bool, policy_version: int | None, is_mapped: bool
    ) -> Call:
        """Loads one bucket.  Arguments as those of `RolloutClient.update_weights`."""
        body: dict[str, Any] = {"serialized_named_tensors": list(blobs), "flush_cache": flush_cache}
        return Call("/update_weights_from_tensor", body | _version(policy_version))

    def join_update_group(
        self, address: str, port: int, *, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> Call:
        body = {"master_address": address, "master_port": port, "rank_offset": rank_offset, "world_size": world_size}
        return Call("/init_weights_update_group", body | {"group_name": group_name, "backend": backend})

    def update_weights_from_group(
        self,
        layout: Sequence[tuple[str, str, Sequence[int]]],
        *,
        group_name: str,
        flush_cache: bool,
        policy_version: int | None,
    ) -> Call:
        names, dtypes, shapes = (list(column) for column in zip(*layout, strict=True))
        body: dict[str, Any] = {"names": names, "dtypes": dtypes, "shapes": [list(shape) for shape in shapes]}
        body |= {"group_name": group_name, "flush_cache": flush_cache, "load_format": FLATTENED}
        return Call("/update_weights_from_distributed", body | _version(policy_version))

    def update_weights_from_disk(self, directory: str, *, policy_version: int) -> Call:
        body = {"model_path": directory, "load_format": "safetensors", "flush_cache": True}
        return Call("/update_weights_from_disk", body | _version(policy_version))

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

    # The parts of device memory that are released and resumed -> the engine's tags of each. A CUDA graph has memory of
    # its own beside the weights that it reads.
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

    def read_cache_size(self, answer: Any) -> CacheSize | None:
        """The size in an answer to `cache_size`; None for an answer that has none."""
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


def _version(policy_version: int | None) -> dict[str, str]:
    return {} if policy_version is None else {"weight_version": str(policy_version)}


def _tp_rank(rank: dict[str, Any]) -> int:
    placement = rank.get("parallelism_info") or [{"tp_rank": 0}]
    return (placement[0] if isinstance(placement, list) else placement)["tp_rank"]
