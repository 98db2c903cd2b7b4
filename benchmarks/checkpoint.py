"""GB/s of saving and loading a checkpoint on real ranks, against dd with as many processes in the same run.

python benchmarks/checkpoint.py                       # a model of 0.1 billion parameters in bfloat16 on two dp ranks
python benchmarks/checkpoint.py --model quickstart --dtype float32
python benchmarks/checkpoint.py --model 1gb --directory /data
python benchmarks/checkpoint.py --model 1gb --cold    # what is read is not in the page cache
python benchmarks/checkpoint.py --device cuda --model 1.7b    # one rank, and how much memory of its GPU a save takes

A save is `save_engine` (digests, one fsync for each rank) and the commit of the directory; dd writes as many bytes with
conv=fsync. A save in the background (`trainer.async_save`) stops the run until it has begun; what each rank writes is
copied beside the passes of the next update, which waits for the rest before it changes the weights. begin is that stop
on the rank where it is longest, wait that of an update right after it, as of SFT, on ROW_TOKENS tokens for each rank:
blocking_share is both over the time of a save. copy is the whole copy, where nothing runs beside it.

A load is `load_engine`, every digest compared; dd reads the files that were written. A run that goes on first has the
driver compare what is beside the tensors: resume is that and the load. All meet the same page cache; with --cold each
load and each dd that reads begins without any page of the files. Predicted from what one core hashes, writes and reads,
with as many cores as ranks; a save no faster than dd writes, a cold load no faster than dd reads.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import record
from merge import evict, one_core, resident
from updates import MODELS, make_model

# Width and layers; the second has 0.5 billion parameters, 1 GB in bfloat16. quickstart: of examples/arithmetic.
SIZES = {"0.1b": (768, 12), "1gb": (1536, 18), "quickstart": None, "0.6b": (1024, 28), "1.7b": (2048, 28)}
# Of the update right after a save; the fewer, the sooner it changes the weights.
ROW_TOKENS = 64
LAYOUTS = {"1": (1, 1), "dp2": (2, 1), "tp2": (2, 2)}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="0.1b")
    parser.add_argument("--hidden", type=int, default=None, help="another width than that of --model")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layout", choices=LAYOUTS, help="default: dp2 on a CPU, 1 on a GPU")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="remove what is read from the page cache before each")
    parser.add_argument("--directory", default=None, help="where to write; default: for temporary files")
    parser.add_argument("--out", help="result file; default benchmarks/results/DATE-checkpoint-DEVICE.json")
    record.add_now(parser)
    args = parser.parse_args(arguments)
    args.layout = args.layout or ("dp2" if args.device == "cpu" else "1")
    return args


def of_rank(
    model: str, layout: tuple[int, int], dtype: str, root: str, repeats: int, cold: bool
) -> list[dict[str, float]]:
    """Seconds of each save and load, between barriers, and the bytes that became resident meanwhile."""
    import torch
    import torch.distributed as dist

    from scalerl.batch.data_proto import DataProto, Jagged
    from scalerl.checkpoint import store
    from scalerl.config.schema import MegatronConfig, OptimConfig
    from scalerl.parallel import checkpoint, platform, restore
    from scalerl.parallel.checkpoint import BackgroundSave
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize

    world_size, tp_size = layout
    groups = initialize(Layout(world_size, tp_size), backend=platform.backend(), timeout_s=600, seed=1)
    engine = MegatronEngine(model, MegatronConfig(dtype=dtype), groups, optim=OptimConfig())
    row = DataProto({"input_ids": Jagged.from_list([torch.arange(ROW_TOKENS)], torch.int64)})
    seconds_by_repeat, beside = [], BackgroundSave()
    for repeat in range(repeats + 1):
        tmp = [str(store.begin_save(root, repeat)) if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(tmp)
        seconds: dict[str, float] = {}
        with _timed(seconds, "save"):
            checkpoint.save_engine(engine, f"{tmp[0]}/actor")
            if dist.get_rank() == 0:
                store.commit(tmp[0], root, repeat)
        if cold and dist.get_rank() == 0:
            evict(Path(root))
        with _timed(seconds, "check"):
            if dist.get_rank() == 0:
                store.check_checkpoint(f"{root}/global_step_{repeat}", digests=True, data=False)
        with _timed(seconds, "load"):
            restore.load_engine(engine, f"{root}/global_step_{repeat}/actor")
        with _timed(seconds, "copy"):
            stops = _slowest(lambda: beside.begin("actor", engine, f"{root}/beside"), lambda: engine.before_change())
        # What stops a rank, without the barriers around them.
        seconds["begin"], seconds["copy"] = stops
        with _timed(seconds, "write"):
            beside.wait("actor")
        beside.begin("actor", engine, f"{root}/beside")
        seconds["wait"] = _wait_of_update(engine, row)
        beside.wait("actor")
        if dist.get_rank() == 0:
            shutil.rmtree(f"{root}/beside")
            if repeat:
                shutil.rmtree(f"{root}/global_step_{repeat - 1}")
        dist.barrier()
        seconds_by_repeat.append(seconds)
    return seconds_by_repeat[1:]


def _slowest(*calls: Callable[[], object]) -> list[float]:
    """Seconds of each call, one after another, on the rank where it took longest. Collective."""
    import torch
    import torch.distributed as dist

    seconds = []
    for call in calls:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(seconds, dtype=torch.float64, device=torch.cuda.current_device())
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def _wait_of_update(engine: Any, row: Any) -> float:
    """Seconds that an update on this row waits, on the slowest rank, for the copy of a save that has just begun."""
    import torch
    import torch.distributed as dist

    waited, copied = 0.0, engine.before_change

    def before_change() -> None:
        nonlocal waited
        start = time.perf_counter()
        copied()
        waited += time.perf_counter() - start

    def loss(logprobs_T: Any, *_: Any) -> tuple[Any, dict[str, Any]]:
        value = -logprobs_T.mean()
        return value, {"loss": value.detach()}

    engine.before_change = before_change
    engine.update(row, [range(1)], loss, temperature=1.0)
    slowest = torch.tensor(waited, device=torch.cuda.current_device())
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


class _timed:
    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self.seconds, self.name = seconds, name

    def __enter__(self) -> None:
        import torch
        import torch.distributed as dist

        dist.barrier()
        self.on_gpu = torch.cuda.is_available()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            self.allocated = torch.cuda.memory_allocated()
        self.before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self.start = time.perf_counter()

    def __exit__(self, *_: Any) -> None:
        import torch
        import torch.distributed as dist

        dist.barrier()
        self.seconds[self.name] = time.perf_counter() - self.start
        self.seconds[f"{self.name}_peak_bytes"] = resident("VmHWM") - self.before
        peak = torch.cuda.max_memory_allocated() - self.allocated if self.on_gpu else 0
        self.seconds[f"{self.name}_gpu_peak_bytes"] = peak


def make(model: str, args: argparse.Namespace) -> None:
    """Writes the model to measure with."""
    sizes = SIZES[args.model]
    if sizes is None:
        script = record.REPOSITORY / "examples" / "arithmetic" / "make_model.py"
        subprocess.run([sys.executable, str(script), "--out", model], check=True, stdout=subprocess.DEVNULL)
        return
    hidden, layers = args.hidden or sizes[0], args.layers or sizes[1]
    like = MODELS.get(args.model, MODELS["17m"])
    make_model(model, like.with_width(hidden, layers), args.dtype, 2048, args.device, 0)


def predicted_gb_per_s(rates: dict[str, float], ranks: int, dd_write: float, dd_read: float | None) -> dict[str, float]:
    """Of a checkpoint's bytes. rates: of one core.  ranks: that work at the same time.  dd_write, dd_read: of the disk.

    dd_read: None: what is read is in the page cache.
    """
    load = ranks / (1 / rates["read"] + 1 / rates["hash"])
    load = load if dd_read is None else min(load, dd_read)
    return {"save": min(dd_write, ranks / (1 / rates["write"] + 1 / rates["hash"])), "load": load, "resume": load}


def dd(commands: list[list[str]]) -> float:
    start = time.perf_counter()
    running = [subprocess.Popen(["dd", "bs=16M", *command], stderr=subprocess.DEVNULL) for command in commands]
    assert [process.wait() for process in running] == [0] * len(running)
    return time.perf_counter() - start


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parse(arguments)
    ran_on = record.machine(args.device, now=args.now)

    layout = LAYOUTS[args.layout]
    with tempfile.TemporaryDirectory(dir=args.directory) as root:
        model, run = f"{root}/model", f"{root}/run"
        rates = one_core(Path(root))
        make(model, args)
        job = (layout[0], of_rank, model, layout, args.dtype, run, args.repeats, args.cold)
        if args.device == "cuda":
            from tests.gpu.isolated import run_isolated_ranks

            ranks = run_isolated_ranks(*job, device="cuda")
        else:
            from tests.dist.launch import run_ranks

            ranks = run_ranks(*job, timeout_s=3600.0, fresh=True)
        files = sorted(Path(run).glob("global_step_*/actor/dist_ckpt/*.distcp"))
        size = sum(file.stat().st_size for file in files)
        writes, reads = [], []
        for _ in range(args.repeats):
            copies = {f"{root}/copy{number}": file.stat().st_size for number, file in enumerate(files)}
            writes.append(
                dd(
                    [
                        ["if=/dev/zero", f"of={copy}", f"count={num_bytes}", "iflag=count_bytes", "conv=fsync"]
                        for copy, num_bytes in copies.items()
                    ]
                )
            )
            for copy in copies:
                Path(copy).unlink()
            if args.cold:
                evict(Path(run))
            reads.append(dd([[f"if={file}", "of=/dev/null"] for file in files]))
    names = ("save", "check", "load", "begin", "copy", "write", "wait")
    saves, checks, loads, begins, copies_s, writes_beside, waits = (
        [of_run[name] for of_run in ranks[0]] for name in names
    )
    resumes = [check + load for check, load in zip(checks, loads, strict=True)]
    cold_read = size / max(reads) / 1e9 if args.cold else None
    predicted = predicted_gb_per_s(rates, min(layout[0], ran_on["cores"]), size / max(writes) / 1e9, cold_read)
    result = {
        "checkpoint_bytes": size,
        "save_gb_per_s": record.spread([size / s / 1e9 for s in saves]),
        "load_gb_per_s": record.spread([size / s / 1e9 for s in loads]),
        "resume_gb_per_s": record.spread([size / s / 1e9 for s in resumes]),
        "predicted_gb_per_s": predicted,
        "one_core_gb_per_s": rates,
        "dd_write_gb_per_s": record.spread([size / s / 1e9 for s in writes]),
        "dd_read_gb_per_s": record.spread([size / s / 1e9 for s in reads]),
        "begin_s": record.spread(begins),
        "copy_s": record.spread(copies_s),
        "wait_s": record.spread(waits),
        "write_beside_s": record.spread(writes_beside),
        "blocking_share": record.spread(
            [(begin + wait) / save for begin, wait, save in zip(begins, waits, saves, strict=True)]
        ),
        **{
            f"{peak}_of_a_rank": {
                name: max(of_run[f"{name}_{peak}"] for rank in ranks for of_run in rank)
                for name in ("save", "load", "copy", "write")
            }
            for peak in ("peak_bytes", "gpu_peak_bytes")
        },
    }
    rows = [("checkpoint", f"{size / 1e9:.2f} GB", f"{len(files)} files")]
    for name, other in (("save", "dd_write"), ("load", "dd_read"), ("resume", "dd_read")):
        ours, theirs = result[f"{name}_gb_per_s"]["median"], result[f"{other}_gb_per_s"]["median"]
        result[f"{name}_over_dd"] = ours / theirs
        note = f"dd {theirs:.2f}: {ours / theirs:.2f} of it; predicted {predicted[name]:.2f}"
        rows.append((name, f"{ours:.2f} GB/s", note))
    share = result["blocking_share"]["median"]
    begin_s, wait_s, copy_s = (result[f"{name}_s"]["median"] for name in ("begin", "wait", "copy"))
    rows.append(("async save", f"{begin_s + wait_s:.3f} s", f"that the run waits: {share:.3f} of a save"))
    rows.append(("  begin, wait", f"{begin_s:.3f} s, {wait_s:.3f} s", f"copied in {copy_s:.3f} s"))
    print(record.table(rows))
    return record.keep("checkpoint", arguments, vars(args), ran_on, result, device=args.device)


if __name__ == "__main__":
    sys.exit(main())
