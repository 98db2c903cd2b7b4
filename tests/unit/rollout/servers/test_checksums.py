from __future__ import annotations

import base64
import hashlib
import io
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from scalerl.errors import UserError
from scalerl.rollout.servers.buckets import Bucket, _memory_for_a_server, shared_bytes
from scalerl.rollout.servers.checksums import TensorPlace, checksum_differences, tensor_checksum
from scalerl.rollout.servers.client import Replica
from scalerl.rollout.servers.engines import ENGINES
from scalerl.rollout.servers.sglang.placement import SGLangPlacement
from tests.served_weights import expected_checksums, serialize_bucket

CONFIG = {
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}
LAYER = "model.layers.0."


def expected_of(config: dict[str, Any], tp_size: int, *options: Any, engine_kwargs: Any = None, **ranks: Any) -> Any:
    """Of an SGLang server, without tensors yet."""
    return Replica("", "sglang", tp_size, "", engine_kwargs or {}).expected_checksums(config, *options, **ranks)


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def hf_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (100, 8),
        "model.norm.weight": (8,),
        "lm_head.weight": (100, 8),
        LAYER + "self_attn.q_proj.weight": (8, 8),
        LAYER + "self_attn.k_proj.weight": (4, 8),
        LAYER + "self_attn.v_proj.weight": (4, 8),
        LAYER + "self_attn.q_proj.bias": (8,),
        LAYER + "self_attn.k_proj.bias": (4,),
        LAYER + "self_attn.v_proj.bias": (4,),
        LAYER + "self_attn.o_proj.weight": (8, 8),
        LAYER + "self_attn.q_norm.weight": (2,),
        # SGLang pads the width to 128 on a CPU, 64 on each of two ranks: the second has 6 rows, and zeros.
        LAYER + "mlp.gate_proj.weight": (70, 8),
        LAYER + "mlp.up_proj.weight": (70, 8),
        LAYER + "mlp.down_proj.weight": (8, 70),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def sglang_rank(tensors: dict[str, torch.Tensor], rank: int) -> dict[str, str]:
    """The parameters of one of two ranks by hand."""
    t = {name: tensor.numpy() for name, tensor in tensors.items()}
    half = lambda a, dim=0: np.split(a, 2, axis=dim)[rank]  # noqa: E731
    attn, mlp = LAYER + "self_attn.", LAYER + "mlp."
    pad = lambda a, size, dim=0: np.concatenate(  # noqa: E731
        [a, np.zeros([size - n if d == dim else n for d, n in enumerate(a.shape)], a.dtype)], dim
    )
    arrays = {
        "model.embed_tokens.weight": half(pad(t["model.embed_tokens.weight"], 128)),
        "lm_head.weight": half(pad(t["lm_head.weight"], 128)),
        "model.norm.weight": t["model.norm.weight"],
        attn + "o_proj.weight": half(t[attn + "o_proj.weight"], 1),
        attn + "q_norm.weight": t[attn + "q_norm.weight"],
        mlp + "gate_up_proj.weight": np.concatenate(
            [half(pad(t[mlp + f"{p}_proj.weight"], 128)) for p in ("gate", "up")]
        ),
        mlp + "down_proj.weight": half(pad(t[mlp + "down_proj.weight"], 128, 1), 1),
    }
    for leaf in ("weight", "bias"):
        arrays[f"{attn}qkv_proj.{leaf}"] = np.concatenate([half(t[f"{attn}{p}_proj.{leaf}"]) for p in "qkv"])
    return {name: digest(array) for name, array in arrays.items()}


@pytest.mark.parametrize("order", ["forward", "backward"])
def test_sglang_checksums_of_two_ranks_in_any_order_of_the_stream(order: str) -> None:
    tensors = hf_tensors()
    names = list(tensors) if order == "forward" else list(tensors)[::-1]
    expected = expected_of(CONFIG, 2)
    for name in names:
        buffer = tensors[name].clone()
        expected.add([(name, buffer)])
        buffer.zero_()  # a sender reuses its bucket
    assert expected.result() == [sglang_rank(tensors, 0), sglang_rank(tensors, 1)]


