"""verl's helper functions that a run of scalerl does not call, for code that was written with them.

A module here has the name of verl's: `verl.utils.X.f` is `scalerl.extras.verl.compat.X.f`, and
`scalerl.extras.verl.compat.f` too.
docs/extending.md says what a run uses instead. Nothing else in scalerl imports this package.
"""

from scalerl.extras.verl.compat.metric import reduce_metrics
from scalerl.extras.verl.compat.protocol import (
    DataProto,
    DataProtoFuture,
    DataProtoItem,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)
from scalerl.extras.verl.compat.py_functional import append_to_dict
from scalerl.extras.verl.compat.rl_dataset import collate_fn
from scalerl.extras.verl.compat.seqlen_balancing import get_reverse_idx, rearrange_micro_batches
from scalerl.extras.verl.compat.torch_functional import (
    get_constant_schedule_with_warmup,
    logprobs_from_logits,
    masked_mean,
    masked_whiten,
)
from scalerl.extras.verl.compat.ulysses import (
    gather_outputs_and_unpad,
    get_ulysses_sequence_parallel_group,
    set_ulysses_sequence_parallel_group,
    ulysses_pad_and_slice_inputs,
)

__all__ = [
    "DataProto",
    "DataProtoFuture",
    "DataProtoItem",
    "append_to_dict",
    "collate_fn",
    "gather_outputs_and_unpad",
    "get_constant_schedule_with_warmup",
    "get_reverse_idx",
    "get_ulysses_sequence_parallel_group",
    "logprobs_from_logits",
    "masked_mean",
    "masked_whiten",
    "pad_dataproto_to_divisor",
    "rearrange_micro_batches",
    "reduce_metrics",
    "set_ulysses_sequence_parallel_group",
    "ulysses_pad_and_slice_inputs",
    "unpad_dataproto",
]
