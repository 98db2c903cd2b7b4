"""Names, shapes and files of adapters, against peft; their shards, against the matrices that they belong to."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from scalerl.models import ModelShape, family_of
from scalerl.models.adapters import (
    ADAPTER_NAME,
    ALL_LINEAR,
    WEIGHTS_FILE,
    Adapter,
    adapter_config,
    adapter_pairs,
    adapter_params,
    adapter_shapes,
    projections,
    read_peft,
    resolve_targets,
    write_peft,
)
from scalerl.models.table import InMemory
from tests.lanes import mostly_full
from tests.tiny_models import FAMILIES, WITH_EXPERTS, make_tiny_model

DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


def tiny(tmp_path: Path, family: str) -> Path:
    path = tmp_path / family
    return make_tiny_model(path, family, hidden_size=32, num_heads=8, num_kv_heads=4, head_dim=4, vocab_size=300)


def an_adapter(model_dir: Path, rank: int = 3) -> tuple[ModelShape, Adapter]:
    shape = ModelShape.from_hf(model_dir)
    return shape, Adapter(rank, 6, resolve_targets(shape, ALL_LINEAR))


def random_tensors(shape: ModelShape, adapter: Adapter) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(size, generator=generator) for n, size in adapter_shapes(shape, adapter).items()}


def in_memory(tensors: dict[str, torch.Tensor]):
    return lambda name: InMemory(tensors[name])


@pytest.mark.parametrize(
    ("family", "targets"), [("qwen3", ALL_LINEAR), ("deepseek_v3", LATENT), ("qwen3_5_text", ALL_LINEAR)]
)
def test_names_and_shapes_are_those_of_peft(peft, tmp_path, family, targets):
    """The MLPs of models with experts are left out, which peft has in another form."""
    model_dir = tiny(tmp_path, family)
    shape = ModelShape.from_hf(model_dir)
    adapter = Adapter(3, 6, resolve_targets(shape, targets))
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    model = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets))
    model.save_pretrained(tmp_path / "adapter")
    theirs = load_file(tmp_path / "adapter" / WEIGHTS_FILE)
    assert {n: tuple(t.shape) for n, t in theirs.items()} == adapter_shapes(shape, adapter)
    written = json.loads((tmp_path / "adapter" / ADAPTER_NAME).read_text())
    ours = adapter_config(adapter, str(model_dir))
    # By whole names, where all of them are asked for; only what is loaded for use says what it is for.
    for key in ours.keys() - {"target_modules", "task_type"}:
        assert written[key] == ours[key], key
    read, tensors = read_peft(tmp_path / "adapter", shape)
    assert read == adapter
    assert all(tensors[name].equal(theirs[name]) for name in theirs)


MIXTURES = [family for family in WITH_EXPERTS if family != "gpt_oss"]


@pytest.mark.parametrize(
    "family", mostly_full(["qwen3", *MIXTURES], lambda family: family in ("qwen3", "deepseek_v3", "qwen3_5_moe_text"))
)
def test_peft_reads_what_is_written(peft, tmp_path, family):
    """Every pair that is written changes what transformers computes as in the weights: also those of each expert."""
    model_dir = tiny(tmp_path, family)
    shape, adapter = an_adapter(model_dir)
    tensors = {name: 0.2 * tensor for name, tensor in random_tensors(shape, adapter).items()}
    write_peft(tmp_path / "adapter", adapter, tensors, str(model_dir))
    read, stored = read_peft(tmp_path / "adapter", shape)
    assert read == adapter and all(stored[name].equal(tensors[name]) for name in tensors)
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    merged = shutil.copytree(model_dir, tmp_path / "merged")
    weights = load_file(merged / "model.safetensors")
    for name in list(tensors)[::2]:
        a, b = tensors[name], tensors[name.replace("lora_A", "lora_B")]
        weights[name.removeprefix("base_model.model.").replace(".lora_A", "")] += 2 * b @ a
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        before = base(ids).logits
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits
        ours = AutoModelForCausalLM.from_pretrained(merged)(ids).logits
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
    assert (theirs - before).abs().max() > 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_shards_of_an_adapter_make_the_whole_again(tmp_path, family, tp_size):
    shape, adapter = an_adapter(tiny(tmp_path, family))
    shape = replace(shape, adapter=adapter)
    tensors, back = random_tensors(shape, adapter), {}
    for param in adapter_params(shape):
        shards = [param.shard(lambda name: InMemory(tensors[name]), shape, rank, tp_size) for rank in range(tp_size)]
        param.add_to_hf(param.join(shards, shape), shape, back)
    assert list(back) == list(tensors)
    assert all(back[name].equal(tensors[name]) for name in tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_matrix_are_the_rows_of_its_adapters(tmp_path, family):
    """On two ranks each has its part of the matrix's rows, or columns: B of all projections, or A, makes that part."""
    shape, adapter = an_adapter(tiny(tmp_path, family))
    shape = replace(shape, adapter=adapter)
    tensors = random_tensors(shape, adapter)
    seen = 0
    for param in family_of(shape).params(shape):
        found = [pair for pair in adapter_pairs(param, shape) if pair is not None]
        if not found:
            continue
        change = {}
        for name in param.hf:
            a, b = (f"base_model.model.{name.removesuffix('.weight')}.lora_{letter}.weight" for letter in "AB")
            change[name] = tensors[b] @ tensors[a]
        for rank in range(2):
            whole = param.shard(in_memory(change), shape, rank, 2)
            pairs = [[part.shard(in_memory(tensors), shape, rank, 2) for part in pair] for pair in found]
            # The sum over all rows does not depend on the order in which projections are joined.
            torch.testing.assert_close(sum((b @ a).sum(0) for a, b in pairs), whole.sum(0))
        seen += 2 * len(found)
    assert seen == len(tensors)


