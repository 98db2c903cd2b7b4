"""GB/s of a merge into a Hugging Face model, against `cp` of the same bytes to the same place in the same run.

python benchmarks/merge.py                                # 1 GB, two saving ranks split over rows and columns
python benchmarks/merge.py --gb 2 --ranks 4 --directory /data
python benchmarks/merge.py --gb 16 --ranks 4 --cold       # what is read is not in the page cache

How much of cp's source the page cache holds is measured before each: of a model larger than the free memory, not all.

The merge is `scalerl.merge.merge` in a process that has imported it (how long that takes is reported beside it): it
reads the pieces, compares every digest, and writes the files with fsync. So cp is timed by itself and with a sync of
its file. Torch's own converter (torch.distributed.checkpoint.format_utils.dcp_to_torch_save) reads the same checkpoint:
it makes one pickle of Megatron's tensors, compares no digest, forces nothing onto the disk, and holds the model in
memory. Slime's converter needs Megatron and a package that builds for CUDA alone, so its way is gone here, with torch's
and safetensors' functions: the whole model is loaded, each parameter converted, and files of 5 GB are saved.

With --cold every one of them begins without any page of the checkpoint or model in memory.

The prediction is what one core needs to read, hash and write a megabyte that is in its cache, measured first, over the
cores that merge; or the disk's rate, by what the sync adds to cp, if that is slower.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record

LAYERS = 8
# Of each file that slime's converter writes.
SLIME_FILE_BYTES = 5 * 2**30
SAMPLE_BYTES = 2**28
IMPORTS = "import time; start = time.perf_counter(); import scalerl.merge; print(time.perf_counter() - start)"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the model in bfloat16, 1e9 bytes")
    parser.add_argument("--ranks", type=int, default=2, help="files of the checkpoint; tensors are split over them")
    parser.add_argument("--workers", type=int, default=None, help="threads of the merge")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="remove what is read from the page cache before each")
    parser.add_argument("--directory", default=None, help="where to write; default: for temporary files")
    parser.add_argument("--out", help="result file; default benchmarks/results/DATE-merge.json")
    record.add_now(parser)
    return parser.parse_args(arguments)


def make_checkpoint(root: Path, gb: float, ranks: int) -> Path:
    """A Qwen2 of that size as `ranks` ranks of tensor parallelism save it."""
    import torch

    from scalerl.checkpoint.pieces import Piece, write_file, write_index
    from scalerl.models import CHECKPOINT_MODEL_PREFIX, ModelShape, family_of

    def config(hidden: int) -> dict[str, object]:
        return dict(
            model_type="qwen2",
            hidden_size=hidden,
            num_attention_heads=hidden // 64,
            num_key_value_heads=max(1, hidden // 256),
            vocab_size=32768,
            intermediate_size=4 * hidden,
            num_hidden_layers=LAYERS,
            max_position_embeddings=2048,
            torch_dtype="bfloat16",
        )

    def num_bytes(hidden: int) -> int:
        return 2 * (LAYERS * 29 * hidden * hidden // 2 + 2 * 32768 * hidden)

    hidden = max(256, max(h for h in range(256, 16384, 256) if num_bytes(h) <= max(gb * 1e9, num_bytes(256))))
    actor = root / "actor"
    (actor / "dist_ckpt").mkdir(parents=True)
    (actor / "huggingface").mkdir()
    (actor / "huggingface" / "config.json").write_text(json.dumps(config(hidden)))
    shape = ModelShape.from_hf(actor / "huggingface")
    params = family_of(shape).params(shape)

    def pieces(rank: int):
        for param in params:
            whole = param.joined_shape(shape)
            dim = 1 if param.kind == "row" else 0
            size = whole[dim] // ranks
            sizes = tuple(size if d == dim else n for d, n in enumerate(whole))
            offsets = tuple(rank * size if d == dim else 0 for d in range(len(whole)))
            tensor = torch.randint(-9, 9, sizes, dtype=torch.int16).view(torch.bfloat16)
            yield Piece(CHECKPOINT_MODEL_PREFIX + param.name, whole, offsets, tensor)

    files = [write_file(actor / "dist_ckpt" / f"__{rank}_0.distcp", pieces(rank)) for rank in range(ranks)]
    write_index(actor / "dist_ckpt", files, {})
    return actor


def resident(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    match = re.search(rf"^{field}:\s*(\d+) kB", status, re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def evict(root: Path) -> None:
    """Removes the pages of all files below `root` from the page cache; what is dirty is written first."""
    for path in filter(Path.is_file, root.rglob("*")):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def remove(directory: Path) -> None:
    """Removes a directory, and waits until the disk has: freeing its blocks would go on beside what is timed next."""
    shutil.rmtree(directory)
    os.sync()


def cached_frac(root: Path) -> float:
    """The share of the bytes of all files below `root` that the page cache holds."""
    page_bytes, cached, pages = os.sysconf("SC_PAGE_SIZE"), 0, 0
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    for path in filter(Path.is_file, root.rglob("*")):
        # A private copy, which ctypes can take the address of, and none of whose pages is touched.
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            is_cached = (ctypes.c_ubyte * -(-len(mapped) // page_bytes))()
            first = ctypes.c_char.from_buffer(mapped)
            if mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped)), is_cached):
                raise OSError(ctypes.get_errno(), f"mincore of {path}")
            del first
        cached, pages = cached + sum(page & 1 for page in is_cached), pages + len(is_cached)
    return cached / pages


def copied(source: Path, target: Path, *, sync: bool) -> float:
    """Seconds of a cp, and of the sync of its files; the copy is removed."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    if sync:
        subprocess.run(["sync", *map(str, target.iterdir())], check=True)
    seconds = time.perf_counter() - start
    remove(target)
    return seconds


