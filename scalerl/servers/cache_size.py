"""Whether servers have a KV cache of the tokens that they were told to have; an engine with less memory takes fewer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from scalerl.servers.client import RolloutClient
from scalerl.servers.purpose import Purpose


def small_caches(clients: Mapping[int, RolloutClient], tokens: int | None, purpose: Purpose) -> Iterator[str]:
    """One sentence for each server whose KV cache is smaller than it was told.

    clients: index of the replica -> client.  tokens: `kv_cache_tokens`; None: no number was given.
    """
    if tokens is None:
        return
    for index, client in clients.items():
        size = client.cache_size()
        if size is not None and size.is_below(tokens):
            num_tokens = size.num_tokens
            yield (
                f"{purpose.who} {index} ({client.url}) has a KV cache of {num_tokens} tokens, not the {tokens} of the "
                f"memory plan or of {purpose.key('kv_cache_tokens')}: its device has less free memory than planned. "
                f"Find what else is on it (nvidia-smi), or set {purpose.key('kv_cache_tokens')}={num_tokens}"
            )
