"""Command line of the merge: `python -m scalerl.merge merge --backend megatron --local_dir D --target_dir H`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from scalerl.data.model_source import model_directory
from scalerl.errors import EXIT_FAILED, EXIT_USER_ERROR, CommandParser, RunError
from scalerl.merge.compare import comparison_report
from scalerl.merge.convert import DTYPES, merge
from scalerl.merge.fsdp import merge_fsdp
from scalerl.merge.split import split, split_sizes

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
# Options of split -> the size of a layout that each sets.
_SIZES = {
    "tp": "ranks that share each layer",
    "pp": "pipeline stages",
    "vpp": "model chunks of a stage",
    "cp": "ranks that share each sequence",
    "ep": "ranks that share the experts of a layer",
    "etp": "ranks that share each expert (default: tp)",
}


def parse_bytes(text: str) -> int:
    """Parses a size: '5GB' -> 5_000_000_000; KB MB GB are powers of 1000, KiB MiB GiB of 1024, no unit is bytes."""
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    if not match or match[2].upper() not in _UNITS or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB or 500MB")
    return int(match[1]) * _UNITS[match[2].upper()]


def build_parser() -> argparse.ArgumentParser:
    """The parser of the operations merge, split and test."""
    parser = CommandParser(
        prog="scalerl merge", description="Turn a distributed checkpoint into a Hugging Face model, offline."
    )
    operations = parser.add_subparsers(dest="operation", required=True)
    # `scalerl merge` needs no name of it.
    command = operations.add_parser("merge", prog="scalerl merge", help="write Hugging Face safetensors")
    command.add_argument("--backend", required=True, choices=["megatron", "fsdp"], help="what wrote the checkpoint")
    command.add_argument("--local_dir", required=True, help="global_step_N/actor (or global_step_N), or /critic")
    command.add_argument("--target_dir", required=True, help="directory for the model; must not exist or be empty")
    command.add_argument("--dtype", choices=list(DTYPES), default=None, help="of the weights (default: as stored)")
    command.add_argument("--max_shard_size", type=parse_bytes, default="5GB", help="of one file (default: 5GB)")
    command.add_argument("--workers", type=int, default=None, help="threads (default: one for each core, at most 8)")
    command.add_argument("--overwrite", action="store_true", help="replace the model that target_dir holds")
    command.add_argument(
        "--hf_model_path",
        default=None,
        help="the model that the run began from: of adapters the weights, of others a vision tower and layers that "
        "predict further tokens come from it",
    )
    command.add_argument(
        "--merge-adapters", action="store_true", help="of adapters: the whole model with them, not a directory of peft"
    )
    command.add_argument("--hf_upload_path", default=None, help="repository of the Hugging Face Hub: user/name")
    command.add_argument("--private", action="store_true", help="make that repository private, where it is new")
    command = operations.add_parser("split", help="the way back: the weights as the ranks of a layout save them")
    command.add_argument("model", help="Hugging Face model directory, or a name on the hub")
    command.add_argument("target", help="directory to make, for dist_ckpt/ and huggingface/")
    for name, meaning in _SIZES.items():
        command.add_argument(f"--{name}", type=int, default=None if name == "etp" else 1, help=meaning)
    command = operations.add_parser("test", help="compare a merged model with another; exit code 1 where they differ")
    command.add_argument("--local_dir", required=True, help="the merged model")
    command.add_argument("--test_hf_dir", required=True, help="the model that it should be")
    command.add_argument("--forward", action="store_true", help="also compare what transformers computes with them")
    return parser


def merge_main(argv: Sequence[str]) -> int:
    """Runs `scalerl merge`, which needs no word `merge` before its options."""
    return main(argv if argv and argv[0] in ("split", "test") else ["merge", *argv])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0, 1 where `test` found a difference, or 2 or 70 with one message on stderr."""
    args = build_parser().parse_args(argv)
    try:
        return {"merge": _merge, "split": _split, "test": _test}[args.operation](args)
    except (ValueError, OSError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED if isinstance(error, RunError) else EXIT_USER_ERROR


def _merge(args: argparse.Namespace) -> int:
    if args.hf_upload_path is not None:
        check_repo_name(args.hf_upload_path)
    options = {
        "dtype": args.dtype,
        "max_shard_bytes": args.max_shard_size,
        "overwrite": args.overwrite,
        "num_workers": args.workers,
    }
    if args.backend == "fsdp":
        if args.hf_model_path is not None or args.merge_adapters:
            name = "--merge-adapters" if args.merge_adapters else "--hf_model_path"
            raise ValueError(f"{name}: the files of an FSDP run have every tensor; leave it out")
        summary = merge_fsdp(args.local_dir, args.target_dir, **options)
    else:
        path = None if args.hf_model_path is None else model_directory(args.hf_model_path, "--hf_model_path")
        adapters = {"merge_adapters": args.merge_adapters}
        summary = merge(args.local_dir, args.target_dir, hf_model_path=path, **adapters, **options)
    print(
        f"merged {summary.num_tensors} tensors, {summary.num_bytes:,} bytes ({summary.dtype}), in {summary.num_files} "
        f"file{'s' if summary.num_files > 1 else ''} and {summary.seconds:.1f} s: {summary.target_dir}"
    )
    if args.hf_upload_path is not None:
        print(f"uploaded: {upload(summary.target_dir, args.hf_upload_path, private=args.private)}")
    return 0


def _split(args: argparse.Namespace) -> int:
    model = model_directory(args.model, "split MODEL")
    num_ranks = split(model, args.target, split_sizes(**{name: getattr(args, name) for name in _SIZES}))
    print(f"split over {num_ranks} rank{'s' if num_ranks > 1 else ''}: {args.target}")
    return 0


def _test(args: argparse.Namespace) -> int:
    lines, same = comparison_report(Path(args.local_dir), Path(args.test_hf_dir), forward=args.forward)
    print("\n".join(lines))
    return 0 if same else 1


# --- upload of a merged model to the Hugging Face Hub ---


class UploadError(OSError):
    """The model was merged, but not uploaded."""


def check_repo_name(repo_id: str) -> None:
    """Raises ValueError for a name that no repository can have."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"--hf_upload_path {repo_id!r} is no name of a repository: {error}") from None


def upload(directory: Path, repo_id: str, *, private: bool) -> str:
    """Uploads the whole directory to a repository, which is made if it does not exist; returns its address.

    Raises UploadError, with the command that repeats the upload, if the hub refuses it or does not answer.
    """
    from httpx import HTTPError
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(folder_path=str(directory), repo_id=repo_id, commit_message="Upload model merged by scalerl")
    # The answers of the hub are HTTPErrors too, like a refused connection and one that takes too long.
    except (HTTPError, OSError) as error:
        raise UploadError(
            f"{directory} was merged but could not be uploaded to {repo_id}: {error}. Log in (hf auth login), or set "
            "HF_TOKEN, then: hf upload " + f"{repo_id} {directory}"
        ) from None
    return f"{api.endpoint}/{repo_id}"
