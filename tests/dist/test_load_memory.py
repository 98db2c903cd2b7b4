"""Loading a Hugging Face model: what a rank reads of the files, and what of the host's memory that takes."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from scalerl.models import ModelShape, family_of
from tests.dist.launch import run_ranks
from tests.dist.layouts import LAYOUTS, MIXTURE_LAYOUTS, ONE
from tests.lanes import full

STORED = torch.bfloat16
NUM_FILES = 3
# Reading headers and running code for the first time leaves a little: 6 MiB where this was written.
SMALL_BYTES = 12 * 2**20
COMMON = dict(hidden_size=1024, num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=512)
# The largest tensor is the tied embedding; gate and up, which become one of twice the size; or embedding and head.
MODELS: dict[str, dict[str, Any]] = {
    "tied": dict(
        model_type="qwen2",
        vocab_size=65536,
        intermediate_size=6144,
        num_hidden_layers=4,
        tie_word_embeddings=True,
    ),
    "wide": dict(model_type="llama", vocab_size=4096, intermediate_size=16384, num_hidden_layers=3),
    "experts": dict(
        model_type="qwen3_moe",
        vocab_size=24576,
        head_dim=128,
        intermediate_size=2048,
        moe_intermediate_size=512,
        num_experts=16,
        num_experts_per_tok=2,
        num_hidden_layers=4,
    ),
}
SIZES = {"one": ONE} | LAYOUTS | MIXTURE_LAYOUTS
CLEAR_REFS = "/proc/self/clear_refs"
CASES = [
    full("tied", "one", "bfloat16"),
    full("tied", "pp2", "bfloat16"),
    full("wide", "one", "float32"),
    ("wide", "tp2", "bfloat16"),
    ("experts", "ep2", "float32"),
    full("experts", "tp2_etp2", "bfloat16"),
]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """About 300 MB each in several files, not kept."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def make(name: str) -> Path:
        path = root / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(COMMON | MODELS[name]))
        shape = ModelShape.from_hf(path)
        sizes = list(family_of(shape).hf_shapes(shape).items())
        weight_map = {}
        for number in range(NUM_FILES):
            file = f"model-{number}.safetensors"
            tensors = {hf: torch.ones(size, dtype=STORED) for hf, size in sizes[number::NUM_FILES]}
            save_file(tensors, path / file)
            weight_map |= dict.fromkeys(tensors, file)
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return path

    yield make
    shutil.rmtree(root)


class CountingSlice:
    """A safetensors slice that counts the bytes of what is asked of it."""

    def __init__(self, source: Any, counts: list[int]) -> None:
        self.get_shape, self.source, self.counts = source.get_shape, source, counts

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self.source[index]
        self.counts.append(part.nbytes)
        return part


def resident_bytes(field: str) -> int:
    """Of this process, anonymous and mapped from files. VmRSS: now; VmHWM: the most since clear_refs."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return int(re.search(rf"^{field}:\s*(\d+) kB", status, re.MULTILINE)[1]) * 1024


def load(model: str, layout: dict[str, int], dtype: str) -> dict[str, int]:
    """Builds an engine and measures load_hf_weights inside, with all parameters resident before it starts."""
    from scalerl.config.schema import MegatronConfig
    from scalerl.models.weights import HFWeights
    from scalerl.parallel import engine
    from scalerl.parallel.layout import Layout, initialize

    groups = initialize(Layout(**layout), backend="gloo", timeout_s=60, seed=1)
    load_hf_weights, read = engine.load_hf_weights, HFWeights.read
    counts: list[int] = []
    num_bytes: dict[str, int] = {}

    def measured(chunks: list[torch.nn.Module], *args: Any) -> None:
        parameters = [parameter.data for chunk in chunks for parameter in chunk.parameters()]
        for tensor in parameters:
            tensor.fill_(torch.nan)
        before = resident_bytes("VmRSS")
        # From here on VmHWM counts anew.
        Path(CLEAR_REFS).write_text("5", encoding="ascii")
        load_hf_weights(chunks, *args)
        num_bytes["peak"] = resident_bytes("VmHWM") - before
        num_bytes["left"] = resident_bytes("VmRSS") - before
        num_bytes["shard"] = sum(tensor.numel() * STORED.itemsize for tensor in parameters)
        assert all(bool((tensor == 1).all()) for tensor in parameters)

    engine.load_hf_weights = measured
    HFWeights.read = lambda self, name: CountingSlice(read(self, name), counts)
    engine.MegatronEngine(model, MegatronConfig(dtype=dtype), groups, optim=None)
    return num_bytes | {"read": sum(counts)}


@pytest.mark.skipif(not os.access(CLEAR_REFS, os.W_OK), reason="the kernel does not reset the peak")
@pytest.mark.parametrize(("model", "layout", "dtype"), CASES)
def test_a_rank_reads_its_slices_and_takes_one_tensor(
    model_of: Callable[[str], Path], model: str, layout: str, dtype: str
) -> None:
    """At no time is more resident than the shard and the largest tensor of the files, pages of these included, though
    the kernel could take those back. Every byte of the shard is read once, and no other."""
    path = model_of(model)
    shape = ModelShape.from_hf(path)
    sizes = family_of(shape).hf_shapes(shape).values()
    largest = max(torch.Size(size).numel() for size in sizes) * STORED.itemsize
    for rank in run_ranks(SIZES[layout]["world_size"], load, str(path), SIZES[layout], dtype, fresh=True):
        assert rank["read"] == rank["shard"]
        assert rank["shard"] > 1.5 * largest and largest > 2 * SMALL_BYTES, "too small to tell"
        assert rank["peak"] <= largest + SMALL_BYTES
        assert rank["left"] <= SMALL_BYTES
