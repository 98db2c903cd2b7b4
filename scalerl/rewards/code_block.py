"""The Python program in a response: which of its fenced blocks, without fence, list and quote marks."""

from __future__ import annotations

import re
import textwrap

# What is thought is no answer, also when the thought has no end.
_THOUGHT = re.compile(r".*</think>|<think>.*", re.DOTALL)
_OPEN = re.compile(r"^(?P<before>[^\n]*?)(?P<fence>`{3,}|~{3,})[ \t]*(?P<mark>[^\n`]*)\n", re.MULTILINE)
# What may stand before a fence without a mark: the signs of a quote or of an item of a list.
_PREFIX = re.compile(r"[ \t>]*(?:(?:[-*+]|\d+[.)])[ \t]+)?")
_PYTHON = re.compile(r"[{.]*(?:python|py)[\d.]*(?![\w+#])", re.IGNORECASE)
_QUOTE = re.compile(r"^[ \t]*>[ \t]?", re.MULTILINE)
_FIRST_LINE = re.compile(r"(?:#|from|import|def|class|for|while|if|try:|with|print\(|@|[\w, ]+=)[^\n]*")
DEFINES = re.compile(r"^(?:async\s+)?(?:def|class)\s|^\w+\s*=\s*lambda\b|^from\s", re.MULTILINE)
READS_INPUT = re.compile(r"\binput\s*\(|\bstdin\b|\bopen\(0|\bread\(0")


def extract_program(solution_str: str, needs: re.Pattern[str] | None = None) -> str | None:
    """The program in a response; None if there is none.

    It is the last block marked python, py or python3, else the last without a mark; the last in which `needs` is found,
    if there is any: a block after the program may be an example of its use. A block at the end need not be closed. A
    response without blocks whose first line is Python is the program. Text in <think></think> does not count.
    """
    text = _THOUGHT.sub("", solution_str.replace("\r\n", "\n"))
    blocks = _blocks(text)
    if not blocks:
        program = text.strip("\n")
        return program if "```" not in text and _FIRST_LINE.match(program) else None
    marked = [body for mark, body in blocks if _PYTHON.match(mark)]
    candidates = marked or [body for mark, body in blocks if not mark]
    fitting = [body for body in candidates if needs is not None and needs.search(body)]
    return (fitting or candidates or [None])[-1]


def _blocks(text: str) -> list[tuple[str, str]]:
    """Mark and body of each fenced block; one behind words on its line only with a mark of Python."""
    blocks, position = [], 0
    while opened := _OPEN.search(text, position):
        mark, start = opened["mark"].strip(), opened.end()
        if not (_PREFIX.fullmatch(opened["before"]) or _PYTHON.match(mark)):
            position = start
            continue
        fence = re.escape(opened["fence"])
        # At the start of a line, or behind the last one; a fence with a mark opens the next block.
        close = re.compile(rf"^[ \t>]*{fence}(?!\w)|{fence}[ \t]*$|(?=^[ \t>]*{fence}\w)", re.MULTILINE)
        closed = close.search(text, start)
        body = text[start : closed.start() if closed else len(text)]
        position = closed.end() if closed else len(text)
        if ">" in opened["before"]:
            body = _QUOTE.sub("", body)
        blocks.append((mark, textwrap.dedent(body)))
    return blocks
