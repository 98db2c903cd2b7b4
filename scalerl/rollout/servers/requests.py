"""Requests to rollout servers and their results: one record per sample, finished or interrupted.

The answer to a request is a stream of events, one for each sample, in SGLang's format.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import orjson

from scalerl.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor

    from scalerl.data.pictures import Picture
    from scalerl.models.routing import RoutingShape
    from scalerl.rollout.servers.routing import RoutedTokens

# Finish reasons of a sample that needs no more tokens.
FINISHED = ("stop", "length")
ABORTED = "abort"
# Policy version of a sample without tokens that no server has seen.
NO_VERSION = -1

# Of a stream of events: the end of each, what it begins with, and the last one.
EVENT_END = b"\n\n"
DATA = b"data: "
LAST_EVENT = b"[DONE]"
# `load_format` of a bucket of weights as SGLang reads it (`weights.flattened_text`).
FLATTENED = "flattened_bucket"
# Name of the policy's adapter on its servers, and what is between such a name and the version.
POLICY_ADAPTER = "policy"
VERSION_MARK = "-"

SampleKey = tuple[int | str, int]


class RolloutError(RunError):
    """Raised when a rollout server refuses a request, breaks its contract or is lost; the message has its answer."""


class ServerLostError(RolloutError):
    """Raised when a server has closed the connection or cannot be reached, so that it takes no further request."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request; temperature 0 is greedy, top_k -1 and top_p 1.0 are off.

    max_new_tokens: tokens of the whole response, over all interruptions.
    A sample ends early at an end-of-text token or one of `stop_token_ids` (neither with `ignore_eos`), and when its
    text contains one of `stop`; the response keeps the token or text that ended it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class GenerateOutput:
    """A sample, finished or interrupted.  output_ids: its tokens, with the one that stopped it.

    logprobs: log-prob of each token under softmax(logits / temperature) (temperature 1 when greedy), whole vocabulary.
    finish_reason: stop | length | abort (interrupted; `unfinished_requests` asks for the rest).
    policy_version: version of the weights of its first token (without tokens: that of the server, or NO_VERSION).
    version_spans: (index of a span's first token, version of its weights), ascending; spans end where the next begins.
    routed_experts: [rows, layers, k] experts of the tokens from `GenerateRequest.routed_from` to the last but one
    (`RoutingShape`); None: nothing is known of them.
    reward: what the turn alone is worth, which a program may set; it is a part of the score (`Trajectory`).
    served: (index of the server that finished it, when that was asked, in seconds since 1970), for the timeline.
    first_token_s: when its first token, or the first after an interruption, came, in seconds since 1970.
    """

    request_id: int | str
    sample_index: int
    output_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    policy_version: int
    version_spans: tuple[tuple[int, int], ...] = ()
    routed_experts: Tensor | None = field(default=None, compare=False, repr=False)
    reward: float = 0.0
    served: tuple[int, float] | None = field(default=None, compare=False, repr=False)
    first_token_s: float | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.version_spans:
            self.version_spans = ((0, self.policy_version),)

    @property
    def key(self) -> SampleKey:
        return self.request_id, self.sample_index

    @property
    def finished(self) -> bool:
        return self.finish_reason in FINISHED

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Yields (first token, end, version of the weights that drew them) of each span of tokens, in order."""
        ends = [start for start, _ in self.version_spans[1:]] + [len(self.output_ids)]
        for (start, version), end in zip(self.version_spans, ends, strict=True):
            yield start, end, version

    def token_versions(self) -> list[int]:
        """[len(output_ids)] the version of the weights that drew each token."""
        return [version for start, end, version in self.spans() for _ in range(start, end)]


@dataclass(frozen=True)
class GenerateRequest:
    """A request for n samples of one prompt.

    seeds: one per sample. The embedded engine needs them; SGLang draws from its own generator and ignores them.
    progress: n interrupted samples to continue; () begins n new ones.
    home: requests with the same home go to one server while it has room; () takes input_ids for it.
    routing: outputs have the experts of their tokens, from position `routed_from` of prompt and response on; None: not.
    adapter: the adapter that the newest version is taken of; None: the model without one.
    pictures: those that stand in input_ids, in order; each has as many placeholders there as it takes tokens.
    """

    request_id: int | str
    input_ids: list[int]
    n: int
    sampling: SamplingParams
    seeds: list[int] | None = None
    progress: tuple[GenerateOutput, ...] = ()
    home: tuple[int, ...] = ()
    routing: RoutingShape | None = None
    routed_from: int = 0
    adapter: str | None = None
    pictures: tuple[Picture, ...] = ()

    def sample_keys(self) -> list[SampleKey]:
        indices = [output.sample_index for output in self.progress] or range(self.n)
        return [(self.request_id, index) for index in indices]


def check_request(request: GenerateRequest, max_model_len: int) -> None:
    """Raises ValueError, naming the request, for one that no server could answer as asked."""
    who, sampling = f"request {request.request_id!r}", request.sampling
    if not request.input_ids or len(request.input_ids) > max_model_len:
        raise ValueError(
            f"{who}: a prompt of {len(request.input_ids)} tokens; it must have 1 to max_model_len={max_model_len}"
        )
    if request.pictures:
        from scalerl.data.pictures import places_of

        try:
            places_of(request.input_ids, request.pictures)
        except ValueError as error:
            # A server may never answer such a request.
            raise ValueError(f"{who}: {error}") from None
    if request.n < 1:
        raise ValueError(f"{who} asks for n={request.n} samples; at least 1")
    if request.seeds is not None and len(request.seeds) != request.n:
        raise ValueError(f"{who} has {len(request.seeds)} seeds for n={request.n} samples")
    if sampling.ignore_eos and sampling.stop_token_ids:
        raise ValueError(
            f"{who}: ignore_eos=true ignores stop_token_ids={list(sampling.stop_token_ids)} too; set one of the two"
        )
    _check_progress(who, request)


def _check_progress(who: str, request: GenerateRequest) -> None:
    if not request.progress:
        return
    if len({output.sample_index for output in request.progress}) != request.n:
        raise ValueError(f"{who} has n={request.n} but continues samples {[o.sample_index for o in request.progress]}")
    for output in request.progress:
        if output.finished or output.request_id != request.request_id:
            raise ValueError(
                f"{who} cannot continue sample {output.key}, which has finish reason {output.finish_reason!r}"
            )
        if output.output_ids and request.sampling.stop:
            # The server would look for the stop string only in the new tokens.
            raise ValueError(
                f"{who}: sample {output.sample_index} has {len(output.output_ids)} tokens; a response with stop "
                f"strings ({list(request.sampling.stop)}) cannot be continued: use stop_token_ids, or drop its tokens"
            )


def unfinished_requests(
    requests: Sequence[GenerateRequest], outputs: Iterable[GenerateOutput]
) -> list[GenerateRequest]:
    """The requests for the samples that did not finish, which continue from the tokens they have.

    requests: the requests that `outputs` answer; one without an unfinished sample is left out.
    """
    unfinished: dict[int | str, list[GenerateOutput]] = {}
    for output in outputs:
        if not output.finished:
            unfinished.setdefault(output.request_id, []).append(output)
    return [
        _rest_of(request, unfinished[request.request_id]) for request in requests if request.request_id in unfinished
    ]


def _rest_of(request: GenerateRequest, unfinished: list[GenerateOutput]) -> GenerateRequest:
    unfinished = sorted(unfinished, key=lambda output: output.sample_index)
    if request.sampling.stop:
        nothing: dict[str, Any] = {"output_ids": [], "logprobs": [], "version_spans": (), "routed_experts": None}
        unfinished = [replace(output, **nothing) for output in unfinished]
    seeds = None
    if request.seeds is not None:
        by_key = dict(zip(request.sample_keys(), request.seeds, strict=True))
        seeds = [by_key[output.key] for output in unfinished]
    return replace(request, n=len(unfinished), seeds=seeds, progress=tuple(unfinished))


# --- a sample while a server generates it ---


@dataclass(frozen=True)
class Slot:
    """A sample being generated.  room: number of tokens that it may still get.

    num_input_tokens: what the server must have counted of its input; None: that is not compared.
    routed: what is known of the experts of its tokens; None: they are not asked for.
    """

    request_id: int | str
    sample_index: int
    seed: int | None
    room: int
    output_ids: list[int]
    logprobs: list[float]
    version_spans: tuple[tuple[int, int], ...]
    routed: RoutedTokens | None = None
    num_input_tokens: int | None = None

    @property
    def key(self) -> SampleKey:
        return self.request_id, self.sample_index

    def extended(
        self,
        output_ids: list[int],
        logprobs: list[float],
        spans: Sequence[tuple[int, int]],
        finish_reason: str,
        routed_experts: Tensor | None = None,
    ) -> GenerateOutput:
        """The sample with further tokens appended.  spans: version spans of the new tokens.

        routed_experts: the rows of all tokens (`RoutedTokens.extended`); None: those of before.
        Raises RolloutError for more tokens than there is room for.
        """
        if len(output_ids) > self.room:
            raise RolloutError(
                f"request {self.request_id!r} sample {self.sample_index}: the server sent {len(output_ids)} tokens, at "
                f"most {self.room} were asked for"
            )
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
            routed_experts=self.routed.rows if routed_experts is None and self.routed is not None else routed_experts,
        )


def slots_of(request: GenerateRequest, max_model_len: int) -> list[Slot]:
    """The samples of a request, in order, with the tokens that they have from before an interruption."""
    budget = min(request.sampling.max_new_tokens, max_model_len - len(request.input_ids))
    seeds = request.seeds or [None] * request.n
    if not request.progress:
        routed = _routed_tokens(request, None)
        keys = zip(request.sample_keys(), seeds, strict=True)
        counted = len(request.input_ids) if request.pictures else None
        return [Slot(*key, seed, budget, [], [], (), routed, counted) for key, seed in keys]
    return [
        Slot(
            *o.key,
            seed,
            budget - len(o.output_ids),
            o.output_ids,
            o.logprobs,
            o.version_spans,
            _routed_tokens(request, o),
            len(request.input_ids) + len(o.output_ids) if request.pictures else None,
        )
        for o, seed in zip(request.progress, seeds, strict=True)
    ]


def _routed_tokens(request: GenerateRequest, output: GenerateOutput | None) -> RoutedTokens | None:
    if request.routing is None:
        return None
    from scalerl.rollout.servers.routing import RoutedTokens

    rows = None if output is None else output.routed_experts
    num_tokens = len(request.input_ids) + (0 if output is None else len(output.output_ids))
    return RoutedTokens(
        request.routing, request.routed_from, num_tokens, request.routing.unknown(0) if rows is None else rows
    )


# --- the answer of a server ---


async def read_events(chunks: AsyncIterable[bytes], who: str) -> AsyncGenerator[dict[str, Any], None]:
    """Yields the JSON of each event.  chunks: bytes as they arrive, divided anywhere.

    Raises ServerLostError for a stream that ends too early.
    """
    pending, num_searched = bytearray(), 0
    async for chunk in chunks:
        pending += chunk
        begin = 0
        while (end := pending.find(EVENT_END, max(begin, num_searched))) >= 0:
            data = pending[begin + len(DATA) if pending.startswith(DATA, begin) else begin : end]
            if data == LAST_EVENT:
                return
            yield orjson.loads(data)
            begin = end + len(EVENT_END)
        del pending[:begin]
        # The first half of an event's end may have arrived.
        num_searched = max(0, len(pending) - 1)
    raise ServerLostError(f"the answer to {who} ends before its last event")


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
    counted, expected = meta.get("prompt_tokens"), slot.num_input_tokens
    if meta["finish_reason"].get("type") in FINISHED and expected not in (None, counted):
        raise RolloutError(
            f"{who}: the server made {counted} tokens of a prompt with pictures, the trainer has {expected}; give it "
            "the model's own preprocessor_config.json, and no limits of pixels of its own"
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
    num_sampled = len(output_ids)
    if finish_reason == ABORTED and undone_by_abort:
        output_ids, logprobs = output_ids[:-undone_by_abort], logprobs[:-undone_by_abort]
    experts = _experts_of(slot, meta, finish_reason, num_sampled=num_sampled, num_kept=len(output_ids))
    versions = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0}]
    spans = [(s["start"], int(s["version"])) for s in versions if s["start"] < max(1, len(output_ids))]
    return slot.extended(output_ids, logprobs, spans, finish_reason, experts)


def _experts_of(slot: Slot, meta: dict[str, Any], finish_reason: str, **counts: int) -> Tensor | None:
    if slot.routed is None:
        return None
    encoded = meta.get("routed_experts")
    who = f"request {slot.request_id!r} sample {slot.sample_index}"
    # An answer that was aborted while it waited has none; its continuation asks for them again.
    if encoded is None and finish_reason in FINISHED:
        raise RolloutError(f"{who}: the server gave no experts of its tokens (algorithm.routing_replay)")
    try:
        return slot.routed.extended(encoded, **counts)
    except ValueError as error:
        raise RolloutError(f"{who}: the server gave {error} (algorithm.routing_replay)") from None


def message_of(text: str) -> str:
    """The message of an error answer, in any of the shapes that servers use."""
    try:
        answer = json.loads(text)
    except json.JSONDecodeError:
        return text.strip()
    if isinstance(answer, dict):
        nested = answer.get("error")
        named = nested.get("message") if isinstance(nested, dict) else nested
        for message in (answer.get("message"), answer.get("error_message"), named):
            if message:
                return str(message)
    return text.strip()
