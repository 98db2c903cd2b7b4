"""Rule of reasoning_gym/*: the task's own rule decides, and nothing that the model wrote is run."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

import pytest

from scalerl.rewards import RewardError, default_compute_score
from scalerl.rewards import reasoning_gym as rule

installed = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="needs the extra reasoning-gym"
)


def info(task: str, entry: dict | str, options: dict | None = None) -> dict[str, str]:
    text = entry if isinstance(entry, str) else repr(entry)
    return {"split": "train", "task": task, "options": json.dumps(options or {}), "entry": text}


def score(task: str, answer: str, entry: dict | str, options: dict | None = None) -> dict:
    response = f"It is <answer>{answer}</answer>"
    return default_compute_score(f"reasoning_gym/{task}", response, "", info(task, entry, options))


def entry(answer: str | None, **metadata: object) -> dict:
    return {"question": "?", "answer": answer, "metadata": metadata}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>1</answer>", "1"),
        ("<answer>1</answer> no: <answer>\n a b \n</answer>.", "a b"),
        ("write <answer> so: <answer>3</answer>", "3"),
        ("<answer></answer>", ""),
        ("<answer>1", None),
        ("</answer><answer>", None),
        ("1", None),
        ("<answer>" * 20000, None),
    ],
)
def test_the_answer_is_in_the_last_tags(text, expected):
    assert rule.extract_answer(text) == expected


@pytest.mark.parametrize(
    "text",
    ["(1 + 2)*3 - 4/5", "x**2*sin(3*x)/2 + C", "sqrt(x) + log(x, 2) - .5*exp(-2.5*x)", "arctan(x)", "-pi", "2^3"],
)
def test_formulas(text):
    assert rule.is_formula(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "__import__('os')", "x.__class__", "x.a", "1.real", "1 .a", "1.e.b", "().a", "[1]", "open(x)", "S('a')",
        "x;y", "eval(x)", "f'{x}'", "x:=1", "lambda x: x", "x_1", "ｘ", "١", "Integral(x, x)", "1" * 1001, "x\ny", "#",
    ],
)  # fmt: skip
def test_what_is_no_formula(text):
    assert not rule.is_formula(text)


def test_a_long_number_before_what_does_not_fit_is_refused_at_once():
    # With a pattern that may split numbers, this would not end within the age of the universe.
    assert not rule.is_formula("1" * 900 + "!")


@installed
def test_the_rule_of_the_task_scores():
    row = entry("1000")
    assert score("chain_sum", "+01,000.00", row) == {"score": 1.0, "acc": True, "pred": "+01,000.00", "failure": ""}
    assert score("chain_sum", "it is 1000", row)["score"] == pytest.approx(4 / 10)
    assert score("chain_sum", "999", row) == {"score": 0.0, "acc": False, "pred": "999", "failure": ""}
    none = default_compute_score("reasoning_gym/chain_sum", "1000", "1000", info("chain_sum", row))
    assert none == {"score": 0.0, "acc": False, "pred": "", "failure": "no <answer>...</answer> in the response"}
    # Many answers are right where the task has none of its own.
    countdown = entry("3*4", numbers=[3, 4], target=12)
    assert [score("countdown", text, countdown)["score"] for text in ("4*3", "6+6", "x")] == [1.0, 0.05, 0.01]


@installed
def test_options_of_the_row_decide_where_the_rule_asks_for_them():
    row = entry("(10 - 2)*(4 - 1)", numbers=[10, 2, 4, 1])
    assert score("puzzle24", "(10 - 2)*(4 - 1)", row)["acc"] is True
    assert score("puzzle24", "(10 - 2)*(4 - 1)", row, {"max_value": 5})["acc"] is False


@installed
@pytest.mark.parametrize(
    ("task", "row"),
    [
        ("binary_matrix", entry("1")),
        ("n_queens", entry("Q", valid_answers=["Q"])),
        ("spiral_matrix", entry("1")),
        ("string_insertion", entry("1")),
        ("number_sorting", entry("['1']", direction="ascending")),
        ("countdown", entry("1", numbers=[1], target=1)),
        ("puzzle24", entry("1", numbers=[1])),
        ("simple_integration", entry("x", variable="x", integrand="1")),
        ("intermediate_integration", entry("x", variable="x", integrand="1")),
        ("polynomial_multiplication", entry("x")),
    ],
)
def test_an_answer_is_not_run(tmp_path, task, row):
    made = tmp_path / "made"
    score(task, f"open({str(made)!r}, 'w')", row)
    score(task, f"[open({str(made)!r}, 'w').name]", row)
    assert not made.exists()


@installed
@pytest.mark.parametrize(
    ("task", "row"),
    [
        ("bitwise_arithmetic", lambda code: entry("0x1", problem=code)),
        ("number_sorting", lambda code: entry(code, direction="ascending")),
        ("simple_integration", lambda code: entry("x", variable="x", integrand=code)),
        ("intermediate_integration", lambda code: entry("x", variable="x", integrand=code)),
        ("polynomial_multiplication", entry),
    ],
)
def test_an_entry_is_not_run(tmp_path, task, row):
    made = tmp_path / "made"
    try:
        assert (
            score(task, "['1']" if task == "number_sorting" else "1", row(f"open({str(made)!r}, 'w')"))["score"] < 0.5
        )
    except RewardError as error:
        assert "it is not run" in str(error)
    assert not made.exists()


@installed
@pytest.mark.full
def test_only_known_rules_evaluate_python():
    """What another version of the package evaluates has to be looked at before it is pinned."""
    from scalerl.rewards.reasoning_gym_task import EVALUATES_ANSWERS

    root = Path(importlib.util.find_spec("reasoning_gym").submodule_search_locations[0])
    calls = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called in ("eval", "exec", "compile", "parse_expr", "sympify", "__import__", "system", "Popen"):
                    calls.add((path.stem, called))
    calls = {(stem, called) for stem, called in calls if (stem, called) != ("propositional_logic", "parse_expr")}
    rules = {(task, "parse_expr") for task in rule.PARSED_AS_PYTHON}
    rules |= {(module.__name__.rpartition(".")[2], "eval") for module in EVALUATES_ANSWERS}
    # They make rows, of what they hold themselves; the rule of bitwise_arithmetic runs a checked part of the entry.
    makers = {("basic_arithmetic", "eval"), ("bitwise_arithmetic", "eval"), ("codeio", "exec")}
    makers |= {("generators_00_49", "eval"), ("generators_50_99", "eval")}
    assert {item for item in calls if item[1] != "compile"} == rules | makers


@installed
def test_every_task_scores_its_own_answers_as_a_file_has_them():
    from scalerl.commands.data import reasoning_gym_process
    from scalerl.rewards.reasoning_gym_task import score_answer

    tasks = set(reasoning_gym_process.DATASETS) - {"composite"}
    assert len(tasks) > 100
    for task in sorted(tasks):
        made = reasoning_gym_process.generate(task, {}, [{"name": "train", "size": 2, "seeds": [7, 77]}])["rows"]
        assert len(made) == 2, task
        for row in made:
            # An unevaluated integral is right by the package's rule: not by ours.
            if row["answer"] and "Integral" not in row["answer"]:
                assert not rule._why_unsafe(task, row["answer"].strip()), task
                assert score_answer(task, "{}", row["entry"], row["answer"].strip()) == (1.0, ""), task


@installed
def test_an_answer_that_the_rule_cannot_read_scores_zero_and_says_why():
    result = score("prime_factorization", "two", entry("2 × 2", number=4, factors=[2, 2]))
    assert result["score"] == 0.0 and result["failure"].startswith("ValueError: invalid literal")


@installed
@pytest.mark.full
def test_an_answer_that_hangs_or_eats_memory_is_stopped(monkeypatch):
    monkeypatch.setattr(rule, "TIMEOUT_S", 2.0)
    with pytest.raises(RewardError, match=r"countdown.*(did not score .* in 2 s|MemoryError)"):
        score("countdown", "9**9**9**9", entry("9", numbers=[9, 9, 9, 9], target=1))
    assert score("chain_sum", "9", entry("9"))["acc"]


@installed
@pytest.mark.parametrize(
    ("task", "text", "message"),
    [
        ("chain_sum", "{'question': '?'}", "extra_info.entry has no question, answer and metadata"),
        ("chain_sum", "open('x')", "malformed node"),
        ("no_task", repr(entry("1")), "Dataset 'no_task' not registered"),
    ],
)
def test_rows_that_cannot_be_scored(task, text, message):
    with pytest.raises(RewardError, match=message):
        score(task, "1", text)


@installed
def test_rows_of_another_origin():
    with pytest.raises(RewardError, match="extra_info has index; needs task, options and entry"):
        default_compute_score("reasoning_gym/chain_sum", "1", "1", {"index": 3})


def test_without_the_package_the_extra_is_named(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "reasoning_gym" else find_spec(name, *a)
    )
    with pytest.raises(RewardError, match=r"pip install 'scalerl\[reasoning-gym\]'"):
        score("chain_sum", "1", entry("1"))
