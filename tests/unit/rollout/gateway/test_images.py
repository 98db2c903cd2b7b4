"""Images in the messages of a chat endpoint's clients, and in the rows of agents with tools."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest

from scalerl.data import PromptRow
from scalerl.data.chat import encode
from scalerl.data.pictures import PictureProcessor, places_of, with_image_urls
from scalerl.rollout.gateway.anthropic import as_chat
from scalerl.rollout.gateway.command import _row_text
from scalerl.rollout.gateway.session import Parsers, RequestError, Session
from scalerl.rollout.gateway.template import ChatTemplate
from scalerl.rollout.program import Ask, Servers
from scalerl.rollout.servers.requests import GenerateOutput, SamplingParams
from tests.pictures import content, noise
from tests.unit.data.test_pictures import model, processor, vision_tokenizer  # noqa: F401  (fixtures)

END = 2
ONE, TWO = content(noise(1, 84, 56)), content(noise(2, 56, 56))


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def session_of(tokenizer: Any, processor: PictureProcessor | None, asks: list[Ask]) -> Session:  # noqa: F811
    async def policy(sample: Servers, number: int, ask: Ask) -> GenerateOutput:
        asks.append(ask)
        ids = [*encode(tokenizer, [f"a{number}"])[0], END]
        return GenerateOutput("r", 0, ids, [-0.5] * len(ids), "stop", 0)

    servers = Servers(policy, [1], SamplingParams(200), uid=7, sample_index=1, seed=5, max_prompt_length=100)
    return Session(servers, ChatTemplate(tokenizer, None, processor), Parsers())


def test_every_turn_sees_the_images_so_far(vision_tokenizer: Any, processor: PictureProcessor) -> None:  # noqa: F811
    """Tokens are those of the conversation in one go; a placeholder that a user writes is text."""
    asks: list[Ask] = []
    session = session_of(vision_tokenizer, processor, asks)
    messages: list[Any] = [{"role": "user", "content": [text("a"), image(ONE), text("<|image_pad|>")]}]

    async def talk() -> None:
        session.turns.append(await session.answer(messages, None))
        more = {"role": "user", "content": [image(TWO), text("b"), image(ONE)]}
        session.turns.append(await session.answer([*session.turns[0].messages, more], None))

    asyncio.run(talk())
    assert [[picture.num_tokens for picture in ask.pictures] for ask in asks] == [[6], [6, 4, 6]]
    (trajectory,) = session.trajectories()
    ids = trajectory.prompt_ids + trajectory.token_ids
    assert [len(place) for place in places_of(ids, trajectory.pictures)] == [6, 4, 6]
    shown = vision_tokenizer.decode(ids)
    pads = {n: "<|vision_start|>" + "<|image_pad|>" * n + "<|vision_end|>" for n in (4, 6)}
    assert shown.startswith(f"<|im_start|>user\na{pads[6]}<|image_pad|><|im_end|>\n<|im_start|>assistant\na0<|im_end|>")
    assert f"<|im_start|>user\n{pads[4]}b{pads[6]}<|im_end|>\n" in shown


@pytest.mark.parametrize(
    ("part", "with_processor", "message"),
    [
        (image(b"none"), True, "an image: 4 bytes, which is no picture"),
        (
            {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
            True,
            "an image: the URL 'https://a/b.png'",
        ),
        (image(ONE), False, "a part of type 'image_url': the policy takes no images"),
    ],
)
def test_images_that_cannot_be_shown_are_refused(vision_tokenizer, processor, part, with_processor, message):  # noqa: F811
    session = session_of(vision_tokenizer, processor if with_processor else None, [])
    with pytest.raises(RequestError, match=message):
        asyncio.run(session.answer([{"role": "user", "content": [part]}], None))


def test_images_of_the_other_dialect_are_the_same() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(ONE).decode()}
    blocks = [text("a"), {"type": "image", "source": source}]
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": source}]}
    chat = as_chat({"messages": [{"role": "user", "content": blocks}, {"role": "user", "content": [result]}]})
    assert [message["content"] for message in chat["messages"]] == [[text("a"), image(ONE)], [image(ONE)]]
    with pytest.raises(RequestError, match="a source of type base64"):
        as_chat({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "u"}}]}]})


def test_a_row_s_images_stand_where_its_messages_say(tmp_path) -> None:
    (tmp_path / "two.png").write_bytes(TWO)
    messages = with_image_urls([{"role": "user", "content": "a<image>b<image>"}], [ONE, str(tmp_path / "two.png")])
    assert messages == [{"role": "user", "content": [text("a"), image(ONE), text("b"), image(TWO)]}]
    assert with_image_urls([{"role": "user", "content": "a"}], []) == [{"role": "user", "content": "a"}]
    # An agent that is a command gets the row so.
    row = PromptRow(3, [1], 1, "d", "t", {}, [{"role": "user", "content": "a<image>"}], "rule", [ONE])
    assert json.loads(_row_text(row))["messages"] == [{"role": "user", "content": [text("a"), image(ONE)]}]
