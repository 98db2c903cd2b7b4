"""What holds in every step of every run, whatever it is about."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tests.unit.metrics.test_documented_keys import DOC, patterns

# Of a step: what its parts may leave out. Steps of half a second on a busy machine left out a thousandth where this was
# written; that nothing but trifles is in between, tests/unit/trainer/test_phases.py sees in the code.
UNTIMED_FRAC = 0.02


def check_step(metrics: Mapping[str, float], own_keys: Collection[str] = ()) -> None:
    """metrics: all that was logged at a step. own_keys: of code that is the test's own."""
    known = patterns(DOC.read_text(encoding="utf-8"))
    unknown = [key for key in metrics if key not in own_keys and not any(pattern.match(key) for pattern in known)]
    assert unknown == [], "not in docs/metrics.md"
    if "timing_s/step" in metrics:
        check_timing(metrics)


def check_timing(metrics: Mapping[str, float]) -> None:
    """The parts of a step add up to it, without what was measured as the rest."""
    step_s = metrics["timing_s/step"]
    parts = {key: value for key, value in metrics.items() if key.startswith("timing_s/") and key.count("/") == 1}
    parts_s = sum(parts.values()) - step_s - parts["timing_s/untimed"]
    assert 0 <= step_s - parts_s <= UNTIMED_FRAC * step_s, parts
