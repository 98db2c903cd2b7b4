"""GB/s of a weight sync, from a trainer's ranks into a real rollout server, against a plain copy of the same bytes.

python benchmarks/weight_sync.py                              # 0.1 and 1 GB, trainer on 1, tp 2, pp 2
python benchmarks/weight_sync.py --gb 8 --layouts tp2         # up to what memory holds three times
python benchmarks/weight_sync.py --server-tp 2 --bucket-mb 64 # other servers, buckets: --help
python benchmarks/weight_sync.py --paths in-turn gathered     # what it saves to gather while servers load
python benchmarks/weight_sync.py --model 0.6b --layouts 1 --adapter-rank 32 # beside it an adapter alone, to SGLang

On a CPU. A byte is copied twice: by the trainer rank that holds it into memory that all processes of the machine map,
and by the server out of it. The limit is therefore half of the speed of one copy, which is measured after every sync in
the trainer's rank 0; both copies run at the same time, on different buckets, so that on idle cores more is possible.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record
from updates import MODELS, Sizes, make_model

COPIES = 2
LAYERS = 8
VOCAB = 2048
HEAD_DIM = 64
MAX_MODEL_LEN = 64
LAYOUTS = {"1": (1, 1, 1), "tp2": (2, 2, 1), "pp2": (2, 1, 2), "tp2pp2": (4, 2, 2)}


@dataclass(frozen=True)
class SyncJob:
    """layout: world, tp and pp size of the trainer.

    paths: shared (one machine), gathered (several, or GPUs), in-turn (gathered, one bucket after the other), adapter.
    adapter_rank: the trainer has adapters of all projections, and sends them alone; 0: it has none.
    """

    model_path: str
    url: str
    key: str
    engine: str
    server_tp: int
    layout: tuple[int, int, int]
    dtype: str
    bucket_mb: tuple[int, ...]
    paths: tuple[str, ...]
    repeats: int
    warmup: int
    device: str = "cpu"
    adapter_rank: int = 0

    @property
    def world_size(self) -> int:
        return self.layout[0]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, nargs="+", default=[0.1, 1.0], help="sizes of the model, 1e9 bytes")
    parser.add_argument("--model", choices=MODELS, help="in the place of --gb: the widths of a model")
    parser.add_argument("--adapter-rank", type=int, default=0, help="measures an adapter of that rank, too")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["1", "tp2", "pp2"], help="of the trainer")
    parser.add_argument("--server-tp", type=int, nargs="+", default=[1], help="ranks of the server")
    parser.add_argument("--bucket-mb", type=int, nargs="+", default=[64, 512], help="MiB")
    parser.add_argument("--paths", nargs="+", choices=("shared", "gathered", "in-turn"), default=["shared"])
    parser.add_argument("--rollout", choices=("sglang", "embedded"), default="sglang")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5, help="timed syncs, with checksums and without")
    parser.add_argument("--warmup", type=int, default=1, help="untimed ones before them")
    parser.add_argument("--start-timeout-s", type=float, default=600.0, help="of the server")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="result file; default benchmarks/results/DATE-weight-sync-cpu.json")
    record.add_now(parser)
    return parser.parse_args(arguments)


def sizes_of(gb: float, dtype: str) -> Sizes:
    """A Qwen3 of at most that many bytes, or the smallest: of LAYERS layers and more, an even number of them."""
    numbers = gb * 1e9 / {"float32": 4, "bfloat16": 2}[dtype]

    def num_layers(hidden: int) -> int:
        # Queries and output, keys and values at half their width, an MLP of three times the width; embedding and head.
        return int((numbers - 2 * VOCAB * hidden) / ((3 + 9) * hidden**2)) // 2 * 2

    # Heads of queries and of keys that two ranks can share.
    step = 4 * HEAD_DIM
    hidden = step
    while num_layers(hidden + step) >= LAYERS:
        hidden += step
    heads = hidden // HEAD_DIM
    return Sizes(
        hidden=hidden,
        ffn=3 * hidden,
        layers=max(2, num_layers(hidden)),
        heads=heads,
        kv_heads=heads // 2,
        head_dim=HEAD_DIM,
        vocab=VOCAB,
        tied=False,
    )


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    ran_on = record.machine("cpu", now=options.now)
    measured = []
    models = [MODELS[options.model]] if options.model else [sizes_of(gb, options.dtype) for gb in options.gb]
    for sizes in models:
        with tempfile.TemporaryDirectory() as directory:
            make_model(directory, sizes, options.dtype, MAX_MODEL_LEN, "cpu", options.seed)
            for server_tp in options.server_tp:
                measured += measure_server(options, directory, server_tp)
                if options.adapter_rank:
                    measured += measure_server(options, directory, server_tp, options.adapter_rank)
    result = {"copies_per_byte": COPIES, "measured": measured}
    print(report(measured))
    return record.keep("weight_sync", arguments, vars(options), ran_on, result, device="cpu")


def measure_server(
    options: argparse.Namespace, model_path: str, server_tp: int, adapter_rank: int = 0
) -> list[dict[str, Any]]:
    """One server, synced from trainers of every layout.  adapter_rank: as `SyncJob`."""
    from scalerl.config.schema import RolloutConfig
    from scalerl.rollout.servers.engines import ENGINES, Launch
    from scalerl.rollout.servers.process import RolloutServer, start_on_free_port

    config = RolloutConfig(
        name=options.rollout, dtype=options.dtype, max_num_seqs=2, tensor_model_parallel_size=server_tp
    )

    def make_server(port: int) -> RolloutServer:
        launch = Launch(
            model_path, config, "cpu", MAX_MODEL_LEN, port=port, adapter=adapter_of(model_path, adapter_rank)
        )
        command, env = ENGINES[config.name].command(launch)
        return RolloutServer(command, env, f"http://127.0.0.1:{port}", log_path, options.start_timeout_s)

    measured = []
    with tempfile.TemporaryDirectory() as log_directory:
        log_path = Path(log_directory) / "server.log"
        server = start_on_free_port(make_server)
        try:
            for layout in options.layouts:
                job = SyncJob(
                    model_path=model_path,
                    url=server.url,
                    key=server.key,
                    engine=options.rollout,
                    server_tp=server_tp,
                    layout=LAYOUTS[layout],
                    dtype=options.dtype,
                    bucket_mb=tuple(options.bucket_mb[:1] if adapter_rank else options.bucket_mb),
                    paths=("adapter",) if adapter_rank else tuple(options.paths),
                    repeats=options.repeats,
                    warmup=options.warmup,
                    adapter_rank=adapter_rank,
                )
                measurements = run_ranks(job)
                measured += [{"layout": layout, "server_tp": server_tp} | one for one in measurements]
        finally:
            server.stop()
    return measured


def adapter_of(model_path: str, rank: int) -> Any:
    """Of all projections; None with rank 0."""
    from scalerl.models import ModelShape
    from scalerl.models.adapters import Adapter, projections

    return Adapter(rank, 2 * rank, projections(ModelShape.from_hf(model_path))) if rank else None


def run_ranks(job: SyncJob) -> list[dict[str, Any]]:
    """What rank 0 measured. A rank that fails writes its traceback to stderr.

    The ranks' sentinels are of no use here: the process that looks after their shared memory inherits them and lives as
    long as the server does.
    """
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    queue = context.SimpleQueue()
    ranks = [context.Process(target=run_rank, args=(rank, job, port, queue)) for rank in range(job.world_size)]
    for rank in ranks:
        rank.start()
    try:
        while queue.empty():
            failed = [number for number, rank in enumerate(ranks) if rank.exitcode]
            if failed:
                raise RuntimeError(f"ranks {failed} of {job.world_size} failed; their tracebacks are above")
            time.sleep(0.1)
        measured = queue.get()
    except BaseException:
        for rank in ranks:
            rank.kill()
        raise
    for rank in ranks:
        rank.join()
    return measured


def run_rank(rank: int, job: SyncJob, port: int, queue: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import torch

    # As the trainer's ranks.
    torch.set_num_threads(1)
    measured = measure_rank(job)
    if rank == 0:
        queue.put(measured)


def measure_rank(job: SyncJob) -> list[dict[str, Any]]:
    """Collective; what rank 0 saw of every path and bucket size."""
    from scalerl.parallel import platform

    platform.install("cpu")
    from scalerl.config.schema import MegatronConfig
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize

    world, tp_size, pp_size = job.layout
    groups = initialize(Layout(world, tp_size=tp_size, pp_size=pp_size), backend="gloo", timeout_s=600, seed=1)
    megatron = MegatronConfig(tensor_model_parallel_size=tp_size, pipeline_model_parallel_size=pp_size, dtype=job.dtype)
    adapter = adapter_of(job.model_path, job.adapter_rank)
    engine = MegatronEngine(job.model_path, megatron, groups, optim=None, adapter=adapter)
    return [measure_syncs(job, engine, path, mib) for mib in job.bucket_mb for path in job.paths]


def measure_syncs(job: SyncJob, engine: Any, path: str, bucket_mb: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from scalerl.rollout.servers.client import Replica
    from scalerl.rollout.servers.engines import ENGINES
    from scalerl.rollout.sync.weight_sync import WeightSync

    sync = WeightSync(
        engine,
        [Replica(job.url, job.engine, ENGINES[job.engine].num_ranks(job.server_tp), job.key)],
        json.loads((Path(job.model_path) / "config.json").read_text()),
        bucket_bytes=bucket_mb * 2**20,
        timeout_s=300.0,
        adapter=adapter_of(job.model_path, job.adapter_rank),
    )
    if path not in ("shared", "adapter"):
        sync.transport = gathered(engine.export_buckets, in_turn=path == "in-turn")
    copied: list[torch.Tensor] = []
    seconds: dict[str, list[float]] = {"send": [], "whole": [], "copy": []}
    for repeat in range(job.warmup + job.repeats):
        dist.barrier()
        sent = sync.sync(2 * repeat, verify=False)
        whole = sync.sync(2 * repeat + 1, verify=True)
        num_bytes = sent.num_bytes
        if not copied:
            copied = [torch.ones(min(num_bytes, bucket_mb * 2**20), dtype=torch.uint8) for _ in range(2)]
        copy_s = time_copy(copied, num_bytes) if dist.get_rank() == 0 else 0.0
        if repeat >= job.warmup:
            seconds["send"].append(sent.seconds["send"])
            seconds["whole"].append(whole.seconds["send"] + whole.seconds["verify"])
            seconds["copy"].append(copy_s)
    return summarize(job, path, bucket_mb, num_bytes, sent.num_buckets, seconds) if copy_s else {}


def gathered(export: Any, *, in_turn: bool) -> Any:
    """The transport of ranks on several machines.  in_turn: gathers no bucket while servers load the one before."""
    import torch.distributed as dist

    from scalerl.rollout.sync.transports.memory import GatheredTransport

    loaded = threading.Semaphore(0)

    class InTurn(GatheredTransport):
        def _send(self, *part: Any) -> None:
            super()._send(*part)
            loaded.release()

    def export_in_turn(bucket_bytes: int, wanted: Any) -> Any:
        for number, named in enumerate(export(bucket_bytes, wanted)):
            yield named
            # There is one server.
            if dist.get_rank() in wanted(number):
                loaded.acquire()

    return InTurn(export_in_turn) if in_turn else GatheredTransport(export)


def time_copy(buffers: list[Any], num_bytes: int) -> float:
    """Seconds to copy that many bytes, a bucket at a time, into memory that is there already; one thread."""
    source, target = buffers
    left, start = num_bytes, time.perf_counter()
    while left > 0:
        size = min(left, len(source))
        target[:size].copy_(source[:size])
        left -= size
    return time.perf_counter() - start


def summarize(
    job: SyncJob, path: str, bucket_mb: int, num_bytes: int, num_buckets: int, seconds: dict[str, list[float]]
) -> dict[str, Any]:
    spreads = {name: record.spread(values) for name, values in seconds.items()}
    rates = {name: num_bytes / 1e9 / spreads[name]["median"] for name in spreads}
    summary = {
        "gb": num_bytes / 1e9,
        "bucket_mb": bucket_mb,
        "num_buckets": num_buckets,
        "path": path,
        "seconds": spreads,
        "send_gb_per_s": rates["send"],
        "whole_gb_per_s": rates["whole"],
        "copy_gb_per_s": rates["copy"],
    }
    if path == "shared":
        # Of gathered weights the number of copies depends on the layout: it is compared by its speed alone.
        summary["send_over_limit"] = rates["send"] / (rates["copy"] / COPIES)
    return summary


def report(measured: list[dict[str, Any]]) -> str:
    rows = [("GB, trainer, server, bucket, path", "GB/s", "")]
    for one in measured:
        name = (
            f"{one['gb']:.4f}  {one['layout']:<6} tp{one['server_tp']}  "
            f"{one['num_buckets']:>3} x {one['bucket_mb']} MiB  {one['path']}"
        )
        limit = f", {one['send_over_limit']:.2f} of copy/{COPIES}" if "send_over_limit" in one else ""
        rows.append(
            (
                name,
                f"{one['send_gb_per_s']:.2f}",
                f"{one['seconds']['send']['median']:.3f} s; with checksums {one['whole_gb_per_s']:.2f}; one copy "
                f"{one['copy_gb_per_s']:.2f}{limit}",
            )
        )
    return record.table(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
