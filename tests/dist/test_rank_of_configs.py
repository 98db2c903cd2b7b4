"""One rank of each run in configs/ on meta tensors: Megatron builds what the family's table and the plan say, and the
loader fills it from files of the model's size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.dist.launch import run_ranks
from tests.hub_files import SCALE, NotedReads, Shapes, headers, write_headers
from tests.lanes import mostly_full
from tests.model_configs import FILES, WITH_CRITIC, model_of, read_config

CASES = [*((name, "actor") for name in sorted(FILES)), *((name, "critic") for name in WITH_CRITIC)]
# A mixture on a pipeline stage of 512 ranks: experts, latent attention, dense first layers, files in fp8; and a critic.
QUICK = (("deepseek-v3-grpo-512", "actor"), ("qwen3-8b-ppo-8", "critic"))


@dataclass
class Built:
    """A rank.  numbers: with a gradient; planned: as the plan counts them.  names: of its tensors, in files.

    read: the shape of what it reads of each tensor in the files.
    """

    num_tensors: int
    numbers: int
    planned: int
    names: set[str]
    read: Shapes


def built(name: str, role: str, files: str) -> list[Built]:
    """A rank of the first stage and one of the last.  files: a model directory.

    torch's own group without communication stands for the other ranks: building a model and loading it send nothing.
    """
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils import _device

    from scalerl.config import compose, model_roles, trained_layout
    from scalerl.extras.plan.parameters import stage_parameters
    from scalerl.models import ModelShape, family_of
    from scalerl.parallel import loading
    from scalerl.parallel.expert_weights import named_tensors
    from scalerl.parallel.layout import Layout, initialize, leave
    from scalerl.parallel.model import build_model, transformer_config

    # `with torch.device` is about torch's own factories, not about those that the platform puts in their place.
    factories = {getattr(factory, "__wrapped__", factory) for factory in _device._device_constructors()}
    _device._device_constructors = lambda: factories
    current_device: Any = torch.cuda.current_device
    cfg = compose("ppo", ["--config-dir", str(FILES[name].parent), "--config-name", name], rules=False)
    shape, megatron, sizes = ModelShape.from_hf(files), cfg.actor_rollout_ref.actor.megatron, trained_layout(cfg)
    if role != "actor":
        (model_role,) = (each for each in model_roles(cfg) if each.name == role)
        shape, megatron, sizes = shape.with_head(model_role.head), model_role.megatron, model_role.layout(cfg)
    layout = Layout(**vars(sizes))
    family, stages, ranks = family_of(shape), stage_parameters(shape, layout), []
    for rank in (0, layout.world_size - 1):
        groups = initialize(layout, backend="fake", timeout_s=60, seed=1, rank=rank, store=FakeStore())
        with torch.device("meta"):
            # What modules ask for the device of their tensors.
            torch.cuda.current_device = lambda: "meta"  # pyright: ignore[reportAttributeAccessIssue]
            chunks = build_model(shape, transformer_config(shape, megatron, groups, on_cpu=True), groups)
            torch.cuda.current_device = current_device
        tensors = {(index, key): x for index, chunk in enumerate(chunks) for key, x in named_tensors(chunk).items()}
        assert all(tensor.is_meta for tensor in tensors.values())
        names: set[str] = set()
        for param, chunk, key in loading.local_params(family, shape, groups):
            size = layout.tp_size if param.expert is None else layout.etp_size
            assert tensors.pop((chunk, key)).shape == param.mcore_shape(shape, size), param.name
            names.update(param.hf if param.stacked else (rows.name for rows in family.stored_rows(param, shape)))
        assert not tensors, f"no entry of the table loads {sorted(tensors)}"
        read: Shapes = {}
        loading.HFWeights = partial(NotedReads, parts=read)  # pyright: ignore[reportAttributeAccessIssue]
        loading.load_hf_weights(chunks, files, family, shape, groups)
        parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        planned = stages[groups.coordinates.pp_rank].trained
        ranks.append(Built(len(parameters), sum(p.numel() for p in parameters), planned, names, read))
        del chunks, tensors, parameters
        leave()
    return ranks


@pytest.mark.parametrize(("name", "role"), mostly_full(CASES, QUICK.__contains__))
def test_a_rank_is_what_the_table_and_the_plan_say(name: str, role: str, tmp_path: Path) -> None:
    model = model_of(name)
    stored = headers(model)
    files = write_headers(tmp_path / "model", read_config(model), stored)
    (ranks,) = run_ranks(1, built, name, role, str(files), fresh=True)
    for rank in ranks:
        assert rank.num_tensors > 0 and rank.numbers == rank.planned
        # A critic's head is in no file.
        assert rank.names - stored.keys() == ({"score.weight"} if role == "critic" else set())
        scales = {name + SCALE for name in rank.names if name + SCALE in stored}
        assert rank.read.keys() == (rank.names & stored.keys()) | scales
        for scale in scales:
            part = rank.read[scale.removesuffix(SCALE)]
            assert rank.read[scale] == tuple(math.ceil(length / 128) for length in part), scale
