"""The program `child_of_raylet.py COMMAND ...`, which becomes a process of a raylet's and ends whenever that does.

Ray's own workers and agents notice the end of their raylet once they run; before, they import for a while, and they may
then try for a minute to reach the cluster's head, which has ended, too. It is run by its path, and imports next to
nothing: every worker of Ray's begins with it.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with open(f"/proc/{os.getppid()}/comm", encoding="utf-8") as name:
        # Else the raylet ended before it could be watched.
        if name.read().strip() == "raylet":
            os.execv(sys.argv[1], sys.argv[1:])
