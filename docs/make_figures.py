"""Writes the figures of the documentation, docs/images/{processes,packages,step}.svg.

Needs nothing but Python. `make docs` runs it.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
INK, MUTED, LINE = "#1f2933", "#52606d", "#7b8794"
BLUE, GREEN, ORANGE, GREY = "#e3f0fb", "#e5f5e9", "#fdf0dc", "#f2f4f7"
STYLE = "font-family='Helvetica, Arial, DejaVu Sans, sans-serif'"


class Figure:
    """An SVG file of boxes, arrows and texts."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, *, size: int = 13, bold: bool = False, middle: bool = False) -> None:
        weight = " font-weight='bold'" if bold else ""
        anchor = " text-anchor='middle'" if middle else ""
        color = INK if bold else MUTED
        self.parts.append(
            f"<text x='{x}' y='{y}' font-size='{size}' fill='{color}'{weight}{anchor}>{escape(text)}</text>"
        )

    def box(self, x: int, y: int, width: int, height: int, title: str, lines: list[str], fill: str) -> None:
        self.parts.append(
            f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='8' fill='{fill}' stroke='{LINE}'/>"
        )
        self.text(x + 14, y + 24, title, size=15, bold=True)
        for number, line in enumerate(lines):
            self.text(x + 14, y + 45 + 18 * number, line)

    def arrow(self, points: list[tuple[int, int]], label: str = "", at: tuple[int, int] = (0, 0)) -> None:
        path = " L ".join(f"{x} {y}" for x, y in points)
        self.parts.append(f"<path d='M {path}' fill='none' stroke='{INK}' stroke-width='1.6' marker-end='url(#head)'/>")
        if label:
            self.text(*at, label)

    def write(self, name: str, title: str) -> None:
        head = (
            "<defs><marker id='head' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='8' markerHeight='8' "
            f"orient='auto'><path d='M 0 0 L 10 5 L 0 10 z' fill='{INK}'/></marker></defs>"
        )
        size = f"viewBox='0 0 {self.width} {self.height}' width='{self.width}' height='{self.height}'"
        body = "\n".join(self.parts)
        IMAGES.mkdir(exist_ok=True)
        (IMAGES / f"{name}.svg").write_text(
            f"<svg xmlns='http://www.w3.org/2000/svg' {size} {STYLE}>\n<title>{escape(title)}</title>\n{head}\n"
            f"<rect width='100%' height='100%' fill='white'/>\n{body}\n</svg>\n",
            encoding="utf-8",
        )


def processes() -> None:
    figure = Figure(960, 470)
    figure.box(
        300,
        16,
        340,
        84,
        "driver (scalerl train)",
        ["configuration, step loop, trackers", "one row of numbers for each sample"],
        BLUE,
    )
    figure.box(
        20,
        190,
        300,
        104,
        "trainer ranks",
        ["Ray actors, one for each device", "Megatron: actor, reference, critic", "forward, backward, optimizer"],
        GREEN,
    )
    figure.box(
        600,
        190,
        320,
        104,
        "rollout workers",
        ["Ray actors", "prompts, programs, tools, rewards", "hold the tokens of their samples"],
        ORANGE,
    )
    figure.box(600, 366, 320, 84, "rollout servers", ["SGLang, or the embedded engine", "weights and KV cache"], ORANGE)
    figure.box(
        20, 366, 300, 84, "run directory, MLflow", ["checkpoints, config.yaml, logs", "metrics, tables, curves"], GREY
    )
    figure.arrow([(380, 100), (230, 186)], "passes, updates, saves", (150, 140))
    figure.arrow([(560, 100), (710, 186)], "prompts of the step", (655, 140))
    figure.arrow([(600, 230), (324, 230)], "tokens, log-probs (object store)", (362, 220))
    figure.arrow([(700, 294), (700, 362)], "requests", (632, 334))
    figure.arrow([(800, 366), (800, 298)], "token ids, log-probs", (810, 334))
    figure.arrow([(320, 280), (360, 280), (360, 408), (596, 408)], "weights and checksums", (372, 376))
    figure.text(372, 396, "memory, CUDA IPC, NCCL or files")
    figure.arrow([(120, 294), (120, 362)], "one file for each rank", (130, 334))
    figure.write("processes", "Processes of a run, and what goes between them")


def packages() -> None:
    rows = [
        ("cli", "finds a command in its table, and imports it", GREY),
        ("extras: verl, slurm, plan, verify, sglang_cpu", "they import the core, the core imports none of them", GREY),
        ("commands", "generate, eval, serve, chat, init, data, doctor", BLUE),
        ("trainer", "loops, checks before a start, saves, what the ranks do", BLUE),
        ("rollout", "servers, weight sync, programs, sampling", ORANGE),
        ("cluster", "Ray: pools, groups of workers, failures, probes", ORANGE),
        ("parallel, merge", "the Megatron engine; checkpoint to Hugging Face model", GREEN),
        (
            "algorithms, batch, checkpoint, data, models, rewards",
            "what is computed and stored; without processes",
            GREEN,
        ),
        ("config, configs, tracking", "keys and their checks; metrics and where they go", GREEN),
        ("base, errors", "files, signals, locks, errors with a remedy", GREEN),
    ]
    figure = Figure(860, 30 + 54 * len(rows))
    for number, (name, what, fill) in enumerate(rows):
        y = 12 + 54 * number
        figure.parts.append(f"<rect x='50' y='{y}' width='790' height='44' rx='8' fill='{fill}' stroke='{LINE}'/>")
        figure.text(64, y + 19, name, size=15, bold=True)
        figure.text(64, y + 36, what)
    figure.arrow([(24, 16), (24, 26 + 54 * len(rows) - 20)])
    figure.parts.append(
        f"<text x='16' y='{15 + 27 * len(rows)}' font-size='13' fill='{MUTED}' text-anchor='middle' "
        f"transform='rotate(-90 16 {15 + 27 * len(rows)})'>imports</text>"
    )
    figure.write("packages", "The packages of scalerl; imports go down")


def step() -> None:
    stages = [
        ("gen", "rollout servers, rollout workers", "input_ids, response_mask, rollout_logprobs; score", ORANGE),
        ("balance", "driver", "a plan: which rank computes which samples, in which micro-batch", BLUE),
        ("old_log_prob", "actor", "old_logprobs; comparison with rollout_logprobs; correction", GREEN),
        ("ref, values", "reference, critic", "ref_logprobs, values (only where the run has the role)", GREEN),
        ("adv", "driver, or the ranks for single tokens", "advantages, returns", BLUE),
        ("update_critic, update_actor", "critic, actor", "new weights; losses divided once by global counts", GREEN),
        ("update_weights", "ranks to servers", "every tensor under its Hugging Face name; checksums", ORANGE),
    ]
    figure = Figure(900, 24 + 62 * len(stages))
    for number, (name, who, what, fill) in enumerate(stages):
        y = 12 + 62 * number
        figure.parts.append(f"<rect x='20' y='{y}' width='860' height='44' rx='8' fill='{fill}' stroke='{LINE}'/>")
        figure.text(34, y + 28, name, size=15, bold=True)
        figure.text(310, y + 19, who)
        figure.text(310, y + 37, what, bold=True)
        if number:
            figure.arrow([(130, y - 18), (130, y - 2)])
    figure.write("step", "The data of a step: phase, who computes it, columns that it makes")


if __name__ == "__main__":
    processes()
    packages()
    step()
