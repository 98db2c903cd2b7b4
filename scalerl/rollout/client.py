"""`RolloutClient`: generation (async) and weight updates (sync) on one rollout server, SGLang or embedded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from scalerl.errors import UserError
from scalerl.rollout.weights import EngineKind

FINISH_REASONS = ("stop", "length", "abort")
MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")


class RolloutError(UserError, RuntimeError):
    """A rollout server refused a request, broke its contract or went away. The message holds what the server said."""


@dataclass(frozen=True)
class SamplingParams:
    """temperature 0 is greedy; top_k -1 and top_p 1.0 are off. A sample ends early at an end-of-text token."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False


@dataclass(frozen=True)
class GenerateRequest:
    """n samples for one prompt.

    seeds: one per sample. The embedded engine needs them; SGLang draws from its own generator and ignores them.
    """

    request_id: int | str
    input_ids: list[int]
    n: int
    sampling: SamplingParams
    seeds: list[int] | None = None


@dataclass(frozen=True)
class GenerateOutput:
    """One sample. output_ids include the end-of-text token that stopped it.

    logprobs: of each output token under softmax(logits / temperature) (temperature 1 when greedy), whole vocabulary.
    finish_reason: stop | length | abort.  policy_version: of the weights of its first token.
    """

    request_id: int | str
    sample_index: int
    output_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    policy_version: int


