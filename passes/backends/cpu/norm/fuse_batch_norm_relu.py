"""Fuse a batch norm in training with the following relu into one operation, which saves only the norm's input.

Before: ``n = batch_norm(x, mean, var, weight, bias, True, 0.1, 1e-5); h = relu(n)``.
After: ``h = norm_and_relu(x, mean, var, weight, bias, 0.1, 1e-5)``. At the end of a residual block, ``h = relu(n +
other)`` becomes ``norm_add_relu(x, other, ...)``; with neither, the norm becomes ``norm_alone(x, ...)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from amp_graph.passes.backends.cpu.norm.batch_norm_functions import norm_add_relu, norm_alone, norm_and_relu
from amp_graph.passes.backends.cpu.norm.batch_norm_kernel import library
from amp_graph.passes.base import Change, Skip, Writes
from amp_graph.passes.graph.activation_checkpoints import place_of
from amp_graph.passes.graph.call_arguments import BATCH_NORM_ARGUMENTS, RELUS, batch_norm_arguments
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.graph.match import Formula, is_written_meanwhile, one_reader, summand
from amp_graph.passes.graph.meta_keys import CAST, IDENTITY, MARK, REGION
from amp_graph.passes.graph.node_info import HALVES
from amp_graph.passes.graph.node_pass import NodePass
from amp_graph.passes.layout.memory_format import is_channels_last
from amp_graph.passes.native.kernel_table import why_missing
from amp_graph.passes.torch_compat.fake import FakeTensorMode, numel, same


@dataclass(frozen=True)
class FuseBatchNormRelu(NodePass):
    """Replaces ``relu(batch_norm(x))`` in training with ``norm_and_relu(x)``, and that of a sum with ``norm_add_relu``.

    Law: low-precision channels_last images on the CPU, fp32 parameters, statistics of the batch itself. If the norm has
    readers other than a relu, or a sum that is its only reader, only the norm is replaced, with ``norm_alone``.
    Exactness: rounding-equal, of a sum one rounding less; statistics and gradients are summed in fp32 by blocks and in
    fp64 over them, and the result and the input's gradient are computed in fp32 and rounded once, as torch's are. Only
    where C can be compiled, and above a profitable size.
    """

    writes: ClassVar[Writes] = Writes.ABSORBED

    def visit(self, gm: GraphModule, node: Node, mode: FakeTensorMode) -> Change | Skip | None:
        """Fuse a batch norm that trains."""
        if node.target is not F.batch_norm or names_of(node) != ("aten.batch_norm",) or not is_trained(node):
            return None
        given = batch_norm_arguments(node)
        if reason := _why_not(node, given):
            return Skip(node.name, reason)
        found = _relu_behind(node)
        made = _rewrite(gm, node, found, given) if found is not None else _alone(node, given)
        parts = "norm" if found is None else f"norm{', sum' if found[2] else ''} and relu"
        return Change(self.name, "fused", made.name, f"{parts} of {tuple(value(made).shape)} in one operation")


def _why_not(node: Node, given: dict[str, Any]) -> str:
    """Return why a norm stays as it is, or ""."""
    x, parameters = value(given["input"]), [given["weight"], given["bias"]]
    running = [given["running_mean"], given["running_var"]]
    if REGION in node.meta:
        return "inside a region that affects what is computed"
    if given["training"] is not True or not isinstance(given["momentum"], float):
        return "its statistics are not those of the batch, or are updated in another way"
    if not all(isinstance(p, Node) and value(p).dtype == torch.float32 for p in parameters):
        return "it has no weight and bias in fp32"
    if any(isinstance(r, Node) and value(r).dtype != torch.float32 for r in running):
        return "its running statistics are not fp32"
    if x.dtype not in HALVES or not is_channels_last(x):
        return "its images are not channels_last in low precision"
    if not batch_norm_in_one_pass_is_profitable(x.device.type, numel(x)):
        return f"torch's operations are as fast for {tuple(x.shape)} on {x.device.type}"
    return why_missing(library, x.dtype)


Behind = tuple[Node, Node | None, Node | None]  # what follows a norm: a relu, and before it perhaps a sum with the last


def _relu_behind(node: Node) -> Behind | None:
    """Return the relu that is the only reader of ``node``, or of the sum that is the only reader."""
    user = _only_reader(node)
    if user is None:
        return None
    if names_of(user) in RELUS:
        return user, None, None
    other, relu = summand(user, node), _only_reader(user)
    if relu is None or names_of(relu) not in RELUS or other is None:
        return None
    whole, images = value(node), value(other)
    fits = isinstance(images, torch.Tensor) and same(images.shape, whole.shape) and images.dtype == whole.dtype
    between = Formula(node, relu, {node, user, relu})
    return (relu, user, other) if fits and not is_written_meanwhile(between, other, between.inside) else None


def _only_reader(node: Node) -> Node | None:
    """Return the only reader of ``node``, if it trains in the same place and precision."""
    user = one_reader(node)
    if user is None or user.op == "output" or REGION in user.meta:
        return None
    if not isinstance(value(user), torch.Tensor) or value(user).dtype != value(node).dtype:
        return None
    return user if place_of(user) == place_of(node) and is_trained(user) else None


def _alone(node: Node, given: dict[str, Any]) -> Node:
    """Replace a norm with a call of ours; return it."""
    node.target, node.kwargs = norm_alone, {}
    node.args = tuple(given[name] for name in BATCH_NORM_ARGUMENTS if name != "training")
    return node


def _rewrite(gm: GraphModule, node: Node, found: Behind, given: dict[str, Any]) -> Node:
    """Replace a norm and what follows it with one call; return it."""
    relu, total, other = found
    x, *rest = (given[name] for name in BATCH_NORM_ARGUMENTS if name != "training")
    args = (x, *rest) if other is None else (x, other, *rest)
    with gm.graph.inserting_after(relu):
        made = gm.graph.call_function(norm_and_relu if other is None else norm_add_relu, args)
    made.meta = {k: v for k, v in relu.meta.items() if k not in (IDENTITY, CAST)}
    made.meta[MARK] = node.meta.get(MARK)
    relu.replace_all_uses_with(made)
    for gone in (relu, total, node):
        if gone is not None:
            gm.graph.erase_node(gone)
    return made


# Elements of a batch norm below which the call of an autograd.Function costs more than the saved memory traffic.
FEWEST_OF_A_BATCH_NORM = 1 << 17


def batch_norm_in_one_pass_is_profitable(device: str, elements: int) -> bool:
    """Say whether a training batch norm of ``elements`` and the relu after it are faster in one C kernel.

    Time over that of torch's norm and relu, CPU, bf16 with AVX-512, forward and backward: 0.5 to 0.65 from 200,000
    elements on, 0.7 at 100,000, 0.9 at 65,536. With cold caches, as in a step: 0.6 to 0.9, and 1.0 at 65,536
    (``benchmarks/batch_norm.py``). A norm without a relu, cold caches: 0.4 to 0.75 from 300,000 elements on, 1.2 at
    75,000.
    """
    return device == "cpu" and elements >= FEWEST_OF_A_BATCH_NORM
