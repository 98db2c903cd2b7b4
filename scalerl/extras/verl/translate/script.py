"""Reads the commands of verl in a launch script without running it: quotes, variables, arrays and sums."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field


def _parentheses(depth: int = 4) -> str:
    """A pattern of a text in parentheses, in which quotes and further parentheses are closed."""
    nested = r"(?!)"
    for _ in range(depth):
        double = rf'"(?>\\.|[^"\\$`]|\$(?:{nested})|`[^`]*`|\$)*"'
        nested = rf"\((?>[^()'\"\\]|\\.|'[^']*'|{double}|{nested})*\)"
    return nested


_COMMAND = rf"\${_parentheses()}|`[^`]*`"
_VARIABLE = r"\$\{(?>[^{}]|\{[^{}]*\})*\}|\$(?:\w+|[@*#?$!])"
_DOUBLE = rf'"(?>\\.|[^"\\$`]|{_COMMAND}|{_VARIABLE}|\$)*"'
# A word of the shell is one piece after another.
_PIECE = (
    rf"(?P<gap>\\\n)|'(?P<single>[^']*)'|(?P<double>{_DOUBLE})|\\(?P<escaped>.)|(?P<command>{_COMMAND})|"
    rf"(?P<variable>{_VARIABLE})|(?P<plain>\d?>&\d?|&>>?|[^\s;&|()'\"\\$`]+|\$)"
)
_PIECES = re.compile(_PIECE, re.DOTALL)
_IN_DOUBLE = re.compile(rf'\\(?P<escaped>["\\$`\n])|(?P<command>{_COMMAND})|(?P<variable>{_VARIABLE})', re.DOTALL)
_TOKEN = re.compile(
    r"(?P<skip>[ \t\r]+|\\\n|\#[^\n]*)|(?P<function>(?:function\s+[\w-]+(?:\s*\(\))?|[\w-]+\s*\(\))\s*\{)|"
    rf"(?P<array>\w+\+?=)\(|(?P<word>(?:{re.sub('[?]P<[a-z]+>', '?:', _PIECE)})+)|(?P<operator>;;|&&|\|\||[;|&\n()])|.",
    re.DOTALL,
)
_HEREDOC = re.compile(
    r"^(?P<head>.*)<<-?[ \t]*(['\"]?)(?P<end>\w+)\2(?P<rest>.*)\n(?P<body>(?:.*\n)*?)[ \t]*(?P=end)$", re.MULTILINE
)
# A module of verl's; its recipes are also started as modules by themselves.
_MODULE = re.compile(r"(verl|recipe|scalerl)\.|main_\w+$")
_FILE = re.compile(r"(^|/)(main_\w+|\w*sft_trainer\w*)\.py$")
_RUNS_VERL = re.compile(r"(^|\s)(-m\s+((verl|recipe|scalerl)\.|main_\w)|\S*\bmain_\w+\.py\b|\S*sft_trainer\w*\.py\b)")
_OF_TORCHRUN = {"nproc_per_node": "trainer.n_gpus_per_node", "nnodes": "trainer.nnodes"}
_DECLARING = ("export", "local", "declare", "readonly", "typeset")
_CLOSERS = {"if": "fi", "case": "esac", "for": "done", "while": "done", "until": "done", "select": "done"}
# A word as it is written, or `NAME=` or `NAME+=` with the items of an array.
_Word = str | tuple[str, list[str]]


@dataclass(frozen=True)
class Command:
    """A Python program and its arguments. What could not be expanded stays in them as `$NAME` or `$(...)`.

    launched: arguments of torchrun -> the same as arguments of scalerl.
    """

    program: str
    arguments: list[str]
    line: int
    launched: dict[str, str] = field(default_factory=dict)


@dataclass
class LaunchScript:
    """What a launch script runs.

    commands: those of verl's programs.  notes: what was left out or could not be known, by line.
    """

    commands: list[Command] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_script(text: str) -> LaunchScript:
    """Reads the commands of verl in a bash script, without running it."""
    interpreter = _Interpreter()
    interpreter.read(text)
    return interpreter.script


def split_commands(text: str) -> Iterator[tuple[str, bool]]:
    """Yields the pieces of a text, in order, and of each whether it is a `$(...)` or a text in backticks."""
    place = 0
    for match in re.finditer(rf"\\.|({_COMMAND})", text, re.DOTALL):
        if match[1] and not match[1].startswith("$(("):
            yield text[place : match.start()], False
            yield match[1], True
            place = match.end()
    yield text[place:], False


def _statements(text: str) -> Iterator[tuple[list[_Word], int, str]]:
    """Yields the words of each statement, its line from 1, and the operator behind it."""
    text = _HEREDOC.sub(_without_heredoc, text)
    words: list[_Word] = []
    items: list[str] | None = None
    start = 0
    for token in _TOKEN.finditer(f"{text}\n"):
        kind, written = token.lastgroup, token[0]
        if not words:
            start = token.start()
        if items is not None and written == ")":
            items = None
        elif items is not None and kind in ("word", None):
            items.append(written)
        elif kind == "array":
            items = []
            words.append((token["array"], items))
        elif kind == "operator" and items is None:
            yield words, text.count("\n", 0, start) + 1, written
            words = []
        elif kind != "skip" and items is None:
            words.append(written)


def _without_heredoc(match: re.Match[str]) -> str:
    """Blanks the body of a heredoc line by line, except one that is fed to a shell."""
    if match["head"].endswith("<"):
        return match[0]
    if re.search(r"\b(bash|sh)\b(\s+-\w+)*\s*$", match["head"]):
        return f"\n{match['body']}"
    return match["head"] + match["rest"] + "\n" * (match["body"].count("\n") + 1)


class _Interpreter:
    def __init__(self) -> None:
        self.script = LaunchScript()
        self.variables: dict[str, str | list[str]] = {}
        # The blocks around a statement: the word that ends each, and the name of one that is left out.
        self.blocks: list[tuple[str, str]] = []
        self.line = 0

    def read(self, text: str, first_line: int = 1) -> None:
        is_left_out = False
        for words, line, end in _statements(text):
            self.line = first_line - 1 + line
            rest: list[_Word] | None = words
            while words and (rest := self._after_keyword(words)) is not None:
                words = rest
            names = [name for _, name in self.blocks if name]
            if words and names:
                self._name_program(words, names[0])
            elif words and words[0] in ("[", "[[", "test") and end in ("&&", "||"):
                self._note(f"what depends on the condition `{' '.join(map(str, words))}` is left out")
                is_left_out = True
            elif words and is_left_out:
                is_left_out = end == "&&"
            elif words:
                self._simple(words)

    def _note(self, text: str) -> None:
        note = f"line {self.line}: {text}"
        if note not in self.script.notes:
            self.script.notes.append(note)

    def _name_program(self, words: list[_Word], block: str) -> None:
        """Says of a program of verl in a loop or a function that it is not translated."""
        if program := _program([word for word in words if isinstance(word, str)]):
            self._note(f"{program[0]} is in {block}, and not translated; put the command into a separate file")

    def _after_keyword(self, words: list[_Word]) -> list[_Word] | None:
        """The words behind a keyword; none behind the head of a block; None where the first word is no keyword."""
        first, rest = words[0], words[1:]
        if not isinstance(first, str):
            return None
        if self.blocks and first == self.blocks[-1][0]:
            self.blocks.pop()
        elif first.endswith("{") or first in _CLOSERS:
            closer = _CLOSERS.get(first, "}")
            function = re.sub(r"^function\s|[\s(){]", "", first)
            name = f"`{first} ... {closer}`" if first in _CLOSERS else f"the function {function}" if function else ""
            if name and not any(name for _, name in self.blocks):
                self._note(f"{name} is left out")
            self.blocks.append((closer, name))
            return [] if first in _CLOSERS else rest
        elif first not in ("then", "do", "else"):
            return None
        return rest

    def _simple(self, words: list[_Word]) -> None:
        first = words[0]
        index = 1 if first in _DECLARING else 0
        while index < len(words) and self._assign(words[index]):
            index += 1
        if index == len(words) or first in _DECLARING:
            return
        fields = [text for word in words[index:] if isinstance(word, str) for text in self._fields(word)]
        if fields[:1] in (["source"], ["."], ["let"]):
            self._note(f"`{' '.join(fields)}` is not read")
        elif (command := _program(fields)) is not None:
            program, arguments = command
            launched = _launched(fields[: len(fields) - len(arguments)])
            self.script.commands.append(Command(program, _until_redirection(arguments), self.line, launched))
        elif any(re.search(r"(^|/)((ba|z|)sh|ssh)$", text) for text in fields):
            for word in words:
                # What another shell runs: `bash -c "..."`, `ssh HOST "..."`, `srun ... bash -c '...'`.
                if isinstance(word, str) and word[0] in "'\"" and _RUNS_VERL.search(word):
                    self.read(self._text(word), self.line)

    def _assign(self, word: _Word) -> bool:
        """Takes a `NAME=...` or `NAME+=...`; returns whether the word is one."""
        match = re.match(r"(\w+)(\+?)=", word if isinstance(word, str) else word[0])
        if match is None:
            return False
        before = self.variables.get(match[1], "") if match[2] else ""
        if not isinstance(word, str):
            items = [text for item in word[1] for text in self._fields(item)]
            self.variables[match[1]] = [*([before] if before and isinstance(before, str) else before), *items]
        else:
            text = self._text(word[match.end() :])
            self.variables[match[1]] = (before if isinstance(before, str) else " ".join(before)) + text
        return True

    # Expansions

    def _text(self, word: str) -> str:
        """A word expanded to one text."""
        return "".join(text for text, _ in self._expanded(word))

    def _fields(self, word: str) -> list[str]:
        """A word expanded to arguments: an array becomes its items, a variable without quotes is split at blanks."""
        array = re.fullmatch(r"(\"?)\$(?:\{(\w+)\[[@*]\]\}|[@*]|\{[@*]\})\1", word)
        if array is not None:
            value = self.variables.get(array[2] or "", [])
            return [value] if isinstance(value, str) else list(value)
        fields, is_quoted = [""], False
        for text, is_split in self._expanded(word):
            # A command that is left in the text is one argument with its blanks.
            is_split = is_split and not re.search(r"\$\(|`", text)
            pieces = re.split(r"\s+", text) if is_split else [text]
            is_quoted = is_quoted or not is_split
            fields[-1] += pieces[0]
            fields += pieces[1:]
        return [text for text in fields if text or (is_quoted and len(fields) == 1)]

    def _expanded(self, word: str) -> Iterator[tuple[str, bool]]:
        """The pieces of a word, and of each whether the shell splits it at blanks."""
        for piece in _PIECES.finditer(word):
            if piece["double"] is not None:
                yield _IN_DOUBLE.sub(self._expansion, piece["double"][1:-1]), False
            elif piece["variable"] or piece["command"]:
                yield self._expansion(piece), piece["variable"] is not None
            elif piece["gap"] is None:
                yield piece["single"] or piece["escaped"] or piece["plain"] or "", False

    def _expansion(self, match: re.Match[str]) -> str:
        written = match[0]
        if match["escaped"] is not None:
            return "" if match["escaped"] == "\n" else match["escaped"]
        if written.startswith("$(("):
            return self._sum(written)
        return self._command(written) if match["command"] else self._variable(written)

    def _sum(self, written: str) -> str:
        """The value of `$((...))`, in which a name stands for its value; the text itself where it is no such sum."""

        def number(match: re.Match[str]) -> str:
            value = self._variable(match[0]) if match[0].startswith("$") else self.variables.get(match[0], match[0])
            return value if isinstance(value, str) else match[0]

        numbers = re.sub(rf"{_VARIABLE}|[A-Za-z_]\w*", number, written[3:-2])
        if re.fullmatch(r"[\d\s()+*/%-]+", numbers) and "**" not in numbers:
            with contextlib.suppress(SyntaxError, ZeroDivisionError, TypeError):
                # Digits, operators and parentheses: nothing of the script is run.
                return str(int(eval(numbers.strip().replace("/", "//"))))
        self._note(f"`{written}` is not computed")
        return written

    def _command(self, written: str) -> str:
        """A `$(...)` with the values of the script's own variables, which the shell that runs it will not have."""
        self._note(f"`{written}` is a command, and not run")

        def value(match: re.Match[str]) -> str:
            known = self.variables.get(match[1] or match[2])
            if isinstance(known, str) and re.fullmatch(r"[\w./:@%+=,-]*", known):
                return known
            if known is not None:
                self._note(f"`{match[0]}` in `{written}` is set by the script; set it in your shell, too")
            return match[0]

        return re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, written)

    def _variable(self, written: str) -> str:
        parts = re.fullmatch(r"\$\{?(\w+|[@*#?$!])(?:\[[@*]\])?(?:(:?)([-=+?])(.*?))?\}?", written, re.DOTALL)
        if parts is None:
            self._note(f"`{written}` is not expanded")
            return written
        name, colon, sign, other = parts.groups()
        value = self.variables.get(name)
        is_set = value is not None and (value != "" or not colon)
        if sign == "+":
            return self._text(other) if is_set else ""
        if value is not None and (is_set or sign is None):
            return value if isinstance(value, str) else " ".join(value)
        if sign in ("-", "="):
            default = self._text(other)
            if sign == "=":
                self.variables[name] = default
            if not name.isdigit():
                self._note(f"${name} is not set in the script: its default {default!r} is taken")
            return default
        if name in ("@", "*"):
            return ""
        self._note(f"${name} is not set in the script")
        return f"${name}"


