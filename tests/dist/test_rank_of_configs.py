"""One rank of each run in configs/ on meta tensors: Megatron builds what the family's table and the plan say."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.launch import run_ranks
from tests.lanes import mostly_full
from tests.model_configs import FILES, model_of, read_config

# A mixture on a pipeline stage of 512 ranks: experts, latent attention, dense first layers.
QUICK = ("deepseek-v3-grpo-512",)


def built(name: str, config: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Of a rank of the first stage and the last: tensors, numbers with a gradient, numbers that the plan counts.

    torch's own group without communication stands for the other ranks: building a model sends nothing.
    """
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from scalerl.config import compose, trained_layout
    from scalerl.families import ModelShape, family_of
    from scalerl.memory_plan.parameters import stage_parameters
    from scalerl.parallel.expert_weights import named_tensors
    from scalerl.parallel.layout import Layout, initialize, leave
    from scalerl.parallel.loading import local_params
    from scalerl.parallel.model import build_model, transformer_config

    current_device: Any = torch.cuda.current_device
    cfg = compose("ppo", ["--config-dir", str(FILES[name].parent), "--config-name", name], rules=False)
    megatron = cfg.actor_rollout_ref.actor.megatron
    shape, layout = ModelShape.from_config(config), Layout(**vars(trained_layout(cfg)))
    family, stages, counts = family_of(shape), stage_parameters(shape, layout), []
    for rank in (0, layout.world_size - 1):
        groups = initialize(layout, backend="fake", timeout_s=60, seed=1, rank=rank, store=FakeStore())
        with torch.device("meta"):
            # What modules ask for the device of their tensors.
            torch.cuda.current_device = lambda: "meta"  # pyright: ignore[reportAttributeAccessIssue]
            chunks = build_model(shape, transformer_config(shape, megatron, groups, on_cpu=True), groups)
            torch.cuda.current_device = current_device
        tensors = {(index, key): x for index, chunk in enumerate(chunks) for key, x in named_tensors(chunk).items()}
        for param, chunk, key in local_params(family, shape, groups):
            size = layout.tp_size if param.expert is None else layout.etp_size
            assert tensors.pop((chunk, key)).shape == param.mcore_shape(shape, size), param.name
        assert not tensors, f"no entry of the table loads {sorted(tensors)}"
        parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        counts.append((len(parameters), sum(p.numel() for p in parameters), stages[groups.coordinates.pp_rank].trained))
        del chunks, tensors, parameters
        leave()
    return counts


@pytest.mark.parametrize("name", mostly_full(sorted(FILES), lambda name: name in QUICK))
def test_a_rank_is_what_the_table_and_the_plan_say(name: str) -> None:
    (counts,) = run_ranks(1, built, name, read_config(model_of(name)), fresh=True)
    for num_tensors, numbers, planned in counts:
        assert num_tensors > 0 and numbers == planned
