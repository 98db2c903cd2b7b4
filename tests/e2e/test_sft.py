"""`scalerl sft` on two processes: what it logs of each step."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.e2e.conftest import StartJob
from tests.e2e.jobs import Inputs, Record, scalerl

STEPS = 3


def write_rows(path: Path, num_rows: int) -> Path:
    conversations = [
        [{"role": "user", "content": f"{i}+1="}, {"role": "assistant", "content": str(i + 1)}] for i in range(num_rows)
    ]
    pq.write_table(pa.Table.from_pylist([{"messages": messages} for messages in conversations]), path)
    return path


def test_metrics_of_a_run(inputs: Inputs, start_job: StartJob, tmp_path: Path) -> None:
    """Memory of the phases of each step, test and checkpoint among them; no key that is not documented."""
    overrides = [
        f"data.train_files={write_rows(tmp_path / 'train.parquet', 16)}",
        f"data.val_files={write_rows(tmp_path / 'val.parquet', 4)}",
        "data.max_length=32",
        "data.train_batch_size=8",
        "data.max_token_len_per_gpu=64",
        f"model.path={inputs.model}",
        "megatron.dtype=float32",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=2",
        f"trainer.total_training_steps={STEPS}",
        "trainer.test_freq=2",
        f"trainer.save_freq={STEPS}",
        "trainer.logger=[file]",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    job = start_job(scalerl("sft", *overrides), tmp_path)
    assert job.finish() == 0, job.tail()
    steps = Record.read(tmp_path / "run").final
    assert steps.keys() == set(range(1, STEPS + 1))
    phases = {
        1: ["update_actor"],
        2: ["testing", "update_actor"],
        STEPS: ["save_checkpoint", "testing", "update_actor"],
    }
    for step, metrics in steps.items():
        for kind in ("peak", "current"):
            prefix = f"perf/memory_{kind}_gb/"
            found = {key.removeprefix(prefix): metrics[key] for key in metrics if key.startswith(prefix)}
            assert sorted(found) == phases[step]
            assert all(0 < gib < 64 for gib in found.values())
        assert {"train/loss", "train/grad_norm", "perf/max_memory_allocated_gb"} <= metrics.keys()
        assert ("val/loss" in metrics) is (step > 1)
