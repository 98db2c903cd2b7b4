"""The rollout engines by name, with what checks of a configuration know of each; their code is in servers/engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineTraits:
    """The properties of a rollout engine that are asked before, or without, its code.

    spans_nodes: one server may have ranks on several nodes.
    compiles_kernels: on a GPU its servers compile kernels, so each node needs nvcc and ninja.
    repeats_draws: a sample's tokens follow from its seed and the weights, so that a resumed run has the same ones.
    answers_openai: its server has OpenAI's API too, so that `scalerl serve` can run it; the first such engine is taken.
    """

    spans_nodes: bool = False
    compiles_kernels: bool = False
    repeats_draws: bool = False
    answers_openai: bool = False


# The value of rollout.name, which is also the module of `servers.engines` with its `ENGINE` -> traits.
ROLLOUT_ENGINES = {
    "sglang": EngineTraits(spans_nodes=True, compiles_kernels=True, answers_openai=True),
    "embedded": EngineTraits(repeats_draws=True),
}


def traits_of(name: str) -> EngineTraits:
    """The traits of an engine; none for a name that is not known, which the check of its key reports."""
    return ROLLOUT_ENGINES.get(name, EngineTraits())


def engines_with(has: Callable[[EngineTraits], bool]) -> str:
    """The names of the engines with a trait, for an error that says what to set: "a or b"."""
    return " or ".join(name for name, traits in ROLLOUT_ENGINES.items() if has(traits))