def test_checksums_of_one_of_two_ranks() -> None:
    tensors = hf_tensors()
    for rank in range(2):
        expected = expected_of(CONFIG, 2, ranks=[rank])
        expected.add(tensors.items())
        assert expected.by_rank() == {rank: sglang_rank(tensors, rank)}


MIXTURE_CONFIG = {
    "qwen3_moe": CONFIG | {"model_type": "qwen3_moe", "num_experts": 3},
    "mixtral": CONFIG | {"model_type": "mixtral", "num_local_experts": 3},
}
MIXTURE_NAMES = {
    "qwen3_moe": (LAYER + "mlp.", "gate_proj", "up_proj", "down_proj"),
    "mixtral": (LAYER + "block_sparse_moe.", "w1", "w3", "w2"),
}


def mixture_tensors(family: str, num_experts: int = 3, width: int = 64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    prefix, gate, up, down = MIXTURE_NAMES[family]
    shapes = {prefix + "gate.weight": (num_experts, 8)}
    for expert in range(num_experts):
        shapes |= {f"{prefix}experts.{expert}.{part}.weight": (width, 8) for part in (gate, up)}
        shapes[f"{prefix}experts.{expert}.{down}.weight"] = (8, width)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("order", ["forward", "backward"])
@pytest.mark.parametrize("family", MIXTURE_CONFIG)
def test_the_experts_of_a_layer_are_two_parameters(family: str, order: str) -> None:
    tensors = mixture_tensors(family)
    prefix, gate, up, down = MIXTURE_NAMES[family]
    expected = expected_of(MIXTURE_CONFIG[family], 2)
    for name in list(tensors) if order == "forward" else list(tensors)[::-1]:
        buffer = tensors[name].clone()
        expected.add([(name, buffer)])
        buffer.zero_()
    of = lambda expert, part: tensors[f"{prefix}experts.{expert}.{part}.weight"].numpy()  # noqa: E731
    for rank, checksums in enumerate(expected.result()):
        rows, columns = np.s_[32 * rank : 32 * rank + 32], np.s_[:, 32 * rank : 32 * rank + 32]
        assert checksums == {
            prefix + "gate.weight": digest(tensors[prefix + "gate.weight"].numpy()),
            prefix + "experts.w13_weight": digest(
                np.stack([np.concatenate([of(e, gate)[rows], of(e, up)[rows]]) for e in range(3)])
            ),
            prefix + "experts.w2_weight": digest(np.stack([of(e, down)[columns] for e in range(3)])),
        }


@pytest.mark.parametrize("order", ["forward", "backward"])
@pytest.mark.parametrize("family", MIXTURE_CONFIG)
def test_each_range_of_experts_is_on_ranks_of_its_own(family: str, order: str) -> None:
    """Four in two ranges on four ranks, of a width that a CPU pads to 256: a half has 128 rows, one 2 and zeros."""
    config = MIXTURE_CONFIG[family] | dict.fromkeys(("num_experts", "num_local_experts"), 4)
    tensors = mixture_tensors(family, num_experts=4, width=130)
    prefix, gate, up, down = MIXTURE_NAMES[family]
    names = list(tensors) if order == "forward" else list(tensors)[::-1]
    expected = expected_of(config, 4, engine_kwargs={"sglang": {"ep_size": 2}})
    for name in names:
        expected.add([(name, tensors[name])])
    of = lambda expert, part: tensors[f"{prefix}experts.{expert}.{part}.weight"].numpy()  # noqa: E731
    tall, wide = np.zeros((126, 8), np.float32), np.zeros((8, 126), np.float32)
    for rank, checksums in enumerate(expected.result()):
        experts, half = ((0, 1), (2, 3))[rank // 2], rank % 2
        rows = [np.split(np.concatenate([of(e, part), tall]), 2)[half] for e in experts for part in (gate, up)]
        columns = [np.split(np.concatenate([of(e, down), wide], 1), 2, axis=1)[half] for e in experts]
        assert checksums == {
            prefix + "gate.weight": digest(tensors[prefix + "gate.weight"].numpy()),
            prefix + "experts.w13_weight": digest(np.concatenate(rows)),
            prefix + "experts.w2_weight": digest(np.stack(columns)),
        }


def test_stacked_experts_whose_gates_come_before_their_ups() -> None:
    """Their ranges and widths are those of the test above."""
    config = {"model_type": "qwen3_vl_moe", "text_config": CONFIG | {"num_experts": 4}}
    generator = torch.Generator().manual_seed(5)
    tensors = {"gate_up_proj": (4, 8, 260), "down_proj": (4, 130, 8)}
    tensors = {name: torch.randn(size, generator=generator) for name, size in tensors.items()}
    expected = expected_of(config, 4, engine_kwargs={"sglang": {"ep_size": 2}})
    expected.add([(f"model.language_model.layers.0.mlp.experts.{name}", tensor) for name, tensor in tensors.items()])
    # By expert: rows of gate and of up, columns of down.
    gate, up = np.split(tensors["gate_up_proj"].numpy().swapaxes(1, 2), 2, axis=1)
    down = tensors["down_proj"].numpy().swapaxes(1, 2)
    padded = lambda part, axis: np.pad(part, [(0, 126 if dim == axis else 0) for dim in range(3)])  # noqa: E731
    for rank, checksums in enumerate(expected.result()):
        experts, half = np.s_[:2] if rank < 2 else np.s_[2:], rank % 2
        of = lambda part, axis: np.split(padded(part, axis), 2, axis=axis)[half][experts]  # noqa: B023, E731
        assert checksums == {
            LAYER + "mlp.experts.w13_weight": digest(np.concatenate([of(gate, 1), of(up, 1)], 1)),
            LAYER + "mlp.experts.w2_weight": digest(of(down, 2)),
        }


def test_with_deepep_every_rank_has_experts_of_its_own_and_shared_ones_whole() -> None:
    """Unlike the other MLPs of the model."""
    config = LATENT_CONFIG | {"n_routed_experts": 2}
    generator, mlp, dense = torch.Generator().manual_seed(3), "model.layers.1.mlp.", LAYER + "mlp."
    tensors = {
        f"{prefix}{part}_proj.weight": torch.randn((8, 64) if part == "down" else (64, 8), generator=generator)
        for prefix in (dense, mlp + "experts.0.", mlp + "experts.1.", mlp + "shared_experts.")
        for part in ("gate", "up", "down")
    }
    kwargs = {"sglang": {"moe_a2a_backend": "deepep", "ep_size": 1}}
    ranks = expected_checksums(tensors.items(), config, 2, "sglang", engine_kwargs=kwargs)
    t = {name: tensor.numpy() for name, tensor in tensors.items()}
    fused = lambda prefix: np.concatenate([t[prefix + "gate_proj.weight"], t[prefix + "up_proj.weight"]])  # noqa: E731
    for rank, checksums in enumerate(ranks):
        half = lambda part, dim=0, rank=rank: np.split(t[f"{dense}{part}_proj.weight"], 2, axis=dim)[rank]  # noqa: E731
        arrays = {
            mlp + "experts.w13_weight": fused(f"{mlp}experts.{rank}."),
            mlp + "experts.w2_weight": t[f"{mlp}experts.{rank}.down_proj.weight"],
            mlp + "shared_experts.gate_up_proj.weight": fused(mlp + "shared_experts."),
            mlp + "shared_experts.down_proj.weight": t[mlp + "shared_experts.down_proj.weight"],
            dense + "gate_up_proj.weight": np.concatenate([half("gate"), half("up")]),
            dense + "down_proj.weight": half("down", 1),
        }
        assert checksums == {name: digest(array) for name, array in arrays.items()}


def test_a_missing_expert_of_a_range_is_named() -> None:
    """On the one rank that lacks it."""
    config = MIXTURE_CONFIG["qwen3_moe"] | {"num_experts": 4}
    tensors = mixture_tensors("qwen3_moe", num_experts=4)
    del tensors[LAYER + "mlp.experts.3.down_proj.weight"]
    for rank in range(2):
        expected = expected_of(config, 2, ranks=[rank], engine_kwargs={"sglang": {"ep": 2}})
        expected.add(tensors.items())
        if rank == 0:
            assert len(expected.by_rank()[0]) == 3
        else:
            with pytest.raises(ValueError, match=r"experts\.w2_weight.*\[1\]"):
                expected.by_rank()


LATENT_CONFIG = CONFIG | {"model_type": "deepseek_v3", "n_routed_experts": 3, "q_lora_rank": 6, "kv_lora_rank": 5}


@pytest.mark.parametrize("q_lora_rank", [6, None])
def test_a_model_with_latent_attention(q_lora_rank: int | None) -> None:
    """Of two ranks, by hand: down projections whole, in one tensor if there are two; all else by heads."""
    generator = torch.Generator().manual_seed(2)
    attention, mlp = LAYER + "self_attn.", LAYER + "mlp."
    # 4 heads of 3 + 2 numbers, whose values have 3.
    shapes = {"kv_a_proj_with_mqa": (7, 8), "kv_b_proj": (24, 5), "o_proj": (8, 12), "kv_a_layernorm": (5,)}
    shapes |= {"q_a_proj": (6, 8), "q_a_layernorm": (6,), "q_b_proj": (20, 6)} if q_lora_rank else {"q_proj": (20, 8)}
    tensors = {f"{attention}{name}.weight": torch.randn(size, generator=generator) for name, size in shapes.items()}
    bias = mlp + "gate.e_score_correction_bias"
    tensors |= {mlp + "gate.weight": torch.randn(3, 8, generator=generator), bias: torch.randn(3, generator=generator)}
    shared = {part: (8, 64) if part == "down" else (64, 8) for part in ("gate", "up", "down")}
    for part, size in shared.items():
        tensors[f"{mlp}shared_experts.{part}_proj.weight"] = torch.randn(size, generator=generator)
        for expert in range(3):
            tensors[f"{mlp}experts.{expert}.{part}_proj.weight"] = torch.randn(size, generator=generator)
    expected = expected_of(LATENT_CONFIG | {"q_lora_rank": q_lora_rank}, 2, torch.bfloat16)
    expected.add(reversed(tensors.items()))
    t = {name: tensor.bfloat16().view(torch.int16).numpy() for name, tensor in tensors.items()}
    for rank, checksums in enumerate(expected.result()):
        half = lambda name, dim=0, rank=rank: np.split(t[name + ".weight"], 2, axis=dim)[rank]  # noqa: E731
        of = lambda name: t[f"{attention}{name}.weight"]  # noqa: E731
        arrays = {
            attention + "kv_b_proj.weight": half(attention + "kv_b_proj"),
            attention + "o_proj.weight": half(attention + "o_proj", 1),
            attention + "kv_a_layernorm.weight": of("kv_a_layernorm"),
            mlp + "gate.weight": t[mlp + "gate.weight"],
            # Whatever the model's dtype.
            bias: tensors[bias].numpy(),
            mlp + "shared_experts.gate_up_proj.weight": np.concatenate(
                [half(f"{mlp}shared_experts.{part}_proj") for part in ("gate", "up")]
            ),
            mlp + "shared_experts.down_proj.weight": half(mlp + "shared_experts.down_proj", 1),
            mlp + "experts.w13_weight": np.stack(
                [np.concatenate([half(f"{mlp}experts.{e}.{part}_proj") for part in ("gate", "up")]) for e in range(3)]
            ),
            mlp + "experts.w2_weight": np.stack([half(f"{mlp}experts.{e}.down_proj", 1) for e in range(3)]),
        }
        if q_lora_rank:
            arrays |= {
                attention + "fused_qkv_a_proj_with_mqa.weight": np.concatenate(
                    [of("q_a_proj"), of("kv_a_proj_with_mqa")]
                ),
                attention + "q_a_layernorm.weight": of("q_a_layernorm"),
                attention + "q_b_proj.weight": half(attention + "q_b_proj"),
            }
        else:
            arrays |= {
                attention + "kv_a_proj_with_mqa.weight": of("kv_a_proj_with_mqa"),
                attention + "q_proj.weight": half(attention + "q_proj"),
            }
        assert checksums == {name: digest(array) for name, array in arrays.items()}


@pytest.mark.parametrize("family", MIXTURE_CONFIG)
def test_a_gpu_has_experts_without_padding(family: str) -> None:
    """Of a width that a CPU would pad; on fake tensors, no GPU needed."""
    prefix, gate, _, down = MIXTURE_NAMES[family]
    placement = SGLangPlacement(MIXTURE_CONFIG[family], 2)
    with FakeTensorMode():
        for device, width in (("cuda", 24), ("cpu", 32)):
            matrix = torch.empty(48, 8, device=device)
            rows = list(placement.parts(f"{prefix}experts.2.{gate}.weight", matrix, range(2)))
            columns = list(placement.parts(f"{prefix}experts.2.{down}.weight", matrix.t(), range(2)))
            assert [(rank, place, tuple(part.shape)) for rank, place, part in rows] == [
                (rank, TensorPlace(prefix + "experts.w13_weight", 4, 6), (width, 8)) for rank in range(2)
            ]
            assert [(rank, place, tuple(part.shape)) for rank, place, part in columns] == [
                (rank, TensorPlace(prefix + "experts.w2_weight", 2, 3), (8, width)) for rank in range(2)
            ]


def test_experts_that_come_in_the_order_of_the_table_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = expected_of(MIXTURE_CONFIG["qwen3_moe"], 1)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "clone", lambda *args, **kwargs: pytest.fail("a part was copied"))
        expected.add(mixture_tensors("qwen3_moe").items())
    assert len(expected.result()[0]) == 3


def test_a_missing_expert_is_named() -> None:
    tensors = mixture_tensors("qwen3_moe")
    del tensors[LAYER + "mlp.experts.1.up_proj.weight"]
    with pytest.raises(ValueError, match=r"experts\.w13_weight.*\[3\]"):
        expected_checksums(tensors.items(), MIXTURE_CONFIG["qwen3_moe"], 1, "sglang")


@pytest.mark.parametrize("name", ["mlp.experts.0.gate_bias.weight", "mlp.gate.e_score_correction_bias"])
def test_a_parameter_without_a_rule_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"no rule for the parameter '{LAYER}{name}'"):
        expected_checksums([(LAYER + name, torch.zeros(2))], MIXTURE_CONFIG["qwen3_moe"], 1, "sglang")


