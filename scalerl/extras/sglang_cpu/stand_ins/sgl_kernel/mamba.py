"""The kernels of gated delta nets that SGLang imports by this module's name."""

from scalerl.extras.sglang_cpu.delta_kernels import (
    causal_conv1d_fn_cpu,
    causal_conv1d_update_cpu,
    chunk_gated_delta_rule_cpu,
    use_kernels_of_norms,
)

use_kernels_of_norms()

__all__ = ["causal_conv1d_fn_cpu", "causal_conv1d_update_cpu", "chunk_gated_delta_rule_cpu"]
