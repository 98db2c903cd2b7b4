"""The text of a shell script -> statements of words: quotes, continuations, arrays, heredocs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Quote = Literal["", "'", '"']
# Ends of a statement.
OPERATORS = (";;", "&&", "||", ";", "|", "&", "\n")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")


@dataclass(frozen=True)
class Part:
    """Text of a word between two quotes."""

    text: str
    quote: Quote


@dataclass
class Statement:
    """words: each its parts. items: of the words that assign an array. ends: the operator behind the statement."""

    line: int
    words: list[list[Part]] = field(default_factory=list)
    # Number of a word `NAME=(...)` -> the words between the parentheses.
    items: dict[int, list[list[Part]]] = field(default_factory=dict)
    ends: str = "\n"

    def raw(self, number: int) -> str:
        return "".join(part.text for part in self.words[number])


def without_heredocs(text: str) -> str:
    """The script with the bodies of its heredocs blank, line by line; what is fed to a shell is kept."""
    lines, end, kept = [], None, False
    for line in text.split("\n"):
        if end is not None:
            if line.strip() == end:
                lines, end = [*lines, ""], None
            else:
                lines.append(line if kept else "")
            continue
        if (found := _HEREDOC.search(line)) and "<<<" not in line:
            end = found[2]
            kept = re.search(r"\b(bash|sh)\b(\s+-\w+)*\s*<<", line) is not None
            line = "" if kept else line[: found.start()] + line[found.end() :]
        lines.append(line)
    return "\n".join(lines)


def statements(text: str) -> Iterator[Statement]:
    """Those of a script, in order. A syntax that is not understood ends up inside words."""
    reader = _Reader(without_heredocs(text))
    while not reader.done:
        statement = reader.statement()
        if statement.words or statement.ends == ";;":
            yield statement


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.at, self.line = text, 0, 1

    @property
    def done(self) -> bool:
        return self.at >= len(self.text)

    def _take(self, count: int = 1) -> str:
        taken = self.text[self.at : self.at + count]
        self.line += taken.count("\n")
        self.at += count
        return taken

    def _skip_blanks(self, newlines: bool = False) -> None:
        while not self.done:
            if self.text.startswith("\\\n", self.at):
                self._take(2)
            elif self.text[self.at] in " \t\r" or (newlines and self.text[self.at] == "\n"):
                self._take()
            elif self.text[self.at] == "#":
                while not self.done and self.text[self.at] != "\n":
                    self._take()
            else:
                return

    def statement(self) -> Statement:
        self._skip_blanks()
        found = Statement(self.line)
        while not self.done:
            operator = next((name for name in OPERATORS if self.text.startswith(name, self.at)), None)
            if operator is not None and not self._is_redirection(operator):
                self._take(len(operator))
                found.ends = operator
                return found
            word = self._word()
            if re.fullmatch(r"\w+\+?=", "".join(part.text for part in word)) and self.text.startswith("(", self.at):
                found.items[len(found.words)] = self._array()
            found.words.append(word)
            self._skip_blanks()
        return found

    def _is_redirection(self, operator: str) -> bool:
        # `2>&1` and `&>log` are no ends.
        around = self.text[max(self.at - 1, 0) : self.at + 2]
        return operator == "&" and (around.startswith(">&") or around[1:] == "&>")

    def _array(self) -> list[list[Part]]:
        self._take()
        items = []
        while True:
            self._skip_blanks(newlines=True)
            if self.done or self.text[self.at] == ")":
                self._take()
                return items
            items.append(self._word(")"))

    def _word(self, stop: str = "") -> list[Part]:
        parts: list[Part] = []
        bare = ""
        while not self.done:
            rest, char = self.text[self.at :], self.text[self.at]
            if rest.startswith("\\\n"):
                self._take(2)
            elif self._ends_word(char, bare, stop):
                break
            elif char in "'\"":
                quote: Quote = "'" if char == "'" else '"'
                parts, bare = self._flushed(parts, bare), ""
                parts.append(Part(self._quoted(quote), quote))
            elif char == "\\":
                parts, bare = self._flushed(parts, bare), ""
                parts.append(Part(self._take(2)[1:], "'"))
            elif rest.startswith(("$(", "${", "`")):
                bare += self._nested()
            else:
                bare += self._take()
        return self._flushed(parts, bare)

    def _ends_word(self, char: str, bare: str, stop: str) -> bool:
        if char == "&":
            return not (bare.endswith(">") or self.text.startswith("&>", self.at))
        if char == "(":
            return re.fullmatch(r"\w+\+?=", bare) is not None
        return char in " \t\r\n" + stop or (char in ";|" and not stop)

    @staticmethod
    def _flushed(parts: list[Part], bare: str) -> list[Part]:
        return [*parts, Part(bare, "")] if bare else parts

    def _quoted(self, quote: Quote) -> str:
        self._take()
        text = ""
        while not self.done and self.text[self.at] != quote:
            if quote == '"' and self.text[self.at] == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "\\", "`"):
                self._take()
                text += self._take()
            elif quote == '"' and self.text.startswith("\\\n", self.at):
                self._take(2)
            elif quote == '"' and self.text.startswith(("$(", "${"), self.at):
                text += self._nested()
            else:
                text += self._take()
        self._take()
        return text

    def _nested(self) -> str:
        """`$(...)`, `$((...))`, `${...}` or backticks, whole."""
        if self.text[self.at] == "`":
            end = self.text.find("`", self.at + 1)
            return self._take((end if end > 0 else len(self.text)) - self.at + 1)
        opening, closing = ("(", ")") if self.text[self.at + 1] == "(" else ("{", "}")
        text, depth = self._take(2), 1
        while not self.done and depth:
            depth += (self.text[self.at] == opening) - (self.text[self.at] == closing)
            text += self._take()
        return text
