"""Seeds of SGLang's generators."""

from __future__ import annotations

import itertools

from scalerl.servers.host import server_seed


def test_no_server_draws_what_another_drew() -> None:
    """Of any two replicas, starts after a loss, and runs that were resumed after different steps."""
    places = list(itertools.product([0, 42], range(16), range(20), range(4)))
    seeds = {
        server_seed(seed, index=index, first_step=step, num_restarts=restarts) for seed, index, step, restarts in places
    }
    assert len(seeds) == len(places)
    # What SGLang, torch and numpy take.
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_the_same_start_has_the_same_seed() -> None:
    assert server_seed(42, index=1, first_step=0, num_restarts=0) == 1920655309
