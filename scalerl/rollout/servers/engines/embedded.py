"""The embedded engine: transformers on a CPU, with draws that are repeatable from the sample's seed."""

from __future__ import annotations

import base64
import sys
from typing import TYPE_CHECKING, Any

from scalerl.rollout.servers.engines.base import Command, Engine, Launch, check_context_length
from scalerl.rollout.servers.requests import GenerateRequest

if TYPE_CHECKING:
    from scalerl.rollout.servers.buckets import Bucket
    from scalerl.rollout.servers.requests import Slot


class EmbeddedEngine(Engine):
    name = "embedded"

    def command(self, launch: Launch) -> Command:
        assert launch.nnodes == 1, "the embedded engine is one process"
        check_context_length(launch.model_path, launch.max_model_len)
        command = [sys.executable, "-m", "scalerl.rollout.servers.embedded.server", "--model-path", launch.model_path]
        command += ["--host", launch.host, "--port", str(launch.port), "--device", launch.device]
        command += ["--dtype", launch.config.dtype, "--max-model-len", str(launch.max_model_len)]
        command += ["--max-batch-size", str(launch.config.max_num_seqs)]
        env = {"OMP_NUM_THREADS": "1"}
        if launch.device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        elif launch.gpu_ids is not None:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, launch.gpu_ids))
        return command + (["--trust-remote-code"] if launch.trust_remote_code else []), env

    def sampling_params(self, request: GenerateRequest, slot: Slot) -> dict[str, Any]:
        if slot.seed is None:
            raise ValueError(f"request {request.request_id!r}: the embedded engine needs seeds, one per sample")
        # The position continues after an interruption, which so does not change the tokens.
        draw = {"sampling_seed": slot.seed, "sampling_position": len(slot.output_ids)}
        return super().sampling_params(request, slot) | draw

    def serialize(self, bucket: Bucket) -> str:
        """A bucket as text: the handle of mapped memory or of device memory, or the values."""
        if bucket.shared is not None:
            return bucket.shared.handle()
        if bucket.named[0][1].is_cuda:
            from scalerl.rollout.servers.buckets import cuda_handle, flat_bucket

            return cuda_handle(*flat_bucket(bucket.named))
        import safetensors.torch

        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket.named}
        return base64.b64encode(safetensors.torch.save(tensors)).decode("ascii")


ENGINE = EmbeddedEngine()
