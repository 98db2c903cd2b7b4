"""Full disks, quotas, slow file systems, directories that cannot be written, files that changed: every rank says the
same, none waits."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from scalerl.checkpoint import store
from scalerl.checkpoint.errors import DamagedCheckpointError
from scalerl.checkpoint.pieces import BLOCK_BYTES
from scalerl.checkpoint.torch_dist import DistCheckpoint
from scalerl.parallel import checkpoint, restore
from scalerl.trainer.saving.saves import SavedModel
from tests.dist.launch import run_ranks
from tests.filesystems import mounted, slow, with_quota
from tests.tiny_models import make_tiny_model
from tests.whole_saves import save as save_whole

WORLD_SIZE = 2
# In which a tmpfs counts.
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


def errors_of(model: str, directories: list[str]) -> list[str]:
    """What saving into each says on this rank; "" where nothing fails. All in one life of the ranks' groups."""
    engine = _engine(model)
    errors = []
    for directory in directories:
        try:
            checkpoint.save_engine(engine, directory)
            errors.append("")
        except store.CheckpointWriteError as error:
            errors.append(str(error))
    return errors


def load_errors(model: str, directories: list[str], dtype: str = "float32") -> list[str]:
    engine = _engine(model, dtype)
    errors = []
    for directory in directories:
        try:
            restore.load_engine(engine, directory)
            errors.append("")
        except DamagedCheckpointError as error:
            errors.append(str(error))
    return errors


def _engine(model: str, dtype: str = "float32"):
    from scalerl.config.schema import MegatronConfig, OptimConfig
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize

    groups = initialize(Layout(WORLD_SIZE), backend="gloo", timeout_s=60, seed=1)
    return MegatronEngine(model, MegatronConfig(dtype=dtype), groups, optim=OptimConfig())


def test_a_full_disk_a_quota_and_a_directory_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "small", "size=400k") as small,
        mounted(tmp_path / "readonly", "ro") as readonly,
        with_quota(tmp_path / "limited", "400k") as limited,
    ):
        places = [str(place / "actor") for place in (small, readonly, limited, tmp_path)]
        ranks = run_ranks(WORLD_SIZE, errors_of, str(model), places)
        with pytest.raises(store.CheckpointWriteError, match="readonly: no checkpoint can be written here: Read-only"):
            store.begin_save(readonly, 1)
    assert ranks[0] == ranks[1]
    full, unwritable, over_quota, good = ranks[0]
    could_not = " could not write its part of the checkpoint: "
    assert could_not in full and "No space left on device" in full
    assert could_not in over_quota and "Disk quota exceeded" in over_quota
    assert "Read-only file system" in unwritable and "readonly/actor" in unwritable
    assert good == ""


def test_a_disk_that_is_full_at_the_first_file_and_one_that_is_full_at_the_last(
    model: Path, whole: Path, tmp_path: Path
) -> None:
    """Random states are written first, the index last, by one rank alone: all say the same, and save elsewhere."""
    files = [*whole.glob("actor/rng/*"), *whole.glob("actor/dist_ckpt/*.distcp")]
    assert len(files) == 2 * WORLD_SIZE
    all_but_index = sum(-(-file.stat().st_size // PAGE_BYTES) for file in files) * PAGE_BYTES
    with (
        mounted(tmp_path / "first", f"size={PAGE_BYTES}") as first,
        mounted(tmp_path / "last", f"size={all_but_index}") as last,
    ):
        places = [str(place / "actor") for place in (first, last, tmp_path)]
        ranks = run_ranks(WORLD_SIZE, errors_of, str(model), places)
        assert len(list(last.glob("actor/dist_ckpt/*.distcp"))) == WORLD_SIZE
    assert ranks[0] == ranks[1]
    *full, good = ranks[0]
    assert all("rank 0 could not write its part of the checkpoint: [Errno 28] No space left" in said for said in full)
    assert good == ""


def test_a_checkpoint_counts_where_an_older_one_cannot_be_removed(tmp_path: Path) -> None:
    """Which is named, and removed the next time: mount points stand for what NFS keeps of a file that is open."""

    def save(root: Path, step: int, keep: int | None) -> Path:
        files = {"actor": SavedModel(lambda at: (Path(at) / "data").write_text("data"), str(no_model))}
        return save_whole(str(root), step, files, state={}, keep=keep)

    (no_model := tmp_path / "model").mkdir()
    (no_model / "config.json").write_text("{}")
    root = tmp_path / "run"
    first = save(tmp_path / "elsewhere", 1, None)
    save(root, 2, None)
    rest = "global_step_0.deleting-0123abcd"
    with mounted(root / "global_step_1", "size=1m") as step, mounted(root / rest, "size=1m"):
        shutil.copytree(first, step, dirs_exist_ok=True)
        with pytest.warns(UserWarning, match="could not be removed, and takes room: .*busy") as said:
            assert save(root, 3, 1).name == "global_step_3"
        # A library may warn beside it, of a socket of another test for example.
        ours = [str(one.message) for one in said if one.category is UserWarning]
        assert [rest in message for message in ours] == [True, False]
    assert store.find_latest_ckpt_path(root) == str(root / "global_step_3")
    shutil.copytree(first, root / "global_step_1", dirs_exist_ok=True)
    save(root, 4, 1)
    assert sorted(path.name for path in root.iterdir()) == ["global_step_4", store.TRACKER_NAME]


def test_a_run_on_a_full_disk_leaves_the_room_to_others(model: Path, tmp_path: Path) -> None:
    """And the checkpoint before stays."""
    with mounted(tmp_path / "run", "size=3m") as root:
        models = {"actor": SavedModel(lambda d: run_ranks(WORLD_SIZE, save, str(model), d), str(model))}
        whole = save_whole(str(root), 1, models, state={}, keep=None)
        with pytest.raises(AssertionError, match="No space left on device"):
            save_whole(str(root), 2, models, state={}, keep=None)
        assert [path.name for path in root.glob("global_step_*")] == ["global_step_1"]
        assert store.find_latest_ckpt_path(root, digests=True) == str(whole)


def save_slowly(model: str, directory: str) -> None:
    """Waits for one save, and begins another one in the background, which is still written when `begin` returns."""
    from scalerl.parallel.checkpoint import BackgroundSave

    engine, saves = _engine(model), BackgroundSave()
    checkpoint.save_engine(engine, f"{directory}/waited")
    saves.begin("actor", engine, f"{directory}/beside")
    assert saves.written("actor") is None
    saves.close()
    assert saves.written("actor") is not None


def test_a_slow_file_system_holds_up_no_run(model: Path, tmp_path: Path) -> None:
    """A save in the background is waited for when it has to be there; what is written is whole."""
    with slow(tmp_path / "slow", 0.01) as directory:
        run_ranks(WORLD_SIZE, save_slowly, str(model), str(directory))
        files = [sorted((directory / name / "dist_ckpt").glob("*.distcp")) for name in ("waited", "beside")]
        assert len(files[0]) == WORLD_SIZE
        assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]


def save(model: str, directory: str) -> None:
    checkpoint.save_engine(_engine(model), directory)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = {"actor": SavedModel(lambda d: run_ranks(WORLD_SIZE, save, str(model), d), str(model))}
    return save_whole(str(tmp_path_factory.mktemp("run")), 1, models, state={}, keep=None)


KEY = "optimizer.state.exp_avg_sq.decoder.layers.1.mlp.linear_fc2.weight"


def damage(dist_ckpt: Path, change: Callable[[Path, int], None], key: str = KEY) -> str:
    """To the middle of the second half of a tensor. Returns the name of the file."""
    with DistCheckpoint(dist_ckpt) as stored:
        piece = list(stored.pieces(key))[-1]
    change(dist_ckpt / piece.file, piece.start + piece.payload + piece.payload_bytes // 2)
    return piece.file


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 4]))


