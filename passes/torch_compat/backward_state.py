"""What surrounds a call or its backward, as far as a recorded call has to know it: private names of torch.

Each states the versions of torch that it was checked on.
"""

from __future__ import annotations

import torch

from amp_graph.passes.torch_compat.autograd import outer_saved_tensors_hooks, saved_tensors_hooks_are_enabled
from amp_graph.passes.torch_compat.dispatch import in_forward_mode, in_transform


def keeps_graph() -> bool:
    """Say whether the running backward keeps its graph (``retain_graph=True``); 2.11 - 2.13."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def what_watches_calls() -> str:
    """Return what is on that has to see each operation, or each saved tensor, of a call; "" for nothing; 2.11 - 2.13.

    A recording runs no operation that could be seen.
    """
    if torch.is_anomaly_enabled():
        return "anomaly mode"
    if torch._C._len_torch_dispatch_stack():
        return "a dispatch mode"
    if in_transform() or in_forward_mode() or not saved_tensors_hooks_are_enabled():
        return "a function transform"
    if outer_saved_tensors_hooks() is not None:
        return "saved-tensor hooks"
    if torch.cuda.is_initialized() and torch._C._cuda_isCurrentStreamCapturing():
        return "another CUDA graph's recording"
    return ""
