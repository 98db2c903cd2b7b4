"""`ChatTemplate`: messages to tokens, where the policy's own turns keep the tokens that were sampled.

Only what is new is rendered: after a turn, the text that the template writes between the end of that turn and the next.
Special tokens that a tool or a user writes are ordinary text: nobody else ends a turn or begins one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scalerl.data.chat import SpecialTokens, encode, render
from scalerl.data.pictures import Picture, expand, source_of_url

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from scalerl.data.pictures import PictureProcessor
    from scalerl.rollout.servers.requests import GenerateOutput

Message = dict[str, Any]

# An answer that no chat template has in its own text.
_ANSWER = "qz7answer7zq"
# Stands inside the special tokens that are ordinary text.
_BREAK = "qz7break7zq"


class TemplateError(ValueError):
    """Raised for messages that the chat template cannot write, or not without changing a turn before them."""


class ChatTemplate:
    """A tokenizer's chat template.  options: data.chat_template_kwargs.  processor: of images; None: there are none.

    Raises TemplateError where the template writes an answer in another way once a question follows it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: Mapping[str, Any] | None = None,
        processor: PictureProcessor | None = None,
    ) -> None:
        self.tokenizer, self.options, self.processor = tokenizer, options, processor
        self._special_tokens = SpecialTokens(tokenizer)
        # What ends an answer: the token that the policy samples, and what the template adds to it.
        self.end, _ = self._after_answer([], [{"role": "user", "content": "?"}], None)
        self._end_ids = self._encoded(self.end)

    def prompt(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, pictures: Sequence[Picture] = ()
    ) -> list[int]:
        """The tokens of a conversation that begins.  pictures: of `images_of` the messages."""
        return _expanded(self._encoded(self._rendered(messages, tools, add_generation_prompt=True)), pictures)

    def picture(self, url: str) -> Picture:
        """Decodes an image of a message.  Raises TemplateError for one that cannot be shown."""
        if self.processor is None:
            raise TemplateError("a part of type 'image_url': the policy takes no images")
        try:
            return self.processor.read(source_of_url(url))
        except ValueError as error:
            raise TemplateError(f"an image: {error}") from error

    def ends(self, output: GenerateOutput) -> bool:
        """Whether the last token of a turn is the token that ends an answer."""
        return output.finish_reason == "stop" and output.output_ids[-1:] == self._end_ids[:1]

    def text(self, output: GenerateOutput, *, with_special_tokens: bool) -> str:
        """The text of a turn, without the token that ends it."""
        ids = output.output_ids
        is_special = bool(ids) and ids[-1] in self.tokenizer.all_special_ids
        if self.ends(output) or (output.finish_reason == "stop" and is_special):
            ids = ids[:-1]
        text = self.tokenizer.decode(ids, skip_special_tokens=not with_special_tokens)
        assert isinstance(text, str)
        return text

    def continuation(
        self,
        output: GenerateOutput,
        calls: Sequence[Message],
        new: Sequence[Message],
        tools: list[dict[str, Any]] | None,
        pictures: Sequence[Picture] = (),
    ) -> list[int]:
        """The tokens between a turn of the policy and its next one.

        output: the turn.  calls: the tool calls of its message.  new: the messages that follow.  pictures: of
        `images_of` them.
        """
        try:
            _, text = self._after_answer(calls, new, tools)
        except TemplateError:
            # There are templates that write an answer's calls in place of its content.
            _, text = self._after_answer([], new, tools)
        end = self._encoded(self.end)
        return _expanded([*(end[1:] if self.ends(output) else end), *self._encoded(text)], pictures)

    def _after_answer(
        self, calls: Sequence[Message], new: Sequence[Message], tools: list[dict[str, Any]] | None
    ) -> tuple[str, str]:
        """What the template writes after the content of an answer, up to its end, and from there to the next answer."""
        answer: Message = {"role": "assistant", "content": _ANSWER} | ({"tool_calls": list(calls)} if calls else {})
        turn = [{"role": "user", "content": "?"}, answer]
        before = self._rendered(turn, tools, add_generation_prompt=False).partition(_ANSWER)[2]
        after = self._rendered([*turn, *new], tools, add_generation_prompt=True).partition(_ANSWER)[2]
        if not before or not after.startswith(before):
            raise TemplateError(
                f"the chat template writes an answer as {before!r} after its content, and as "
                f"{after[: len(before) + 20]!r} when {' and '.join(str(message.get('role')) for message in new)} "
                "follow: a turn of the policy would not keep its tokens. Give a template that only adds "
                "(data.chat_template_path)"
            )
        return before, after[len(before) :]

    def _rendered(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, **kwargs: Any) -> str:
        try:
            rendered = [self._harmless(as_rendered(message)) for message in messages]
            return render(self.tokenizer, rendered, options=self.options, tools=tools, **kwargs)
        except Exception as error:  # whatever a template raises
            raise TemplateError(f"the chat template cannot write these messages: {error}") from error

    def _harmless(self, message: Message) -> Message:
        # An answer that the policy has not sampled may need its format's tokens.
        if message.get("role") == "assistant":
            return message
        content, broken = message["content"], self._special_tokens.broken
        if isinstance(content, str):
            return message | {"content": broken(content, _BREAK)}
        return message | {
            "content": [part | ({"text": broken(part["text"], _BREAK)} if "text" in part else {}) for part in content]
        }

    def _encoded(self, text: str) -> list[int]:
        return [token for part in encode(self.tokenizer, text.split(_BREAK)) for token in part]


