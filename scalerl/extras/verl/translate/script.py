"""Reads the commands of a launch script without running it: assignments, expansions, plain conditions."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from scalerl.extras.verl.translate.words import QuotedText, Statement, split_commands, statements

_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_EXPANSION = re.compile(
    r"\$\(\((?P<sum>.*?)\)\)|\$\{(?P<braced>[^{}]*(?:\{[^{}]*\}[^{}]*)*)\}|\$(?P<name>\w+|[@*#?$!])"
)
_BRACED = re.compile(r"(\w+|[@*])(\[[@*]\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
# A module of verl's; its recipes are also started as modules by themselves.
_MODULE = r"((verl|recipe|scalerl)\.|main_\w+$)"
_RUNS_VERL = re.compile(r"(^|\s)(-m\s+((verl|recipe|scalerl)\.|main_\w)|\S*\bmain_\w+\.py\b|\S*sft_trainer\w*\.py\b)")
_OF_TORCHRUN = {"nproc_per_node": "trainer.n_gpus_per_node", "nnodes": "trainer.nnodes"}
_DECLARING = ("export", "local", "declare", "readonly", "typeset")
_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}


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


@dataclass
class _Block:
    """A block of statements that the reader is in.

    kind: if, case, group or skipped.  active: its statements count.  done: one of its branches has been taken, or the
    brace that begins a function has been read.
    subject: the text that a case compares.
    """

    kind: str
    active: bool
    done: bool = False
    subject: str | None = None
    # Of a skipped block: what it is.
    name: str = ""
    # The alternatives of a case's pattern before the last one, each with its `|`.
    patterns: str = ""


def read_script(text: str) -> LaunchScript:
    """Reads the commands of verl in a bash script, without running it."""
    return _Interpreter().read(text)


class _Interpreter:
    def __init__(self) -> None:
        self.script = LaunchScript()
        self.variables: dict[str, str | list[str]] = {}
        self.blocks: list[_Block] = []
        self.line = 0

    def read(self, text: str) -> LaunchScript:
        self._read(text, first_line=1)
        return self.script

    def _read(self, text: str, first_line: int) -> None:
        for statement in statements(text):
            self.line = first_line - 1 + statement.line
            self._statement(statement)

    def _note(self, text: str) -> None:
        note = f"line {self.line}: {text}"
        if note not in self.script.notes:
            self.script.notes.append(note)

    @property
    def _active(self) -> bool:
        return all(block.active for block in self.blocks)

    # Statements

    def _statement(self, statement: Statement) -> None:
        block = self.blocks[-1] if self.blocks else None
        if block is not None and block.kind == "case" and statement.ends == "|" and not block.active:
            # A `|` between patterns, behind `case ... in` or alone.
            while statement.words and self._keyword(statement):
                pass
            block.patterns += "".join(statement.raw(number) + "|" for number in range(len(statement.words)))
            return
        while statement.words and self._keyword(statement):
            pass
        if statement.words and self._active:
            self._simple(statement)
        elif statement.words:
            self._skipped(statement)
        if statement.ends == ";;" and self.blocks and self.blocks[-1].kind == "case":
            self.blocks[-1].active = False

    def _skipped(self, statement: Statement) -> None:
        """Says of a program of verl in a loop or a function that it is not translated."""
        outside = next((block.name for block in self.blocks if block.kind == "skipped"), None)
        program = _program([statement.raw(number) for number in range(len(statement.words))])
        if outside is not None and program is not None:
            self._note(f"{program[0]} is in {outside}, and not translated; put its command into a file of its own")

    def _keyword(self, statement: Statement) -> bool:
        """Takes a keyword away if the first word is one, a condition as a whole.

        Returns whether a keyword was taken and words are left.
        """
        first = statement.raw(0)
        block = self.blocks[-1] if self.blocks else None
        if first in ("if", "elif"):
            self._condition(first, statement)
            statement.words.clear()
        elif first in ("then", "do", "{", "}", "done", "fi", "esac", "else"):
            if first in ("fi", "done", "esac", "}") and self.blocks:
                self.blocks.pop()
            if first == "else" and block is not None and block.kind == "if":
                block.active, block.done = not block.done, True
            if first == "{" and block is not None and block.kind == "skipped" and not block.done:
                block.done = True
            elif first == "{":
                self.blocks.append(_Block("group", True))
            self._drop(statement)
        elif first in ("for", "while", "until", "select"):
            if self._active:
                self._note(f"a loop ({first}) is left out")
            self.blocks.append(_Block("skipped", False, True, name=f"a loop ({first})"))
            statement.words.clear()
        elif first == "case":
            subject = self._text(statement.words[1]) if len(statement.words) > 1 else None
            self.blocks.append(_Block("case", False, subject=subject))
            del statement.words[: min(3, len(statement.words))]
        elif re.fullmatch(r"[\w-]+\(\)", first) or first == "function":
            name = statement.raw(1 if first == "function" and len(statement.words) > 1 else 0).rstrip("()")
            if self._active:
                self._note(f"the function {name} is left out")
            words = [statement.raw(number) for number in range(len(statement.words))]
            self.blocks.append(_Block("skipped", False, "{" in words, name=f"the function {name}"))
            for _ in words[: words.index("{") + 1] if "{" in words else words:
                self._drop(statement)
        elif block is not None and block.kind == "case" and first.endswith(")") and not first.startswith("$"):
            self._case_pattern(block, first.rstrip(")").lstrip("("))
            self._drop(statement)
        else:
            return False
        return bool(statement.words)

    @staticmethod
    def _drop(statement: Statement) -> None:
        del statement.words[0]
        statement.items = {number - 1: items for number, items in statement.items.items()}

    def _condition(self, keyword: str, statement: Statement) -> None:
        if keyword == "if":
            self.blocks.append(_Block("if", True))
        block = self.blocks[-1]
        block.active = True
        if block.done or not self._active:
            block.active = False
            return
        result = self._test([self._text(word) for word in statement.words[1:]])
        if result is None:
            shown = " ".join(statement.raw(number) for number in range(1, len(statement.words)))
            self._note(f"the condition `{shown}` is not known; what depends on it is left out")
        block.active = result is True
        block.done = block.done or result is True

    def _case_pattern(self, block: _Block, pattern: str) -> None:
        subject = block.subject
        if subject is None or "$" in subject:
            self._note("what `case` looks at is not known; its branches are left out")
            return
        options = (block.patterns + pattern).split("|")
        block.patterns = ""
        fits = any(fnmatch.fnmatchcase(subject, option.strip("\"'")) for option in options)
        block.active = fits and not block.done
        block.done = block.done or fits

    def _test(self, words: list[str | None]) -> bool | None:
        """The result of `[ ... ]`, `[[ ... ]]` or `test ...`; None where it is not known."""
        known = [word for word in words if word is not None]
        if len(known) < len(words) or not known:
            return None
        if known[0] in ("[", "[["):
            known = known[1:-1]
        elif known[0] == "test":
            known = known[1:]
        else:
            return None
        if known and known[0] == "!":
            inner = self._test(["[", *known[1:], "]"])
            return None if inner is None else not inner
        if len(known) == 2 and known[0] in ("-z", "-n"):
            return None if "$" in known[1] else (known[1] == "") == (known[0] == "-z")
        if len(known) != 3 or "$" in known[0] + known[2]:
            return None
        left, sign, right = known
        if sign in ("=", "==", "!="):
            return fnmatch.fnmatchcase(left, right) == (sign != "!=")
        if sign in _COMPARISONS and re.fullmatch(r"-?\d+", left) and re.fullmatch(r"-?\d+", right):
            return _COMPARISONS[sign](int(left), int(right))
        return None

    def _simple(self, statement: Statement) -> None:
        if statement.raw(0) == "let":
            for number in range(1, len(statement.words)):
                self._let(statement.raw(number))
            return
        start = 1 if statement.raw(0) in _DECLARING else 0
        index = start
        while index < len(statement.words) and self._assign(statement, index):
            index += 1
        if index == len(statement.words) or start:
            return
        if statement.raw(0) in ("source", "."):
            self._note(f"`{statement.raw(0)} {self._text(statement.words[1]) or '...'}` is not read")
            return
        fields = [text for word in statement.words[index:] for text in self._fields(word)]
        if (command := _program(fields)) is not None:
            program, arguments = command
            launched = _launched(fields[: len(fields) - len(arguments)])
            self.script.commands.append(Command(program, _until_redirection(arguments), self.line, launched))
        elif any(re.search(r"(^|/)(ba|z|)sh$|(^|/)ssh$", text) for text in fields):
            for word in statement.words[index + 1 :]:
                # What another shell runs: `bash -c "..."`, `ssh HOST "..."`, `srun ... bash -c '...'`.
                if len(word) == 1 and word[0].quote and _RUNS_VERL.search(word[0].text):
                    self._read(self._text(word) or "", first_line=statement.line)

    def _let(self, text: str) -> None:
        """Computes `NAME=SUM`, in which a name stands for its value; what is none stays with the shell."""
        match = re.fullmatch(r"\s*(\w+)\s*([-+*/%]?)=(.*)", text, re.DOTALL)
        if match is None:
            self._note(f"`let {text}` is not computed")
            return
        name, sign, value = match.groups()
        self.variables[name] = self._sum(f"{name} {sign} ({value})" if sign else value, f"$(({text}))")

    def _assign(self, statement: Statement, index: int) -> bool:
        word = statement.words[index]
        first = word[0].text if word and word[0].quote == "" else ""
        if not (match := _ASSIGNMENT.fullmatch(first)):
            return False
        name, more = match[1], match[2] == "+"
        if index in statement.items:
            items = [text for item in statement.items[index] for text in self._fields(item)]
            before = self.variables.get(name, []) if more else []
            self.variables[name] = [*([before] if isinstance(before, str) else before), *items]
            return True
        text = self._text([QuotedText(match[3], ""), *word[1:]])
        before = self.variables.get(name, "") if more else ""
        self.variables[name] = (before if isinstance(before, str) else " ".join(before)) + (text or "")
        return True

    # Expansions

    def _text(self, word: list[QuotedText]) -> str | None:
        """A word expanded to one text."""
        return "".join(part.text if part.quote == "'" else self._expanded(part.text) for part in word)

    def _fields(self, word: list[QuotedText]) -> list[str]:
        """A word expanded to arguments: an array becomes its items, and text without quotes is split at blanks."""
        if len(word) == 1 and (array := re.fullmatch(r"\$\{(\w+)\[[@*]\]\}|\$[@*]|\$\{[@*]\}", word[0].text)):
            if array[1] is None:
                return []
            value = self.variables.get(array[1], [])
            return [value] if isinstance(value, str) else list(value)
        fields = [""]
        is_empty = True
        for part in word:
            text = part.text if part.quote == "'" else self._expanded(part.text)
            pieces = re.split(r"\s+", text) if part.quote == "" and not re.search(r"\$\(|`", text) else [text]
            is_empty = is_empty and part.quote == "" and text == ""
            fields[-1] += pieces[0]
            fields += pieces[1:]
        return [] if is_empty else [text for text in fields if text or len(fields) == 1]

    def _expanded(self, text: str) -> str:
        pieces = list(split_commands(text))
        if any(is_command for _, is_command in pieces):
            self._note(f"`{text.strip()}` is a command, and not run")
        return "".join(
            self._command(piece) if is_command else _EXPANSION.sub(self._value, piece) for piece, is_command in pieces
        )

    def _command(self, text: str) -> str:
        """A `$(...)` with the values of the script's own variables, which the shell that runs it will not have."""

        def value(match: re.Match[str]) -> str:
            known = self.variables.get(match[1] or match[2])
            if isinstance(known, str) and re.fullmatch(r"[\w./:@%+=,-]*", known):
                return known
            if known is not None:
                self._note(f"`{match[0]}` in `{text}` is set by the script; set it in your shell, too")
            return match[0]

        return re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, text)

    def _value(self, match: re.Match[str]) -> str:
        if match["sum"] is not None:
            return self._sum(match["sum"], match[0])
        body = match["braced"] if match["braced"] is not None else match["name"]
        parts = _BRACED.fullmatch(body)
        if parts is None:
            self._note(f"`{match[0]}` is not expanded")
            return match[0]
        name, _, sign, other = parts.groups()
        value = self.variables.get(name)
        if name in ("@", "*"):
            return ""
        if value is not None and (value or not (sign or "").startswith(":")):
            return (
                self._expanded(other) if sign in ("+", ":+") else (value if isinstance(value, str) else " ".join(value))
            )
        if sign in ("+", ":+"):
            return ""
        if sign in ("-", ":-", "=", ":="):
            default = self._expanded(other.strip("\"'"))
            if sign in ("=", ":="):
                self.variables[name] = default
            self._note(
                f"${name} is not set in the script: its default {default!r} is taken"
            ) if not name.isdigit() else None
            return default
        if value is None:
            self._note(f"${name} is not set in the script")
            return f"${name}"
        return ""

    def _sum(self, text: str, whole: str) -> str:
        try:
            expanded = _EXPANSION.sub(self._value, text)
            return str(self._number(ast.parse(expanded.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, TypeError):
            self._note(f"`{whole}` is not computed")
            return whole

    def _number(self, node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            value = self.variables.get(node.id, "")
            return int(value if isinstance(value, str) else "")
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._number(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            left, right = self._number(node.left), self._number(node.right)
            if isinstance(node.op, ast.Pow) and abs(right) > 64:
                raise ValueError("a power too large")
            return _ARITHMETIC[type(node.op)](left, right)
        raise ValueError("no whole number")


def _program(fields: list[str]) -> tuple[str, list[str]] | None:
    """The module or file of verl that a command runs, and its arguments; None where it runs no such program."""
    for index, text in enumerate(fields):
        if text == "-m" and index + 1 < len(fields) and re.match(_MODULE, fields[index + 1]):
            return fields[index + 1], fields[index + 2 :]
        if re.search(r"(^|/)(main_\w+|\w*sft_trainer\w*)\.py$", text):
            return text, fields[index + 1 :]
    return None


def _launched(fields: list[str]) -> dict[str, str]:
    """The devices that torchrun was given: its arguments -> those of scalerl."""
    if not any(re.search(r"(^|/)torchrun$|^torch\.distributed\.(run|launch)$", text) for text in fields):
        return {}
    settings = {}
    for index, text in enumerate(fields):
        option, equals, value = text.partition("=")
        key = _OF_TORCHRUN.get(option.replace("-", "_").lstrip("_"))
        if key is not None and (equals or index + 1 < len(fields)):
            value = value if equals else fields[index + 1]
            if re.fullmatch(r"\d+|\$.*", value):
                settings[text if equals else f"{text} {value}"] = f"{key}={value}"
    return settings


def _until_redirection(arguments: list[str]) -> list[str]:
    ends = [index for index, text in enumerate(arguments) if re.match(r"\d?>|&>|<", text)]
    return arguments[: ends[0]] if ends else arguments
