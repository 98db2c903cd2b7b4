"""A checkpoint of an adapter -> a directory of peft, or the whole model; each is what transformers and peft compute."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from scalerl.checkpoint.pieces import Piece, write_file, write_index
from scalerl.checkpoint.torch_dist import DistCheckpoint
from scalerl.config import LayoutSizes
from scalerl.merge import main
from scalerl.merge.inspect import _describe_role
from scalerl.models import CHECKPOINT_MODEL_PREFIX, Head, HFWeights, ModelShape, value_model_config
from scalerl.models.adapters import ALL_LINEAR, Adapter, read_peft, resolve_targets, trained_params, write_peft
from scalerl.models.table import InMemory
from scalerl.models.weights import joined_digest
from tests.lanes import mostly_full
from tests.tiny_models import WITH_EXPERTS, make_tiny_model, store_as_released
from tests.unit.models.test_adapters import random_tensors

RANK, ALPHA = 3, 6
IDS = torch.arange(3, 40)[None]


def tiny(path: Path, family: str = "qwen3", **sizes) -> Path:
    return make_tiny_model(path, family, hidden_size=32, num_heads=4, num_kv_heads=2, vocab_size=300, **sizes)


def digest_of(model: Path) -> str:
    with HFWeights(model) as weights:
        return joined_digest({name: weights.digest(name) for name in weights.names()})


def save_adapter(
    root: Path,
    model: Path,
    *,
    head: Head = "lm",
    role: str = "actor",
    tp_size: int = 2,
    dtype: torch.dtype | None = None,
) -> tuple[Path, ModelShape, dict[str, torch.Tensor]]:
    """global_step_7 as a run leaves it that trains an adapter: (directory of the role, shape, peft's tensors)."""
    shape = ModelShape.from_hf(model).with_head(head)
    adapter = Adapter(RANK, ALPHA, resolve_targets(shape, ALL_LINEAR))
    shape = replace(shape, adapter=adapter)
    tensors = {name: (0.2 * tensor).to(dtype) for name, tensor in random_tensors(shape, adapter).items()}
    own = tensors | {"score.weight": torch.ones(1, shape.hidden_size)}
    directory = root / "global_step_7" / role
    (directory / "dist_ckpt").mkdir(parents=True)
    pieces = []
    for param in trained_params(shape):
        shards = [param.shard(lambda name: InMemory(own[name]), shape, rank, 2) for rank in range(2)]
        whole = shards[0] if param.kind == "replicated" else param.join(shards, shape)
        size = tuple(whole.shape)
        pieces.append(Piece(CHECKPOINT_MODEL_PREFIX + param.name, size, (0,) * len(size), whole))
    common = {
        "num_updates": 1,
        "layout": asdict(LayoutSizes(1)),
        "adapter": asdict(adapter),
        "base_digest": digest_of(model),
    }
    data = directory / "dist_ckpt"
    write_index(data, [write_file(data / "__0_0.distcp", pieces)], common)
    shutil.copytree(model, directory / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    keys = {
        "actor": ("actor_rollout_ref", {"model": {"path": str(model)}}),
        "critic": ("critic", {"model": {"path": str(model)}}),
    }
    (directory.parent / "config.yaml").write_text(yaml.safe_dump(dict([keys[role]])))
    (directory.parent / "COMPLETE").write_text('{"files": {}}')
    return directory, shape, tensors


def run(actor: Path, target: Path, *more: str) -> int:
    return main(["merge", "--backend", "megatron", "--local_dir", str(actor), "--target_dir", str(target), *more])


def logits(path: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(IDS).logits


@pytest.mark.parametrize(
    "family", mostly_full(["qwen3", *WITH_EXPERTS], lambda family: family in ("qwen3", "deepseek_v3", "gpt_oss"))
)
def test_a_directory_of_peft_and_the_whole_model_are_one_model(peft, tmp_path, family):
    """Bit by bit what was trained; and what peft computes with it is what transformers computes with the weights."""
    model = tiny(tmp_path / "hf", family)
    actor, shape, tensors = save_adapter(tmp_path / "run", model)
    assert run(actor, tmp_path / "peft") == 0 == run(actor, tmp_path / "whole", "--merge-adapters")
    adapter, stored = read_peft(tmp_path / "peft", replace(shape, adapter=None))
    assert adapter == shape.adapter
    assert list(stored) == list(tensors) and all(stored[name].equal(tensors[name]) for name in tensors)
    base = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        before, theirs = base(IDS).logits, peft.PeftModel.from_pretrained(base, tmp_path / "peft")(IDS).logits
    torch.testing.assert_close(theirs, logits(tmp_path / "whole"), rtol=1e-5, atol=1e-5)
    assert (theirs - before).abs().max() > 1
    # By its name alone transformers finds the model too.
    assert logits(tmp_path / "peft").equal(theirs)
    others = {path.name for path in model.iterdir()}
    assert {path.name for path in (tmp_path / "whole").iterdir()} == others


def test_weights_are_those_that_the_run_had(tmp_path):
    """A run in bfloat16 of a model in float32: rounded weights and the adapter, added in float32."""
    model = tiny(tmp_path / "hf")
    actor, shape, tensors = save_adapter(tmp_path / "run", model, dtype=torch.bfloat16)
    assert run(actor, tmp_path / "whole", "--merge-adapters", "--max_shard_size", "40KB") == 0
    assert run(actor, tmp_path / "float32", "--merge-adapters", "--dtype", "float32") == 0
    exact, scale = load_file(tmp_path / "float32" / "model.safetensors"), ALPHA / RANK
    with HFWeights(tmp_path / "whole") as whole:
        for name, weight in load_file(model / "model.safetensors").items():
            expected = weight.bfloat16().float()
            a = f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight"
            if a in tensors:
                expected = expected + scale * tensors[a.replace("lora_A", "lora_B")].float() @ tensors[a].float()
            torch.testing.assert_close(exact[name], expected, rtol=1e-6, atol=1e-6)
            assert whole.read(name)[:].equal(exact[name].bfloat16()), name
    assert shape.adapter is not None and shape.adapter.scale == scale


def test_released_files_with_stacked_experts_and_a_vision_tower(peft, tmp_path):
    model = tiny(tmp_path / "hf", "qwen3_5_moe_text")
    before = store_as_released(model)
    actor, _, tensors = save_adapter(tmp_path / "run", model)
    assert run(actor, tmp_path / "peft") == 0 == run(actor, tmp_path / "whole", "--merge-adapters")
    after = load_file(tmp_path / "whole" / "model.safetensors")
    # A layer for further tokens and the vision tower are as they were.
    assert after.keys() == before.keys()
    name = "model.language_model.layers.0.mlp.experts"
    for whole, part, rows in (("gate_up_proj", "up_proj", slice(16, None)), ("down_proj", "down_proj", slice(None))):
        pair = f"base_model.model.{name.replace('language_model.', '')}.2.{part}"
        a, b = (tensors[f"{pair}.lora_{letter}.weight"] for letter in "AB")
        changed = before[f"{name}.{whole}"][2, rows] + 2 * b @ a
        torch.testing.assert_close(after[f"{name}.{whole}"][2, rows], changed)
    for other in before:
        assert not other.startswith(("model.visual", "mtp")) or after[other].equal(before[other])
    base = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "peft")(IDS).logits
    torch.testing.assert_close(theirs, logits(tmp_path / "whole"), rtol=1e-5, atol=1e-5)


def test_a_critic_becomes_a_whole_model(tmp_path, capsys):
    """Its value head is the trained one; a directory of peft has no place for it."""
    model = tiny(tmp_path / "hf")
    critic, _, tensors = save_adapter(tmp_path / "run", model, head="value", role="critic")
    config = value_model_config(json.loads((model / "config.json").read_text()))
    (critic / "huggingface" / "config.json").write_text(json.dumps(config))
    assert run(critic, tmp_path / "peft") == 2
    assert "give --merge-adapters" in capsys.readouterr().err and not (tmp_path / "peft").exists()
    assert run(critic, tmp_path / "whole", "--merge-adapters") == 0
    whole, before = (load_file(path / "model.safetensors") for path in (tmp_path / "whole", model))
    assert whole["score.weight"].equal(torch.ones(1, 32)) and "lm_head.weight" not in whole
    name = "model.layers.0.mlp.down_proj"
    a, b = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    torch.testing.assert_close(whole[f"{name}.weight"], before[f"{name}.weight"] + 2 * b @ a)


def test_other_weights_are_refused_with_both_digests(tmp_path, capsys):
    model = tiny(tmp_path / "hf")
    actor, *_ = save_adapter(tmp_path / "run", model)
    other = tiny(tmp_path / "other", seed=1)
    assert run(actor, tmp_path / "whole", "--merge-adapters", "--hf_model_path", str(other)) == 2
    error = capsys.readouterr().err
    assert digest_of(model) in error and digest_of(other) in error and not (tmp_path / "whole").exists()
    # Another directory with the same weights, in several files.
    with HFWeights(model) as weights:
        names = weights.names()
        parts = {f"part-{n}.safetensors": names[n::2] for n in range(2)}
        moved = shutil.copytree(model, tmp_path / "moved", ignore=shutil.ignore_patterns("*.safetensors"))
        for file, of_file in parts.items():
            save_file({name: weights.read(name)[:] for name in of_file}, moved / file)
    index = {"weight_map": {name: file for file, of_file in parts.items() for name in of_file}}
    (moved / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.rmtree(model)
    assert run(actor, tmp_path / "whole", "--merge-adapters") == 2
    assert f"--hf_model_path = {model}: there is no such directory" in capsys.readouterr().err
    assert run(actor, tmp_path / "whole", "--merge-adapters", "--hf_model_path", str(moved)) == 0


def test_a_checkpoint_that_names_no_model(tmp_path, capsys):
    """A directory of peft is made from the checkpoint alone, and names no model then."""
    actor, *_ = save_adapter(tmp_path / "run", tiny(tmp_path / "hf"))
    (actor.parent / "config.yaml").unlink()
    assert run(actor, tmp_path / "whole", "--merge-adapters") == 2
    assert "has no config.yaml that names the model; give --hf_model_path" in capsys.readouterr().err
    assert run(actor, tmp_path / "peft") == 0
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["base_model_name_or_path"] is None
    assert run(actor, tmp_path / "peft") == 2 and "is not empty" in capsys.readouterr().err
    named = str(tmp_path / "hf")
    assert run(actor, tmp_path / "peft", "--overwrite", "--hf_model_path", named) == 0
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["base_model_name_or_path"] == named


def test_what_is_damaged_is_found(tmp_path, capsys):
    actor, shape, _ = save_adapter(tmp_path / "run", tiny(tmp_path / "hf"))
    file = actor / "dist_ckpt" / "__0_0.distcp"
    with DistCheckpoint(actor / "dist_ckpt") as stored:
        piece = next(iter(stored.pieces(CHECKPOINT_MODEL_PREFIX + trained_params(shape)[-1].name)))
    data = bytearray(file.read_bytes())
    assert piece.payload is not None
    data[piece.start + piece.payload + 3] ^= 16
    file.write_bytes(data)
    for more in ((), ("--merge-adapters",)):
        assert run(actor, tmp_path / "merged", *more) == 2
        assert f"tensor {piece.key} at [" in capsys.readouterr().err
    assert not list(tmp_path.glob("*merged*"))


def test_adapters_are_compared(tmp_path, capsys):
    """With each other, number by number."""
    model = tiny(tmp_path / "hf")
    actor, shape, tensors = save_adapter(tmp_path / "run", model)
    for target, more in (("peft", ()), ("whole", ("--merge-adapters",))):
        assert run(actor, tmp_path / target, *more) == 0
    assert shape.adapter is not None
    changed = {name: tensor + 1 if number == 3 else tensor for number, (name, tensor) in enumerate(tensors.items())}
    write_peft(tmp_path / "other", Adapter(RANK, 7, shape.adapter.targets), changed, str(model))

    def compare(one: str, other: str, *more: str) -> tuple[int, str]:
        code = main(["test", "--local_dir", str(tmp_path / one), "--test_hf_dir", str(tmp_path / other), *more])
        return code, "".join(capsys.readouterr())

    assert compare("peft", "peft")[0] == 0
    code, text = compare("peft", "other")
    assert code == 1 and f"{list(tensors)[3]}: differs by up to 1" in text and "lora_alpha: 6, 7" in text
    code, text = compare("whole", "peft")
    assert code == 2 and f"{tmp_path / 'peft'} is an adapter, and the other is a model" in text
    assert compare("peft", "peft", "--forward")[0] == 2


def test_a_whole_checkpoint_has_no_adapter_to_merge(tmp_path, capsys):
    model = tiny(tmp_path / "hf")
    assert main(["split", str(model), str(tmp_path / "split")]) == 0
    assert run(tmp_path / "split", tmp_path / "whole", "--merge-adapters") == 2
    assert "no adapter; leave out --merge-adapters" in capsys.readouterr().err


def test_inspect_says_what_the_adapter_is(tmp_path):
    actor, *_ = save_adapter(tmp_path / "run", tiny(tmp_path / "hf"))
    lines = "\n".join(_describe_role(actor))
    assert "an adapter of rank 3, alpha 6: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj" in lines