def _program(fields: list[str]) -> tuple[str, list[str]] | None:
    """The module or file of verl that a command runs, and its arguments; None where it runs no such program."""
    for index, text in enumerate(fields):
        if text == "-m" and index + 1 < len(fields) and _MODULE.match(fields[index + 1]):
            return fields[index + 1], fields[index + 2 :]
        if _FILE.search(text):
            return text, fields[index + 1 :]
    return None


def _launched(fields: list[str]) -> dict[str, str]:
    """The devices that torchrun was given: its arguments -> those of scalerl."""
    if not any(re.search(r"(^|/)torchrun$|^torch\.distributed\.(run|launch)$", text) for text in fields):
        return {}
    settings = {}
    for text, following in zip(fields, [*fields[1:], ""], strict=True):
        option, equals, value = text.partition("=")
        key, value = _OF_TORCHRUN.get(option.replace("-", "_").lstrip("_")), value if equals else following
        if key is not None and re.fullmatch(r"\d+|\$.*", value):
            settings[text if equals else f"{text} {value}"] = f"{key}={value}"
    return settings


def _until_redirection(arguments: list[str]) -> list[str]:
    ends = [index for index, text in enumerate(arguments) if re.match(r"\d?>|&>|<", text)]
    return arguments[: ends[0]] if ends else arguments
