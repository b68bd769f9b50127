"""Values that autograd does not save: backward recomputes them from what their operation saved anyway.

Before: ``h = relu(z); y = conv2d(h, w)``, where relu and convolution both save ``h``.
After: ``h = relu_computed_again(z); y = computing_again(conv2d)(h, w)``, where both refer to the node that can
recompute it.

This module holds nothing that autograd does not hold. A value is identified by autograd nodes, and what those saved is
read when backward needs it, through whatever hooks saved it (checkpoints, ``save_on_cpu``). Second derivatives are
torch's own. Source of the idea for batch norm and relu: Rota Bulo et al., "In-Place Activated BatchNorm", 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.torch_compat.autograd import outer_saved_tensors_hooks, saved_tensors_hooks_are_enabled

KEY = "amp_graph_again"  # key in an autograd node's metadata: its result is recomputed
SHARED_CAST = "_SharedCastBackward"
CASTS = ("ToCopyBackward0", SHARED_CAST)


@dataclass(eq=False)
class RecomputeRecipe:
    """One recomputed value, shared by all operations that did not save it; the last reader in a backward frees it.

    extra: what the computation needs besides what autograd saved. inputs: returns the operation's inputs where hooks
    save them; may be called only once per save, because checkpoints allow no more. Holds no node, because the node of
    the value holds this.
    """

    extra: Any = None
    inputs: Callable[[], list[Any]] | None = None
    readers: int = 0
    left: int = 0
    made: Tensor | None = None

    def given(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return the value; ``compute`` makes it at the first request in this backward."""
        if self.made is None:
            self.made, self.left = compute(), self.readers
        found = self.made
        self.left -= 1
        if self.left <= 0:
            self.made = None
        return found


