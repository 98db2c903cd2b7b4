"""The report of real runs, in a real browser; alarms of a real run in its progress, its MLflow run and its report."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from scalerl.trainer.alarms import KINDS
from tests.browser import look
from tests.e2e.jobs import PROMPTS, SAMPLES, Inputs, Record
from tests.e2e.kept import Kept
from tests.lanes import full

STEPS = 3
# Fails for a third of the texts.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    kind = sum(map(ord, solution_str)) % 3
    if kind == 2:
        raise TimeoutError("the verifier did not end")
    return float(kind)
"""
# Two turns, and between them a tool, whose answer the policy did not sample.
PROGRAM = """
import asyncio

async def program(prompt, servers, tools):
    trajectory = servers.begin()
    await servers.generate(trajectory, max_new_tokens=3)
    with servers.spans("search"):
        await asyncio.sleep(0.02)
    trajectory.observe(tools.encode("=1"))
    await servers.generate(trajectory)
    return trajectory
"""
# Where this run is healthy: far beyond its numbers.
LIMITS = {
    "max_kl": 1e-9,
    "min_entropy": 100,
    "max_clip_ratio": 0,
    "max_equal_groups_frac": 0,
    "max_probs_diff": 1e-12,
    "min_load_frac": 1,
    "max_failed_frac": 0,
}


