"""torch's fused Adam is called rightly for the installed torch and megatron: on fake CUDA tensors, no GPU needed.

Values are compared on a CPU in tests/dist/test_fused_adam.py, on a GPU in tests/gpu/test_fused_adam.py.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import FP32Optimizer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from scalerl.parallel.optimizer import _allocate_adam_state, use_fused_adam
from scalerl.parallel.restore import set_num_updates


class Calls(TorchDispatchMode):
    """Remembers the calls of fused Adam, each by the devices and shapes of its counts of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[tuple[str, torch.Size]]] = []
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name)
        if func._schema.name == "aten::_fused_adamw_":
            self.steps.append([(step.device.type, step.shape) for step in args[5]])
        return func(*args, **kwargs or {})


def test_one_kernel_with_the_counts_of_steps_on_the_device() -> None:
    with FakeTensorMode(), Calls() as calls:
        parameters = [torch.nn.Parameter(torch.empty(size, device="cuda")) for size in (3, 5)]
        adam = torch.optim.AdamW(parameters, lr=1e-3)
        optimizer = FP32Optimizer(adam, OptimizerConfig(optimizer="adam", lr=1e-3), lambda *_: None)
        _allocate_adam_state(optimizer)
        assert {state["step"].device.type for state in adam.state.values()} == {"cpu"}
        use_fused_adam(optimizer)
        set_num_updates(optimizer, 7)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        calls.names.clear()
        adam.step()
    assert calls.steps == [[("cuda", torch.Size([]))] * 2]
    assert not {name for name in calls.names if "sqrt" in name or "addcdiv" in name}
