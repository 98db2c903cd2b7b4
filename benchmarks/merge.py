"""GB/s of a merge into a Hugging Face model, against `cp` of the same bytes to the same place in the same run.

python benchmarks/merge.py                                # 1 GB, two saving ranks split over rows and columns
python benchmarks/merge.py --gb 2 --ranks 4 --directory /data --sync

The merge is `scalerl.merge.merge` in a process that has imported it (how long that takes is reported beside it): it
reads the pieces, compares every digest, and writes the files with fsync. --sync has cp followed by a sync of its file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record

LAYERS = 8
IMPORTS = "import time; start = time.perf_counter(); import scalerl.merge; print(time.perf_counter() - start)"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the model in bfloat16, 1e9 bytes")
    parser.add_argument("--ranks", type=int, default=2, help="files of the checkpoint; tensors are split over them")
    parser.add_argument("--workers", type=int, default=None, help="threads of the merge")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", default=None, help="where to write; default: for temporary files")
    parser.add_argument("--sync", action="store_true", help="cp, then sync of its file, as the merge does")
    parser.add_argument("--out", help="result file; default benchmarks/results/DATE-merge.json")
    return parser.parse_args(arguments)


def make_checkpoint(root: Path, gb: float, ranks: int) -> Path:
    """A Qwen2 of that size as `ranks` ranks of tensor parallelism save it."""
    import torch

    from scalerl.checkpoint.pieces import Piece, write_file, write_index
    from scalerl.families import CHECKPOINT_MODEL_PREFIX, ModelShape, family_of

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
    found = re.search(rf"^{field}:\s*(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def copied(source: Path, target: Path, *, sync: bool) -> float:
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    if sync:
        subprocess.run(["sync", *map(str, target.iterdir())], check=True)
    return time.perf_counter() - start


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parse(arguments)
    ran_on = record.machine("cpu")
    import_s = [
        float(subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    from scalerl.merge import merge

    with tempfile.TemporaryDirectory(dir=args.directory) as root:
        actor = make_checkpoint(Path(root), args.gb, args.ranks)
        merged, copy = Path(root) / "merged", Path(root) / "copy"
        summary = merge(actor, merged, num_workers=args.workers)
        cp_s, merge_s, peaks = [], [], []
        for _ in range(args.repeats):
            cp_s.append(copied(merged, copy, sync=args.sync))
            shutil.rmtree(copy)
            shutil.rmtree(merged)
            before = resident("VmRSS")
            if os.access("/proc/self/clear_refs", os.W_OK):
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            start = time.perf_counter()
            merge(actor, merged, num_workers=args.workers)
            merge_s.append(time.perf_counter() - start)
            peaks.append(resident("VmHWM") - before)
    size = summary.num_bytes
    result = {
        "model_bytes": size,
        "merge_gb_per_s": record.spread([size / s / 1e9 for s in merge_s]),
        "cp_gb_per_s": record.spread([size / s / 1e9 for s in cp_s]),
        "merge_over_cp": record.spread([c / m for c, m in zip(cp_s, merge_s, strict=True)]),
        "peak_bytes_over_imports": max(peaks),
        "import_s": record.spread(import_s),
    }
    print(
        record.table(
            [
                ("merge", f"{result['merge_gb_per_s']['median']:.2f} GB/s", f"of {size / 1e9:.2f} GB, digests checked"),
                ("cp", f"{result['cp_gb_per_s']['median']:.2f} GB/s", "then sync" if args.sync else "page cache"),
                ("ratio", f"{result['merge_over_cp']['median']:.2f}", "in the same run, median"),
                ("peak", f"{max(peaks) / 2**20:.0f} MiB", "over what was resident after the imports"),
                ("imports", f"{result['import_s']['median']:.2f} s", "before it, once"),
            ]
        )
    )
    return record.keep("merge", arguments, vars(args), ran_on, result)


if __name__ == "__main__":
    sys.exit(main())
