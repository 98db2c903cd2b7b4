"""The weight of the KL in the reward."""

from __future__ import annotations

import pytest

from scalerl.algorithms import KLController
from scalerl.config.schema import KLControlConfig

ADAPTIVE = KLControlConfig(type="adaptive", kl_coef=0.2, horizon=1000, target_kl=0.1)


@pytest.mark.parametrize(
    ("kl", "want"),
    [
        (0.1, 0.2),  # on target
        (0.11, 0.2 * (1 + 0.1 * 64 / 1000)),
        (5.0, 0.2 * (1 + 0.2 * 64 / 1000)),  # the error counts up to 20 %
        (0.09, 0.2 * (1 - 0.1 * 64 / 1000)),
        (-3.0, 0.2 * (1 - 0.2 * 64 / 1000)),  # an estimate may be negative
    ],
)
def test_adaptive(kl, want):
    controller = KLController.of(ADAPTIVE)
    controller.update(kl, 64)
    assert controller.coef == pytest.approx(want, rel=1e-12)


def test_fixed_stays():
    controller = KLController.of(KLControlConfig(kl_coef=0.3))
    controller.update(9.0, 1000)
    assert controller.coef == 0.3


def test_a_resumed_controller_goes_on_where_it_was():
    first = KLController.of(ADAPTIVE)
    for kl in (0.3, 0.05, 0.2):
        first.update(kl, 32)
    second = KLController.of(ADAPTIVE)
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(0.15, 32)
    assert first.coef == second.coef != ADAPTIVE.kl_coef


def test_a_fixed_weight_is_the_configurations():
    controller = KLController.of(KLControlConfig(kl_coef=0.5))
    controller.load_state_dict({"coef": 0.1})
    assert controller.coef == 0.5
