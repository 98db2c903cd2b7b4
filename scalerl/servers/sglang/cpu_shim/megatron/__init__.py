"""No Megatron in a rollout server: SGLang's debugging aid imports it where it finds it, for six seconds of a start."""

raise ImportError("a rollout server has no trainer, so no megatron (scalerl/servers/sglang/cpu_shim)")
