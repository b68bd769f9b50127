"""What may be recorded where several processes train a model: calls inside of DistributedDataParallel.

Its hooks run when the gradient of a parameter arrives, thus after a recorded backward, as after any other: no
recording holds a call between ranks. What communicates inside of forward or backward, or moves parameters between
them, is not recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from amp_graph.passes.torch_compat.modules import is_fsdp, surrounding_ddp
from amp_graph.passes.weights.batch_weight_casts import has_process_group

OUTSIDE = (
    "a process group exists, and the call is not one of DistributedDataParallel: who reduces gradients, and when "
    "parameters move, is unknown"
)
STATIC = "static_graph=True: DistributedDataParallel counts the gradients of each parameter, and a recording has others"
UNUSED = (
    "find_unused_parameters=True, and some of its outputs do not lead to all trained inputs: DistributedDataParallel "
    "would take all of them as used"
)
MIXED = "DistributedDataParallel casts the parameters itself (mixed_precision), and frees the casts between calls"


def why_not_with_ranks(model: nn.Module | None) -> str:
    """Return why nothing of ``model`` is recorded in this process; "" if something may be."""
    if model is None or not has_process_group():
        return ""
    for name, part in model.named_modules():
        if is_fsdp(part) or getattr(part, "_is_fsdp_managed_module", False):
            return f"FSDP shards {name or 'the model'}: its parameters come and go"
        if isinstance(part, nn.SyncBatchNorm):
            return f"{name or 'the model'} communicates between ranks: SyncBatchNorm"
    ddp = surrounding_ddp()
    if ddp is None:
        return OUTSIDE
    if getattr(ddp, "static_graph", False):
        return STATIC
    return MIXED if getattr(ddp, "mixed_precision", None) is not None else ""


def why_not_partly(partly: Sequence[int]) -> str:
    """Return why a graph is not recorded some of whose outputs do not reach the arguments ``partly``; "" if it may be.

    DistributedDataParallel looks from the outputs which parameters have gradients, and a recorded call is one node.
    """
    return UNUSED if partly and getattr(surrounding_ddp(), "find_unused_parameters", False) else ""
