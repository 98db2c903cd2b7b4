"""Reward rule of multiple choice: compares the letter that the response chose last with the right letter."""

from __future__ import annotations

import re
from typing import Any

from scalerl.rewards.errors import RewardError
from scalerl.rewards.math_answer import last_boxed

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# Signs of Markdown, LaTeX and HTML, and quotes, which may be around a letter.
_MARKS = re.compile(
    r"</[^<>]*>|<\|[^<>]*>|<[a-z]\w*>|\\(?:text|math)[a-z]*|\\displaystyle|\\[()\[\]]"
    r"|[*_`\"“”{}\[\]<>$]|(?<!\w)['‘]|['’](?!\w)"
)
_SPACES = re.compile(r"\\[,;:! ]|\\quad")
_FULL_WIDTH = str.maketrans({chr(code + 0xFEE0): chr(code) for code in (*range(ord("A"), ord("Z") + 1), *b"():")})
_CAPITAL = r"\(?(?P<{}>[A-Z])\)?(?![\w'’+^])"
# A small letter is one only in brackets or at the end of a line; "A" and "I" may be words.
_LETTER = (
    rf"(?-i:{_CAPITAL.format('capital')}(?!(?<=[AI]) (?!because|since|as|not|rather|and|or|is|in)[a-z])"
    r"|\((?P<small>[a-z])\)|(?P<last>[b-hj-z])(?=\.?[ \t]*(?:\n|$)))"
)
_KIND = r"(?:(?:option|choice|letter|answer)\s+)?"
_SAID = r"(?:I\s+(?:think|believe)\s+)?(?:(?:it\s+is|it's)\s+)?"
_NAMED = re.compile(
    r"(?:(?:answer(?:\s+choice)?|(?:correct|right|best|final)\s+(?:option|choice|letter))"
    r"(?:\s+(?:is|(?:must|would|should|will)\s+be)(?:\s+(?:clearly|therefore|thus))?)?"
    r"|答案[是为]?|réponse\s+est|respuesta\s+es|antwort\s+ist)"
    rf"\s*[-–=:]?\s*{_SAID}(?:the\s+)?{_KIND}{_LETTER}"
    rf"|(?<!not )\b(?:choose|select|pick|go\s+with)\s+(?:the\s+)?{_KIND}(?-i:{_CAPITAL.format('chosen')})"
    r"|(?-i:(?<![\w'])\(?(?P<correct>[A-Z]|(?<=\()[a-z])\)?) is (?:the )?(?:correct|right|best|answer)\b"
    rf"|\b(?:so|thus|hence|therefore)[,:]?\s+(?:it\s+is\s+|it's\s+)?{_KIND}"
    rf"(?-i:{_CAPITAL.format('concluded')})(?=\.?[ \t]*(?:\n|$))",
    re.IGNORECASE,
)
# Behind a letter: another one that may be meant as well, or a question.
_HEDGE = re.compile(
    r"\)?[ \t]*(?:\?|(?:,|/|&|\b(?:and|or)\b)?[ \t]*(?:(?:or|and|maybe)[ \t]+)*\(?[A-Z]\)?(?![\w'’])(?! [a-z]))"
)
_ALONE = re.compile(rf"[\s=>→-]*{_SAID}{_KIND}{_LETTER}\s*[.:)]?\s*", re.IGNORECASE)
_OPTION = re.compile(r"[ \t]*\(?([A-Z])[.:)](?:[ \t].*)?")
# "B", "(B)", "B: 12 km", "(B) 12", "Answer: B"; not "A, B", "2B".
_IN_BOX = re.compile(
    rf"\s*(?:the\s+)?(?:answer\s*(?:is|:)?\s*)?{_KIND}(?:{_LETTER}|(?P<only>[a-z])(?=\s*$))\s*(?:[.:)].*|\(.*|\d.*)?",
    re.IGNORECASE | re.DOTALL,
)


def extract_choice(solution_str: str) -> str | None:
    """The letter A to Z that a response chose last, as a capital; None if there is none.

    It is in the last \\boxed{} or <answer></answer>, or is named ("answer: B", "the answer is B", "B is correct", "I
    choose B"), or is the whole last line, or begins the only line that begins as an option does ("B. 12 km"). None too
    if the box holds anything else, or a second letter follows ("B or C").
    """
    marked = last_boxed(solution_str)
    if marked is None and (tagged := _TAGGED.findall(solution_str)):
        marked = tagged[-1]
    if marked is not None:
        return _chosen(_IN_BOX.fullmatch(_plain(marked)))
    text = _plain(solution_str).strip()
    named = list(_NAMED.finditer(text))
    if named:
        return _chosen(named[-1])
    lines = text.splitlines() or [""]
    if alone := _ALONE.fullmatch(lines[-1]):
        return _chosen(alone)
    options = [option[1] for line in lines if (option := _OPTION.fullmatch(line))]
    return options[0] if len(options) == 1 else None


def _plain(text: str) -> str:
    return _MARKS.sub("", _SPACES.sub(" ", text)).translate(_FULL_WIDTH)


def _chosen(match: re.Match[str] | None) -> str | None:
    if match is None:
        return None
    name, letter = next((name, letter) for name, letter in match.groupdict().items() if letter)
    return None if _HEDGE.match(match.string, match.end(name)) else letter.upper()


def compute_score(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Scores a response by its letter.

    Returns score: 1.0 for the right letter, else 0.0; acc: the same as a bool; pred: the letter, "" without one.

    ground_truth: one capital letter, bare or in brackets. Raises RewardError for anything else.
    """
    truth = re.fullmatch(r"\(?([A-Z])\)?", str(ground_truth).strip())
    if truth is None:
        raise RewardError(
            f"multiple_choice: ground truth {ground_truth!r} is no letter A to Z; correct reward_model.ground_truth"
        )
    choice = extract_choice(solution_str)
    correct = choice == truth[1]
    return {"score": float(correct), "acc": correct, "pred": choice or ""}
