"""Text that a tokenizer has no token for: it becomes the unknown token, or nothing, so that no model ever sees it."""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from scalerl.data.problems import FileProblems, excerpt, shown_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_MAX_SHOWN = 10
# For private use: in no vocabulary.
_NO_CHARACTER = "\ue5d3"


class UnknownText:
    """Finds what a tokenizer has no token for."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        # The model of a tokenizer may have an unknown token of which transformers is not told.
        names = (tokenizer.unk_token, getattr(getattr(backend, "model", None), "unk_token", None))
        tokens = {name: tokenizer.convert_tokens_to_ids(name) for name in names if isinstance(name, str)}
        self._names = {token: name for name, token in tokens.items() if isinstance(token, int)}
        # Other tokenizers have bytes, or the unknown token, for what they do not know.
        self._leaves_out = tokenizer.is_fast and not self._encode(_NO_CHARACTER)

    @property
    def ids(self) -> set[int]:
        """Ids of the unknown token that a text can have for no other reason: not those that end or begin a text."""
        others = (self._tokenizer.eos_token_id, self._tokenizer.bos_token_id)
        return {token for token in self._names if token not in others}

    def find(self, text: str, input_ids: Sequence[int]) -> list[str]:
        """The pieces of a text that became the unknown token, one for each, and the characters that became nothing.

        input_ids: the text's tokens, without any that are not of the text.
        """
        # The text may name the token itself, which a chat template does where it is the end of a turn, too.
        if any(list(input_ids).count(token) > text.count(name) for token, name in self._names.items()):
            return self._unknown(text)
        return self._left_out(text) if self._leaves_out else []

    def _unknown(self, text: str) -> list[str]:
        if not self._tokenizer.is_fast:
            return [c for c in text if self._names.keys() & set(self._encode(c))] or sorted(self._names.values())
        pieces = [(token, text[start:end]) for token, start, end in self._places(text) if token in self._names]
        return [piece for token, piece in pieces if piece != self._names[token]]

    def _left_out(self, text: str) -> list[str]:
        kept = bytearray(len(text))
        for _, start, end in self._places(text):
            kept[start:end] = b"1" * (end - start)
        return [c for c, is_kept in zip(text, kept, strict=True) if not is_kept and _is_visible(c)]

    def _places(self, text: str) -> list[tuple[int, int, int]]:
        """The tokens of a text with their places, as (token, start, end) in characters."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        places = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return [(token, start, end) for token, (start, end) in places]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _is_visible(character: str) -> bool:
    """False for what tokenizers leave out by design: spaces, accents, control characters."""
    return character.isprintable() and not character.isspace() and unicodedata.category(character)[0] != "M"


def unwritable_ascii(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The printable ASCII characters that a tokenizer has no token for."""
    unknown = UnknownText(tokenizer)
    characters = [chr(code) for code in range(ord(" "), ord("~") + 1)]
    return [c for c in characters if unknown.find(c, tokenizer.encode(c, add_special_tokens=False))]


def unknown_in_messages(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[dict[str, Any]]]
) -> UnknownRows:
    """Counts unknown tokens in the contents of messages, without their chat template."""
    unknown, rows = UnknownText(tokenizer), UnknownRows()
    for row, messages in enumerate(conversations):
        text = "".join(message["content"] for message in messages)
        input_ids = tokenizer.encode(text, add_special_tokens=False)
        rows.add(row, len(input_ids), unknown.find(text, input_ids))
    return rows


@dataclass
class UnknownRows:
    """Counts unknown tokens in the rows of a file, and notes what else of them the model reads in another way.

    left_out: what the chat template does not write -> rows.  special: special token in the text of messages -> rows.
    """

    num_tokens: int = 0
    num_unknown: int = 0
    pieces: dict[str, int] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)
    left_out: dict[str, list[int]] = field(default_factory=dict)
    special: dict[str, list[int]] = field(default_factory=dict)

    def add(
        self, row: int, num_tokens: int, pieces: Iterable[str], left_out: str = "", special: Iterable[str] = ()
    ) -> None:
        """Counts a row.  pieces: as `UnknownText.find` returns them.  left_out, special: as those of `Tokens`."""
        self.num_tokens += num_tokens
        if left_out:
            self.left_out.setdefault(left_out, []).append(row)
        for token in dict.fromkeys(special):
            self.special.setdefault(token, []).append(row)
        for piece in pieces:
            self.num_unknown += 1
            self.pieces[piece] = self.pieces.get(piece, 0) + 1
            if row not in self.rows[-1:]:
                self.rows.append(row)

    def __str__(self) -> str:
        share = self.num_unknown / max(1, self.num_tokens)
        return f"{self.num_unknown} unknown tokens ({share:.2%} of {self.num_tokens}) for {shown_pieces(self.pieces)}"

    def report(self, name: str, column: str, problems: FileProblems, *, allow: bool) -> None:
        """Adds the problems of the rows with unknown tokens or text that is left out; allow: logs lines instead.

        Special tokens in the text are a line in any case.
        """
        for token, rows in self.special.items():
            log.warning(
                "%s: %s: the text of messages has the special token %r, which the model reads as such (a prompt that "
                "a chat template has written already is written into one again: give its messages)",
                name, shown_rows(rows), token,
            )  # fmt: skip
        for what, rows in self.left_out.items():
            problem = f"{what}, which the chat template leaves out"
            if allow:
                log.warning("%s: %s: %s", name, shown_rows(rows), problem)
                continue
            advice = (
                "the model would not see it: write it into a message that the template shows, take another template "
                "(data.chat_template_path), or train without it by data.unknown_tokens=allow"
            )
            for row in rows:
                problems.add(problem, advice, row=row, column=column)
        if allow and self.rows:
            log.warning("%s: %s: %s", name, shown_rows(self.rows), self)
            return
        advice = (
            "the tokenizer has no token for this text, which the model would not see: change the rows, take another "
            "model, or train without it by data.unknown_tokens=allow"
        )
        for row in self.rows:
            problems.add(str(self), advice, row=row, column=column)


def shown_pieces(pieces: Iterable[str]) -> str:
    """Pieces of text for messages, quoted; the first ones of many."""
    quoted = list(map(excerpt, pieces))
    more = f" and {len(quoted) - _MAX_SHOWN} more" if len(quoted) > _MAX_SHOWN else ""
    return ", ".join(quoted[:_MAX_SHOWN]) + more
