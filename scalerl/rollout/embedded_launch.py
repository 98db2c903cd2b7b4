"""The command line of an embedded server. Apart from the server, so that who starts it does not import torch."""

from __future__ import annotations

import sys

from scalerl.config.schema import RolloutConfig
from scalerl.rollout.context_length import check_context_length


def embedded_command(
    *,
    model_path: str,
    rollout: RolloutConfig,
    port: int,
    max_model_len: int,
    host: str = "127.0.0.1",
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """-> (command, environment variables to add). ValueError when max_model_len exceeds the model's positions."""
    check_context_length(model_path, max_model_len)
    command = [sys.executable, "-m", "scalerl.rollout.embedded_server"]
    command += ["--model-path", model_path, "--host", host, "--port", str(port), "--device", device]
    command += ["--dtype", rollout.dtype, "--max-model-len", str(max_model_len)]
    command += ["--max-batch-size", str(rollout.max_num_seqs)]
    env = {"OMP_NUM_THREADS": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    return command + (["--trust-remote-code"] if trust_remote_code else []), env
