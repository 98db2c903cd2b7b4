"""`python ask_silent_server.py URL`: asks a server that never says a word for samples, and prints what became of it."""

from __future__ import annotations

import asyncio
import sys

from scalerl.servers import client
from scalerl.servers.requests import GenerateRequest, SamplingParams, ServerLostError

# A thirtieth of what a run waits.
client.KEEP_ALIVE.update(TCP_KEEPIDLE=1, TCP_KEEPINTVL=1, TCP_KEEPCNT=2, TCP_USER_TIMEOUT=3000)


async def ask(url: str) -> None:
    asked = client.RolloutClient(url, "embedded", key="key", max_model_len=64, timeout_s=600)
    request = GenerateRequest("prompt", [5, 6], 1, SamplingParams(max_new_tokens=4), seeds=[7])
    async with asked.connected():
        async for output in asked.generate([request]):
            raise AssertionError(f"nobody is there who could have made {output}")


if __name__ == "__main__":
    try:
        asyncio.run(ask(sys.argv[1]))
    except ServerLostError as error:
        print("LOST", error)
