"""A batch norm with the relu behind it whose result is computed again in backward, where nobody saves it.

Before: ``conv2d(norm_and_relu(x, ...), w)``, which keeps the relu's result. After:
``computing_again(conv2d)(norm_and_relu_computed_again(x, ...), w)``, which keeps ``x`` alone.
"""

from __future__ import annotations

from torch import Tensor

from amp_graph.passes.batch_norm import norm_and_relu
from amp_graph.passes.recompute_makers import marked


def norm_and_relu_computed_again(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    momentum: float = 0.1,
    eps: float = 1e-5,
    relu: bool = True,
) -> Tensor:
    """``norm_and_relu`` whose result can be computed again."""
    out = norm_and_relu(x, running_mean, running_var, weight, bias, momentum, eps, relu)
    return marked(out, (x, weight, bias))