class Elements(HTMLParser):
    """The elements of a page, counted, and the names of their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes |= {name for name, _ in attrs}


@pytest.fixture(scope="module")
def run(inputs: Inputs, kept: Kept, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """-> (directory of the run, standard output). Two data-parallel ranks, so that one can starve."""
    pytest.importorskip("plotly", reason="pip install 'scalerl[report]'")
    directory = tmp_path_factory.mktemp("report")
    (directory / "reward.py").write_text(REWARD)
    (directory / "program.py").write_text(PROGRAM)
    arguments = inputs.overrides(
        directory / "run",
        f"custom_reward_function.path={directory / 'reward.py'}",
        "reward_model.on_error=zero",
        f"actor_rollout_ref.rollout.program.path={directory / 'program.py'}",
        "trainer.n_gpus_per_node=2",
        "trainer.logger=[console,file,mlflow]",
        f"trainer.mlflow_tracking_uri=sqlite:///{directory / 'run' / 'mlflow.db'}",
        "trainer.log_val_generations=4",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        *(f"trainer.alarms.{key}={value}" for key, value in LIMITS.items()),
    )
    finished = kept.train(arguments)
    assert finished.code == 0, finished.tail()
    return directory / "run", finished.stdout


def test_each_alarm_is_said_once_and_tagged(run: tuple[Path, str]) -> None:
    from mlflow import MlflowClient

    run_dir, said = run
    lines = re.findall(r"^alarm (\w+) at step (\d+): .+ Try first: .+$", said, re.MULTILINE)
    assert sorted(name for name, _ in lines) == sorted(KINDS)
    client = MlflowClient(f"sqlite:///{run_dir / 'mlflow.db'}")
    (tracked,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    tags = {name: value for name, value in tracked.data.tags.items() if name.startswith("alarm.")}
    assert tags == {f"alarm.{name}": step for name, step in lines}
    artifacts = {file.path for file in client.list_artifacts(tracked.info.run_id)}
    assert {"report.html", "timeline.trace.json.gz"} <= artifacts


def test_the_timeline_has_everybody(run: tuple[Path, str]) -> None:
    """Driver, ranks, servers, and of samples turns, tools and rewards: where they were, by the seconds of the step."""
    lines = [json.loads(line) for line in (run[0] / "timeline.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    final = Record.read(run[0]).final
    for line in lines:
        spans: dict[str, list[list]] = {}
        for span in line["spans"]:
            spans.setdefault(span[0], []).append(span)
        driver = {what: (begin, end) for _, what, begin, end, _ in spans["driver"]}
        for part in ("gen", "update_actor", "update_weights"):
            begin, end = driver[part]
            assert end - begin == pytest.approx(final[line["step"]][f"timing_s/{part}"], abs=0.05)
        for rank in ("trainer rank 0", "trainer rank 1"):
            done = {what: (begin, end) for _, what, begin, end, _ in spans[rank]}
            assert {"actor old_log_prob", "ref ref", "actor update_actor", "actor update_weights"} <= done.keys()
            inner, outer = done["actor update_actor"], driver["update_actor"]
            assert outer[0] - 0.01 <= inner[0] < inner[1] <= outer[1] + 0.01
        samples = {who: mine for who, mine in spans.items() if who.startswith("sample ")}
        assert len(samples) == PROMPTS * SAMPLES
        for mine in samples.values():
            what = [span[1] for span in sorted(mine, key=lambda span: span[2])]
            in_turns = ("prefill", "decode")
            assert [name for name in what if name not in ("queued", "program", *in_turns)] == [
                *("turn", "search", "turn", "reward")
            ]
            # Both parts of each turn, one after the other.
            turns, *parts = (
                sorted((begin, end) for _, name, begin, end, _ in mine if name == kind) for kind in ("turn", *in_turns)
            )
            assert turns == [(one[0], two[1]) for one, two in zip(*parts, strict=True) if one[1] == two[0]]
            (program,) = (span for span in mine if span[1] == "program")
            assert all(program[2] <= span[2] and span[3] <= program[3] + 1e-3 for span in mine if span[1] != "reward")
            assert all(span[3] - span[2] >= 0.019 for span in mine if span[1] == "search")
        turns = [span for mine in samples.values() for span in mine if span[1] == "turn"]
        servers = [span for who, mine in spans.items() if who.startswith("server ") for span in mine]
        assert sum(span[4]["turns"] for span in servers) == len(turns) == 2 * PROMPTS * SAMPLES
        assert sum(span[4]["tokens"] for span in servers) == sum(span[4]["tokens"] for span in turns)


# At 1300 the test of hostile samples draws all of it, too.
@pytest.mark.parametrize("width", [full(1300), 390])
def test_a_browser_draws_all_of_it(run: tuple[Path, str], width: int) -> None:
    """Without a network, an error in its console, or anything wider than the window."""
    page = run[0] / "report.html"
    seen = look(page, width)
    assert seen.console == []
    wanted = page.read_text(encoding="utf-8").count('<figure class="plot">')
    assert wanted > 15 and f'data-plots="{wanted}"' in seen.dom
    widths = [float(found) for found in re.findall(r'<svg class="main-svg"[^>]* width="([\d.]+)"', seen.dom)]
    assert len(widths) >= wanted and max(widths) <= width
    shown = re.sub(r"<script.*?</script>", "", seen.dom, flags=re.DOTALL)
    for name in KINDS:
        assert f"<h3>{name.replace('_', ' ')}</h3>" in shown
    # Of the last sample, in words; and in the figure each of its parts.
    assert re.search(r"All waited for sample \d+\.\d+ at the end: .* in 2 turns of the policy.* in tools", shown)
    for text in ("trainer rank 1", "server 0", "search", "update_actor", "Samples before and after"):
        assert text in shown


def test_what_a_sample_says_is_text(run: tuple[Path, str], tmp_path: Path) -> None:
    """Scripts in prompts, answers, data sources and names do not run, and the page is whole behind them."""
    from scalerl.extras.report.command import main

    evil = "</script></figure><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><b>"
    copy = tmp_path / "run"
    for file in ("config.yaml", "metrics.jsonl", "timeline.jsonl"):
        text = (run[0] / file).read_text(encoding="utf-8")
        text = text.replace("arithmetic/add", json.dumps(evil)[1:-1]).replace("search", json.dumps(evil)[1:-1])
        (copy / file).parent.mkdir(exist_ok=True)
        (copy / file).write_text(text, encoding="utf-8")
    tables = copy / "tables" / "val" / "generations"
    tables.mkdir(parents=True)
    table = json.loads((run[0] / "tables/val/generations" / f"step_{STEPS}.json").read_text())
    for step in (0, STEPS):
        rows = [[f"{evil} {number}", f"{evil}\n[tool, masked]\n{evil}", evil, step, evil] for number in range(2)]
        (tables / f"step_{step}.json").write_text(json.dumps({"columns": table["columns"][:5], "data": rows}))
    assert main([str(copy)]) == 0
    seen = look(copy / "report.html", 1300)
    assert seen.console == [] and "<title>owned" not in seen.dom
    elements = Elements()
    elements.feed(seen.dom)
    wanted = (copy / "report.html").read_text(encoding="utf-8").count('<figure class="plot">')
    assert f'data-plots="{wanted}"' in seen.dom
    # Plotly and the page's own script, beside what they draw.
    assert elements.tags["script"] == wanted + 2 and elements.tags["img"] == 0
    assert not any(name.startswith("on") for name in elements.attributes)
    assert seen.dom.count("document.title='owned'&lt;/script&gt;") >= 4, "it is there to be read"


def test_the_trace_is_for_perfetto(run: tuple[Path, str]) -> None:
    """In a track two spans are apart, or one is in the other, as its format demands."""
    with gzip.open(run[0] / "timeline.trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"driver", "trainer rank 0", "trainer rank 1", "server 0"} <= names
    assert sum(map(len, tracks.values())) == sum(
        len(json.loads(line)["spans"]) for line in (run[0] / "timeline.jsonl").read_text().splitlines()
    )
    for spans in tracks.values():
        spans.sort(key=lambda span: (span[0], -span[1]))
        ends: list[int] = []
        for begin, end in spans:
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or end <= ends[-1] + 1, "they cross"
            ends.append(end)


@pytest.mark.full
def test_two_runs_side_by_side(run: tuple[Path, str], tmp_path: Path) -> None:
    from scalerl.extras.report.command import main

    other = tmp_path / "other"
    other.mkdir()
    for file in ("config.yaml", "metrics.jsonl"):
        text = (run[0] / file).read_text(encoding="utf-8")
        (other / file).write_text(text.replace("lr: 0.001", "lr: 0.002"), encoding="utf-8")
    assert main([str(run[0]), "--compare", str(other), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.search(r"<th>actor_rollout_ref.actor.optim.lr</th><td>0.001</td><td>0.002</td>", page)
    seen = look(tmp_path / "report.html", 1300)
    assert seen.console == [] and f'data-plots="{page.count(chr(60) + "figure class")}"' in seen.dom
