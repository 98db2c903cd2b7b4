"""Hooks of an SGLang server that loads adapters: requests have the newest version, and checksums are of it too."""

from __future__ import annotations

from typing import Any

from scalerl.rollout.servers.requests import VERSION_MARK

# Between an adapter and a tensor of it, in the names of checksums.
TENSOR_MARK = "/"
# What SGLang puts between a module that may have adapters and its own parameters.
_WRAPPED = ".base_layer."


def add_adapter_hooks() -> None:
    """Adds the hooks, before SGLang loads its plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    registry = "sglang.srt.lora.lora_registry.LoRARegistry"
    HookRegistry.register(f"{registry}._register_adapter", _note_newest, HookType.BEFORE)
    HookRegistry.register(f"{registry}.wait_for_unload", _wait_for_nobody, HookType.REPLACE)
    resolve = "sglang.srt.managers.tokenizer_manager.TokenizerManager._resolve_lora_path"
    HookRegistry.register(resolve, _take_newest, HookType.BEFORE)
    load = "sglang.srt.lora.lora_manager.LoRAManager.load_lora_adapter_from_tensors"
    HookRegistry.register(load, _keep_copies, HookType.BEFORE)
    check = "sglang.srt.model_executor.model_runner.ModelRunner.check_weights"
    HookRegistry.register(check, _add_checksums, HookType.AFTER)


def _note_newest(registry: Any, loaded: Any) -> None:
    newest = vars(registry).setdefault("newest", {})
    newest[loaded.lora_name.rpartition(VERSION_MARK)[0]] = loaded.lora_name


def _take_newest(manager: Any, request: Any) -> None:
    """Replaces the name of an adapter by that of its newest version, once a paused server goes on."""
    newest, names = vars(manager.lora_registry).get("newest", {}), request.lora_path
    is_list = isinstance(names, list)
    request.lora_path = [newest.get(name, name) for name in names] if is_list else newest.get(names, names)


async def _wait_for_nobody(registry: Any, lora_id: str) -> None:
    """Lets an adapter go at once, which no request has any more.

    SGLang would wait until its own count of them is 0; after a request for several samples it is below
    (sgl-project/sglang#36894).
    """


def _keep_copies(manager: Any, reference: Any, tensors: dict[str, Any], *rest: Any) -> tuple[Any, dict[str, Any]]:
    """Has the server keep its own tensors, and not the memory in which the trainer sent them."""
    own = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    return (manager, reference, own, *rest), {}


def _add_checksums(answer: Any, runner: Any, *_: Any, **__: Any) -> Any:
    """Adds the newest version of each adapter, as VERSION/TENSOR, to the checksums of the model's own tensors."""
    from sglang.srt.managers.mm_utils import tensor_hash

    if not answer or "checksums" not in answer:
        return answer
    checksums = {name.replace(_WRAPPED, "."): value for name, value in answer["checksums"].items()}
    manager = runner.lora_manager
    newest = {ref.lora_name.rpartition(VERSION_MARK)[0]: ref for ref in manager.lora_refs.values()}
    for reference in newest.values():
        for layer in manager.loras[reference.lora_id].layers:
            for name, tensor in layer.weights.items():
                checksums[f"{reference.lora_name}{TENSOR_MARK}{name}"] = f"{tensor_hash(tensor):016x}"
    return answer | {"checksums": checksums}
