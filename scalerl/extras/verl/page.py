"""The tables of docs/from-verl.md, of what becomes of each key of verl; `python -m` this module prints them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

from scalerl.config.value_checks import show
from scalerl.extras.verl.keys.table import Row, rows_of


def key_tables() -> str:
    """Makes the markdown of two sections with a table each: keys of training, and what else fine-tuning has."""
    rows = {kind: {row.key: row for row in rows_of(kind)} for kind in ("ppo", "sft")}
    of_sft = [row for key, row in rows["sft"].items() if key not in rows["ppo"]]
    head = "`*` is one part of a key, `**` the rest, `{a, b}` either; `...` what a pattern has there.\n"
    training, tuning = _table(rows["ppo"].values()), _table(of_sft)
    return f"{head}\n## Keys of training\n\n{training}\n\n## Further keys of fine-tuning\n\n{tuning}\n"


def _table(rows: Iterable[Row]) -> str:
    lines = ["| key of verl | here | why |", "|---|---|---|"]
    for row in rows:
        cells = (f"`{_readable(row.key)}`", *_fate(row))
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def _fate(row: Row) -> tuple[str, str]:
    """What becomes of the keys of a row, and why."""
    if row.read is not None:
        return (inspect.getdoc(row.read) or "").partition("\n\n")[0].replace("\n", " ").rstrip("."), ""
    target = re.sub(r"\\\d", "...", row.to)
    parts = [f"{'all values' if row.so == 'any' else _listed(row.so)}: already so"] if row.so else []
    if row.values:
        becomes = (f"`{show(old)}`: `{target + '=' if target else ''}{show(new)}`" for old, new in row.values.items())
        parts.append(", ".join(becomes))
    elif target:
        parts.append(f"`{target}`")
    if row.so != "any" and (row.values or not target):
        parts.append("else scalerl's own" if row.is_own else "else refused" if parts else "refused")
    is_refused = parts[-1].endswith("refused") and row.instead != "leave it out"
    return "; ".join(parts), f"{row.why}; {row.instead}" if is_refused else row.why


def _listed(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(f"`{show(value)}`" for value in values))


def _readable(pattern: str) -> str:
    """A pattern as a reader sees it: `(a|b).c` as `{a, b}.c`, with `?` after a group that may be empty."""
    pattern = pattern.replace("()", "")
    while group := re.search(r"\(([^()]*)\)", pattern):
        options = [option for option in group[1].split("|") if option]
        text = f"<{', '.join(options)}>" if len(options) > 1 else "".join(options)
        optional = "?" if "" in group[1].split("|") else ""
        pattern = f"{pattern[: group.start()]}{text}{optional}{pattern[group.end() :]}"
    return pattern.replace("<", "{").replace(">", "}").replace("|", ", ")


if __name__ == "__main__":
    print(key_tables())
