"""KEY=VALUE ...: `scalerl generate` that loses its first server in the second batch and is killed in the third.

Each by SIGKILL, when the first response of the batch comes. Run by its path, in the directory of responses.parquet.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from graded_reward import server_of

from scalerl.commands import generation, main_generation
from scalerl.rollout.servers.requests import GenerateOutput

SERVER_LOG = Path("responses.parquet.parts", "logs", "rollout-0.").absolute()

generate_samples = generation.generate_samples
num_batches = 0
struck = False


def lose_server(output: GenerateOutput) -> None:
    global struck
    if not struck:
        struck = True
        os.killpg(server_of(str(SERVER_LOG)), signal.SIGKILL)


def die(output: GenerateOutput) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def disturbed(clients: Any, requests: Any, **kwargs: Any) -> Any:
    global num_batches
    num_batches += 1
    return generate_samples(clients, requests, {2: lose_server, 3: die}.get(num_batches), **kwargs)


generation.generate_samples = disturbed
sys.exit(main_generation.main(sys.argv[1:]))
