"""Large files that several threads read at once: what each reads next is on its way from the disk meanwhile."""

from __future__ import annotations

import os

# Bytes ahead of a reader that are asked for, and how many at least at a time.
_AHEAD_BYTES, _ASK_BYTES = 16 * 2**20, 8 * 2**20


class Readahead:
    """Asks the kernel for the part of a file that one reader comes to next.

    The kernel reads ahead by itself for one reader of a descriptor; several, at different places, look like none.
    """

    def __init__(self, start: int, end: int) -> None:
        """Has asked for nothing.  start, end: what will be read of the file, in bytes."""
        self._asked, self._end = start, end

    def reading(self, file: int, position: int) -> None:
        """Says that the reader is about to pass `position`.  file: a descriptor."""
        stop = min(position + _AHEAD_BYTES, self._end)
        # A piece that is read in one go is not worth the call.
        if stop > max(position, self._asked) and (stop - self._asked >= _ASK_BYTES or stop == self._end):
            os.posix_fadvise(file, self._asked, stop - self._asked, os.POSIX_FADV_WILLNEED)
            self._asked = stop
