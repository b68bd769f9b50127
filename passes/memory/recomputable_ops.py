"""Operations whose results are recomputed in backward if nothing saves them.

Before: ``relu(batch_norm(x, ...))``, whose result relu saves.
After: ``relu_computed_again(batch_norm_computed_again(x, ...))``, where only the norm saves anything: its input and its
statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from amp_graph.passes.casts.low_layer_norm import layer_norm_low
from amp_graph.passes.memory.recompute_functions import (
    COMPUTE,
    KEY,
    RecomputeRecipe,
    computed,
    is_known,
    may_hook,
    relu_of,
    sources_of,
)
from amp_graph.passes.torch_compat.autograd import outer_saved_tensors_hooks


def marked(out: Tensor, given: tuple[Any, ...], extra: Any = None) -> Tensor:
    """Record on the autograd node of ``out``, made from ``given``, that it is recomputable; see ``RecomputeRecipe``."""
    node: Any = out.grad_fn
    if node is not None and node.name() in COMPUTE:
        hooks = outer_saved_tensors_hooks()
        node.metadata[KEY] = RecomputeRecipe(extra, None if hooks is None else _kept_by(hooks, given))
    return out


def _kept_by(hooks: Any, given: tuple[Any, ...]) -> Callable[[], list[Any]]:
    pack, unpack = hooks
    packed = [pack(t) if isinstance(t, Tensor) else t for t in given]
    found = [isinstance(t, Tensor) for t in given]
    return lambda: [unpack(p) if is_tensor else p for p, is_tensor in zip(packed, found, strict=True)]


def relu_computed_again(x: Tensor, inplace: bool = False) -> Tensor:
    """``F.relu`` that does not save its result if ``x`` is a marked norm, or a sum of such norms and of relus."""
    before = x.grad_fn
    if not may_hook() or not is_known(before):
        return F.relu(x, inplace)
    again = RecomputeRecipe(readers=1)

    def unpack(_: Any) -> Tensor:
        return computed(lambda: again.given(lambda: relu_of(before)))

    with saved_tensors_hooks(lambda _: None, unpack):
        out = F.relu(x, inplace)
    for source in sources_of(before):
        source.readers += 1
    node: Any = out.grad_fn
    node.metadata[KEY] = again
    return out


def relu_kept(x: Tensor, inplace: bool = False) -> Tensor:
    """``F.relu`` whose saved result others can be recomputed from."""
    out, hooks = F.relu(x, inplace), outer_saved_tensors_hooks()
    return out if hooks is None else marked(out, (out.detach(),))


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
    """``F.batch_norm`` with a recomputable result, for a relu behind it. Running statistics are updated once."""
    out = F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    statistics = (None, None) if training else (running_mean, running_var)
    return marked(out, (x, weight, bias, *statistics), (bias, bias._version))


def layer_norm_computed_again(
    x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, _: bool = True
) -> Tensor:
    """``F.layer_norm`` with a recomputable result."""
    return marked(F.layer_norm(x, shape, weight, bias, eps), (x, weight, bias), eps)


def layer_norm_low_computed_again(
    x: Tensor, shape: Any, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, _: bool = True
) -> Tensor:
    """``layer_norm_low`` with a recomputable result."""
    return marked(layer_norm_low(x, shape, weight, bias, eps), (x, weight, bias))


def gelu_computed_again(x: Tensor, approximate: str = "none") -> Tensor:
    """``F.gelu`` with a recomputable result."""
    return marked(F.gelu(x, approximate=approximate), (x,))


def silu_computed_again(x: Tensor) -> Tensor:
    """``F.silu`` with a recomputable result."""
    return marked(F.silu(x), (x,))
