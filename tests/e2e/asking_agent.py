"""Agents with a reviewer that has another prompt, and a conversation with a second turn: as a coroutine, and as a plain
function. The score follows from the answers alone."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI, OpenAI

Messages = list[dict[str, str]]


def first(row: Any) -> Messages:
    return [{"role": "user", "content": row.messages[-1]["content"]}]


def review(text: str) -> Messages:
    return [{"role": "system", "content": "1+1="}, {"role": "user", "content": text or "0"}]


def more(messages: Messages, text: str) -> Messages:
    return [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "="}]


def score(texts: list[str]) -> dict[str, float]:
    return {"score": float(sum(map(ord, "".join(texts))) % 3), "num_calls": len(texts)}


async def agent(base_url: str, api_key: str, row: Any) -> dict[str, float]:
    http = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)

    async def ask(messages: Any, limit: int) -> str:
        answer = await http.chat.completions.create(model="policy", messages=messages, max_tokens=limit)
        return answer.choices[0].message.content or ""

    one = await ask(first(row), 3)
    return score([one, await ask(review(one), 4), await ask(more(first(row), one), 4)])


def in_a_thread(base_url: str, api_key: str, row: Any) -> dict[str, float]:
    http = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)

    def ask(messages: Any, limit: int) -> str:
        answer = http.chat.completions.create(model="policy", messages=messages, max_tokens=limit)
        return answer.choices[0].message.content or ""

    one = ask(first(row), 3)
    return score([one, ask(review(one), 4), ask(more(first(row), one), 4)])
