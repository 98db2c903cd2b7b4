"""Hides Megatron in a rollout server, where SGLang's debugging aid would import it, which takes six seconds."""

raise ImportError("a rollout server has no trainer, so no megatron (scalerl/extras/sglang_cpu)")
