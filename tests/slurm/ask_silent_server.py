"""`python ask_silent_server.py samples|control URL`: asks a server that never says a word for samples, or to flush its
cache, and prints what became of it."""

from __future__ import annotations

import asyncio
import sys

from scalerl.rollout.servers import connection
from scalerl.rollout.servers.client import RolloutClient
from scalerl.rollout.servers.requests import GenerateRequest, RolloutError, SamplingParams

# A thirtieth of what a run waits.
connection.KEEP_ALIVE.update(TCP_KEEPIDLE=1, TCP_KEEPINTVL=1, TCP_KEEPCNT=2, TCP_USER_TIMEOUT=3000)


async def ask_for_samples(client: RolloutClient) -> None:
    request = GenerateRequest("prompt", [5, 6], 1, SamplingParams(max_new_tokens=4), seeds=[7])
    async with client.connected():
        async for output in client.generate(request):
            raise AssertionError(f"nobody is there who could have made {output}")


if __name__ == "__main__":
    what, url = sys.argv[1:]
    asked = RolloutClient(url, "embedded", key="key", max_model_len=64, timeout_s=600)
    try:
        if what == "samples":
            asyncio.run(ask_for_samples(asked))
        else:
            asked.flush_cache()
    except RolloutError as error:
        print(type(error).__name__, error)
