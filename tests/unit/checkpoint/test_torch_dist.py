"""Reading boxes of stored tensors: of any pieces, into any memory, with every digest compared."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from scalerl.checkpoint import PIECES_INDEX_NAME, torch_dist
from scalerl.checkpoint.pieces import Digest, Piece, digest_of_file, write_file, write_index
from scalerl.checkpoint.torch_dist import (
    CheckpointReadError,
    DamagedCheckpointError,
    DistCheckpoint,
    PieceReader,
    RemovedCheckpointError,
    as_bytes,
    while_there,
)

WHOLE = torch.arange(7 * 5 * 4, dtype=torch.float32).view(7, 5, 4)
# (offsets, sizes): rows, a row in two parts, columns, and columns of columns.
BOXES = [
    ((0, 0, 0), (2, 5, 4)),
    ((2, 0, 0), (1, 2, 4)),
    ((2, 2, 0), (1, 3, 4)),
    ((3, 0, 0), (3, 3, 4)),
    ((3, 3, 0), (3, 2, 1)),
    ((3, 3, 1), (3, 2, 3)),
    ((6, 0, 0), (1, 5, 4)),
]


def part_of_whole(box: torch_dist.Box) -> torch.Tensor:
    return torch_dist.box_view(WHOLE, box, (0, 0, 0))


@pytest.fixture(params=["in parts", "in one go"])
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """WHOLE as two files, and a number without dimensions; pieces are read in parts of a row or two, or in one go."""
    if request.param == "in parts":
        monkeypatch.setattr(torch_dist, "CACHED_BYTES", 100)
    pieces = [
        Piece(
            "whole", tuple(WHOLE.shape), offsets, torch_dist.box_view(WHOLE, (offsets, sizes), (0, 0, 0)).contiguous()
        )
        for offsets, sizes in BOXES
    ]
    pieces.append(Piece("number", (), (), torch.tensor(3.0)))
    files = [write_file(tmp_path / f"__{rank}_0.distcp", pieces[rank::2]) for rank in range(2)]
    write_index(tmp_path, files, {})
    return tmp_path


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_box_of_any_pieces(directory: Path, dtype: torch.dtype, with_index: bool) -> None:
    if not with_index:
        (directory / PIECES_INDEX_NAME).unlink()
    with DistCheckpoint(directory) as stored:
        assert torch.equal(stored.read("whole"), WHOLE) and stored.read("number") == 3.0
        for offsets in [(0, 0, 0), (1, 0, 0), (2, 1, 0), (3, 2, 1)]:
            for end in [(4, 5, 4), (7, 5, 4), (7, 4, 2), (5, 4, 4)]:
                sizes = tuple(stop - start for start, stop in zip(offsets, end, strict=True))
                out = torch.full(sizes, torch.nan, dtype=dtype)
                stored.read_box("whole", (offsets, sizes), out)
                assert torch.equal(out, part_of_whole((offsets, sizes)).to(dtype))
                # Memory in another order.
                turned = torch.empty(tuple(reversed(sizes)), dtype=dtype).permute(2, 1, 0)
                stored.read_box("whole", (offsets, sizes), turned)
                assert torch.equal(turned, out)


def test_a_flipped_byte_is_found_by_who_reads_any_part_of_its_piece(directory: Path) -> None:
    with DistCheckpoint(directory) as stored:
        piece = next(piece for piece in stored.pieces("whole") if piece.offsets == (3, 0, 0))
        assert piece.payload is not None
        for at in (0, piece.payload, piece.payload + piece.payload_bytes - 1, piece.num_bytes - 1):
            with (directory / piece.file).open("r+b") as file:
                file.seek(piece.start + at)
                byte = file.read(1)[0]
                file.seek(piece.start + at)
                file.write(bytes([byte ^ 1]))
            with pytest.raises(DamagedCheckpointError, match=r"tensor whole at \[3, 0, 0\]"):
                stored.read_box("whole", ((5, 0, 0), (1, 1, 1)), torch.empty(1, 1, 1))
            with pytest.raises(DamagedCheckpointError):
                PieceReader(stored, piece).finish()
            stored.read_box("whole", ((0, 0, 0), (3, 5, 4)), torch.empty(3, 5, 4))
            with (directory / piece.file).open("r+b") as file:
                file.seek(piece.start + at)
                file.write(bytes([byte]))
        PieceReader(stored, piece).finish()


@pytest.mark.parametrize("with_index", [True, False])
def test_only_lost_data_is_damage(directory: Path, with_index: bool) -> None:
    """A run passes over a damaged checkpoint; one that cannot be read for another reason may be whole."""
    if not with_index:
        (directory / PIECES_INDEX_NAME).unlink()
    file = directory / "__0_0.distcp"
    file.rename(directory / "moved")
    with DistCheckpoint(directory) as stored, pytest.raises(DamagedCheckpointError, match="No such file"):
        stored.read("whole")
    # A link to itself, which the system does not follow.
    file.symlink_to(file.name)
    with DistCheckpoint(directory) as stored, pytest.raises(CheckpointReadError, match=r"whole at .* Too many levels"):
        stored.read("whole")


FEW_FILES = """
import os, resource, sys
from scalerl.checkpoint import torch_dist
from scalerl.checkpoint.errors import CheckpointReadError
from scalerl.checkpoint.torch_dist import DistCheckpoint

