"""What is wrong with a checkpoint that cannot be read. Imports no torch, as whoever only reports such an error."""

from __future__ import annotations

import errno

from scalerl.errors import RunError, UserError

# What the system says of data that is not there. Any other error is of the machine, as a file server that is away.
_LOST_DATA = (errno.EIO, errno.ENOENT, errno.EBADMSG, errno.EUCLEAN)


class DamagedCheckpointError(UserError):
    """A part of a checkpoint has other bytes than were saved.

    The message names the file and, if there is one, the tensor.
    """


class CheckpointReadError(RunError):
    """A part of a checkpoint cannot be read now, which says nothing of it: too many open files, or no answer."""


class RemovedCheckpointError(UserError):
    """A checkpoint was removed while it was read."""


def read_error(what: str, error: OSError) -> DamagedCheckpointError | CheckpointReadError:
    """The error to raise for one of the system.  what: the beginning of its message."""
    kind = DamagedCheckpointError if error.errno in _LOST_DATA else CheckpointReadError
    return kind(f"{what} cannot be read: {error.strerror or error}")
