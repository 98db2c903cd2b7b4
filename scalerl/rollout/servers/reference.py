"""`ReferenceServer`: an SGLang server that a user started, which has the reference model or teacher of a run."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from scalerl.config.schema.actor import RefConfig
from scalerl.errors import UserError
from scalerl.rollout.servers.connection import ask, authorization
from scalerl.rollout.servers.requests import RolloutError, message_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from scalerl.batch.data_proto import DataProto

# Requests of one rank at a time, and how long one may take.
NUM_REQUESTS, REQUEST_S = 16, 300.0
# How long a server that is away, or too busy, is asked again, and the first and the longest wait between two tries.
RETRY_S, FIRST_WAIT_S, LAST_WAIT_S = 60.0, 0.5, 8.0
TOO_BUSY = (408, 425, 429)
# Tokens whose text is compared with the policy's tokenizer, and how long the server may take for them.
NUM_COMPARED, CHECK_S = 64, 60.0
KEY = "actor_rollout_ref.ref"


class ReferenceServerError(RolloutError):
    """A reference server does not answer, or not as asked.  status: of HTTP; None: there was no answer."""

    # Other ranks would ask the same server.
    restart_helps = False

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ReferenceServer:
    """The server at a URL.  key: of its requests; None: it needs none.  retry_s: how long a lost server is awaited."""

    url: str
    key: str | None = field(default=None, repr=False)
    retry_s: float = RETRY_S

    @classmethod
    def of(cls, config: RefConfig) -> ReferenceServer | None:
        """The server of a configuration, with the key from the environment; None if it has none.

        Raises UserError for a variable that the environment lacks.
        """
        if config.url is None:
            return None
        variable = config.api_key_env
        if variable is not None and not os.environ.get(variable):
            raise UserError(
                f"{KEY}.api_key_env = {variable}: the environment has no such variable; export {variable}, or set "
                f"{KEY}.api_key_env=null"
            )
        return cls(config.url.rstrip("/"), None if variable is None else os.environ[variable])

    def columns(self, shard: DataProto, top_k: int) -> DataProto:
        """Asks for ref_logprobs of every row of a shard; with top_k for teacher_ids and teacher_logprobs too.

        Raises ReferenceServerError naming the sample.
        """
        import torch

        from scalerl.batch import columns
        from scalerl.batch.data_proto import DataProto, Jagged

        ids = shard[columns.INPUT_IDS]
        names = [
            f"sample {index} of group {uid}"
            for index, uid in zip(shard[columns.SAMPLE_INDEX], shard[columns.UID], strict=True)
        ]
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            tries = [
                pool.submit(self.scores, ids[row].tolist(), top_k, name=name, retry_s=self.retry_s)
                for row, name in enumerate(names)
            ]
            try:
                rows = [answer.result() for answer in tries]
            finally:
                pool.shutdown(cancel_futures=True)
        made = {columns.REF_LOGPROBS.name: Jagged.from_list([row.logprobs for row in rows], torch.float32)}
        if top_k:
            made[columns.TEACHER_IDS.name] = Jagged.from_list([row.top_ids for row in rows], torch.int32)
            made[columns.TEACHER_LOGPROBS.name] = Jagged.from_list([row.top_logprobs for row in rows], torch.float32)
        return DataProto(made)

    def scores(self, ids: Sequence[int], top_k: int, *, name: str, retry_s: float = 0.0) -> Scores:
        """Asks for the log-prob of each token, and of the likeliest words in its place.

        name: of the tokens, for errors.  retry_s: how long to ask again where the server is away or too busy.
        Raises ReferenceServerError.
        """
        body = {
            "input_ids": list(ids),
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": top_k,
            # Nothing is sampled; a temperature of 0 would make some servers give a greedy one's log-probs.
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        }
        answer = self._ask("/generate", body, name=name, retry_s=retry_s)
        try:
            return Scores.of(answer["meta_info"], ids, top_k)
        except (KeyError, TypeError, ValueError) as error:
            raise ReferenceServerError(f"{self._place(name)}: not what was asked for: {error}") from None

    def violations(self, tokenizer: PreTrainedTokenizerBase, top_k: int) -> Iterator[str]:
        """Yields why the server cannot be the reference of a policy with this tokenizer."""
        start = f"{KEY}.url = {self.url}: "
        ids = sorted(tokenizer.get_vocab().values())
        try:
            about = self._ask("/model_info", None, name="model_info", timeout_s=CHECK_S)
            if not (isinstance(about, dict) and about.get("is_generation")):
                yield f"{start}is no SGLang server of a language model; give the address of one"
                return
            # Of another tokenizer the first ids have other texts; the last ones might be none of its model's.
            for compared in (ids[:NUM_COMPARED], ids[:: -(-len(ids) // NUM_COMPARED)], ids[-2:]):
                if (other := self._other_text(tokenizer, compared)) is not None:
                    yield (
                        f"{start}its model ({about.get('model_path')}) has another tokenizer than the policy: {other}; "
                        "give the address of a server whose model has the policy's tokenizer"
                    )
                    return
            self.scores(ids[:2], top_k, name="two tokens")
        except ReferenceServerError as error:
            yield f"{start}{error}; start the server, or set {KEY}.url=null and {KEY}.model_path=teacher"

    def _other_text(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str | None:
        """A token whose text is another one on the server than here; None if there is none, or it gives no texts."""
        body = {
            "input_ids": list(ids),
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_text_in_logprobs": True,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        }
        answer = self._ask("/generate", body, name=f"tokens {ids[0]} to {ids[-1]}", timeout_s=CHECK_S)
        try:
            rows = answer["meta_info"]["input_token_logprobs"]
            texts = {int(row[1]): row[2] for row in rows}
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ReferenceServerError(f"no log-probs of a prompt in its answer: {error!r}") from None
        for token in ids:
            here, there = str(tokenizer.decode([token])), texts.get(token)
            if there is not None and here.strip() != there.strip():
                return f"token {token} is {there!r} there and {here!r} here"
        return None

    def _place(self, name: str) -> str:
        return f"reference server {self.url}, {name}"

    def _ask(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        name: str,
        retry_s: float = 0.0,
        timeout_s: float = REQUEST_S,
    ) -> Any:
        deadline, wait_s = time.monotonic() + retry_s, FIRST_WAIT_S
        while True:
            try:
                return self._ask_once(path, body, name, timeout_s)
            except ReferenceServerError as error:
                passes = error.status is None or error.status in TOO_BUSY or error.status >= 500
                if not passes or time.monotonic() + wait_s > deadline:
                    raise
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, LAST_WAIT_S)

    def _ask_once(self, path: str, body: Mapping[str, Any] | None, name: str, timeout_s: float) -> Any:
        headers = {"Content-Type": "application/json"} | ({} if self.key is None else authorization(self.key))
        sent = None if body is None else json.dumps(body).encode()
        try:
            status, text = ask(
                self.url + path, "GET" if sent is None else "POST", sent, headers=headers, timeout_s=timeout_s
            )
        except (OSError, http.client.HTTPException) as error:
            raise ReferenceServerError(f"{self._place(name)}: no answer ({error!r})") from None
        if status != 200:
            raise ReferenceServerError(f"{self._place(name)}: status {status}: {message_of(text)[:500]}", status)
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ReferenceServerError(f"{self._place(name)}: no JSON: {error}") from None


@dataclass(frozen=True)
class Scores:
    """What a server says of T tokens.  logprobs: [T].  top_ids, top_logprobs: [T][K].  All 0 at the first token."""

    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]

    @classmethod
    def of(cls, about: Mapping[str, Any], ids: Sequence[int], top_k: int) -> Scores:
        """Reads SGLang's meta_info: for each token [log-prob, id, text], for the likeliest words a list of these.

        Raises KeyError, TypeError or ValueError for anything else.
        """
        tokens = about["input_token_logprobs"]
        # SGLang reports the last word of a vocabulary as 0 (logprob_result_processor.py); its log-prob is right.
        if len(tokens) != len(ids) or any(
            said not in (0, token) for (_, said, *_), token in zip(tokens, ids, strict=True)
        ):
            raise ValueError(f"log-probs of {len(tokens)} tokens, which are not the {len(ids)} that were sent")
        logprobs = [0.0, *(float(logprob) for logprob, *_ in tokens[1:])]
        if not top_k:
            return cls(logprobs, [], [])
        words = about["input_top_logprobs"][1:]
        if len(words) != len(ids) - 1 or any(len(row) != top_k for row in words):
            raise ValueError(f"not {top_k} likeliest words for each token")
        nothing = [0] * top_k
        top_ids = [nothing, *([int(token) for _, token, *_ in row] for row in words)]
        return cls(logprobs, top_ids, [[0.0] * top_k, *([float(p) for p, *_ in row] for row in words)])
