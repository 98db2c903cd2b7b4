"""How a sample is drawn: its seed and its sampling parameters, which a prompt may set in `extra_info["sampling"]`."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl.rollout.servers.requests import SamplingParams

if TYPE_CHECKING:
    from scalerl.data import PromptRow

KEY = "sampling"


def sampling_of(dataset: str, prompt: PromptRow, base: SamplingParams) -> SamplingParams:
    """`base` with the changes of the prompt's extra_info["sampling"]. Raises ValueError naming the prompt."""
    name = f"{dataset} prompt {prompt.uid}"
    sampling = override_sampling(base, prompt.extra_info, name)
    if dataset == "train" and base.temperature == 0:
        # The greedy baseline of the samples stays greedy, whatever temperature the prompt asks for.
        return replace(sampling, temperature=0.0)
    if dataset == "train" and sampling.temperature != base.temperature:
        raise ValueError(
            f"{name}: extra_info.sampling.temperature is {sampling.temperature}, the run trains at {base.temperature}: "
            "the log-probs of a step are all at one temperature; leave it out, or set "
            f"actor_rollout_ref.rollout.temperature={sampling.temperature}"
        )
    return sampling


@lru_cache(maxsize=2**14)
def sample_seed(seed: int, step: int, position: int, sample: int) -> int:
    """A seed of 63 bits from the four numbers, so that the same sample of the same step always draws the same.

    Cached, because it is needed when a sample is asked for and when it has come.
    """
    return int(np.random.SeedSequence([seed, step, position, sample]).generate_state(1, np.uint64)[0] >> 1)


def override_sampling(
    base: SamplingParams,
    extra_info: Mapping[str, Any] | None,
    prompt_name: str,
    *,
    max_new_tokens_key: str = "data.max_response_length",
) -> SamplingParams:
    """Returns `base` with what the prompt asks for; null means `base`'s value, as a parquet struct has every key.

    prompt_name: for errors, e.g. "train prompt 7".  max_new_tokens_key: the configuration key of `base`'s, for errors.
    Raises ValueError naming the prompt, the field, its value and what it may be.
    """
    asked = (extra_info or {}).get(KEY)
    if asked is None:
        return base
    where = f"{prompt_name}: extra_info.{KEY}"
    if not isinstance(asked, Mapping):
        raise ValueError(f"{where} is {asked!r}; write a dict of {', '.join(_FIELDS)}, or null")
    for name in asked:
        if name not in _FIELDS:
            near = difflib.get_close_matches(str(name), _FIELDS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{where}.{name} is not known{hint} Known: {', '.join(_FIELDS)}")
    values = {
        name: _check(where, name, value, base, max_new_tokens_key) for name, value in asked.items() if value is not None
    }
    sampling = replace(base, **values)
    if sampling.ignore_eos and sampling.stop_token_ids:
        raise ValueError(
            f"{where}: ignore_eos=true ignores stop_token_ids={list(sampling.stop_token_ids)} too; set one of the two"
        )
    return sampling


def _check(where: str, name: str, value: Any, base: SamplingParams, max_new_tokens_key: str) -> Any:
    read, domain = _FIELDS[name]
    try:
        checked = read(value)
    except (TypeError, ValueError):
        raise ValueError(f"{where}.{name} is {value!r}; it must be {domain}") from None
    if name == "max_new_tokens" and checked > base.max_new_tokens:
        raise ValueError(
            f"{where}.{name} is {checked}, more than {max_new_tokens_key}={base.max_new_tokens}; lower it, or raise "
            f"{max_new_tokens_key}"
        )
    return checked


def _integer(value: Any, allows: Callable[[int], bool]) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not allows(int(value)):
        raise ValueError
    return int(value)


def _real(value: Any, allows: Callable[[float], bool]) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError
    if not math.isfinite(value) or not allows(float(value)):
        raise ValueError
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _strings(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(string, str) and string for string in strings):
        raise ValueError
    return strings


# Field of `SamplingParams` -> what reads it (ValueError or TypeError where it is wrong), and what it must be.
_FIELDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "max_new_tokens": (lambda value: _integer(value, lambda n: n >= 1), "an integer of at least 1"),
    "temperature": (lambda value: _real(value, lambda x: x >= 0.0), "a number of at least 0"),
    "top_p": (lambda value: _real(value, lambda x: 0.0 < x <= 1.0), "a number in (0, 1]"),
    "top_k": (lambda value: _integer(value, lambda n: n == -1 or n >= 1), "an integer of at least 1, or -1 for off"),
    "ignore_eos": (_flag, "true or false"),
    "stop": (_strings, "a string or a list of strings, none empty"),
    "stop_token_ids": (
        lambda value: tuple(_integer(token, lambda n: n >= 0) for token in value),
        "a list of token ids",
    ),
}
