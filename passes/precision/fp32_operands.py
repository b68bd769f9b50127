"""Keep operations in full precision, whatever the lists say, because of their operands or of the results in use.

Before: ``a @ h`` with ``a`` sparse, which the lists class as a matmul. After: it runs as captured, in fp32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.fx import Node

from amp_graph.lists import OpClass
from amp_graph.passes.graph.fake_values import captured, tensors
from amp_graph.passes.graph.identify_ops import Operation, is_part, operations_of, tensor_inputs
from amp_graph.passes.precision.classify import Classification

# Tensor layouts whose kernels accept and return low precision as those of dense tensors do.
DENSE = (torch.strided, torch.jagged)
NORMS = frozenset({
    "aten.native_layer_norm", "aten.native_group_norm", "aten.native_batch_norm", "aten._native_batch_norm_legit",
    "aten._native_batch_norm_legit_functional", "aten._batch_norm_with_update", "aten._batch_norm_impl_index",
})  # fmt: skip
CONVOLUTIONS = frozenset({
    "aten.conv3d", "aten.conv_transpose3d", "aten.convolution", "aten._convolution", "aten.convolution_backward",
})  # fmt: skip
VOLUME, DEPTH = 5, -3  # dimensions of a batch of volumes and of the weight of their convolution, and which is the depth
PROBABILITIES = frozenset({"aten.sigmoid", "aten.special_expit"})
BUILT_IN = re.compile(r"\w+\.toml:\d+")  # the origin of a rule that no user gave
RETURNED = (
    "its result is read in full precision alone, and low precision rounds probabilities near 1 to 1, whose logarithm a "
    "loss takes"
)
SHALLOW = (
    "torch's gradient of the weight is wrong in low precision on a CPU where a volume is less deep than the kernel: it "
    "reads memory that it does not own"
)


def left_full(node: Node, found: Classification) -> Classification:
    """Return ``found``, or a classification that keeps ``node`` in full precision, with the reason."""
    layouts = {t.layout for n in (node, *node.all_input_nodes) for t in tensors(captured(n))}
    if not layouts.issubset(DENSE):
        names = ", ".join(sorted(str(layout).removeprefix("torch.") for layout in layouts.difference(DENSE)))
        why = f"a tensor is {names}, and such kernels need full precision"
        return replace(found, cls=OpClass.OPAQUE, why=why, listed=True)
    if found.cls is OpClass.FP32_INSIDE and not NORMS.isdisjoint(found.names) and _statistics_are_read(node):
        return replace(found, cls=OpClass.DENY, why="its statistics are read too, and they stay in full precision")
    return found


def trained_in_fp32(node: Node, found: Classification) -> Classification:
    """Return ``found``, or ``deny`` for a convolution of which torch's low-precision gradient is wrong on the CPU."""
    if found.cls is OpClass.ALLOW and any(_is_shallow(node, operation) for operation in operations_of(node)):
        return replace(found, cls=OpClass.DENY, why=SHALLOW)
    return found


def returned_probabilities(classes: Mapping[Node, Classification], keep_outputs: bool) -> frozenset[Node]:
    """Return the sigmoids that the lists let be low, and whose results are read in full precision alone.

    The cast stands above such a sigmoid instead of below it. In bf16 a probability above 0.998 is 1, so that
    ``BCELoss``, which bounds logarithms at -100, has a loss and gradients of another size than in fp32.
    ``keep_outputs``: whether the graph's outputs are cast back to full precision.
    """
    return frozenset(
        node
        for node, found in classes.items()
        if found.cls is OpClass.FOLLOW
        and PROBABILITIES.issuperset(found.names)
        and not found.written
        and BUILT_IN.fullmatch(found.origin)
        and all(t.dtype == torch.float32 for t in tensors(captured(node)))
        and _is_read_in_full(node, classes, keep_outputs)
    )


def _is_read_in_full(node: Node, classes: Mapping[Node, Classification], keep_outputs: bool) -> bool:
    """Say whether every reader of ``node``, or of a view of it, reads full precision."""
    return bool(node.users) and all(_reads_full(user, node, classes, keep_outputs) for user in node.users)


def _reads_full(user: Node, node: Node, classes: Mapping[Node, Classification], keep_outputs: bool) -> bool:
    if user.op == "output":
        return keep_outputs
    found = classes.get(user)
    if found is None:
        return False
    if found.conversion:
        return found.dtype == torch.float32
    if found.cls is OpClass.NEUTRAL:
        return _is_read_in_full(user, classes, keep_outputs)
    return found.cls is OpClass.DENY and node in found.applies


def _is_shallow(node: Node, operation: Operation) -> bool:
    """Say whether ``operation`` of ``node`` trains a convolution over volumes that are less deep than its kernel.

    Checked on torch 2.11 and 2.13 with AVX512_BF16 (oneDNN): kernels of depth 3 over a depth of 2, of depth 5 over 1 to
    4, transposed ones as well. The gradient has infinities or errors of the size of the gradient, and the heap may be
    damaged. Convolutions in one and two dimensions are right, and so are all gradients in fp32.
    """
    if operation.packet not in CONVOLUTIONS:
        return False
    inputs = tensor_inputs(node)
    given = {
        name: captured(inputs[i])
        for name in ("input", "weight", "grad_output")
        for i in operation.operands(name)
        if i < len(inputs)
    }
    weight, made = given.pop("weight", None), captured(node)
    if not isinstance(weight, torch.Tensor) or weight.dim() != VOLUME or weight.device.type != "cpu":
        return False
    volumes = [t for t in (*given.values(), made) if isinstance(t, torch.Tensor) and t.dim() >= VOLUME - 1]
    trains = "grad_output" in given or any(t.requires_grad for t in tensors(made))
    # The operand is as deep as the result, or deeper, but for a transposed convolution.
    return trains and max((t.shape[DEPTH] for t in volumes), default=0) < weight.shape[DEPTH]


def _statistics_are_read(node: Node) -> bool:
    """Say whether the statistics of a norm are read, not just its result.

    The kernels return statistics in the dtype of the parameters; fake tensors claim the dtype of the input.
    """
    return any(user.users and user.args[1] != 0 for user in node.users if is_part(user)) or any(
        not is_part(user) for user in node.users if not isinstance(captured(node), torch.Tensor)
    )