def unless_written(kept: tuple[Tensor, int]) -> Tensor:
    """Return a tensor saved with its version; raise as torch does for saved tensors if it was written since."""
    tensor, version = kept
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{tensor.dtype} {list(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
        )
    return tensor


# -- how each node's result is computed: from what its operation read, where hooks have kept that ----------------

Inputs = list[Any] | None


def _batch_norm(node: Any, inputs: Inputs) -> Tensor:
    """Apply a batch norm with its saved statistics: the arithmetic is that of a norm in evaluation mode.

    The kernel computes ``x * alpha + beta`` with ``alpha = invstd * weight`` and ``beta = bias - mean * alpha``; a
    variance of 1 lets us choose ``alpha`` (aten/src/ATen/native/cpu/batch_norm_kernel.cpp). Where the saved statistics
    are not accessible, they are computed again.
    """
    again, training, eps = node.metadata[KEY], node._saved_training, node._saved_eps
    kernel: Any = torch.native_batch_norm
    if inputs is not None:
        x, weight, bias, mean, var = inputs
        return kernel(x, weight, bias, *((None, None) if training else (mean, var)), training, 0.0, eps)[0]
    x, weight, bias = node._saved_input, node._saved_weight, unless_written(again.extra)
    if not training:
        return kernel(x, weight, bias, node._saved_running_mean, node._saved_running_var, False, 0.0, eps)[0]
    mean, invstd = node._saved_result1, node._saved_result2
    return kernel(x, weight * invstd, bias, mean, torch.ones_like(invstd), False, 0.0, 0.0)[0]


def _layer_norm(node: Any, inputs: Inputs) -> Tensor:
    x, weight, bias = inputs or (node._saved_input, node._saved_weight, node._saved_bias)
    return torch.native_layer_norm(x, node._saved_normalized_shape, weight, bias, node.metadata[KEY].extra)[0]


def _layer_norm_low(node: Any, inputs: Inputs) -> Tensor:
    x, weight, bias = inputs or node.saved_tensors[:3]
    return torch.native_layer_norm(x, node.shape, weight, bias, node.eps)[0]


def _activated(node: Any, inputs: Inputs) -> Tensor:
    (x,) = inputs or (node._saved_self,)
    return F.silu(x) if node.name() == "SiluBackward0" else F.gelu(x, approximate=node._saved_approximate)


def _relu(node: Any, inputs: Inputs) -> Tensor:
    return inputs[0] if inputs else relu_of(before_of(node))


def relu_of(before: Any) -> Tensor:
    """Return the relu of the result of the node ``before``."""
    x = value_of(before)
    return x.relu_() if _is_own(before) else x.relu()


def _add(node: Any, inputs: Inputs) -> Tensor:
    (a, _), (b, _) = node.next_functions
    x, y = value_of(a), value_of(b)
    return x.add_(y) if _is_own(a) and x.dtype == y.dtype and x.shape == y.shape else x + y


def _cast(node: Any, inputs: Inputs) -> Tensor:
    return value_of(before_of(node)).to(node.metadata[KEY].extra)


# Keyed by the autograd node's name; backends add theirs with ``register_recompute``.
COMPUTE: dict[str, Callable[[Any, Inputs], Tensor]] = {
    "NativeBatchNormBackward0": _batch_norm,
    "NativeLayerNormBackward0": _layer_norm,
    "_LowLayerNormBackward": _layer_norm_low,
    "GeluBackward0": _activated,
    "SiluBackward0": _activated,
    "ReluBackward0": _relu,
    "AddBackward0": _add,
    **dict.fromkeys(CASTS, _cast),
}

# How to read a result that the node saved itself, used if it has no recipe; and whether the node saved it.
KEPT: dict[str, Callable[[Any], Tensor]] = {"ReluBackward0": lambda node: node._saved_result}
KEEPS: dict[str, Callable[[Any], bool]] = {"ReluBackward0": lambda node: True}


def register_recompute(
    name: str,
    compute: Callable[[Any, Inputs], Tensor],
    kept: Callable[[Any], Tensor] | None = None,
    keeps: Callable[[Any], bool] = lambda node: True,
) -> None:
    """Let ``compute`` recompute the result of autograd nodes called ``name`` from what they saved, or hooks kept.

    ``kept`` returns a result that the node saved itself; ``keeps`` says whether it did.
    """
    COMPUTE[name] = compute
    if kept is not None:
        KEPT[name], KEEPS[name] = kept, keeps


def before_of(node: Any) -> Any:
    """Return the node that made the first operand of ``node``."""
    return node.next_functions[0][0]


def value_of(node: Any) -> Tensor:
    """Return the result of a node for which ``is_known`` holds, without gradients."""
    again, name = node.metadata.get(KEY), node.name()
    if again is None and name in KEPT:
        kept: Tensor = KEPT[name](node)
        return kept
    if again is None:
        return COMPUTE[name](node, None)
    return again.given(lambda: COMPUTE[name](node, again.inputs() if again.inputs else None))


def _is_own(node: Any) -> bool:
    """Say whether ``value_of`` of a node returns a new tensor that no other reader gets."""
    again = node.metadata.get(KEY)
    return node.name() == "AddBackward0" if again is None else again.readers <= 1


def is_known(node: Any) -> bool:
    """Say whether the result of a node can be recomputed, or was saved by it."""
    if node is None:
        return False
    if node.name() == "AddBackward0" and KEY not in node.metadata:
        return node._saved_alpha == 1 and all(is_known(source) for source, _ in node.next_functions)
    kept = node.name() in KEEPS and KEEPS[node.name()](node)
    return KEY in node.metadata or (kept and outer_saved_tensors_hooks() is None)


def sources_of(node: Any) -> Iterator[RecomputeRecipe]:
    """Yield the recipes that the result of a known node depends on."""
    if KEY in node.metadata:
        yield node.metadata[KEY]
    elif node.name() == "AddBackward0":
        for source, _ in node.next_functions:
            yield from sources_of(source)


def computed(compute: Callable[[], Tensor]) -> Tensor:
    """Call ``compute`` as forward ran: without gradients, and with any autocast region around backward disabled."""
    with torch.no_grad(), ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        return compute()


def may_hook() -> bool:
    """Say whether hooks may now save something other than tensors."""
    return torch.is_grad_enabled() and saved_tensors_hooks_are_enabled()
