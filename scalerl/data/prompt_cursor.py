"""The order in which prompts are used, and how far a run has come in it."""

from __future__ import annotations

from typing import Any

import numpy as np


class PromptCursor:
    """Endless indices into a data set of `num_rows` rows: every row once per epoch, epoch after epoch.

    The order of an epoch is a pure function of (seed, epoch, num_rows): row i's rank among num_rows raw 64-bit words of
    Philox seeded with SeedSequence([seed, epoch]). Both streams are frozen by numpy's compatibility policy (NEP 19),
    which Generator.permutation is not, so a run resumes to the same order under another numpy.
    shuffle=False: 0, 1, 2, ... in every epoch.
    digest: of the rows (`MessagesDigest`), to know them again when a state is loaded; None: they are not compared.

    Raises ValueError for num_rows < 1 or seed < 0.
    """

    def __init__(self, num_rows: int, seed: int, shuffle: bool, digest: str | None = None) -> None:
        if num_rows < 1:
            raise ValueError(f"PromptCursor: num_rows={num_rows}: the data set needs at least 1 row")
        if seed < 0:
            raise ValueError(f"PromptCursor: data.seed={seed}: use 0 or more")
        self._num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._digest = digest
        self._num_taken = 0
        self._cached: tuple[int, np.ndarray] | None = None

    @property
    def num_taken(self) -> int:
        """Rows handed out since the start of epoch 0."""
        return self._num_taken

    @property
    def epoch(self) -> int:
        """Epoch of the next row, from 0."""
        return self._num_taken // self._num_rows

    def take(self, n: int) -> list[int]:
        """The next n rows. They may run over the end of an epoch; n may exceed num_rows."""
        if n < 0:
            raise ValueError(f"PromptCursor.take({n}): use 0 or more")
        rows: list[int] = []
        while len(rows) < n:
            epoch, position = divmod(self._num_taken, self._num_rows)
            taken = self._order(epoch)[position : position + n - len(rows)]
            rows.extend(taken.tolist())
            self._num_taken += len(taken)
        return rows

    def _order(self, epoch: int) -> np.ndarray:
        """[num_rows] int64: the rows in the order of an epoch."""
        if self._cached is None or self._cached[0] != epoch:
            if self._shuffle:
                words = np.random.Philox(np.random.SeedSequence([self._seed, epoch])).random_raw(self._num_rows)
                order = np.argsort(words, kind="stable")
            else:
                order = np.arange(self._num_rows)
            self._cached = (epoch, order)
        return self._cached[1]

    def state_dict(self) -> dict[str, Any]:
        """The cursor's state in plain JSON values: epoch, position (rows taken of it), and what is compared on load."""
        epoch, position = divmod(self._num_taken, self._num_rows)
        digest = {} if self._digest is None else {"digest": self._digest}
        return {"epoch": epoch, "position": position, **self._identity(), **digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the position of a saved state.

        Raises ValueError when the state belongs to other rows or another order of them, or is damaged. A state from
        before there were digests has none to compare.
        """
        identity = self._identity()
        missing = [key for key in ("epoch", "position", *identity) if key not in state]
        if missing:
            raise ValueError(f"prompt cursor state lacks {', '.join(missing)} (it has {sorted(state)}); it is damaged")
        changed = [f"{key} {state[key]} -> {mine}" for key, mine in identity.items() if state[key] != mine]
        before = state.get("digest")
        if not changed and before is not None and self._digest is not None and before != self._digest:
            changed = [f"their messages; there are {self._num_rows} as before"]
        if changed:
            raise ValueError(
                f"the prompts changed since the checkpoint ({'; '.join(changed)}), so their order cannot be continued; "
                "restore data.train_files, data.train_max_samples, data.max_prompt_length, data.seed and data.shuffle, "
                "or start a new run"
            )
        epoch, position = state["epoch"], state["position"]
        if not (_is_count(epoch) and _is_count(position) and position < self._num_rows):
            raise ValueError(
                f"prompt cursor state has epoch={epoch!r}, position={position!r}; "
                f"both must be integers from 0, position below {self._num_rows}: it is damaged"
            )
        self._num_taken = epoch * self._num_rows + position

    def _identity(self) -> dict[str, Any]:
        return {"seed": self._seed, "num_rows": self._num_rows, "shuffle": self._shuffle}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
