"""`python -m scalerl.servers.sglang.launch ARGUMENTS`: SGLang's server, with the key that is in the environment.

Arguments are those of `sglang.launch_server`; a key among them would be on the command line, where everybody reads it.
"""

from __future__ import annotations

import os
import sys

from scalerl.servers.access import take_key


def main() -> None:
    key = take_key()
    # Inside: SGLang's processes import this module again.
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    arguments = prepare_server_args([*sys.argv[1:], "--api-key", key])
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
