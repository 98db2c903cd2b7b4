"""The program `python -m scalerl.merge`."""

from __future__ import annotations

import sys

from scalerl.merge.command import main

if __name__ == "__main__":
    sys.exit(main())
