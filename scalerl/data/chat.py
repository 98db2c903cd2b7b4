"""Loading of a tokenizer from a local directory, and its use: chat template and encoding."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from scalerl.base.lean_imports import lean_imports
from scalerl.data.pictures import PictureSource, texts_of, with_parts
from scalerl.data.problems import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
# An answer that no chat template has in its own text.
_ANSWER = "qz7answer7zq"
# Templates write the words of these as they are.
_SHOWN_ROLES = ("system", "developer", "user")
# Added tokens with which templates mark roles, special or not: <|user|> and DeepSeek's with wide bars.
_ROLE = re.compile(r"<[|\uff5c].+[|\uff5c]>")


def load_tokenizer(path: str | os.PathLike, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a local directory; never reaches the network.

    Raises DataError when the directory or its tokenizer files are missing, or the tokenizer does not load.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise DataError(
            [
                f"tokenizer directory {directory} does not exist (working directory {Path.cwd()}); "
                "give a local directory: names on a hub are not downloaded"
            ]
        )
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        present = ", ".join(sorted(entry.name for entry in directory.iterdir())[:20]) or "nothing"
        raise DataError(
            [f"{directory} holds no tokenizer: add tokenizer.json (or tokenizer.model, vocab.json); it has {present}"]
        )
    # A second to import, and only a process that tokenizes needs it.
    with lean_imports(compiler=False):
        from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers, tokenizers and remote code raise bare Exception here
        hint = "" if trust_remote_code else "; if it needs its own code, set trust_remote_code=true"
        raise DataError([f"tokenizer in {directory} does not load: {type(error).__name__}: {error}{hint}"]) from error


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises DataError when the tokenizer cannot turn messages into text."""
    if not tokenizer.chat_template:
        raise DataError(
            [
                f"tokenizer {tokenizer.name_or_path!r} has no chat template; put chat_template.jinja into its "
                "directory, or use the instruction-tuned model's tokenizer"
            ]
        )


def use_chat_template(tokenizer: PreTrainedTokenizerBase, path: str | None) -> None:
    """Gives the tokenizer the chat template in a file; with path None the tokenizer keeps its own.

    Raises DataError for a file that cannot be read or is empty.
    """
    if path is None:
        return
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError([f"data.chat_template_path = {path}: cannot be read ({error}); give a Jinja file"]) from error
    if not text.strip():
        raise DataError([f"data.chat_template_path = {path}: is empty; give a Jinja file"])
    tokenizer.chat_template = text


def ordinary_ends(tokenizer: PreTrainedTokenizerBase, eos_ids: Iterable[int]) -> Iterator[str]:
    """Yields each of the tokens that end a response and are ordinary text, which would cut answers off."""
    added = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    for token in sorted(set(eos_ids) - added):
        if (word := tokenizer.convert_ids_to_tokens(token)) is not None:
            yield (
                f"token {token} ends a response (eos_token_id of config.json and generation_config.json; left out: the "
                f"family's default), and is the ordinary text {word!r}; set eos_token_id to that of the tokenizer, "
                f"{tokenizer.eos_token_id} ({tokenizer.eos_token!r})"
            )


def template_without_end(
    tokenizer: PreTrainedTokenizerBase, eos_ids: Iterable[int], options: Mapping[str, Any] | None = None
) -> str | None:
    """A line about a chat template that ends an answer with no token that ends a response; else None.

    eos_ids: tokens that end a response, beside the tokenizer's own.  options: as those of `render`.
    """
    conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = render(tokenizer, conversation, add_generation_prompt=False, options=options)
    except Exception:  # there is no template, or whatever it raises for a conversation of this kind
        return None
    _, answer, after = text.rpartition(_ANSWER)
    own = cast("int | None", tokenizer.eos_token_id)
    ends = {*eos_ids, *([] if own is None else [own])}
    if not answer or not ends.isdisjoint(encode(tokenizer, [after])[0]):
        return None
    words = [f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in sorted(ends)]
    return (
        f"the chat template writes {after.strip()!r} after an answer, and a response ends only at "
        f"{', '.join(words) or 'its limit'}: "
        "a model that follows the template never stops before its length limit; add that token to eos_token_id "
        "in generation_config.json"
    )


class Conversation(NamedTuple):
    """Messages, and the function schemas that the chat template shows; None: those of data.chat_template_kwargs.

    images: the pictures that the messages show, in order.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    images: Sequence[PictureSource] = ()

    @property
    def shown(self) -> list[dict[str, Any]]:
        """The messages as the chat template takes them: with parts where they have pictures."""
        return with_parts(self.messages) if self.images else self.messages


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    options: Mapping[str, Any] | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """Renders messages to text by the chat template.

    options: data.chat_template_kwargs, variables of the template.  tools: of this row, in the place of theirs.
    """
    given: dict[str, Any] = {**(options or {}), **({"tools": tools} if tools else {})}
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt, **given)
    assert isinstance(text, str)
    return text


def left_out(conversation: Conversation, text: str, options: Mapping[str, Any] | None = None) -> str:
    """What of a conversation its chat template did not write: a message of the system or the user, or a tool; else "".

    text: what it rendered.  options: as those of `render`.  Thoughts of the assistant are left out by design, and
    results of tools may be written in other characters.
    """
    for i, message in enumerate(conversation.shown):
        role = message["role"]
        if role in _SHOWN_ROLES and not all(_has(text, content) for content in texts_of(message)):
            return f"message {i} ({role})"
    tools = conversation.tools or (options or {}).get("tools") or []
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    return next((f"tool {name}" for name in names if isinstance(name, str) and name not in text), "")


def _has(text: str, content: str) -> bool:
    """Whether a text has the content of a message, as it is, in JSON, or in other lines."""
    if content.strip() in text or json.dumps(content, ensure_ascii=False)[1:-1] in text:
        return True
    return "".join(content.split()) in "".join(text.split())


def unknown_options(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> str | None:
    """The variables of data.chat_template_kwargs that the chat template never names, as a line; None without any."""
    template = tokenizer.chat_template
    text = " ".join(template.values()) if isinstance(template, dict) else template or ""
    unknown = [name for name in options if not re.search(rf"\b{re.escape(str(name))}\b", text)]
    if not unknown:
        return None
    return (
        f"the chat template names no variable {', '.join(unknown)} (data.chat_template_kwargs), which changes nothing"
    )


class SpecialTokens:
    """Finds special tokens in the text of messages: a tokenizer makes of them what the chat template's own become.

    Tokens that mark roles are special too: some tokenizers do not say so of theirs.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = tokenizer.added_tokens_decoder.values()
        tokens = {token.content for token in added if token.special or _ROLE.fullmatch(token.content)}
        tokens |= set(tokenizer.all_special_tokens)
        names = sorted((re.escape(token) for token in tokens if token.strip()), key=len, reverse=True)
        self._pattern = re.compile("|".join(names)) if names else None

    def find(self, messages: Sequence[Mapping[str, Any]]) -> list[str]:
        """The special tokens in the contents, in order and each as often as it is there."""
        text = "\n".join(content for message in messages for content in texts_of(message))
        return [] if self._pattern is None else self._pattern.findall(text)

    def broken(self, text: str, mark: str) -> str:
        """The text with a mark after the first character of each special token."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda found: found[0][0] + mark + found[0][1:], text)


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Encodes rendered texts, into which the chat template has written the special tokens already."""
    if not texts:
        return []
    return tokenizer(
        list(texts), add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )["input_ids"]