def test_experts_have_pairs_by_themselves_and_routers_none(tmp_path):
    shape, adapter = an_adapter(tiny(tmp_path, "qwen3_moe"))
    assert adapter.targets == DENSE
    names = adapter_shapes(shape, adapter)
    assert names["base_model.model.model.layers.0.mlp.experts.3.gate_proj.lora_A.weight"] == (3, shape.hidden_size)
    assert not [name for name in names if ".mlp.gate." in name]


def test_targets_are_names_of_projections(tmp_path):
    shape = ModelShape.from_hf(tiny(tmp_path, "qwen3"))
    assert projections(shape) == DENSE
    assert resolve_targets(shape, ["v_proj", "q_proj"]) == ("q_proj", "v_proj")
    assert resolve_targets(shape, ALL_LINEAR, ["q_proj", "down_proj"]) == DENSE[1:-1]
    with pytest.raises(ValueError, match=r"'embed_tokens': the embedding.*'lm_head': the head.*'w9'.*no such"):
        resolve_targets(shape, ["q_proj", "embed_tokens", "lm_head"], ["w9"])
    with pytest.raises(ValueError, match="no projection at all"):
        resolve_targets(shape, ["q_proj"], ["q_proj"])


def test_experts_have_those_pairs_that_peft_reads(tmp_path):
    """Down alone, or all three; in a dense model any."""
    mixture, dense = (ModelShape.from_hf(tiny(tmp_path, family)) for family in ("mixtral", "qwen3"))
    for targets in (["q_proj", "w2"], ["w1", "w2", "w3"]):
        assert set(resolve_targets(mixture, targets)) == set(targets)
    with pytest.raises(ValueError, match="w1 of experts need w2 and w3 beside them"):
        resolve_targets(mixture, ["w1"])
    with pytest.raises(ValueError, match="w1 and w3 of experts need w2 beside them"):
        resolve_targets(mixture, ALL_LINEAR, ["w2"])
    assert resolve_targets(dense, ["gate_proj"]) == ("gate_proj",)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_rslora", True),
        ("use_dora", True),
        ("rank_pattern", {"q_proj": 8}),
        ("alpha_pattern", {"q_proj": 8}),
        ("modules_to_save", ["lm_head"]),
        ("bias", "all"),
        ("target_parameters", ["mlp.experts.down_proj"]),
        ("r", 0),
        ("lora_alpha", None),
        ("peft_type", "IA3"),
    ],
)
def test_another_kind_of_adapter_is_refused_by_its_key(tmp_path, key, value):
    shape, adapter = an_adapter(tiny(tmp_path, "qwen3"))
    write_peft(tmp_path / "adapter", adapter, random_tensors(shape, adapter))
    path = tmp_path / "adapter" / ADAPTER_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ValueError, match=f"{ADAPTER_NAME}: {key} is"):
        read_peft(tmp_path / "adapter", shape)


def test_all_tensors_that_do_not_fit_are_named_at_once(tmp_path):
    shape, adapter = an_adapter(tiny(tmp_path, "qwen3"))
    tensors = random_tensors(shape, adapter)
    first, second, *_ = tensors
    del tensors[first]
    tensors |= {second: torch.zeros(2, 2), "base_model.model.lm_head.lora_A.weight": torch.zeros(3, 8)}
    write_peft(tmp_path / "adapter", adapter, tensors)
    with pytest.raises(ValueError, match="3 problems") as error:
        read_peft(tmp_path / "adapter", shape)
    for text in (f"missing {first}", f"{second} has shape (2, 2)", "unexpected base_model.model.lm_head.lora_A.weight"):
        assert text in str(error.value)


def test_a_directory_without_an_adapter_says_what_is_missing(tmp_path):
    shape, adapter = an_adapter(tiny(tmp_path, "qwen3"))
    with pytest.raises(ValueError, match=f"has no {ADAPTER_NAME}"):
        read_peft(tmp_path, shape)
    write_peft(tmp_path, adapter, {})
    (tmp_path / WEIGHTS_FILE).unlink()
    with pytest.raises(ValueError, match=f"has no {WEIGHTS_FILE}"):
        read_peft(tmp_path, shape)
    save_file({}, tmp_path / WEIGHTS_FILE)
    with pytest.raises(ValueError, match="no tensor of a projection"):
        read_peft(tmp_path, shape)
    (tmp_path / WEIGHTS_FILE).write_bytes(b"x")
    with pytest.raises(ValueError, match="cannot be read"):
        read_peft(tmp_path, shape)