class RolloutClient:
    """One server.

    max_concurrency: samples in flight at a time; for the embedded engine the samples of one batch.
    max_model_len: tokens of prompt + response; max_new_tokens is cut to fit.
    timeout_s: for one request, its time in the server's queue included.
    """

    def __init__(
        self, url: str, kind: EngineKind, *, max_model_len: int, timeout_s: float = 600.0, max_concurrency: int = 256
    ) -> None:
        self.url = url.rstrip("/")
        self.kind = kind
        self.max_model_len = max_model_len
        self.timeout_s = timeout_s
        self.max_concurrency = max_concurrency
        self._http: aiohttp.ClientSession | None = None
        self._has_session: bool | None = None
        self._released: set[str] = set()

    # --- generation ---

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Keep connections open across several `generate` calls of one event loop."""
        if self._http is not None:
            yield
            return
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as self._http:
            try:
                yield
            finally:
                self._http = None

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[GenerateOutput]:
        """All samples of all requests, in the order in which they finish.

        Raises ValueError for a request that cannot be sent and RolloutError for one that the server did not serve; the
        rest is given up then.
        """
        units = work_units(requests, self.kind, self.max_concurrency)
        in_flight = asyncio.Semaphore(
            max(1, self.max_concurrency // max((request.n for request in requests), default=1))
        )

        async def bounded(unit: list[GenerateRequest]) -> list[GenerateOutput]:
            async with in_flight:
                return await self._generate_unit(unit)

        async with self.connected():
            tasks = [asyncio.ensure_future(bounded(unit)) for unit in units]
            try:
                for finished in asyncio.as_completed(tasks):
                    for output in await finished:
                        yield output
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _generate_unit(self, unit: list[GenerateRequest]) -> list[GenerateOutput]:
        """One HTTP request: for SGLang one prompt with n samples, for the embedded engine any number of samples."""
        body, owners = self._embedded_body(unit) if self.kind == "embedded" else self._sglang_body(unit)
        who = f"request {unit[0].request_id!r}" + (f" and {len(unit) - 1} more" if len(unit) > 1 else "")
        assert self._http is not None
        try:
            async with self._http.post(f"{self.url}/generate", json=body) as response:
                text = await response.text()
                if response.status != 200:
                    raise RolloutError(f"{self.url}/generate refused {who}: {_message(text)}")
        except TimeoutError as error:
            raise RolloutError(
                f"{self.url}/generate did not answer {who} in {self.timeout_s:.0f} s; see the server's log, or raise "
                "actor_rollout_ref.rollout.request_timeout_s"
            ) from error
        except aiohttp.ClientError as error:
            raise RolloutError(f"{self.url} went away during {who}: {error!r}; see the server's log") from error
        answers = json.loads(text)
        answers = answers if isinstance(answers, list) else [answers]
        if len(answers) != len(owners):
            raise RolloutError(f"{self.url}/generate gave {len(answers)} samples for {who}, asked for {len(owners)}")
        return [_output(*owner, answer) for owner, answer in zip(owners, answers, strict=True)]

    def _sampling_body(self, request: GenerateRequest) -> dict[str, Any]:
        room = self.max_model_len - len(request.input_ids)
        if room < 1 or not request.input_ids:
            raise ValueError(
                f"request {request.request_id!r}: a prompt of {len(request.input_ids)} tokens leaves no room for a "
                f"response in max_model_len={self.max_model_len}"
            )
        sampling = request.sampling
        return {
            "max_new_tokens": min(sampling.max_new_tokens, room),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "ignore_eos": sampling.ignore_eos,
        }

    def _sglang_body(self, unit: list[GenerateRequest]) -> tuple[dict[str, Any], list[tuple[int | str, int]]]:
        (request,) = unit
        body = {
            "input_ids": request.input_ids,
            "sampling_params": self._sampling_body(request) | {"n": request.n, "skip_special_tokens": False},
            "return_logprob": True,
        }
        return body, [(request.request_id, index) for index in range(request.n)]

    def _embedded_body(self, unit: list[GenerateRequest]) -> tuple[dict[str, Any], list[tuple[int | str, int]]]:
        prompts, params, owners = [], [], []
        for request in unit:
            if request.seeds is None or len(request.seeds) != request.n:
                raise ValueError(f"request {request.request_id!r}: the embedded engine needs seeds, one per sample")
            for index, seed in enumerate(request.seeds):
                prompts.append(request.input_ids)
                params.append(self._sampling_body(request) | {"sampling_seed": seed})
                owners.append((request.request_id, index))
        return {"input_ids": prompts, "sampling_params": params, "return_logprob": True}, owners

    # --- weights ---

    def begin_weight_update(self) -> None:
        """Open a session; waits for running requests. SGLang before 0.5.21 has none: nothing to do there."""
        self._has_session = self._post("/begin_weight_update", {}, missing_ok=True) is not None

    def update_weights(self, blobs: Sequence[str], *, flush_cache: bool, policy_version: int | None = None) -> None:
        """Load one bucket. blobs: `serialize_bucket` once per engine rank.  flush_cache: on the last bucket."""
        body: dict[str, Any] = {"serialized_named_tensors": list(blobs), "flush_cache": flush_cache}
        if self.kind == "sglang":
            body["load_format"] = "flattened_bucket"
        if policy_version is not None:
            body["weight_version"] = str(policy_version)
        self._post("/update_weights_from_tensor", body)

    def end_weight_update(self, policy_version: int) -> None:
        """Close the session; samples from now on carry `policy_version`."""
        if self._has_session:
            self._post("/end_weight_update", {})
        self._has_session = None
        self.set_policy_version(policy_version)

    def set_policy_version(self, policy_version: int) -> None:
        """The version of the weights that the server has; no request may be running."""
        self._post("/update_weight_version", {"new_version": str(policy_version), "abort_all_requests": False})

    def checksums(self) -> list[dict[str, str]]:
        """Per engine rank {the server's parameter name: checksum}; `weights.expected_checksums` says what to expect."""
        answer = self._post("/weights_checker", {"action": "checksum"})
        if not answer.get("ranks"):
            raise RolloutError(f"{self.url}/weights_checker answered no ranks: {answer}")
        ranks = answer["ranks"]
        return [rank["checksums"] for rank in sorted(ranks, key=_tp_rank)]

    def flush_cache(self) -> None:
        self._post("/flush_cache", {})

    # --- state ---

    def release(self, tags: Sequence[str] | None = None) -> None:
        """Give memory back (GPU). tags: of kv_cache, weights, cuda_graph; None: all. The server must be idle."""
        self._post("/release_memory_occupation", {} if tags is None else {"tags": list(tags)})
        self._released |= set(MEMORY_TAGS if tags is None else tags)

    def resume(self, tags: Sequence[str] | None = None) -> None:
        """Undo `release`. Weights come back undefined and must be updated.

        Raises ValueError for a tag that this client did not release: SGLang's scheduler would die of it.
        """
        wanted = set(MEMORY_TAGS if tags is None else tags)
        if not wanted <= self._released:
            raise ValueError(f"resume {sorted(wanted)}: {sorted(wanted - self._released)} is not released")
        self._post("/resume_memory_occupation", {} if tags is None else {"tags": list(tags)})
        self._released -= wanted

    def pause(self) -> None:
        """End running requests with what they have (finish reason abort); new ones wait for `continue_generation`."""
        self._post("/pause_generation", {"mode": "abort"})

    def continue_generation(self) -> None:
        self._post("/continue_generation", {})

    def healthy(self) -> bool:
        try:
            self._request("GET", "/health", None)
        except RolloutError:
            return False
        return True

    def server_info(self) -> dict[str, Any]:
        """What the server says about itself: version, tp_size, model_path and its resolved arguments."""
        info = self._request("GET", "/server_info", None)
        assert info is not None
        return info

    def _post(self, path: str, body: dict[str, Any], missing_ok: bool = False) -> Any:
        return self._request("POST", path, body, missing_ok)

    def _request(self, method: str, path: str, body: dict[str, Any] | None, missing_ok: bool = False) -> Any:
        """The answer's JSON ({} when it has none); None for a 404 with missing_ok. RolloutError unless a success."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                text = response.read().decode()
        except urllib.error.HTTPError as error:
            if error.code == 404 and missing_ok:
                return None
            raise RolloutError(
                f"{self.url}{path} refused (HTTP {error.code}): {_message(error.read().decode())}"
            ) from error
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            raise RolloutError(f"{self.url}{path} got no answer: {error}; see the server's log") from error
        try:
            answer = json.loads(text) if text else {}
        except json.JSONDecodeError:  # /flush_cache answers in prose
            return {}
        if isinstance(answer, dict) and answer.get("success") is False:
            raise RolloutError(f"{self.url}{path} failed: {answer.get('message')}")
        return {} if answer is None else answer


def work_units(
    requests: Sequence[GenerateRequest], kind: EngineKind, max_samples: int
) -> Iterator[list[GenerateRequest]]:
    """Requests that go to the server in one HTTP call: one by one for SGLang, in batches for the embedded engine."""
    unit: list[GenerateRequest] = []
    num_samples = 0
    for request in requests:
        if unit and (kind == "sglang" or num_samples + request.n > max_samples):
            yield unit
            unit, num_samples = [], 0
        unit.append(request)
        num_samples += request.n
    if unit:
        yield unit


def _output(request_id: int | str, sample_index: int, answer: dict[str, Any]) -> GenerateOutput:
    meta = answer["meta_info"]
    output_ids = answer["output_ids"]
    triples = meta["output_token_logprobs"]
    if [token for _, token, _ in triples] != output_ids:
        raise RolloutError(
            f"request {request_id!r} sample {sample_index}: the server's log-probs are of other tokens than its output "
            f"({len(triples)} log-probs, {len(output_ids)} tokens)"
        )
    finish_reason = (meta["finish_reason"] or {}).get("type")
    if finish_reason not in FINISH_REASONS:
        raise RolloutError(
            f"request {request_id!r} sample {sample_index}: unknown finish reason {meta['finish_reason']}"
        )
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"]}]
    return GenerateOutput(
        request_id=request_id,
        sample_index=sample_index,
        output_ids=output_ids,
        logprobs=[logprob for logprob, _, _ in triples],
        finish_reason=finish_reason,
        policy_version=int(spans[0]["version"]),
    )


def _tp_rank(rank: dict[str, Any]) -> int:
    placement = rank.get("parallelism_info") or [{"tp_rank": 0}]
    return (placement[0] if isinstance(placement, list) else placement)["tp_rank"]


def _message(text: str) -> str:
    """What an error answer says, out of the shapes that the servers use."""
    try:
        answer = json.loads(text)
    except json.JSONDecodeError:
        return text.strip()
    if isinstance(answer, dict):
        nested = answer.get("error")
        for found in (answer.get("message"), nested.get("message") if isinstance(nested, dict) else nested):
            if found:
                return str(found)
    return text.strip()
