"""The task: which shape, or which color, is in a drawn picture.

The demonstrations for SFT come from a careless teacher who often says any word, so SFT teaches the format and a part
of the answers. The reward knows the right word, so RL can teach the rest. Without the picture nobody can know it.
"""

from __future__ import annotations

import io
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

DATA_SOURCE, BLANK_SOURCE = "vision/name", "vision/blank"
ANSWERS = {"shape": ("circle", "square", "triangle"), "color": ("red", "green", "blue")}
# A picture has 2 x 2 cells of CELL points, one of which has a shape.
CELLS, CELL = 4, 28
NUM_TRAIN, NUM_VALIDATION = 1500, 120
# Share of the demonstrations in which the teacher says any word that fits the question.
GUESSES = 0.6


@dataclass(frozen=True)
class Problem:
    """A picture with a question, of the shape or of the color.  x, y, size: of the shape, in points."""

    asked: str
    shape: str
    color: str
    x: int
    y: int
    size: int

    @property
    def question(self) -> str:
        """<image> is where the model sees the picture."""
        return f"<image>Which {self.asked}?"

    @property
    def answer(self) -> str:
        return self.shape if self.asked == "shape" else self.color

    def png(self, *, blank: bool = False) -> bytes:
        """The picture; blank: without its shape."""
        image = Image.new("RGB", (2 * CELL, 2 * CELL), "white")
        if not blank:
            self._draw(ImageDraw.Draw(image))
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        return buffer.getvalue()

    def _draw(self, draw: ImageDraw.ImageDraw) -> None:
        x, y, right, bottom = box = (self.x, self.y, self.x + self.size, self.y + self.size)
        if self.shape == "circle":
            draw.ellipse(box, fill=self.color)
        elif self.shape == "square":
            draw.rectangle(box, fill=self.color)
        else:
            draw.polygon([((x + right) // 2, y), (x, bottom), (right, bottom)], fill=self.color)


def problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """(train, validation), in an order that the seed fixes; no picture is in both with the same question."""
    chance = random.Random(seed)
    made: dict[Problem, None] = {}
    while len(made) < NUM_TRAIN + NUM_VALIDATION:
        cell, size = chance.randrange(CELLS), chance.randint(18, 24)
        x, y = (CELL * place + chance.randint(1, CELL - size - 2) for place in (cell % 2, cell // 2))
        shape, color = (chance.choice(words) for words in ANSWERS.values())
        made[Problem(chance.choice(list(ANSWERS)), shape, color, x, y, size)] = None
    everything = list(made)
    return everything[NUM_VALIDATION:], everything[:NUM_VALIDATION]


def demonstrations(train: list[Problem], seed: int) -> list[tuple[Problem, str]]:
    """An answer of the careless teacher to every problem."""
    teacher = random.Random(seed + 1)
    return [
        (problem, teacher.choice(ANSWERS[problem.asked]) if teacher.random() < GUESSES else problem.answer)
        for problem in train
    ]
