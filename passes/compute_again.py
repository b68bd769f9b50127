"""Values that autograd does not save: backward computes them again from what their operation saved anyway.

Before: ``h = relu(z); y = conv2d(h, w)``, where relu and convolution both keep ``h``. After:
``h = relu_computed_again(z); y = computing_again(conv2d)(h, w)``, where both know whom to ask for it.

Nothing is held here that autograd does not hold: a value is told by nodes of autograd's graph, and what those saved is
read when backward wants it, by way of whatever hooks save it (checkpoints, ``save_on_cpu``). Second derivatives are
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
from torch.autograd.graph import saved_tensors_hooks

from amp_graph.passes.runtime import layer_norm_low
from amp_graph.passes.torch_private import saved_tensors_hooks_are_enabled

KEY = "amp_graph_again"  # in the metadata of a node of autograd: its result is computed again
SHARED_CAST = "_SharedCastBackward"
CASTS = ("ToCopyBackward0", SHARED_CAST)


@dataclass(eq=False)
class Again:
    """One value that is computed again, for all who did not save it; the last to ask in a backward lets it go.

    extra: what computing it takes beside what autograd saved. Holds no node: the node of the value holds this.
    """

    extra: Any = None
    readers: int = 0
    left: int = 0
    made: Tensor | None = None

    def given(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return the value; ``compute`` makes it where nobody has asked in this backward yet."""
        if self.made is None:
            self.made, self.left = compute(), self.readers
        found = self.made
        self.left -= 1
        if self.left <= 0:
            self.made = None
        return found


