"""The embedded engine, a transformers model with the operations of a rollout server: generate, load, checksum."""

from __future__ import annotations

import queue
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from scalerl.base.lean_imports import lean_imports
from scalerl.models import HFWeights, read_config, weight_block
from scalerl.rollout.servers.checksums import tensor_checksum
from scalerl.rollout.servers.embedded.decode_rows import SequenceCache, decode, prefill
from scalerl.rollout.servers.embedded.file_tensors import file_tensors
from scalerl.rollout.servers.embedded.sampling import SampleSettings, sample

MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")


class RefusedError(ValueError):
    """Raised for a request that the server answers with status 400 and this message."""


@dataclass
class _Sequence:
    """A sequence to generate.

    index: its number in the request.  position: index of its first new token in the response.
    events: gets each sequence of its request twice: with its first token, and True once it is finished.
    """

    index: int
    input_ids: list[int]
    settings: SampleSettings
    position: int
    max_new_tokens: int
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    events: queue.SimpleQueue[tuple[_Sequence, bool]]
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: dict[str, Any] | None = None
    # From its first token on.
    cache: SequenceCache | None = None
    # Why the engine failed.
    error: Exception | None = None


class DecodingEngine:
    """One model, and one thread that computes while callers wait.

    Up to `max_batch_size` sequences run at a time; each begins when one has ended. The tokens of a sequence depend,
    bit by bit, on its prompt, settings and seed and on the weights, not on sequences that run at the same time
    (`decode_rows`).
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: torch.dtype,
        device: str,
        max_model_len: int,
        max_batch_size: int,
        trust_remote_code: bool,
    ) -> None:
        self.model_path = model_path
        self.max_model_len = max_model_len
        self.max_batch_size = max_batch_size
        self.policy_version = "0"
        self.device = torch.device(device)
        # The model's class is the one that the directory names. transformers makes it on torch's device "meta", whose
        # random numbers import torch's compiler.
        with lean_imports(compiler=False):
            self._model: Any = _model(model_path, dtype, trust_remote_code)
        self._model.to(self.device).eval().requires_grad_(False)
        self._parameters: dict[str, Tensor] = file_tensors(self._model, read_config(model_path).get("model_type"))
        self._vocab_size: int = self._model.get_input_embeddings().num_embeddings
        self._tokenizer = _tokenizer(model_path, trust_remote_code)
        self._eos_ids = _eos_ids(model_path, self._model.config.eos_token_id, self._tokenizer)
        self._changed = threading.Condition()
        self._waiting: deque[_Sequence] = deque()
        self._live: list[_Sequence] = []
        self._paused = False
        self._session_open = False
        self._released: set[str] = set()
        self._thread = threading.Thread(target=self._compute, name="engine", daemon=True)
        self._thread.start()

    # --- generation ---

    def generate(
        self, prompts: Sequence[list[int]], sampling_params: Sequence[dict[str, Any]]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields (index, {"output_ids", "meta_info"} as SGLang answers) of prompts as soon as they are finished, and
        of each its first token before, without a finish reason.

        Raises RefusedError, before anything is returned, for input that the model cannot take; RuntimeError if the
        engine fails.
        """
        events: queue.SimpleQueue[tuple[_Sequence, bool]] = queue.SimpleQueue()
        sequences = [
            self._sequence(index, prompt, params, events)
            for index, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True))
        ]
        with self._changed:
            self._changed.wait_for(lambda: not self._paused)
            if self._session_open or self._released:
                state = (
                    "a weight-update session is open" if self._session_open else f"{sorted(self._released)} is released"
                )
                raise RefusedError(f"cannot generate: {state}")
            self._waiting.extend(sequences)
            self._changed.notify_all()
        return self._answers(len(sequences), events)

    def _answers(
        self, num_sequences: int, events: queue.SimpleQueue[tuple[_Sequence, bool]]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        while num_sequences:
            sequence, is_finished = events.get()
            if not is_finished:
                yield sequence.index, {"output_ids": sequence.output_ids[:1], "meta_info": {"finish_reason": None}}
                continue
            num_sequences -= 1
            if sequence.error is not None:
                raise RuntimeError(f"the engine failed: {sequence.error!r}") from sequence.error
            yield sequence.index, self._answer(sequence)

    def abort_all(self) -> None:
        """Ends running and waiting sequences with the tokens that they have (finish reason abort)."""
        with self._changed:
            for sequence in (*self._live, *self._waiting):
                sequence.finish_reason = sequence.finish_reason or {"type": "abort", "message": "Aborted"}

    def pause(self) -> None:
        """Does `abort_all`, and holds new requests until `resume_generation`."""
        with self._changed:
            self._paused = True
        self.abort_all()
        with self._changed:
            self._wait_idle()

    def resume_generation(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def _wait_idle(self) -> None:
        self._changed.wait_for(lambda: not self._live and not self._waiting)

    def _sequence(
        self, index: int, prompt: list[int], params: dict[str, Any], events: queue.SimpleQueue[tuple[_Sequence, bool]]
    ) -> _Sequence:
        max_new_tokens = params["max_new_tokens"]
        if not prompt:
            raise RefusedError(f"prompt {index} is empty")
        if len(prompt) + max_new_tokens > self.max_model_len:
            raise RefusedError(
                f"prompt {index}: {len(prompt)} tokens + max_new_tokens {max_new_tokens} exceed the context of "
                f"{self.max_model_len} tokens"
            )
        if not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            raise RefusedError(f"prompt {index} has token ids outside 0..{self._vocab_size - 1}")
        settings = SampleSettings(
            temperature=float(params["temperature"]),
            top_p=float(params["top_p"]),
            top_k=int(params["top_k"]),
            seed=int(params["sampling_seed"]),
        )
        if settings.temperature < 0.0 or not 0.0 < settings.top_p <= 1.0 or max_new_tokens < 1:
            raise RefusedError(
                f"prompt {index}: temperature {settings.temperature} must be at least 0, top_p {settings.top_p} in "
                f"(0, 1] and max_new_tokens {max_new_tokens} at least 1"
            )
        stop_strings = tuple(params["stop"])
        if stop_strings and self._tokenizer is None:
            raise RefusedError(f"prompt {index}: stop {list(stop_strings)} needs a tokenizer in {self.model_path}")
        stop_ids = frozenset() if params["ignore_eos"] else self._eos_ids | set(params["stop_token_ids"])
        position = int(params["sampling_position"])
        return _Sequence(index, list(prompt), settings, position, max_new_tokens, stop_ids, stop_strings, events)

    # --- the computing thread ---

    def _compute(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._live or self._waiting)
                self._leave()
                self._enter()
                running = list(self._live)
            try:
                self._advance(running)
            except Exception as error:
                traceback.print_exc()
                self._fail(error)

    def _leave(self) -> None:
        """Hands finished sequences to their callers."""
        finished = [s for s in (*self._live, *self._waiting) if s.finish_reason is not None]
        if not finished:
            return
        self._live = [s for s in self._live if s.finish_reason is None]
        self._waiting = deque(s for s in self._waiting if s.finish_reason is None)
        for sequence in finished:
            # A request may wait for others a long time.
            sequence.cache = None
            sequence.events.put((sequence, True))
        if not self._live and not self._waiting:
            self._changed.notify_all()

    def _enter(self) -> None:
        """Begins waiting sequences, as many as may run."""
        while self._waiting and len(self._live) < self.max_batch_size:
            self._live.append(self._waiting.popleft())

    @torch.inference_mode()
    def _advance(self, running: Sequence[_Sequence]) -> None:
        """Draws one token for every sequence; equal prompts that enter together are computed once."""
        entering: dict[tuple[int, ...], list[_Sequence]] = {}
        for sequence in running:
            if sequence.cache is None:
                entering.setdefault(tuple(sequence.input_ids), []).append(sequence)
        begun = [sequence for sequence in running if sequence.cache is not None and sequence.finish_reason is None]
        if begun:
            caches = [sequence.cache for sequence in begun if sequence.cache is not None]
            self._draw(decode(self._model, caches, [sequence.output_ids[-1] for sequence in begun]), begun)
        for prompt, together in entering.items():
            logits_V, layers = prefill(self._model, prompt)
            for sequence in together:
                sequence.cache = SequenceCache(len(prompt), layers)
            self._draw(logits_V.expand(len(together), -1), together)

    def _draw(self, logits_SV: Tensor, sequences: Sequence[_Sequence]) -> None:
        positions = [sequence.position + len(sequence.output_ids) for sequence in sequences]
        tokens, logprobs = sample(logits_SV, [sequence.settings for sequence in sequences], positions)
        with self._changed:
            for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
                self._append(sequence, token, logprob)

    def _append(self, sequence: _Sequence, token: int, logprob: float) -> None:
        if sequence.finish_reason is not None:  # aborted while this token was computed
            return
        if not sequence.spans or sequence.spans[-1]["version"] != self.policy_version:
            sequence.spans.append({"version": self.policy_version, "start": len(sequence.output_ids)})
        sequence.output_ids.append(token)
        if len(sequence.output_ids) == 1:
            sequence.events.put((sequence, False))
        sequence.logprobs.append(logprob)
        if token in sequence.stop_ids:
            matched: int | str | None = token
        else:
            matched = self._stop_string(sequence) if sequence.stop_strings else None
        if matched is not None:
            sequence.finish_reason = {"type": "stop", "matched": matched}
        elif len(sequence.output_ids) >= sequence.max_new_tokens:
            sequence.finish_reason = {"type": "length", "length": sequence.max_new_tokens}

    def _stop_string(self, sequence: _Sequence) -> str | None:
        assert self._tokenizer is not None
        # A token has at least one byte of text, so a stop string is within the last tokens.
        num_tokens = max(len(string.encode()) for string in sequence.stop_strings) + 1
        text = self._tokenizer.decode(sequence.output_ids[-num_tokens:], skip_special_tokens=False)
        return next((string for string in sequence.stop_strings if string in text), None)

    def _fail(self, error: Exception) -> None:
        """Ends all sequences with an error."""
        with self._changed:
            for sequence in (*self._live, *self._waiting):
                sequence.error = error
                sequence.finish_reason = sequence.finish_reason or {"type": "abort", "message": repr(error)}
            self._leave()

    def _answer(self, sequence: _Sequence) -> dict[str, Any]:
        ends = [span["start"] for span in sequence.spans[1:]] + [len(sequence.output_ids)]
        spans = sequence.spans or [{"version": self.policy_version, "start": 0}]
        return {
            "output_ids": sequence.output_ids,
            "meta_info": {
                "finish_reason": sequence.finish_reason,
                "prompt_tokens": len(sequence.input_ids),
                "completion_tokens": len(sequence.output_ids),
                "weight_version": spans[-1]["version"],
                "weight_versions": [span | {"end": end} for span, end in zip(spans, ends, strict=True)],
                "output_token_logprobs": [
                    [logprob, token, None]
                    for logprob, token in zip(sequence.logprobs, sequence.output_ids, strict=True)
                ],
            },
        }

    # --- weights ---

    def begin_weight_update(self) -> None:
        """Opens a weight-update session, after all running sequences have ended."""
        with self._changed:
            self._wait_idle()
            if self._session_open:
                raise RefusedError("a weight-update session is already open; call end_weight_update first")
            self._session_open = True

    def end_weight_update(self) -> None:
        with self._changed:
            if not self._session_open:
                raise RefusedError("no weight-update session is open; call begin_weight_update first")
            self._session_open = False

    def require_session(self, work: str) -> None:
        with self._changed:
            if not self._session_open:
                raise RefusedError(f"{work} must run between begin_weight_update and end_weight_update")

    def load(self, tensors: Mapping[str, Tensor], policy_version: str | None) -> None:
        """Loads tensors; none of them if a name is unknown or a shape is wrong."""
        with self._changed:
            unknown = sorted(tensors.keys() - self._parameters.keys())
            if unknown:
                raise RefusedError(
                    f"the model has no parameter {unknown[:5]} ({len(unknown)} unknown names in the bucket)"
                )
            for name, tensor in tensors.items():
                if tensor.shape != self._parameters[name].shape:
                    raise RefusedError(
                        f"{name} has shape {list(tensor.shape)}, the model's is {list(self._parameters[name].shape)}"
                    )
            for name, tensor in tensors.items():
                self._parameters[name].data.copy_(tensor)
            if policy_version is not None:
                self.policy_version = policy_version

    def load_directory(self, directory: str, policy_version: str | None) -> None:
        """Loads a whole model, after all running sequences have ended."""
        files = sorted(Path(directory).glob("*.safetensors"))
        if not files:
            raise RefusedError(f"{directory} has no *.safetensors file")
        tensors = {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}
        missing = sorted(self._parameters.keys() - tensors.keys())
        if missing:
            raise RefusedError(f"{directory} lacks the parameter {missing[:5]} ({len(missing)} in all)")
        with self._changed:
            self._wait_idle()
            self.load(tensors, policy_version)

    def set_policy_version(self, policy_version: str) -> None:
        with self._changed:
            self.policy_version = policy_version

    def checksums(self) -> dict[str, str]:
        with self._changed:
            return {name: tensor_checksum(parameter.data.cpu()) for name, parameter in self._parameters.items()}

    # --- memory: there is none worth releasing; the calls only check SGLang's order ---

    def release(self, tags: Sequence[str] | None) -> None:
        with self._changed:
            self._wait_idle()
            self._released |= _known_tags(tags)

    def resume(self, tags: Sequence[str] | None) -> None:
        with self._changed:
            missing = _known_tags(tags) - self._released
            if missing:
                raise RefusedError(f"cannot resume {sorted(missing)}: not released")
            self._released -= _known_tags(tags)

    def check_alive(self) -> None:
        if not self._thread.is_alive():
            raise RuntimeError("the engine's thread has ended; the log says why")

    def info(self) -> dict[str, Any]:
        return {
            "model_path": self.model_path,
            "weight_version": self.policy_version,
            "max_model_len": self.max_model_len,
            "max_running_requests": self.max_batch_size,
            "is_generation": True,
        }


def _known_tags(tags: Sequence[str] | None) -> set[str]:
    unknown = set(tags or ()) - set(MEMORY_TAGS)
    if unknown:
        raise RefusedError(f"unknown memory tags {sorted(unknown)}; known: {MEMORY_TAGS}")
    return set(tags or MEMORY_TAGS)


# Models whose attention sinks transformers computes in this way alone.
_WITHOUT_SDPA = ("gpt_oss",)


def _model(model_path: str, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code, local_files_only=True)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "attn_implementation": "sdpa", "dtype": dtype}
    if config.model_type in _WITHOUT_SDPA:
        options["attn_implementation"] = "eager"
    if weight_block(config.to_dict()) is None:
        return AutoModelForCausalLM.from_pretrained(model_path, local_files_only=True, **options)
    # transformers computes with 8-bit weights on a GPU alone.
    delattr(config, "quantization_config")
    model = AutoModelForCausalLM.from_config(config, **options).requires_grad_(False)
    with HFWeights(model_path) as weights:
        for name, tensor in file_tensors(model).items():
            tensor.copy_(weights.read(name)[:])
    return model


def _tokenizer(model_path: str, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    if not (Path(model_path) / "tokenizer_config.json").exists():
        return None
    return AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code, local_files_only=True)


def _eos_ids(
    model_path: str, config_eos: int | list[int] | None, tokenizer: PreTrainedTokenizerBase | None
) -> frozenset[int]:
    """The end-of-text tokens, as in SGLang: of the config, the generation config and the tokenizer, if they exist."""
    eos_ids: list[int | list[int] | None] = [config_eos]
    if (Path(model_path) / "generation_config.json").exists():
        eos_ids.append(GenerationConfig.from_pretrained(model_path, local_files_only=True).eos_token_id)
    if tokenizer is not None:
        eos_ids.append(cast("int | None", tokenizer.eos_token_id))
    return frozenset(token for ids in eos_ids if ids is not None for token in (ids if isinstance(ids, list) else [ids]))