def test_a_hashed_tensor_can_still_leave_its_device() -> None:
    tensor = torch.arange(6.0)
    assert tensor_checksum(tensor) == hashlib.sha256(tensor.clone().numpy().tobytes()).hexdigest()[:16]
    assert tensor_checksum(tensor[:0]) == hashlib.sha256(b"").hexdigest()[:16]
    tensor.untyped_storage().resize_(0)


def test_a_tied_head_is_not_hashed_twice() -> None:
    tensors = hf_tensors()
    (rank,) = expected_checksums(tensors.items(), CONFIG | {"tie_word_embeddings": True}, 1, "sglang")
    assert "lm_head.weight" not in rank


def test_the_engines_dtype_is_hashed() -> None:
    tensor = torch.randn(8)
    (rank,) = expected_checksums([("model.norm.weight", tensor)], CONFIG, 1, "embedded", torch.bfloat16)
    assert rank == {"model.norm.weight": digest(tensor.bfloat16().view(torch.int16).numpy())}


def test_a_missing_part_of_a_fused_parameter_is_named() -> None:
    tensors = hf_tensors()
    del tensors[LAYER + "self_attn.k_proj.bias"]
    with pytest.raises(ValueError, match=r"qkv_proj\.bias.*\[1\]"):
        expected_checksums(tensors.items(), CONFIG, 1, "sglang")


