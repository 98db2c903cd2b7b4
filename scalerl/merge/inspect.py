"""The command `scalerl inspect`: what is in a checkpoint, and whether it is what was saved."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

from scalerl.checkpoint.store import (
    COMPLETE_NAME,
    TRAINER_STATE_NAME,
    find_latest_ckpt_path,
    has_digests,
    integrity_problem,
    manifest_sizes,
    read_trainer_state,
)
from scalerl.checkpoint.torch_dist import DistCheckpoint, while_there
from scalerl.errors import EXIT_USER_ERROR, CommandParser
from scalerl.merge.adapters import stored_adapter
from scalerl.models import ModelShape

# Prefixes of keys -> what these tensors are. Keys with none of them are weights of the model.
_PARTS = {
    "optimizer.state.param.": "main parameters",
    "optimizer.state.exp_avg.": "Adam's first moments",
    "optimizer.state.exp_avg_sq.": "Adam's second moments",
    "optimizer.": "other state of the optimizer",
}
_LAYOUT = ("world_size", "tp_size", "pp_size", "vpp_size", "cp_size", "ep_size", "etp_size")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns 0, else, with one message on stderr, 1 if --check found what was not saved so, or 2 for no whole checkpoint.
    """
    parser = CommandParser(prog="scalerl inspect", description="What is in a checkpoint of a training run.")
    parser.add_argument("checkpoint", help="global_step_N, or the run's directory: the one that it would go on from")
    parser.add_argument("--check", action="store_true", help="read all of it and compare every digest")
    args = parser.parse_args(argv)
    try:
        directory = _directory(Path(args.checkpoint))
        if (problem := integrity_problem(directory)) is not None:
            raise ValueError(f"{directory} is no whole checkpoint: {problem}")
        with while_there(directory):
            # First: what is damaged cannot be described.
            problem = integrity_problem(directory, digests=True) if args.check else None
            if problem is not None and directory.is_dir():
                print(f"error: {directory}: {problem}", file=sys.stderr)
                return 1
            for line in describe_checkpoint(directory):
                print(line)
            if args.check:
                print(_checked(directory))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def describe_checkpoint(directory: Path) -> Iterator[str]:
    """Lines about a whole checkpoint, for which only indexes and small files are read."""
    sizes = manifest_sizes(directory)
    yield f"{directory}: {len(sizes)} files, {_gb(sum(sizes.values()))}"
    if (directory / TRAINER_STATE_NAME).is_file():
        state = read_trainer_state(directory)
        yield f"  step {state.get('step')}; state of the run: {', '.join(sorted(state.keys() - {'step'})) or 'nothing'}"
        if code := state.get("code"):
            yield f"  saved by scalerl {code.get('version')}" + (
                f", commit {code['commit']}" if "commit" in code else ""
            )
    for role in sorted({Path(name).parts[0] for name in sizes if "/dist_ckpt/" in name}):
        yield from _describe_role(directory / role)


def _describe_role(directory: Path) -> Iterator[str]:
    shape = ModelShape.from_hf(directory / "huggingface")
    yield f"  {directory.name}: {shape.model_type}, {shape.num_layers} layers, hidden size {shape.hidden_size}"
    with DistCheckpoint(directory / "dist_ckpt") as stored:
        layout, adapter = stored.common.get("layout"), stored_adapter(stored)
        if layout is not None:
            yield "    saved on " + ", ".join(f"{name} {layout[name]}" for name in _LAYOUT)
        yield f"    after {stored.common.get('num_updates')} updates"
        if adapter is not None:
            yield f"    an adapter of rank {adapter.rank}, alpha {adapter.alpha:g}: {', '.join(adapter.targets)}"
        num_bytes, numbers, dtypes, pieces = Counter(), Counter(), {}, Counter()
        for key, tensor in stored.tensors.items():
            part = next((name for start, name in _PARTS.items() if key.startswith(start)), "weights")
            num_bytes[part] += tensor.num_bytes
            numbers[part] += prod(tensor.shape)
            dtypes.setdefault(part, set()).add(str(tensor.dtype).removeprefix("torch."))
            pieces[part] += sum(1 for _ in stored.pieces(key))
        digests = "with digests" if stored.has_digests else "without digests: saved before there were any"
    for part, size in num_bytes.items():
        kinds = ", ".join(sorted(dtypes[part]))
        yield f"    {part}: {numbers[part]:,} numbers ({kinds}), {_gb(size)} in {pieces[part]} pieces {digests}"


def _directory(path: Path) -> Path:
    if (path / COMPLETE_NAME).is_file() or not path.is_dir():
        return path
    latest = find_latest_ckpt_path(path)
    if latest is None:
        raise ValueError(f"{path} is no checkpoint and holds none: give global_step_N, or the directory of a run")
    return Path(latest)


def _checked(directory: Path) -> str:
    if not has_digests(directory):
        return f"  nothing to compare: {directory.name} was saved before there were digests; sizes are as saved"
    return f"  every file of {directory.name} has the digest that it was saved with"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3f} GB" if num_bytes >= 10**6 else f"{num_bytes:,} bytes"
