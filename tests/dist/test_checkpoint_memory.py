"""Saving and loading on data-parallel ranks: what each writes and reads, and the memory that takes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from scalerl.checkpoint.pieces import MAX_PIECE_BYTES
from scalerl.checkpoint.torch_dist import DistCheckpoint
from scalerl.extras.plan.plan import CHECKPOINT_PIECE_BYTES
from scalerl.models import ModelShape, family_of
from scalerl.parallel import checkpoint, restore
from scalerl.trainer.saving.checkpoints import find_resume_point
from scalerl.trainer.saving.saves import SavedModel
from tests.dist.launch import run_ranks
from tests.dist.test_load_memory import CLEAR_REFS, resident_bytes
from tests.whole_saves import save as save_whole

WORLD_SIZE = 4
# Running code for the first time, buffers of files, and a piece that is on its way.
SMALL_BYTES = 24 * 2**20
CONFIG = dict(
    model_type="qwen2",
    hidden_size=512,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=512,
    vocab_size=24576,
    intermediate_size=2048,
    num_hidden_layers=2,
    tie_word_embeddings=True,
)
# Of a checkpoint: its index, and what is read of code meanwhile.
SMALL_SHARE = 0.03
# Main parameter and Adam's two moments, in float32.
STATE_BYTES = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    shape = ModelShape.from_hf(path)
    sizes = family_of(shape).hf_shapes(shape)
    save_file({hf: torch.ones(size, dtype=torch.bfloat16) for hf, size in sizes.items()}, path / "model.safetensors")
    return path


def measured(work: Any) -> int:
    """Bytes that became resident at most while `work` ran, over those before it."""
    before = resident_bytes("VmRSS")
    Path(CLEAR_REFS).write_text("5", encoding="ascii")
    work()
    return resident_bytes("VmHWM") - before


def read_bytes() -> int:
    """Bytes that this process has read from files, out of the page cache too."""
    return int(Path("/proc/self/io").read_text().split()[1])


def save_and_load(model: str, directory: str) -> dict[str, int]:
    from scalerl.config.schema import MegatronConfig, OptimConfig
    from scalerl.parallel.checkpoint import BackgroundSave, main_tensors
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize

    groups = initialize(Layout(WORLD_SIZE), backend="gloo", timeout_s=60, seed=1)
    engine = MegatronEngine(model, MegatronConfig(dtype="bfloat16"), groups, optim=OptimConfig())
    held = [tensor for _, _, tensors, _ in main_tensors(engine.optimizer) for tensor in tensors.values()]
    for number, tensor in enumerate(held):
        tensor.detach().fill_(number)
    num_bytes = {"save": measured(lambda: checkpoint.save_engine(engine, directory))}
    beside = BackgroundSave()

    def begin() -> None:
        beside.begin("actor", engine, f"{directory}_beside")
        engine.before_change()

    num_bytes["begin_save"] = measured(begin)
    num_bytes["written_beside"] = measured(beside.close)
    for tensor in held:
        tensor.detach().fill_(torch.nan)
    num_bytes["load"] = measured(lambda: restore.load_engine(engine, directory))
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(held))
    num_parameters = sum(parameter.numel() for parameter in engine.chunks[0].parameters())
    # What is read once more is code, and files of a few bytes.
    before = read_bytes()
    restore.load_engine(engine, directory)
    num_bytes["read"] = read_bytes() - before
    return num_bytes | {"shard": sum(tensor.nbytes for tensor in held), "state": STATE_BYTES * num_parameters}


@pytest.mark.skipif(not os.access(CLEAR_REFS, os.W_OK), reason="the kernel does not reset the peak")
def test_a_rank_writes_and_reads_its_share_in_the_memory_of_a_piece(model: Path, tmp_path: Path) -> None:
    """No rank sees another's state: all of it is many times what a save or a load may take."""
    ranks = run_ranks(WORLD_SIZE, save_and_load, str(model), str(tmp_path / "actor"), fresh=True)
    state = ranks[0]["state"]
    assert state > 6 * SMALL_BYTES, "too small to tell"
    for rank in ranks:
        assert rank["shard"] == pytest.approx(state / WORLD_SIZE, rel=0.01)
        # In the background: a copy of what the rank writes, its part of the weights included.
        share = rank["shard"] * (STATE_BYTES + 2) / STATE_BYTES
        assert share / 2 < rank["begin_save"] <= share + SMALL_BYTES and rank["written_beside"] <= SMALL_BYTES, rank
        # From host to file and back no piece is copied, as it is on its way from and to a GPU, which the plan counts.
        assert rank["save"] <= SMALL_BYTES and rank["load"] <= SMALL_BYTES, rank
        assert MAX_PIECE_BYTES <= CHECKPOINT_PIECE_BYTES and SMALL_BYTES < CHECKPOINT_PIECE_BYTES
    files = sorted((tmp_path / "actor" / "dist_ckpt").glob("*.distcp"))
    # 2 bytes of each weight beside the state.
    share = state * (STATE_BYTES + 2) / STATE_BYTES / WORLD_SIZE
    assert [file.stat().st_size for file in files] == [pytest.approx(share, rel=0.02)] * WORLD_SIZE


def test_a_resume_reads_each_byte_of_the_state_once(model: Path, tmp_path: Path) -> None:
    """The driver, which chooses the checkpoint, reads no tensor: the ranks compare what they read anyway."""

    def write(directory: str) -> None:
        ranks.extend(run_ranks(WORLD_SIZE, save_and_load, str(model), directory, fresh=True))
        # Files without an index are compared whole.
        shutil.rmtree(f"{directory}_beside")

    ranks: list[dict[str, int]] = []
    directory = save_whole(str(tmp_path / "run"), 1, {"actor": SavedModel(write, str(model))}, state={}, keep=None)
    files = sum(file.stat().st_size for file in directory.glob("actor/dist_ckpt/*.distcp"))
    before = read_bytes()
    assert find_resume_point(str(tmp_path / "run"), "auto", None).directory == directory
    assert read_bytes() - before < SMALL_SHARE * files
    # On CPUs each rank reads the weights that others update, for which others would have to send them.
    weights = ranks[0]["state"] * 2 / STATE_BYTES
    read = sum(rank["read"] for rank in ranks)
    assert files < read < (1 + SMALL_SHARE) * files + (WORLD_SIZE - 1) * weights


def test_what_megatron_reads_is_what_was_saved(model: Path, tmp_path: Path) -> None:
    """The format is torch_dist: its own readers take it."""
    run_ranks(WORLD_SIZE, save_and_load, str(model), str(tmp_path / "actor"), fresh=True)
    run_ranks(1, read_with_megatron, str(tmp_path / "actor" / "dist_ckpt"))


def read_with_megatron(directory: str) -> None:
    from megatron.core.dist_checkpointing import load_common_state_dict, load_plain_tensors

    from scalerl.parallel.layout import Layout, initialize

    initialize(Layout(1), backend="gloo", timeout_s=60, seed=1)
    common = load_common_state_dict(directory)
    assert common["num_updates"] == 0 and common["layout"]["world_size"] == WORLD_SIZE
    theirs = load_plain_tensors(directory)
    with DistCheckpoint(directory) as stored:
        assert theirs.keys() == stored.tensors.keys() | common.keys()
        assert all(torch.equal(theirs[key], stored.read(key)) for key in stored.tensors)
