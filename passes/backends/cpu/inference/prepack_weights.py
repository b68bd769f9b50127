"""Let the matmuls of a frozen model read weights packed for the kernel: oneDNN's, or ours over few rows.

Before: ``w = frozen_weight(weight); y = gelu(linear(x, w, b))``.
After: ``w = packed_weight(weight); y = linear_of_packed(x, w, b, "gelu")``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.backends.cpu.inference.activations import activated, relu_in_place
from amp_graph.passes.backends.cpu.linear.panel_gemm import dense_of, library, linear_by_panels, panels_of
from amp_graph.passes.base import Change, Pass, Writes
from amp_graph.passes.graph.edit import give_value
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.grad_regions import may_record_gradients
from amp_graph.passes.graph.identify_ops import arguments_of, names_of
from amp_graph.passes.graph.match import one_reader
from amp_graph.passes.graph.meta_keys import IDENTITY, REGION
from amp_graph.passes.native.gemm_thresholds import packing_is_profitable, panels_are_profitable
from amp_graph.passes.native.operator_library import called
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.devices import linear_of_packed_weight, pack_linear_weight
from amp_graph.passes.torch_compat.dispatch import is_in_mode
from amp_graph.passes.torch_compat.fake import is_number
from amp_graph.passes.weights.frozen_weights import FrozenWeights

own_functions(__name__, frozen_weights=True)

PackedWeight = Callable[[Tensor], Tensor]


def packed_reader(weights: FrozenWeights, transposed: bool = False, in_panels: bool = False) -> PackedWeight:
    """Return what graphs call for a weight [outputs, inputs] that only ``linear_of_packed`` reads.

    ``transposed``: the weight is [inputs, outputs], and the result its transpose. ``in_panels``: ``linear_of_panels``
    reads it instead. It is packed from the first call on: two calls with the same weights have the same bits, because
    sums in another order would differ.
    """
    kind = ("panels" if in_panels else "packed", transposed)

    def as_matrix(weight: Tensor) -> Tensor:
        low = weight.to(weights.dtype)
        return low.t() if transposed else low

    def packed_weight(weight: Tensor) -> Tensor:
        def make() -> Tensor:
            low = as_matrix(weight.detach())
            return panels_of(low) if in_panels else pack_linear_weight(low.contiguous())

        if in_panels or torch.backends.mkldnn.enabled:
            found: Tensor | None = weights.form(kind, make, weight)
            if found is not None:
                return found
        return as_matrix(weight)

    return packed_weight


def linear_of_panels(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, after: str = "none", outputs: int = 0
) -> Tensor:
    """``F.linear(x, weight, bias)`` without gradients, for a ``weight`` in panels or plain, through ``after``.

    after: "none" or "relu", which propagates NaN. outputs: the weight's number of outputs.
    """
    if weight.dim() == 2 or is_in_mode(x):
        dense = weight if weight.dim() == 2 else dense_of(weight, outputs, x.shape[-1])
        return linear_of_packed(x, dense, bias, after)
    return called(linear_by_panels, x, weight, bias, after == "relu", outputs)


def linear_of_packed(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, after: str = "none", form: str = "none"
) -> Tensor:
    """``F.linear(x, weight, bias)`` without gradients, for a ``weight`` that is packed or plain, through ``after``.

    after: "none", "relu", "silu", or "gelu" in the ``form`` "none" or "tanh". The kernel applies the last two to its
    fp32 sums; its relu would turn NaN into 0.
    """
    if weight.layout is torch.strided:
        return activated(F.linear(x, weight, bias), after, form)
    if after == "gelu":
        return linear_of_packed_weight(x, weight, bias, "gelu", form)
    if after == "silu":
        return linear_of_packed_weight(x, weight, bias, "swish")
    out = linear_of_packed_weight(x, weight, bias)
    return relu_in_place(out) if after == "relu" else out


ACTIVATIONS = {
    "aten.relu": "relu",
    "aten.relu_": "relu",
    "aten.silu": "silu",
    "aten.silu_": "silu",
    "aten.gelu": "gelu",
}


# The names of a product's input, weight and bias; and of numbers that must be 1.
PRODUCTS = {
    "aten.linear": ("input", "weight", "bias"),
    "aten.addmm": ("mat1", "mat2", "self"),
    "aten.mm": ("self", "mat2"),
    "aten.matmul": ("self", "other"),
}
SCALES = {"beta", "alpha"}


@dataclass(frozen=True)
class PrepackWeights(Pass):
    """Replaces matmuls with ``frozen_weight(w)`` by ones with ``packed_weight(w)`` in a frozen model.

    Law: the same matmul by the same library, without packing the weight at each call; or, over few rows, where the
    library's call takes longer than the matmul, by compiled C. Exactness: rounding-equal, sums in another order. An
    activation that is the only reader is fused; a fused gelu or silu, which only oneDNN supports, sees the sum before
    its rounding: one rounding less.
    """

    options: PipelineOptions
    writes: ClassVar[Writes] = Writes.ABSORBED

    def rewrite(self, gm: GraphModule) -> Iterator[Change]:
        """Visit every frozen weight that only matmuls read."""
        if may_record_gradients(gm):
            return
        weights, either = self.options.frozen, (False, True)
        readers = {(turned, few): packed_reader(weights, turned, few) for turned in either for few in either}
        for node in list(gm.graph.find_nodes(op="call_function", target=weights.read)):
            found = {user: operands for user in node.users if (operands := _operands(user, node)) is not None}
            forms = {names_of(user) != ("aten.linear",) for user in found}  # whether the weight is [inputs, outputs]
            if len(found) < len(node.users) or len(forms) != 1:
                continue
            few = all(_has_few_rows(user, x, value(node)) for user, (x, *_) in found.items()) and library() is not None
            node.target = readers[True in forms, few]
            if True in forms:
                give_value(node, value(node).t())
            for user, operands in found.items():
                _rewrite(gm, user, operands, few)
            how = "in panels" if few else "packed"
            yield Change(self.name, how, node.name, "for " + ", ".join(u.name for u in found))


def _operands(node: Node, weight: Node) -> tuple[Any, ...] | None:
    """Return input, weight and bias of a linear with ``weight`` that is worth packing; None if ``node`` is none."""
    given, names, low = arguments_of(node), names_of(node), value(weight)
    read = PRODUCTS.get(names[0], ()) if len(names) == 1 and REGION not in node.meta else ()
    if given is None or not read or given.keys() - {*read, *SCALES} or any(given.get(s, 1) != 1 for s in SCALES):
        return None
    x, own, bias = (given.get(name) for name in (*read, "")[:3])
    if own is not weight or x is weight or bias is weight or low.dim() != 2:
        return None
    if not all(isinstance(t, Tensor) and t.dtype == low.dtype for t in map(value, node.all_input_nodes)):
        return None
    outputs, inputs = low.shape if read[0] == "input" else low.shape[::-1]
    fits = bias is None or tuple(value(bias).shape) == (outputs,)
    return (x, weight, bias) if fits and packing_is_profitable(low.device.type, low.dtype, outputs, inputs) else None


def _has_few_rows(node: Node, x: Node, low: Tensor) -> bool:
    """Say whether our kernel is faster over so few rows, even with a separate call for a gelu or a silu."""
    if not is_number(*value(x).shape, *value(node).shape):
        return False
    outputs, inputs = value(node).shape[-1], value(x).shape[-1]
    return panels_are_profitable(low.device.type, low.dtype, value(node).numel() // max(1, outputs), outputs, inputs)


def _rewrite(gm: GraphModule, node: Node, operands: tuple[Any, ...], few: bool) -> None:
    behind = _activation(node)
    behind = behind if not few or behind == ("relu",) else ()
    node.op, node.target = "call_function", linear_of_panels if few else linear_of_packed
    node.kwargs = {"outputs": value(node).shape[-1]} if few else {}
    node.args = (*operands, *behind)
    node.meta.pop(IDENTITY, None)
    if behind:
        (reader,) = node.users
        reader.replace_all_uses_with(node)
        gm.graph.erase_node(reader)


def _activation(node: Node) -> tuple[str, ...]:
    """Return ``linear_of_packed``'s name of the activation that is the only reader of ``node``; () without one."""
    user = one_reader(node)
    name = names_of(user)[0] if user is not None and len(names_of(user)) == 1 else ""
    if user is None or name not in ACTIVATIONS or REGION in user.meta or value(user).dtype != value(node).dtype:
        return ()
    form = (str(user.kwargs.get("approximate", "none")),) if name == "aten.gelu" else ()
    return (ACTIVATIONS[name], *form)
