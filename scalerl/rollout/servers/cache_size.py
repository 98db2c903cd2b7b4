"""Whether servers have a KV cache of the tokens that they were told to have; an engine with less memory takes fewer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from scalerl.rollout.servers.control import ServerControl


def small_caches(control: ServerControl, indices: Iterable[int], tokens: int | None) -> Iterator[str]:
    """One sentence for each of these servers whose KV cache is smaller than it was told.

    tokens: `kv_cache_tokens`; None: no number was given, and no server is asked.
    """
    if tokens is None:
        return
    purpose = control.settings.purpose
    for index, size in control.cache_sizes(indices).items():
        if size is not None and size.is_below(tokens):
            url, num_tokens = control.clients[index].url, size.num_tokens
            yield (
                f"{purpose.who} {index} ({url}) has a KV cache of {num_tokens} tokens, not the {tokens} of the "
                f"memory plan or of {purpose.key('kv_cache_tokens')}: its device has less free memory than planned. "
                f"Find what else is on it (nvidia-smi), or set {purpose.key('kv_cache_tokens')}={num_tokens}"
            )
