"""The samples of a request as slots, and the reading of /generate's answer, a stream of events."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from scalerl.servers.requests import (
    ABORTED,
    FINISHED,
    GenerateOutput,
    GenerateRequest,
    RolloutError,
    ServerLostError,
)

EVENT_END = b"\n\n"
LAST_EVENT = b"[DONE]"


@dataclass(frozen=True)
class Slot:
    """A sample being generated.  room: number of tokens that it may still get."""

    request_id: int | str
    sample_index: int
    seed: int | None
    room: int
    output_ids: list[int]
    logprobs: list[float]
    version_spans: tuple[tuple[int, int], ...]

    def extended(
        self, output_ids: list[int], logprobs: list[float], spans: Sequence[tuple[int, int]], finish_reason: str
    ) -> GenerateOutput:
        """The sample with further tokens appended.  spans: version spans of the new tokens."""
        merged = list(self.version_spans) if self.output_ids else []
        for start, version in spans if output_ids or not merged else ():
            if not merged or merged[-1][1] != version:
                merged.append((len(self.output_ids) + start, version))
        return GenerateOutput(
            request_id=self.request_id,
            sample_index=self.sample_index,
            output_ids=self.output_ids + output_ids,
            logprobs=self.logprobs + logprobs,
            finish_reason=finish_reason,
            policy_version=merged[0][1],
            version_spans=tuple(merged),
        )


def slots_of(request: GenerateRequest, max_model_len: int) -> list[Slot]:
    budget = min(request.sampling.max_new_tokens, max_model_len - len(request.input_ids))
    seeds = request.seeds or [None] * request.n
    if not request.progress:
        return [Slot(*key, seed, budget, [], [], ()) for key, seed in zip(request.sample_keys(), seeds, strict=True)]
    return [
        Slot(*o.key, seed, budget - len(o.output_ids), o.output_ids, o.logprobs, o.version_spans)
        for o, seed in zip(request.progress, seeds, strict=True)
    ]


async def read_events(chunks: AsyncIterable[bytes], who: str) -> AsyncIterator[dict[str, Any]]:
    """Yields the JSON of each event.  chunks: bytes as they arrive, divided anywhere.

    Raises ServerLostError for a stream that ends too early.
    """
    rest = b""
    async for chunk in chunks:
        *events, rest = (rest + chunk).split(EVENT_END)
        for event in events:
            data = event.removeprefix(b"data: ")
            if data == LAST_EVENT:
                return
            yield orjson.loads(data)
    raise ServerLostError(f"the answer to {who} ends before its last event")


def output_of(slot: Slot, answer: dict[str, Any], *, undone_by_abort: int = 0) -> GenerateOutput:
    """Reads the sample of an event.  Raises RolloutError when the answer contradicts itself or the request.

    undone_by_abort: the engine's `Engine.undone_by_abort`.
    """
    who = f"request {slot.request_id!r} sample {slot.sample_index}"
    meta = answer["meta_info"]
    output_ids = answer["output_ids"]
    # SGLang's answer has none for a request that was aborted before it ran.
    triples = meta.get("output_token_logprobs") or []
    if [token for _, token, _ in triples] != output_ids:
        raise RolloutError(
            f"{who}: the server's log-probs are of other tokens than its output ({len(triples)} log-probs, "
            f"{len(output_ids)} tokens)"
        )
    finish_reason = meta["finish_reason"].get("type")
    if finish_reason not in (*FINISHED, ABORTED):
        raise RolloutError(f"{who}: unknown finish reason {meta['finish_reason']}")
    if meta["finish_reason"].get("status_code"):
        # Not an abort by a client: SGLang reports its own errors in a stream in this way.
        raise RolloutError(f"{who} was refused: {meta['finish_reason'].get('message')}")
    if finish_reason == ABORTED and undone_by_abort:
        output_ids, triples = output_ids[:-undone_by_abort], triples[:-undone_by_abort]
    if len(output_ids) > slot.room:
        raise RolloutError(f"{who}: the server sent {len(output_ids)} tokens, at most {slot.room} were asked for")
    versions = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0}]
    spans = [(s["start"], int(s["version"])) for s in versions if s["start"] < max(1, len(output_ids))]
    return slot.extended(output_ids, [logprob for logprob, _, _ in triples], spans, finish_reason)