few = len(os.listdir("/proc/self/fd")) + 4
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
with DistCheckpoint(sys.argv[1]) as stored:
    print(stored.read("rows").sum().item())
resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))
try:
    with DistCheckpoint(sys.argv[1]) as stored:
        stored.read("rows")
except CheckpointReadError as error:
    print(error)
"""


def test_a_checkpoint_of_more_files_than_may_be_open(tmp_path: Path) -> None:
    """As of 1,000 ranks: as many as the system allows are opened, and one that it does not is no damage."""
    rows = [Piece("rows", (20, 2), (row, 0), torch.ones(1, 2)) for row in range(20)]
    write_index(tmp_path, [write_file(tmp_path / f"__{row}_0.distcp", [piece]) for row, piece in enumerate(rows)], {})
    done = subprocess.run([sys.executable, "-c", FEW_FILES, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    read, refused = done.stdout.splitlines()
    assert read == "40.0" and refused.endswith("cannot be read: Too many open files")


def test_what_rotation_removes_under_a_reader_is_no_damage(directory: Path) -> None:
    with (
        pytest.raises(RemovedCheckpointError, match=r"was removed while it was read.*ckpt_every_to_keep"),
        while_there(directory),
        DistCheckpoint(directory) as stored,
    ):
        directory.rename(directory.with_name("deleting"))
        stored.read("whole")
    directory.with_name("deleting").rename(directory)
    (directory / "__0_0.distcp").unlink()
    with pytest.raises(DamagedCheckpointError), while_there(directory), DistCheckpoint(directory) as stored:
        stored.read("whole")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("sizes", [(), (1,), (3, 5), (2, 1, 4), (700, 1100)])
def test_a_piece_is_what_torch_save_makes_of_it(tmp_path: Path, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """The second of a kind too, of which only the numbers are new."""
    tensors = [torch.randint(0, 2, sizes).to(dtype) for _ in range(2)]
    pieces = [Piece("a", (2, *sizes), (row, *(0 for _ in sizes)), tensor) for row, tensor in enumerate(tensors)]
    written = write_file(tmp_path / "file", pieces)
    data = (tmp_path / "file").read_bytes()
    assert written.digest == digest_of_file(tmp_path / "file")
    for piece, tensor in zip(written.pieces, tensors, strict=True):
        torch.serialization.set_crc32_options(False)
        torch.save(tensor, alone := io.BytesIO())
        torch.serialization.set_crc32_options(True)
        assert data[piece.start : piece.start + piece.num_bytes] == alone.getvalue()
        numbers = data[piece.start + piece.payload :][: tensor.nbytes]
        assert numbers == bytes(as_bytes(tensor))
        digest = Digest()
        digest.update(alone.getvalue())
        assert piece.digest == digest.hexdigest()


TOO_LARGE = """
import errno, resource, sys, torch
from pathlib import Path
from scalerl.checkpoint.pieces import Piece, write_file, write_index
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
try:
    if sys.argv[2] == "tensors":
        write_file(Path(sys.argv[1]) / "file", [Piece("a", (1024, 1024), (0, 0), torch.ones(1024, 1024))])
    else:
        write_index(Path(sys.argv[1]), [], {"a": torch.ones(1024, 1024)})
except OSError as error:
    print(errno.errorcode[error.errno])
"""


@pytest.mark.parametrize("which", ["tensors", "index"])
def test_a_file_that_cannot_grow_is_the_systems_error(tmp_path: Path, which: str) -> None:
    """Not that of torch's writer, which a rank would not tell the others."""
    done = subprocess.run(
        [sys.executable, "-c", TOO_LARGE, str(tmp_path), which], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "EFBIG\n", done.stderr[-2000:]


WITHOUT_INDEX = """
import re, sys, torch
from pathlib import Path
from scalerl.checkpoint.torch_dist import DistCheckpoint
def resident(field):
    return int(re.search(rf"^{field}:\\s*(\\d+) kB", Path("/proc/self/status").read_text(), re.M)[1]) * 1024
with DistCheckpoint(sys.argv[1]) as stored:
    small, out = stored.read("small"), torch.zeros(stored.shape("large"))
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    stored.read_box("large", ((0, 0), tuple(out.shape)), out)
    assert out[0, 1] == 1 and out[-1, -1] == out.numel() - 1, out
    print((resident("VmHWM") - before) / out.nbytes)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel does not reset the peak")
def test_a_piece_without_an_index_takes_its_own_size(tmp_path: Path) -> None:
    """As torch and Megatron write them: what `torch.load` makes, and nothing beside it."""
    large = torch.arange(2**24, dtype=torch.float32).view(4096, 4096)
    dcp.save(
        {"small": torch.zeros(2), "large": large}, storage_writer=dcp.FileSystemWriter(tmp_path / "dist"), no_dist=True
    )
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_INDEX, str(tmp_path / "dist")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 1.5
