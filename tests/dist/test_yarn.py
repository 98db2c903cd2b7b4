"""YaRN of dense families: log-probs at four times the original length are those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.launch import run_ranks
from tests.lanes import mostly_full
from tests.tiny_models import make_tiny_model

ORIGINAL, FACTOR = 32, 4
LENGTHS = (FACTOR * ORIGINAL, 40, 5)
YARN = {"rope_type": "yarn", "factor": float(FACTOR), "original_max_position_embeddings": ORIGINAL}
ABSOLUTE = 1e-5
# Arguments of Layout.
LAYOUTS: dict[str, dict[str, int]] = {
    "one": {"world_size": 1},
    "cp2": {"world_size": 2, "cp_size": 2},
    "tp2": {"world_size": 2, "tp_size": 2},
}


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 500, (length,), generator=generator) for length in LENGTHS]


def logprobs_of_engine(model: str, layout: dict[str, int]) -> list[Tensor]:
    from scalerl.batch.data_proto import DataProto, Jagged
    from scalerl.config.schema import MegatronConfig
    from scalerl.parallel import platform
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize

    groups = initialize(Layout(**layout), backend=platform.backend(), timeout_s=60, seed=1)
    engine = MegatronEngine(model, MegatronConfig(dtype="float32"), groups, optim=None)
    shard = DataProto({"input_ids": Jagged.from_list(rows(), torch.int64)})
    logprobs = engine.logprobs(shard, [[0], [1, 2]], temperature=1.0)["logprobs"]
    return list(logprobs.values.split(list(LENGTHS)))


@torch.no_grad()
def logprobs_of_transformers(model: str) -> list[Tensor]:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    logprobs = []
    for ids in rows():
        logits = theirs(ids[None]).logits[0, :-1].log_softmax(-1)
        logprobs.append(torch.cat([torch.zeros(1), logits.gather(1, ids[1:, None])[:, 0]]))
    return logprobs


@pytest.mark.parametrize(
    ("family", "layout", "changes"),
    mostly_full(
        [
            ("qwen3", "one", {}),
            ("qwen3", "cp2", {}),
            ("llama", "tp2", {"beta_fast": 8.0, "beta_slow": 2.0}),
            ("qwen2", "one", {"truncate": False}),
            # It turns half of each head, and by neighbours.
            ("glm4", "one", {}),
        ],
        lambda case: case[:2] == ("qwen3", "one"),
    ),
)
def test_four_times_the_original_length(
    tmp_path_factory: pytest.TempPathFactory, family: str, layout: str, changes: dict[str, Any]
) -> None:
    plain, scaled = (
        str(
            make_tiny_model(
                tmp_path_factory.mktemp(name),
                family,
                head_dim=None if family == "qwen2" else 32,
                max_position_embeddings=ORIGINAL * FACTOR,
                **({"rope_parameters": YARN | {"rope_theta": 10000.0} | changes} if name == "yarn" else {}),
            )
        )
        for name in ("plain", "yarn")
    )
    expected = logprobs_of_transformers(scaled)
    for mine in run_ranks(LAYOUTS[layout]["world_size"], logprobs_of_engine, scaled, LAYOUTS[layout]):
        for ours, theirs in zip(mine, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=ABSOLUTE, rtol=0)
    # The same weights without it say something else: the comparison sees YaRN.
    assert (logprobs_of_transformers(plain)[0] - expected[0]).abs().max() > 100 * ABSOLUTE
