"""A DeepSeek-V3 stored as fp8 with scales of blocks: every layout loads what multiplying out gives, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.launch import run_ranks
from tests.lanes import mostly_full
from tests.tiny_models import make_tiny_model, store_as_fp8

# Arguments of Layout. Halves of 320 and 192 rows or columns end inside a block of 128.
LAYOUTS: dict[str, dict[str, int]] = {
    "one": {"world_size": 1},
    "tp2_etp2": {"world_size": 2, "tp_size": 2, "etp_size": 2},
    "ep2": {"world_size": 2, "ep_size": 2},
    "pp2": {"world_size": 2, "pp_size": 2},
    "tp2_ep2_etp2": {"world_size": 4, "tp_size": 2, "ep_size": 2, "etp_size": 2},
}
DTYPES = ("float32", "bfloat16")
SIZES: dict[str, Any] = dict(num_layers=2, hidden_size=320, ffn_size=320, num_heads=20, vocab_size=512)
FURTHER: dict[str, Any] = dict(moe_intermediate_size=192, q_lora_rank=160, kv_lora_rank=144)


def exported(model: str, layout: dict[str, int]) -> dict[str, dict[str, Tensor]]:
    """Megatron's type -> Hugging Face's name -> tensor, as weight syncs and saves have them."""
    from scalerl.config.schema import MegatronConfig
    from scalerl.parallel import platform
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize

    groups = initialize(Layout(**layout), backend=platform.backend(), timeout_s=60, seed=1)
    tensors_by_dtype = {}
    for dtype in DTYPES:
        engine = MegatronEngine(model, MegatronConfig(dtype=dtype), groups, optim=None)
        tensors_by_dtype[dtype] = {name: t.clone() for bucket in engine.export_buckets(1 << 20) for name, t in bucket}
    return tensors_by_dtype


@pytest.mark.parametrize("layout", mostly_full(LAYOUTS, lambda layout: layout == "tp2_etp2"))
def test_ranks_hold_the_numbers_that_the_file_means(tmp_path: Path, layout: str) -> None:
    model = make_tiny_model(tmp_path / "m", "deepseek_v3", dtype=torch.bfloat16, **SIZES, **FURTHER)
    meant = store_as_fp8(model)
    for tensors_by_dtype in run_ranks(LAYOUTS[layout]["world_size"], exported, str(model), LAYOUTS[layout]):
        for dtype in DTYPES:
            assert tensors_by_dtype[dtype].keys() == meant.keys()
            for name, tensor in tensors_by_dtype[dtype].items():
                assert torch.equal(tensor, meant[name].to(tensor.dtype)), (dtype, name)
                assert tensor.dtype == (torch.float32 if "bias" in name else getattr(torch, dtype)), name
