"""`ServerChooser`: chooses the server of a request, the least loaded one or the one that has the prompt already."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


def max_in_flight(max_num_seqs: int) -> int:
    """The most samples to send to a server that computes max_num_seqs at a time.

    A fifth of them waits there, so that a place that becomes free is taken in the same step. More would leave other
    servers without work at the end (benchmarks/rollout_client.py).
    """
    return max_num_seqs + max_num_seqs // 4


@dataclass
class _Server:
    max_samples: int
    num_samples: int = 0
    num_tokens: int = 0
    alive: bool = True

    def fits(self, num_samples: int) -> bool:
        # A request with more samples than a server runs at a time goes alone.
        return self.alive and (self.num_samples == 0 or self.num_samples + num_samples <= self.max_samples)


@dataclass
class ServerChooser:
    """Chooses servers by load: tokens still owed, then samples; where both tie, the server with the lowest index.

    max_samples: per server, samples in flight at a time.
    """

    max_samples: Sequence[int]
    _servers: list[_Server] = field(init=False)
    _homes: dict[Hashable, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._servers = [_Server(limit) for limit in self.max_samples]

    def assign(self, prompt: Hashable, num_samples: int, num_tokens: int) -> int | None:
        """Returns the index of a server, which now owes these samples and tokens; None when no server has room.

        prompt: requests of equal prompts go to one server while it has room for them.
        """
        fitting = [index for index, server in enumerate(self._servers) if server.fits(num_samples)]
        if not fitting:
            return None
        home = self._homes.get(prompt)
        if home not in fitting:
            home = min(fitting, key=lambda i: (self._servers[i].num_tokens, self._servers[i].num_samples, i))
            self._homes[prompt] = home
        self._servers[home].num_samples += num_samples
        self._servers[home].num_tokens += num_tokens
        return home

    def give_back(self, server: int, num_samples: int, num_tokens: int) -> None:
        self._servers[server].num_samples -= num_samples
        self._servers[server].num_tokens -= num_tokens
        assert self._servers[server].num_samples >= 0
        assert self._servers[server].num_tokens >= 0

    def lose(self, server: int) -> None:
        """Marks a server as lost: it gets no request until `restore`."""
        self._servers[server].alive = False

    def restore(self, server: int) -> None:
        """Marks a lost server as serving again, so that it gets requests."""
        self._servers[server].alive = True

    def loads(self) -> list[tuple[int, int]]:
        """The load of each server, as (tokens, samples) in flight."""
        return [(server.num_tokens, server.num_samples) for server in self._servers]
