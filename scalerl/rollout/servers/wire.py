"""What both ends of `engines.base.Engine` know: the answer of /generate, and how buckets of weights come.

The answer is a stream of events, each with a sample.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any

import orjson

from scalerl.rollout.servers.requests import (
    ABORTED,
    FINISHED,
    GenerateOutput,
    RolloutError,
    ServerLostError,
    Slot,
)

EVENT_END = b"\n\n"
DATA = b"data: "
LAST_EVENT = b"[DONE]"

# `load_format` of a bucket as SGLang reads it (`weights.flattened_text`).
FLATTENED = "flattened_bucket"


async def read_events(chunks: AsyncIterable[bytes], who: str) -> AsyncGenerator[dict[str, Any], None]:
    """Yields the JSON of each event.  chunks: bytes as they arrive, divided anywhere.

    Raises ServerLostError for a stream that ends too early.
    """
    pending, num_searched = bytearray(), 0
    async for chunk in chunks:
        pending += chunk
        begin = 0
        while (end := _event_end(pending, max(begin, num_searched))) >= 0:
            data = pending[begin + len(DATA) if pending.startswith(DATA, begin) else begin : end]
            if data == LAST_EVENT:
                return
            yield orjson.loads(data)
            begin = end + len(EVENT_END)
        del pending[:begin]
        # The first half of an event's end may have arrived.
        num_searched = max(0, len(pending) - 1)
    raise ServerLostError(f"the answer to {who} ends before its last event")


def _event_end(stream: bytearray, start: int) -> int:
    """The position of the first EVENT_END at `start` or behind it; -1 if there is none.

    JSON has no line breaks, and one byte is found many times as fast as two.
    """
    line_end = stream.find(b"\n", start)
    while line_end >= 0 and not stream.startswith(EVENT_END, line_end):
        line_end = stream.find(b"\n", line_end + 1)
    return line_end


def output_of(slot: Slot, answer: dict[str, Any], *, undone_by_abort: int = 0) -> GenerateOutput:
    """Reads the sample of an event.  Raises RolloutError when the answer contradicts itself or the request.

    undone_by_abort: `Engine.undone_by_abort` of the engine.
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
    logprobs = [logprob for logprob, _, _ in triples]
    if None in logprobs:
        # JSON has no NaN.
        raise RolloutError(
            f"{who}: the log-prob of token {logprobs.index(None)} is not a number, so the server's weights may not be: "
            "look at the run's last grad_norm and rewards, and go on from a checkpoint before they went wrong "
            "(trainer.resume_from_path)"
        )
    finish_reason = meta["finish_reason"].get("type")
    if finish_reason not in (*FINISHED, ABORTED):
        raise RolloutError(f"{who}: unknown finish reason {meta['finish_reason']}")
    if meta["finish_reason"].get("status_code"):
        # Not an abort by a client: SGLang reports its own errors in a stream in this way.
        raise RolloutError(f"{who} was refused: {meta['finish_reason'].get('message')}")
    if finish_reason == ABORTED and undone_by_abort:
        output_ids, logprobs = output_ids[:-undone_by_abort], logprobs[:-undone_by_abort]
    versions = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0}]
    spans = [(s["start"], int(s["version"])) for s in versions if s["start"] < max(1, len(output_ids))]
    return slot.extended(output_ids, logprobs, spans, finish_reason)


def message_of(text: str) -> str:
    """The message of an error answer, in any of the shapes that servers use."""
    try:
        answer = json.loads(text)
    except json.JSONDecodeError:
        return text.strip()
    if isinstance(answer, dict):
        nested = answer.get("error")
        for message in (answer.get("message"), nested.get("message") if isinstance(nested, dict) else nested):
            if message:
                return str(message)
    return text.strip()