def unless_written(kept: tuple[Tensor, int]) -> Tensor:
    """Return a tensor that was kept with its version; where it was written since, raise as torch does of saved ones."""
    tensor, version = kept
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{tensor.dtype} {list(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
        )
    return tensor


# -- who computes what ------------------------------------------------------------------------------------


def _batch_norm(node: Any) -> Tensor:
    """Apply a batch norm with the statistics that it took: as a norm in evaluation, whose arithmetic is the same.

    The kernel computes ``x * alpha + beta`` with ``alpha = invstd * weight`` and ``beta = bias - mean * alpha``; a
    variance of 1 leaves ``alpha`` to us (aten/src/ATen/native/cpu/batch_norm_kernel.cpp).
    """
    x, weight, bias = node._saved_input, node._saved_weight, unless_written(node.metadata[KEY].extra)
    kernel = torch.ops.aten.native_batch_norm
    if not node._saved_training:
        mean, var = node._saved_running_mean, node._saved_running_var
        return kernel(x, weight, bias, mean, var, False, 0.0, node._saved_eps)[0]
    mean, invstd = node._saved_result1, node._saved_result2
    return kernel(x, weight * invstd, bias, mean, torch.ones_like(invstd), False, 0.0, 0.0)[0]


def _layer_norm(node: Any) -> Tensor:
    eps = node.metadata[KEY].extra
    shape, weight, bias = node._saved_normalized_shape, node._saved_weight, node._saved_bias
    return torch.native_layer_norm(node._saved_input, shape, weight, bias, eps)[0]


def _layer_norm_low(node: Any) -> Tensor:
    x, weight, bias, _, _ = node.saved_tensors
    return torch.native_layer_norm(x, node.shape, weight, bias, node.eps)[0]


def _relu(node: Any) -> Tensor:
    return _relu_of(before_of(node))


def _relu_of(before: Any) -> Tensor:
    x = value_of(before)
    return x.relu_() if _is_own(before) else x.relu()


def _add(node: Any) -> Tensor:
    (a, _), (b, _) = node.next_functions
    x, y = value_of(a), value_of(b)
    if _is_own(a) and x.dtype == y.dtype and x.shape == y.shape:
        return x.add_(y)
    return x + y


def _cast(node: Any) -> Tensor:
    return value_of(before_of(node)).to(node.metadata[KEY].extra)


COMPUTE: dict[str, Callable[[Any], Tensor]] = {
    "NativeBatchNormBackward0": _batch_norm,
    "NativeLayerNormBackward0": _layer_norm,
    "_LowLayerNormBackward": _layer_norm_low,
    "GeluBackward0": lambda node: F.gelu(node._saved_self, approximate=node._saved_approximate),
    "SiluBackward0": lambda node: F.silu(node._saved_self),
    "ReluBackward0": _relu,
    "AddBackward0": _add,
    **dict.fromkeys(CASTS, _cast),
}


def before_of(node: Any) -> Any:
    """Return the node that made the first operand of ``node``."""
    return node.next_functions[0][0]


def value_of(node: Any) -> Tensor:
    """Return the result of a node for which ``_is_known`` holds, without gradients."""
    again, name = node.metadata.get(KEY), node.name()
    if again is None and name == "ReluBackward0":  # it saved its result
        kept: Tensor = node._saved_result
        return kept
    return COMPUTE[name](node) if again is None else again.given(lambda: COMPUTE[name](node))


def _is_own(node: Any) -> bool:
    """Say whether ``value_of`` of a node is a new tensor that nobody else is given."""
    again = node.metadata.get(KEY)
    return node.name() == "AddBackward0" if again is None else again.readers <= 1


def _is_known(node: Any) -> bool:
    """Say whether the result of a node can be computed, or is kept by it."""
    if node is None:
        return False
    if node.name() == "AddBackward0" and KEY not in node.metadata:
        return node._saved_alpha == 1 and all(_is_known(source) for source, _ in node.next_functions)
    return KEY in node.metadata or node.name() == "ReluBackward0"


def _sources(node: Any) -> Iterator[Again]:
    """Yield what computing the result of a known node asks for."""
    if KEY in node.metadata:
        yield node.metadata[KEY]
    elif node.name() == "AddBackward0":
        for source, _ in node.next_functions:
            yield from _sources(source)


def computed(compute: Callable[[], Tensor]) -> Tensor:
    """Call ``compute`` as forward ran: without gradients, and outside of an autocast region around backward."""
    with torch.no_grad(), ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        return compute()


def may_hook() -> bool:
    """Say whether what is saved now may be something else than tensors."""
    return torch.is_grad_enabled() and saved_tensors_hooks_are_enabled()


# -- what makes values that are computed again ------------------------------------------------------------


def _marked(out: Tensor, extra: Any = None) -> Tensor:
    if out.grad_fn is not None and out.grad_fn.name() in COMPUTE:
        out.grad_fn.metadata[KEY] = Again(extra)
    return out


def relu_computed_again(x: Tensor, inplace: bool = False) -> Tensor:
    """``F.relu`` that does not save its result where ``x`` is a marked norm, or a sum of such and of relus."""
    before = x.grad_fn
    if not may_hook() or not _is_known(before):
        return F.relu(x, inplace)
    again = Again(readers=1)

    def unpack(_: Any) -> Tensor:
        return computed(lambda: again.given(lambda: _relu_of(before)))

    with saved_tensors_hooks(lambda _: None, unpack):
        out = F.relu(x, inplace)
    for source in _sources(before):
        source.readers += 1
    assert out.grad_fn is not None, "its input has one"
    out.grad_fn.metadata[KEY] = again
    return out


def batch_norm_computed_again(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``F.batch_norm`` whose result can be computed again: for a relu behind it. Running statistics move once."""
    return _marked(
        F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps), (bias, bias._version)
    )


def layer_norm_computed_again(
    x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, _: bool = True
) -> Tensor:
    """``F.layer_norm`` whose result can be computed again."""
    return _marked(F.layer_norm(x, shape, weight, bias, eps), eps)


def layer_norm_low_computed_again(*args: Any, **kwargs: Any) -> Tensor:
    """``layer_norm_low`` whose result can be computed again."""
    return _marked(layer_norm_low(*args, **kwargs))


def gelu_computed_again(x: Tensor, approximate: str = "none") -> Tensor:
    """``F.gelu`` whose result can be computed again."""
    return _marked(F.gelu(x, approximate=approximate))


def silu_computed_again(x: Tensor) -> Tensor:
    """``F.silu`` whose result can be computed again."""
    return _marked(F.silu(x))
