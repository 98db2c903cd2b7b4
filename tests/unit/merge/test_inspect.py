"""`scalerl inspect`: what it says of a checkpoint, and that --check finds what changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from scalerl.checkpoint import store
from scalerl.checkpoint.pieces import Piece, write_file, write_index
from scalerl.merge import inspect
from scalerl.merge.inspect import main
from tests.tiny_models import make_tiny_model

WEIGHT = "decoder.layers.0.mlp.linear_fc2.weight"
LAYOUT = dict(world_size=8, tp_size=2, pp_size=2, vpp_size=1, cp_size=1, ep_size=1, etp_size=1)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tmp = store.begin_save(tmp_path / "run", 3)
    (tmp / "actor" / "dist_ckpt").mkdir(parents=True)
    make_tiny_model(tmp / "actor" / "huggingface", "qwen3")
    (tmp / "actor" / "huggingface" / "model.safetensors").unlink()
    keys = {WEIGHT: torch.bfloat16}
    keys |= {f"optimizer.state.{name}.{WEIGHT}": torch.float32 for name in ("param", "exp_avg", "exp_avg_sq")}
    pieces = [
        Piece(key, (64, 128), (32 * half, 0), torch.ones(32, 128, dtype=dtype))
        for key, dtype in keys.items()
        for half in (0, 1)
    ]
    written = write_file(tmp / "actor" / "dist_ckpt" / "__0_0.distcp", pieces)
    write_index(tmp / "actor" / "dist_ckpt", [written], {"num_updates": 6, "layout": LAYOUT})
    store.write_trainer_state(tmp, {"step": 3, "prompts": {}, "code": {"version": "0.1", "commit": "abc"}})
    return store.commit(tmp, tmp_path / "run", 3)


def test_what_is_said(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the directory itself, and of the run's: the one that it would go on from."""
    assert main([str(checkpoint), "--check"]) == 0
    said = capsys.readouterr().out
    for line in (
        "step 3; state of the run: code, prompts",
        "saved by scalerl 0.1, commit abc",
        "actor: qwen3, 2 layers, hidden size 64",
        "saved on world_size 8, tp_size 2, pp_size 2,",
        "after 6 updates",
        "weights: 8,192 numbers (bfloat16), 16,384 bytes in 2 pieces with digests",
        "Adam's second moments: 8,192 numbers (float32), 32,768 bytes in 2 pieces",
        "every file of global_step_3 has the digest that it was saved with",
    ):
        assert line in said
    assert main([str(checkpoint.parent)]) == 0
    assert f"{checkpoint}: " in capsys.readouterr().out


def test_damage_is_found_when_asked_for(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = checkpoint / "actor" / "dist_ckpt" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[2000] ^= 1
    file.write_bytes(data)
    assert main([str(checkpoint)]) == 0
    assert main([str(checkpoint), "--check"]) == 1
    assert f"file actor/dist_ckpt/__0_0.distcp is not what was saved: tensor {WEIGHT} at" in capsys.readouterr().err


def test_what_rotation_removes_while_it_is_checked(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = store.integrity_problem

    def check_too_late(directory: Path, *, digests: bool = False) -> str | None:
        if digests:
            directory.rename(directory.with_name("global_step_3.deleting-0"))
        return check(directory, digests=digests)

    monkeypatch.setattr(inspect, "integrity_problem", check_too_late)
    assert main([str(checkpoint), "--check"]) == 2
    assert f"error: {checkpoint} was removed while it was read" in capsys.readouterr().err


@pytest.mark.parametrize("at", [0.02, 0.5, 0.98])
def test_damage_of_any_file_is_one_message_that_names_it(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], at: float
) -> None:
    """Also where the file is read to say what is in it: no traceback instead of the digests' word."""
    for file in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        content = file.read_bytes()
        damaged = bytearray(content)
        damaged[int(at * len(content))] ^= 64
        file.write_bytes(damaged)
        code = main([str(checkpoint), "--check"])
        error = capsys.readouterr().err
        assert code in (1, 2) and file.name in error and error.startswith("error: "), (file, error)
        # What it does not read for that it cannot know.
        assert main([str(checkpoint)]) in (0, 2), file
        capsys.readouterr()
        file.write_bytes(content)
    assert main([str(checkpoint), "--check"]) == 0


def test_nothing_is_said_of_digests_that_are_not_there(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    complete = checkpoint / store.COMPLETE_NAME
    sizes = json.loads(complete.read_text())["files"]
    complete.write_text(json.dumps({"step": 3, "files": sizes}))
    assert main([str(checkpoint), "--check"]) == 0
    said = capsys.readouterr().out
    assert "nothing to compare: global_step_3 was saved before there were digests" in said and "every file" not in said


def test_what_is_no_checkpoint(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "is no checkpoint and holds none: give global_step_N" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 2
    # Nothing of the key that chooses a run's checkpoint.
    assert capsys.readouterr().err == f"error: {tmp_path / 'nowhere'} is no whole checkpoint: no such directory\n"
    (checkpoint / "trainer_state.json").unlink()
    assert main([str(checkpoint)]) == 2
    assert "file trainer_state.json is missing" in capsys.readouterr().err
