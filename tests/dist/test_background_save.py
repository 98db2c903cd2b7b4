"""Saves that a thread of each rank writes while it trains on: bitwise what a save that waits writes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scalerl.checkpoint import pieces
from scalerl.checkpoint.pieces import digest_of_file
from scalerl.checkpoint.store import CheckpointWriteError
from scalerl.parallel import checkpoint, restore
from scalerl.parallel.checkpoint import BackgroundSave, HostCopy, main_tensors
from tests.dist.launch import run_ranks
from tests.dist.trainee import Trainee
from tests.tiny_models import make_tiny_model

# dp 2, with a range of the optimizer on each rank; tp 2.
LAYOUTS = {"dp2": (1, 1, 2), "tp2": (2, 1, 2)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


def digests(directory: Path, rank: int) -> dict[str, str]:
    """Of what this rank wrote."""
    files = [directory / "dist_ckpt" / f"__{rank}_0.distcp", directory / "rng" / f"rank_{rank}.safetensors"]
    return {file.name: digest_of_file(file) for file in files}


class Held:
    """Holds the writing thread before its second piece, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        add = pieces._File.add

        def held(file: Any, piece: pieces.Piece) -> None:
            add(file, piece)
            if threading.current_thread() is not threading.main_thread():
                self.reached.set()
                assert self.go.wait(60)

        monkeypatch.setattr(pieces._File, "add", held)


def train_while_writing(model: str, layout: tuple[int, int, int], root: str) -> list[dict[str, str]]:
    """Digests of a save that waits and of saves in the background, of the same weights."""
    trainee, saves, saved_digests = Trainee(model, layout, dtype="bfloat16"), BackgroundSave(), []
    rank = torch.distributed.get_rank()
    trainee.update()
    for step in range(2):
        waited, beside = Path(root) / f"waited_{step}", Path(root) / f"beside_{step}"
        checkpoint.save_engine(trainee.engine, waited)
        with pytest.MonkeyPatch.context() as patch:
            held = Held(patch)
            saves.begin("actor", trainee.engine, beside)
            assert held.reached.wait(60)
            assert saves.written("actor") is None
            trainee.update()
            # What an update leaves as it is, too.
            for _, _, tensors, _ in main_tensors(trainee.engine.optimizer):
                for tensor in tensors.values():
                    tensor.detach().mul_(1.5)
            held.go.set()
        saves.close() if step else saves.wait("actor")
        answer = saves.written("actor")
        assert answer is not None and answer[1]["num_updates"] == step + 1
        saved_digests += [digests(waited, rank), digests(beside, rank)]
    return saved_digests


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_beside_the_next_updates_is_what_was_there(model: Path, tmp_path: Path, layout: str) -> None:
    for waited, beside, waited_again, beside_again in run_ranks(
        2, train_while_writing, str(model), LAYOUTS[layout], str(tmp_path)
    ):
        assert waited == beside and waited_again == beside_again
        assert waited != waited_again


def change_while_copying(model: str, layout: tuple[int, int, int], root: str) -> list[tuple[dict[str, str], ...]]:
    """Digests of a save that waits and of one in the background, whose copy is held until the change has begun."""
    trainee, saves, digest_pairs = Trainee(model, layout, dtype="bfloat16"), BackgroundSave(), []
    engine, rank, copy_pieces = trainee.engine, torch.distributed.get_rank(), HostCopy.copy_pieces
    first = Path(root) / "first"
    checkpoint.save_engine(engine, first)
    changes: dict[str, Callable[[], object]] = {
        "update": trainee.update,
        "to_host": engine.to_host,
        "load": lambda: restore.load_engine(engine, first),
    }
    for name, change in changes.items():
        trainee.update()
        waited, beside = Path(root) / f"waited_{name}", Path(root) / f"beside_{name}"
        checkpoint.save_engine(engine, waited)
        go = threading.Event()

        def held(memory: HostCopy, *arguments: Any, go: threading.Event = go) -> Any:
            assert go.wait(60)
            return copy_pieces(memory, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HostCopy, "copy_pieces", held)
            saves.begin("actor", engine, beside)
            threading.Timer(1.0, go.set).start()
            change()
            assert go.is_set(), f"{name} did not wait for the copy"
            saves.wait("actor")
        if name == "to_host":
            engine.to_device()
        digest_pairs.append((digests(waited, rank), digests(beside, rank)))
    saves.close()
    return digest_pairs


def test_what_changes_or_moves_the_weights_waits_for_the_copy(model: Path, tmp_path: Path) -> None:
    for digest_pairs in run_ranks(2, change_while_copying, str(model), LAYOUTS["dp2"], str(tmp_path)):
        assert len(digest_pairs) == 3 and all(waited == beside for waited, beside in digest_pairs)


def begin_nowhere(model: str, directory: str) -> str:
    trainee, saves = Trainee(model, (1, 1, 1)), BackgroundSave()
    saves.begin("actor", trainee.engine, directory)
    saves.close()
    with pytest.raises(CheckpointWriteError) as error:
        saves.written("actor")
    return str(error.value)


def test_a_rank_says_why_it_could_not_write(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (message,) = run_ranks(1, begin_nowhere, str(model), str(tmp_path / "file" / "actor"))
    assert "rank 0 could not write its part of the checkpoint: " in message and "Not a directory" in message