def test_more_ranks_than_key_value_heads_are_refused_on_cpu() -> None:
    with pytest.raises(ValueError, match="num_key_value_heads=2"):
        expected_checksums(hf_tensors().items(), CONFIG, 4, "sglang")


def test_differences_name_rank_and_parameter() -> None:
    want = [{"a": "1", "b": "2"}, {"a": "3"}]
    assert checksum_differences(want, [dict(rank) for rank in want]) == []
    lines = checksum_differences(want, [{"a": "1", "b": "9", "c": "4"}, {}])
    assert [line.split(":")[0] for line in lines] == ["rank 0 b", "rank 0 c", "rank 1 a"]
    assert checksum_differences(want, want[:1]) == ["1 engine ranks answered, 2 expected"]


class Metadata:
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def load_as_megatron(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


@pytest.mark.parametrize("by_value", [False, True])
def test_an_sglang_bucket_names_sglangs_class_and_imports_nothing_of_it(
    by_value: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real server unpickles it in tests/sglang, by a list of names that has none of Megatron."""
    monkeypatch.setattr(torch.storage, "_load_from_bytes", load_as_megatron)
    named = [("a", torch.arange(5, dtype=torch.bfloat16)), ("b", torch.randn(3, 2)), ("c", torch.randn(2, 6).T)]
    blob = ENGINES["sglang"].serialize(Bucket(named, by_value=by_value))
    assert "sglang" not in sys.modules
    seen = []

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            seen.append((module, name))
            return Metadata if module.startswith("sglang.") else super().find_class(module, name)

    bucket = Reader(io.BytesIO(base64.b64decode(blob))).load()
    assert ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata") in seen
    assert not [module for module, _ in seen if module.startswith(("scalerl", "tests"))]
    assert (("torch.storage", "_load_from_bytes") in seen) == by_value
    for (name, tensor), entry in zip(named, bucket["metadata"], strict=True):
        flat = bucket["flattened_tensor"][entry.start_idx : entry.end_idx]
        assert entry.name == name
        assert entry.numel == flat.numel()
        assert torch.equal(flat.view(entry.dtype).reshape(entry.shape), tensor)


def test_shared_memory_that_is_too_small_is_refused() -> None:
    with pytest.raises(UserError, match=r"update_weights_bucket_megabytes.*--shm-size"):
        shared_bytes(1 << 50)


def test_an_embedded_bucket_holds_the_values() -> None:
    tensor = torch.randn(4, 3).T
    assert torch.equal(load(base64.b64decode(serialize_bucket([("a", tensor)], "embedded")))["a"], tensor)


class AllocatorSettings(TorchDispatchMode):
    """Remembers torch's settings at each allocation of bytes on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "empty" in str(func) and (kwargs or {}).get("dtype") == torch.uint8:
            self.seen.append(torch._C._accelerator_getAllocatorSettings())
        return func(*args, **kwargs or {})


def test_a_bucket_of_a_gpu_is_outside_of_expandable_segments() -> None:
    """Which a server could not open in every container; the trainer's other memory stays in them."""
    given = "max_split_size_mb:128,expandable_segments:True"
    torch._C._accelerator_setAllocatorSettings(given)
    try:
        with FakeTensorMode(), AllocatorSettings() as settings:
            flat = _memory_for_a_server(60, torch.device("cuda", 0))
        assert (flat.device.type, flat.dtype, flat.shape) == ("cuda", torch.uint8, (60,))
        assert settings.seen == ["max_split_size_mb:128,expandable_segments:False"]
        assert torch._C._accelerator_getAllocatorSettings() == given
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        torch._C._accelerator_setAllocatorSettings("")