@pytest.mark.parametrize(
    ("change", "said"), [(flip, "its bytes are not those"), (os.truncate, "the file is cut short")]
)
def test_what_changed_is_named_by_every_rank(
    whole: Path, model: Path, tmp_path: Path, change: Callable[[Path, int], None], said: str
) -> None:
    subprocess.run(["cp", "-r", str(whole), str(tmp_path / "global_step_1")], check=True)
    actor = tmp_path / "global_step_1" / "actor"
    file = damage(actor / "dist_ckpt", change)
    # The good one afterwards: the ranks' groups have lost nothing.
    ranks = run_ranks(WORLD_SIZE, load_errors, str(model), [str(actor), str(whole / "actor")])
    assert ranks[0] == ranks[1]
    message, good = ranks[0]
    assert f"dist_ckpt/{file}: tensor {KEY} at [" in message and said in message
    assert good == ""
    problem = store.integrity_problem(tmp_path / "global_step_1", digests=True)
    assert problem is not None and file in problem
    assert change is os.truncate or f"{file} is not what was saved: tensor {KEY} at " in problem


def test_a_flipped_byte_anywhere_is_found(whole: Path, tmp_path: Path) -> None:
    """Headers, padding, indexes and small files too."""
    subprocess.run(["cp", "-r", str(whole), str(tmp_path / "copy")], check=True)
    files = [file for file in sorted((tmp_path / "copy").rglob("*")) if file.is_file()]
    assert len(files) > 11
    for file in files:
        for at in {0, file.stat().st_size // 3, file.stat().st_size - 1}:
            flip(file, at)
            problem = store.integrity_problem(tmp_path / "copy", digests=True)
            if file.name == store.COMPLETE_NAME:
                assert problem is not None and problem.startswith("COMPLETE is not ")
            else:
                name = file.relative_to(tmp_path / "copy")
                assert problem is not None and f"file {name} is not what was saved" in problem
            flip(file, at)
    assert store.integrity_problem(tmp_path / "copy", digests=True) is None


def test_a_load_finds_a_flipped_byte_in_what_no_rank_needs(whole: Path, model: Path, tmp_path: Path) -> None:
    """Weights of another dtype than the run's, which come from the optimizer's; and the zeros between two tensors."""
    key = KEY.removeprefix("optimizer.state.exp_avg_sq.")
    copies = [tmp_path / name / "actor" for name in ("weights", "behind")]
    for copy in copies:
        shutil.copytree(whole / "actor", copy)
    damage(copies[0] / "dist_ckpt", flip, key)
    with DistCheckpoint(copies[1] / "dist_ckpt") as stored:
        piece = next(stored.pieces(key))
    assert piece.num_bytes % BLOCK_BYTES
    flip(copies[1] / "dist_ckpt" / piece.file, piece.start + piece.num_bytes)
    for dtype in ("float32", "bfloat16"):
        ranks = run_ranks(WORLD_SIZE, load_errors, str(model), [*map(str, copies), str(whole / "actor")], dtype)
        assert ranks[0] == ranks[1]
        *damaged, good = ranks[0]
        assert all(f"tensor {key} at [" in said and "its bytes are not those" in said for said in damaged)
        assert good == ""
