"""A transformers model with a KV cache behind the operations of a rollout server: generate, load weights, checksum."""

from __future__ import annotations

import base64
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig

from scalerl.rollout.file_tensors import file_tensors
from scalerl.rollout.sampling import SampleSettings, sample
from scalerl.rollout.weights import tensor_checksum

MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")


class RefusedError(ValueError):
    """A request that the server answers with 400 and this message."""


@dataclass
class _Sequence:
    index: int
    input_ids: list[int]
    settings: SampleSettings
    max_new_tokens: int
    stop_ids: frozenset[int]
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: dict[str, Any] | None = None


class EmbeddedEngine:
    """One model. Every public method but `pause` and `resume_generation` holds one lock: one request is one batch.

    A batch is computed as it came, so that its result does not depend on what else the server does. Sequences are taken
    in descending order of prompt length (then of position in the request), `max_batch_size` at a time.
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
        self._device = torch.device(device)
        self._model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=dtype, trust_remote_code=trust_remote_code, attn_implementation="sdpa"
        )
        self._model.to(self._device).eval().requires_grad_(False)
        self._parameters: dict[str, Tensor] = file_tensors(self._model)
        self._vocab_size: int = self._model.get_input_embeddings().num_embeddings
        self._eos_ids = _eos_ids(model_path, self._model.config.eos_token_id)
        self._lock = threading.Lock()
        self._running = threading.Event()
        self._running.set()
        self._session_open = False
        self._released: set[str] = set()

    # --- generation ---

    def generate(self, prompts: Sequence[list[int]], sampling_params: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """-> per prompt {"output_ids", "meta_info"} as SGLang answers. RefusedError on input the model cannot take."""
        sequences = [
            self._sequence(index, prompt, params)
            for index, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True))
        ]
        self._running.wait()
        with self._lock:
            if self._session_open or self._released:
                state = (
                    "a weight-update session is open" if self._session_open else f"{sorted(self._released)} is released"
                )
                raise RefusedError(f"cannot generate: {state}")
            ordered = sorted(sequences, key=lambda s: (-len(s.input_ids), s.index))
            for first in range(0, len(ordered), self.max_batch_size):
                self._generate_batch(ordered[first : first + self.max_batch_size])
            return [self._answer(sequence) for sequence in sequences]

    def pause(self) -> None:
        """End the running batch with what it has (finish reason abort) and hold new ones until `resume_generation`."""
        self._running.clear()
        with self._lock:  # the running batch has ended when this returns
            pass

    def resume_generation(self) -> None:
        self._running.set()

    def _sequence(self, index: int, prompt: list[int], params: dict[str, Any]) -> _Sequence:
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
        stop_ids = frozenset() if params["ignore_eos"] else self._eos_ids
        return _Sequence(index, list(prompt), settings, max_new_tokens, stop_ids)

    @torch.inference_mode()
    def _generate_batch(self, batch: list[_Sequence]) -> None:
        longest = max(len(sequence.input_ids) for sequence in batch)
        input_ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, sequence in enumerate(batch):
            input_ids[row, longest - len(sequence.input_ids) :] = torch.tensor(sequence.input_ids)
            mask[row, longest - len(sequence.input_ids) :] = 1
        input_ids, mask = input_ids.to(self._device), mask.to(self._device)
        position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=self._model.config)
        while batch:
            logits_SV = self._model(
                input_ids=input_ids,
                attention_mask=mask,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            tokens, logprobs = sample(logits_SV, [s.settings for s in batch], [len(s.output_ids) for s in batch])
            for sequence, token, logprob in zip(batch, tokens, logprobs, strict=True):
                self._append(sequence, token, logprob)
            kept = [row for row, sequence in enumerate(batch) if sequence.finish_reason is None]
            rows = torch.tensor(kept, dtype=torch.int64, device=self._device)
            if len(kept) < len(batch):
                batch = [batch[row] for row in kept]
                if batch:
                    cache.batch_select_indices(rows)
            input_ids = torch.tensor(tokens, device=self._device)[rows, None]
            mask = torch.cat([mask[rows], torch.ones_like(rows)[:, None]], dim=1)
            position_ids = position_ids[rows, -1:] + 1

    def _append(self, sequence: _Sequence, token: int, logprob: float) -> None:
        sequence.output_ids.append(token)
        sequence.logprobs.append(logprob)
        if token in sequence.stop_ids:
            sequence.finish_reason = {"type": "stop", "matched": token}
        elif len(sequence.output_ids) >= sequence.max_new_tokens:
            sequence.finish_reason = {"type": "length", "length": sequence.max_new_tokens}
        elif not self._running.is_set():
            sequence.finish_reason = {"type": "abort", "message": "paused"}

    def _answer(self, sequence: _Sequence) -> dict[str, Any]:
        return {
            "output_ids": sequence.output_ids,
            "meta_info": {
                "finish_reason": sequence.finish_reason,
                "prompt_tokens": len(sequence.input_ids),
                "completion_tokens": len(sequence.output_ids),
                "weight_version": self.policy_version,
                "output_token_logprobs": [
                    [logprob, token, None]
                    for logprob, token in zip(sequence.logprobs, sequence.output_ids, strict=True)
                ],
            },
        }

    # --- weights ---

    def begin_weight_update(self) -> None:
        with self._lock:
            if self._session_open:
                raise RefusedError("a weight-update session is already open; call end_weight_update first")
            self._session_open = True

    def end_weight_update(self) -> None:
        with self._lock:
            if not self._session_open:
                raise RefusedError("no weight-update session is open; call begin_weight_update first")
            self._session_open = False

    def update_weights(self, blob: str, policy_version: str | None) -> None:
        """Load one bucket; all of it or, on an unknown name or a wrong shape, nothing."""
        with self._lock:
            if not self._session_open:
                raise RefusedError(
                    "update_weights_from_tensor must run between begin_weight_update and end_weight_update"
                )
            tensors = safetensors.torch.load(base64.b64decode(blob, validate=True))
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

    def set_policy_version(self, policy_version: str) -> None:
        with self._lock:
            self.policy_version = policy_version

    def checksums(self) -> dict[str, str]:
        with self._lock:
            return {name: tensor_checksum(parameter.data.cpu()) for name, parameter in self._parameters.items()}

    # --- memory: the engine keeps none that is worth releasing; the calls are held to SGLang's order ---

    def release(self, tags: Sequence[str] | None) -> None:
        with self._lock:
            self._released |= _known_tags(tags)

    def resume(self, tags: Sequence[str] | None) -> None:
        with self._lock:
            missing = _known_tags(tags) - self._released
            if missing:
                raise RefusedError(f"cannot resume {sorted(missing)}: not released")
            self._released -= _known_tags(tags)

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


def _eos_ids(model_path: str, config_eos: int | list[int] | None) -> frozenset[int]:
    """As SGLang: of the model's config, its generation config and its tokenizer, whichever exist."""
    found: list[int | list[int] | None] = [config_eos]
    directory = Path(model_path)
    if (directory / "generation_config.json").exists():
        found.append(GenerationConfig.from_pretrained(model_path).eos_token_id)
    if (directory / "tokenizer_config.json").exists():
        found.append(AutoTokenizer.from_pretrained(model_path).eos_token_id)
    return frozenset(token for ids in found if ids is not None for token in (ids if isinstance(ids, list) else [ids]))