def _expanded(ids: list[int], pictures: Sequence[Picture]) -> list[int]:
    """The tokens with as many placeholders as the pictures take."""
    if not pictures:
        return ids
    try:
        return expand(ids, pictures[0].token_id, [picture.num_tokens for picture in pictures])
    except ValueError as error:
        raise TemplateError(f"the chat template writes {error}; give one that shows images") from error


def images_of(messages: Sequence[Message]) -> list[str]:
    """The URLs of the images in messages, in order."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part["image_url"]["url"] for part in parts if _is_image(part)]


def _is_image(part: Mapping[str, Any]) -> bool:
    image = part.get("image_url")
    return part.get("type") == "image_url" and isinstance(image, Mapping) and isinstance(image.get("url"), str)


def as_rendered(message: Message) -> Message:
    """A message as chat templates read it: arguments of tool calls are an object, and text without images is one
    string."""
    content = message.get("content")
    if isinstance(content, list) and any(map(_is_image, content)):
        content = [
            {"type": "image"} if _is_image(part) else {"type": "text", "text": text_of([part])} for part in content
        ]
    else:
        content = text_of(content)
    rendered = {**message, "content": content}
    if calls := message.get("tool_calls"):
        rendered["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": arguments_of(call["function"])}} for call in calls
        ]
    return rendered


def text_of(content: Any) -> str:
    """The text of a message's content, a string or parts.  Raises TemplateError for a part that is no text.

    Halves of a character, which JSON and undecodable bytes may leave and no tokenizer takes, are question marks.
    """
    if content is None or isinstance(content, str):
        return (content or "").encode(errors="replace").decode()
    if not isinstance(content, list):
        raise TemplateError(f"a content is {content!r:.80}; it must be text")
    parts = []
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise TemplateError(f"a part of type {part.get('type')!r}: messages have text alone")
        parts.append(text_of(part["text"]))
    return "".join(parts)


def arguments_of(function: Mapping[str, Any]) -> Any:
    """The arguments of a tool call: the value of their JSON, or what they are if they are none."""
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def is_same(known: Message, sent: Message) -> bool:
    """Whether a client has sent a message back. Ids of calls, white space of arguments and dropped thoughts do not
    matter."""
    return _meaning(known) == _meaning(sent)


def _meaning(message: Message) -> tuple[Any, ...]:
    calls = [(call["function"]["name"], arguments_of(call["function"])) for call in message.get("tool_calls") or []]
    content, images = message.get("content"), images_of([message])
    if images and isinstance(content, list):
        content = [part for part in content if not _is_image(part)]
    return message.get("role"), text_of(content).strip(), calls, images
