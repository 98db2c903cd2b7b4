"""Splits the text of a shell script into statements of words: quotes, continuations, arrays, heredocs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Quote = Literal["", "'", '"']
# Operators that end a statement.
OPERATORS = (";;", "&&", "||", ";", "|", "&", "\n")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")


@dataclass(frozen=True)
class QuotedText:
    """A piece of a word whose text has one kind of quotes.  quote: "" for text without quotes."""

    text: str
    quote: Quote


@dataclass
class Statement:
    """One statement of a script.

    line: its first line, from 1.  words: the parts of each word.  ends: the operator behind the statement.
    """

    line: int
    words: list[list[QuotedText]] = field(default_factory=list)
    # Number of a word `NAME=(...)` -> the words between the parentheses.
    items: dict[int, list[list[QuotedText]]] = field(default_factory=dict)
    ends: str = "\n"

    def raw(self, number: int) -> str:
        """The text of a word, without its quotes."""
        return "".join(part.text for part in self.words[number])


def without_heredocs(text: str) -> str:
    """Blanks the bodies of a script's heredocs line by line, except those that are fed to a shell."""
    lines, end, kept = [], None, False
    for line in text.split("\n"):
        if end is not None:
            if line.strip() == end:
                lines, end = [*lines, ""], None
            else:
                lines.append(line if kept else "")
            continue
        if (match := _HEREDOC.search(line)) and "<<<" not in line:
            end = match[2]
            kept = re.search(r"\b(bash|sh)\b(\s+-\w+)*\s*<<", line) is not None
            line = "" if kept else line[: match.start()] + line[match.end() :]
        lines.append(line)
    return "\n".join(lines)


def statements(text: str) -> Iterator[Statement]:
    """Yields the statements of a script, in order. Syntax that is not understood ends up inside words."""
    reader = _Reader(without_heredocs(text))
    while not reader.done:
        statement = reader.statement()
        if statement.words or statement.ends == ";;":
            yield statement


def split_commands(text: str) -> Iterator[tuple[str, bool]]:
    """Yields the pieces of a text, in order, and of each whether it is a `$(...)` or a text in backticks."""
    reader = _Reader(text)
    plain = ""
    while not reader.done:
        rest = text[reader.position :]
        if rest.startswith(("$(", "`")) and not rest.startswith("$(("):
            if plain:
                yield plain, False
            plain = ""
            yield reader.nested(), True
        elif rest.startswith(("$(", "${")):
            plain += reader.nested()
        else:
            plain += reader.advance(2 if rest[0] == "\\" else 1)
    if plain:
        yield plain, False


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.position, self.line = text, 0, 1

    @property
    def done(self) -> bool:
        return self.position >= len(self.text)

    def advance(self, count: int = 1) -> str:
        taken = self.text[self.position : self.position + count]
        self.line += taken.count("\n")
        self.position += count
        return taken

    def _skip_blanks(self, newlines: bool = False) -> None:
        while not self.done:
            if self.text.startswith("\\\n", self.position):
                self.advance(2)
            elif self.text[self.position] in " \t\r" or (newlines and self.text[self.position] == "\n"):
                self.advance()
            elif self.text[self.position] == "#":
                while not self.done and self.text[self.position] != "\n":
                    self.advance()
            else:
                return

    def statement(self) -> Statement:
        self._skip_blanks()
        parsed = Statement(self.line)
        while not self.done:
            operator = next((name for name in OPERATORS if self.text.startswith(name, self.position)), None)
            if operator is not None and not self._is_redirection(operator):
                self.advance(len(operator))
                parsed.ends = operator
                return parsed
            word = self._word()
            if re.fullmatch(r"\w+\+?=", "".join(part.text for part in word)) and self.text.startswith(
                "(", self.position
            ):
                parsed.items[len(parsed.words)] = self._array()
            parsed.words.append(word)
            self._skip_blanks()
        return parsed

    def _is_redirection(self, operator: str) -> bool:
        # `2>&1` and `&>log` are no ends.
        around = self.text[max(self.position - 1, 0) : self.position + 2]
        return operator == "&" and (around.startswith(">&") or around[1:] == "&>")

    def _array(self) -> list[list[QuotedText]]:
        self.advance()
        items = []
        while True:
            self._skip_blanks(newlines=True)
            if self.done or self.text[self.position] == ")":
                self.advance()
                return items
            items.append(self._word(")"))

    def _word(self, stop: str = "") -> list[QuotedText]:
        parts: list[QuotedText] = []
        bare = ""
        while not self.done:
            rest, char = self.text[self.position :], self.text[self.position]
            if rest.startswith("\\\n"):
                self.advance(2)
            elif self._ends_word(char, bare, stop):
                break
            elif char in "'\"":
                quote: Quote = "'" if char == "'" else '"'
                parts, bare = self._flushed(parts, bare), ""
                parts.append(QuotedText(self._quoted(quote), quote))
            elif char == "\\":
                parts, bare = self._flushed(parts, bare), ""
                parts.append(QuotedText(self.advance(2)[1:], "'"))
            elif rest.startswith(("$(", "${", "`")):
                bare += self.nested()
            else:
                bare += self.advance()
        return self._flushed(parts, bare)

    def _ends_word(self, char: str, bare: str, stop: str) -> bool:
        if char == "&":
            return not (bare.endswith(">") or self.text.startswith("&>", self.position))
        if char == "(":
            return re.fullmatch(r"\w+\+?=", bare) is not None
        return char in " \t\r\n" + stop or (char in ";|" and not stop)

    @staticmethod
    def _flushed(parts: list[QuotedText], bare: str) -> list[QuotedText]:
        return [*parts, QuotedText(bare, "")] if bare else parts

    def _quoted(self, quote: Quote) -> str:
        self.advance()
        text = ""
        while not self.done and self.text[self.position] != quote:
            if (
                quote == '"'
                and self.text[self.position] == "\\"
                and self.text[self.position + 1 : self.position + 2] in ('"', "\\", "`")
            ):
                self.advance()
                text += self.advance()
            elif quote == '"' and self.text.startswith("\\\n", self.position):
                self.advance(2)
            elif quote == '"' and self.text.startswith(("$(", "${", "`"), self.position):
                text += self.nested()
            else:
                text += self.advance()
        self.advance()
        return text

    def nested(self) -> str:
        """Takes a whole `$(...)`, `$((...))`, `${...}` or text in backticks."""
        if self.text[self.position] == "`":
            end = self.text.find("`", self.position + 1)
            return self.advance((end if end > 0 else len(self.text)) - self.position + 1)
        opening, closing = ("(", ")") if self.text[self.position + 1] == "(" else ("{", "}")
        has_quotes = opening == "(" and not self.text.startswith("$((", self.position)
        text, depth = self.advance(2), 1
        while not self.done and depth:
            char = self.text[self.position]
            if has_quotes and char in "'\"\\":
                # Parentheses in the quotes of a command end nothing.
                text += self._raw_quoted()
                continue
            depth += (char == opening) - (char == closing)
            text += self.advance()
        return text

    def _raw_quoted(self) -> str:
        """Takes a quoted text, or a backslash and what is behind it, as it is written."""
        quote = self.advance()
        if quote == "\\":
            return quote + self.advance()
        text = quote
        while not self.done and self.text[self.position] != quote:
            if quote == '"' and self.text.startswith(("$(", "${"), self.position):
                text += self.nested()
            else:
                text += self.advance(2 if quote == '"' and self.text[self.position] == "\\" else 1)
        return text + self.advance()
