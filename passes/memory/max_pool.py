"""Take the maxima of images by halves, where nothing will ask which pixels they were.

Before: ``max_pool2d(x, 2)``, for which torch writes the place of each maximum as well, of eight bytes.
After: ``max_pool_by_halves(x, 2)``: maxima of every two columns, then of every two rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.graph.node_pass import NodePass
from amp_graph.passes.layout.conv_args import pair
from amp_graph.passes.torch_compat.autograd import leaves_to_torch
from amp_graph.passes.torch_compat.fake import FakeTensorMode

POOL = torch.ops.aten.max_pool2d.default
FEWEST = 1 << 17  # pixels of all channels; of fewer, four calls take longer than one


@dataclass(frozen=True)
class MaxPoolByHalves(NodePass):
    """Replaces ``max_pool2d`` of windows of 2 or 3 and a stride of 2 with ``max_pool_by_halves`` without gradients.

    Law: images of even height and width, of 4 and more, on the CPU, padded by 1 for windows of 3. Exactness: the same
    numbers; of a positive and a negative zero either may be the maximum. Speedups of bf16 on a CPU with dot products:
    1.0 to 2.2 for channels_last images, 8 to 11 for others.
    """

    def visit(self, gm: GraphModule, node: Node, mode: FakeTensorMode) -> Change | None:
        """Replace a max pool."""
        plain = names_of(node) == ("aten.max_pool2d",) and node_info.calls_torch(node) and not is_trained(node)
        size = _window(node) if plain else 0
        if not size:
            return None
        node.target, node.args, node.kwargs = max_pool_by_halves, (node.all_input_nodes[0], size), {}
        return Change(self.name, "without indices", node.name, f"windows of {size}")


def _window(node: Node) -> int:
    """Return the size of the windows of a pool that can be taken by halves; 0 for any other."""
    options = {k: v for k, v in node.kwargs.items() if k != "return_indices"}
    given = node_info.schema_arguments(POOL, node.args, options)
    x: Any = value(given["self"])
    if x.device.type != "cpu" or x.dim() != 4 or not all(type(n) is int for n in x.shape) or x.numel() < FEWEST:
        return 0
    size = pair(given["kernel_size"])[0]
    asked = [pair(given[name] or given["kernel_size"]) for name in ("kernel_size", "stride")]
    asked += [pair(given[name]) for name in ("padding", "dilation")]
    fits = asked == [(size, size), (2, 2), (size - 2, size - 2), (1, 1)] and size in (2, 3)
    return size if fits and not given["ceil_mode"] and not any(n % 2 or n < 4 for n in x.shape[2:]) else 0


def max_pool_by_halves(x: Tensor, size: int) -> Tensor:
    """Return ``F.max_pool2d(x, size, 2, size - 2)`` of images of even height and width; size: 2 or 3."""
    if leaves_to_torch(x):
        return F.max_pool2d(x, size, 2, size - 2)
    return _maxima(_maxima(x, 3, size), 2, size)


def _maxima(x: Tensor, dim: int, size: int) -> Tensor:
    """Return the maximum of each pair of neighbours in ``dim``; for ``size`` 3, also of the element before the pair."""
    first, second = x.unflatten(dim, (-1, 2)).unbind(dim + 1)
    found = torch.maximum(first, second)
    if size == 3:
        rest = found.narrow(dim, 1, found.shape[dim] - 1)
        torch.maximum(rest, second.narrow(dim, 0, rest.shape[dim]), out=rest)
    return found