def one_core(directory: Path) -> dict[str, float]:
    """GB/s of one core that reads a file of the page cache, hashes what its cache holds, and writes a new file."""
    from scalerl.base.files import reserve
    from scalerl.checkpoint.pieces import CACHED_BYTES, Digest

    part = bytearray(os.urandom(CACHED_BYTES))
    best: dict[str, float] = {"write": 0.0, "read": 0.0, "hash": 0.0}
    for _ in range(3):
        file = os.open(directory / "sample", os.O_RDWR | os.O_CREAT)
        reserve(file, SAMPLE_BYTES)
        works: dict[str, Callable[[int], object]] = {
            "write": functools.partial(os.pwrite, file, part),
            "read": functools.partial(os.preadv, file, [part]),
            "hash": lambda _: Digest().update(part),
        }
        for name, work in works.items():
            began_s = time.thread_time()
            for start in range(0, SAMPLE_BYTES, CACHED_BYTES):
                work(start)
            best[name] = max(best[name], SAMPLE_BYTES / (time.thread_time() - began_s) / 1e9)
        os.close(file)
        (directory / "sample").unlink()
    return best


def fits_twice(actor: Path) -> bool:
    """Whether the memory holds the checkpoint, and has as much for what is made of it."""
    size = sum(file.stat().st_size for file in (actor / "dist_ckpt").iterdir())
    return 2 * size <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def torch_converted(actor: Path, target: Path) -> float | None:
    """Seconds that torch's converter takes; None where the model would fill half of the memory."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    if not fits_twice(actor):
        return None
    start = time.perf_counter()
    dcp_to_torch_save(actor / "dist_ckpt", target)
    seconds = time.perf_counter() - start
    target.unlink()
    os.sync()
    return seconds


def converted_as_slime_does(actor: Path, target: Path) -> float | None:
    """Seconds until the files of a Hugging Face model are written; None as for `torch_converted`."""
    import torch
    from safetensors.torch import save_file
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    from scalerl.models import CHECKPOINT_MODEL_PREFIX, ModelShape, family_of

    if not fits_twice(actor):
        return None
    start = time.perf_counter()
    target.mkdir()
    loaded: dict[str, torch.Tensor] = {}
    reader = FileSystemReader(actor / "dist_ckpt")
    _load_state_dict(loaded, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    shape = ModelShape.from_hf(actor / "huggingface")
    number, filled, tensors = 0, 0, {}
    for param in family_of(shape).params(shape):
        for name, tensor in param.to_hf(loaded[CHECKPOINT_MODEL_PREFIX + param.name], shape).items():
            if tensors and filled + tensor.nbytes > SLIME_FILE_BYTES:
                save_file(tensors, target / f"model-{number}.safetensors")
                number, filled, tensors = number + 1, 0, {}
            tensors[name] = tensor.contiguous()
            filled += tensor.nbytes
    save_file(tensors, target / f"model-{number}.safetensors")
    seconds = time.perf_counter() - start
    remove(target)
    return seconds


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parse(arguments)
    ran_on = record.machine("cpu", now=args.now)
    import_s = [
        float(subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    from scalerl.merge import merge
    from scalerl.merge.copy import MAX_WORKERS

    with tempfile.TemporaryDirectory(dir=args.directory) as root:
        rates = one_core(Path(root))
        actor = make_checkpoint(Path(root), args.gb, args.ranks)
        merged, copy = Path(root) / "merged", Path(root) / "copy"
        summary = merge(actor, merged, num_workers=args.workers)
        cp_s, synced_cp_s, merge_s, torch_s, slime_s, peaks, cached = [], [], [], [], [], [], []
        begin = functools.partial(evict, Path(root)) if args.cold else lambda: None
        for _ in range(args.repeats):
            begin()
            cached.append(cached_frac(merged))
            cp_s.append(copied(merged, copy, sync=False))
            begin()
            synced_cp_s.append(copied(merged, copy, sync=True))
            remove(merged)
            begin()
            before = resident("VmRSS")
            if os.access("/proc/self/clear_refs", os.W_OK):
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            start = time.perf_counter()
            merge(actor, merged, num_workers=args.workers)
            merge_s.append(time.perf_counter() - start)
            peaks.append(resident("VmHWM") - before)
            begin()
            torch_s.append(torch_converted(actor, Path(root) / "model.pt"))
            begin()
            slime_s.append(converted_as_slime_does(actor, Path(root) / "converted"))
    size = summary.num_bytes
    workers = args.workers or min(MAX_WORKERS, ran_on["cores"])
    sync_s = max(median(synced_cp_s) - median(cp_s), 1e-9)
    predicted = min(size / sync_s / 1e9, min(workers, ran_on["cores"]) / sum(1 / rate for rate in rates.values()))
    converted = {
        name: [size / s / 1e9 for s in seconds if s is not None]
        for name, seconds in (("torch_converter", torch_s), ("slimes_way", slime_s))
    }
    result = {
        "model_bytes": size,
        "merge_gb_per_s": record.spread([size / s / 1e9 for s in merge_s]),
        "predicted_gb_per_s": predicted,
        "one_core_gb_per_s": rates,
        "cp_source_cached_frac": record.spread(cached),
        "cp_gb_per_s": record.spread([size / s / 1e9 for s in cp_s]),
        "synced_cp_gb_per_s": record.spread([size / s / 1e9 for s in synced_cp_s]),
        **{f"{name}_gb_per_s": record.spread(gb_per_s) if gb_per_s else None for name, gb_per_s in converted.items()},
        "merge_over_cp": record.spread([c / m for c, m in zip(cp_s, merge_s, strict=True)]),
        "merge_over_synced_cp": record.spread([c / m for c, m in zip(synced_cp_s, merge_s, strict=True)]),
        "peak_bytes_over_imports": max(peaks),
        "import_s": record.spread(import_s),
    }
    source = f"page cache held {median(cached):.0%} of the source"
    ratio, synced_ratio = (result[f"merge_over_{name}"]["median"] for name in ("cp", "synced_cp"))
    rows = [
        ("merge", f"{result['merge_gb_per_s']['median']:.2f} GB/s", f"of {size / 1e9:.2f} GB, digests checked, fsync"),
        ("predicted", f"{predicted:.2f} GB/s", "from one core's reading, hashing and writing, and the disk"),
        ("cp", f"{result['cp_gb_per_s']['median']:.2f} GB/s", f"{source}; merge {ratio:.2f} of cp, median"),
        ("cp, sync", f"{result['synced_cp_gb_per_s']['median']:.2f} GB/s", f"merge {synced_ratio:.2f} of this, median"),
        ("peak", f"{max(peaks) / 2**20:.0f} MiB", "over what was resident after the imports"),
        ("imports", f"{result['import_s']['median']:.2f} s", "before it, once"),
    ]
    if gb_per_s := converted["torch_converter"]:
        rows.insert(4, ("torch", f"{median(gb_per_s):.2f} GB/s", "dcp_to_torch_save, no digests, no fsync"))
    if gb_per_s := converted["slimes_way"]:
        rows.insert(5, ("as slime", f"{median(gb_per_s):.2f} GB/s", "all in memory, no digests, no fsync"))
    print(record.table(rows))
    return record.keep("merge", arguments, vars(args), ran_on, result)


if __name__ == "__main__":
    sys.exit(main())
