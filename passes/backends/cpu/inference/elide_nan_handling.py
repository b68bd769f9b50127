"""Check once that the inputs of a graph without gradients are finite, and omit operations that only handle NaN.

Before: ``y = convolution_with_norm(x, w, ..., "relu"); z = max_pool2d(y, 2)``; ``linear_of_packed(x, w, b, "relu")``.
After: ``finite = all_finite((x,)); y = convolution_with_norm(..., finite=finite); z = max_pool_of_finite(y, ...)``;
``relu_linear(x, w, b, finite=finite)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.backends.cpu.inference.folded_conv import is_folded
from amp_graph.passes.backends.cpu.inference.prepacked_linear import linear_of_packed, linear_of_panels, relu_linear_of
from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.aliasing import observe
from amp_graph.passes.graph.edit import set_value
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.grad_regions import may_record_gradients
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.graph.meta_keys import ASKED, CAST, IDENTITY, REGION
from amp_graph.passes.layout.conv_args import pair
from amp_graph.passes.precision.plan_precision import marks
from amp_graph.passes.profitability.thresholds import looking_is_profitable
from amp_graph.passes.torch_compat.fake import concrete_size
from amp_graph.passes.weights.cast_cache import WeightCopies
from amp_graph.passes.weights.finite_check import AllFinite, all_finite_of, max_pool_of

# Operations that map finite values to finite ones, within the range of fp32.
KEEPS_FINITE = frozenset(
    f"aten.{name}"
    for name in (
        "relu", "silu", "hardswish", "sigmoid", "hardsigmoid", "gelu", "max_pool2d", "avg_pool2d",
        "adaptive_avg_pool2d", "cat", "add", "mul", "sub", "conv2d", "conv_transpose2d", "view", "reshape", "flatten",
        "permute", "transpose", "slice", "contiguous", "clone", "upsample_nearest2d", "upsample_bilinear2d",
        "pixel_shuffle",
    )
)  # fmt: skip
POOL = torch.ops.aten.max_pool2d.default


@dataclass(frozen=True)
class Sources:
    """What must be finite for a value to be: values of the call, and copies of parameters."""

    values: frozenset[Node]
    kept: frozenset[Node]

    def __or__(self, other: Sources) -> Sources:
        """Return both."""
        return Sources(self.values | other.values, self.kept | other.kept)


@dataclass(frozen=True)
class ElideNanHandling(Pass):
    """Lets relus be oneDNN's, and max pools of images use integer maxima, if all that they depend on is finite.

    Law: bf16 on the CPU, without gradients: relus of convolutions with folded norms and of linears with packed weights,
    max pools behind the former. Their sources are checked, values at every call and parameters once per update; if
    anything is infinite or NaN, everything is computed as before. Finite values give NaN only beyond the range of fp32.
    If the check takes as long as what it saves, nothing changes. Exactness: bit-exact.
    """

    copies: WeightCopies
    name: ClassVar[str] = "elide-nan-handling"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every convolution with a folded norm, every linear with a relu, and every max pool."""
        told = [] if may_record_gradients(gm) else [n for n in gm.graph.nodes if is_folded(n) or _is_relu_linear(n)]
        if not told:
            return PassResult(gm)
        sources, pools = _sources(gm, self.copies.read), _pools(gm)
        relus = [node for node in told if not is_folded(node) or _leaves_no_less_than_zero(node)]
        finite = self.copies.finite
        flags = _Flags(gm, all_finite_of(finite), _worth_looking_at([*relus, *pools], sources))
        max_pool, relu_linear, changes = max_pool_of(finite), relu_linear_of(finite), []
        for node in sorted({*told, *pools}):
            flag = flags.before(node, sources[node])
            if flag is None:
                continue
            node.kwargs = {"finite": flag}
            if node in pools:
                node.target, node.args = max_pool, pools[node]
                node.meta.pop(IDENTITY, None)
            elif not is_folded(node):
                node.target, node.args = relu_linear, node.args[:3]
            what = "integer maxima" if node in pools else "told that all is finite"
            changes.append(Change(self.name, what, node.name, f"if {flag.name} says so"))
        return PassResult(gm, tuple(changes))


def _is_relu_linear(node: Node) -> bool:
    """Say whether ``node`` is one of our linears with a relu, computed by oneDNN."""
    return node.target is linear_of_packed and node.args[3:] == ("relu",) and _is_noted(node)


def _is_noted(linear: Node) -> bool:
    """Say whether the packed weight of ``linear`` is known to be checked for finite values."""
    weight = linear.args[1]
    return isinstance(weight, Node) and bool(weight.meta.get(ASKED))


def _sources(gm: GraphModule, copied: Any) -> dict[Node, Sources | None]:
    """Return what must be finite for each value to be; None where the operations before it do not tell."""
    memory = observe(gm, marks(gm))
    found: dict[Node, Sources | None] = {}
    for node in gm.graph.nodes:
        given = value(node)
        if not isinstance(given, torch.Tensor) or memory.is_written(node):
            found[node] = None
        elif node.target is copied:
            found[node] = Sources(frozenset(), frozenset({node}))
        elif is_folded(node):
            found[node] = _union(found[n] for n in (node.args[0], *node.args[4:5]))
        elif node.target in (linear_of_packed, linear_of_panels) and _is_noted(node):
            found[node] = _union(found[n] for n in (node.args[0], node.args[2]) if n is not None)
        elif _keeps_finite(node):
            found[node] = _union(found[n] for n in node.all_input_nodes if isinstance(value(n), torch.Tensor))
        else:
            in_range = given.dtype in (torch.float32, torch.bfloat16)
            found[node] = Sources(frozenset({node}), frozenset()) if in_range else None
    return found


def _keeps_finite(node: Node) -> bool:
    """Say whether ``node`` maps finite values to finite ones; our casts and copies do."""
    if CAST in node.meta or (node.op, node.target) == ("call_method", "contiguous"):
        return True
    names, numbers = names_of(node), [*node.args, *node.kwargs.values()]
    finite = all(math.isfinite(number) for number in numbers if isinstance(number, (int, float)))
    return bool(names) and KEEPS_FINITE.issuperset(names) and finite and REGION not in node.meta


def _union(found: Iterable[Sources | None]) -> Sources | None:
    total = Sources(frozenset(), frozenset())
    for one in found:
        if one is None:
            return None
        total = total | one
    return total


def _leaves_no_less_than_zero(node: Node) -> bool:
    """Say whether ``node`` holds the result of one of our relus, which has no -0."""
    if is_folded(node):
        return bool(node.args[3][-1] == "relu")  # type: ignore[index]
    keeps = names_of(node) in (("aten.max_pool2d",), ("aten.cat",))
    return keeps and all(map(_leaves_no_less_than_zero, node.all_input_nodes))


def _pools(gm: GraphModule) -> dict[Node, tuple[Node, int]]:
    """Return the max pools behind relus that can be split into rows and columns; and what each reads, and its size."""
    found = {}
    for node in gm.graph.nodes:
        if names_of(node) != ("aten.max_pool2d",) or REGION in node.meta or node.op != "call_function":
            continue
        options = {k: v for k, v in node.kwargs.items() if k != "return_indices"}
        given = node_info.schema_arguments(POOL, node.args, options)
        x, size = given["self"], pair(given["kernel_size"])
        shape = value(x).shape[2:]
        even = value(x).dim() == 4 and all(type(n) is int and n % 2 == 0 for n in shape)
        steps = (pair(given["stride"] or given["kernel_size"]), pair(given["padding"]), pair(given["dilation"]))
        plain = steps in (((2, 2), (n, n), (1, 1)) for n in range(2) if size == (n + 2, n + 2))
        if even and plain and not given["ceil_mode"] and _leaves_no_less_than_zero(x):
            found[node] = (x, size[0])
    return found


def _worth_looking_at(spared: Iterable[Node], sources: dict[Node, Sources | None]) -> frozenset[Node]:
    """Return the values whose check takes less time than the passes over ``spared`` that it makes unnecessary."""
    gains: dict[Node, int] = {}
    for node in spared:
        found = sources[node]
        for source in found.values if found is not None else ():
            gains[source] = gains.get(source, 0) + _size(node)
    return frozenset(source for source, gain in gains.items() if looking_is_profitable(_size(source), gain))


def _size(node: Node) -> int:
    return concrete_size(value(node).numel())


@dataclass
class _Flags:
    """The graph's nodes that say whether values are finite; each checks what no earlier one did."""

    gm: GraphModule
    ask: AllFinite
    worth: frozenset[Node]
    made: dict[Sources, Node] = field(default_factory=dict)

    def before(self, node: Node, sources: Sources | None) -> Node | None:
        """Return the flag, computed before ``node``, that all ``sources`` are finite; None if it is not profitable."""
        if sources is None or not sources.values <= self.worth:
            return None
        if sources not in self.made:
            known = [one for one in self.made if one.values <= sources.values and one.kept <= sources.kept]
            nothing = Sources(frozenset(), frozenset())
            most = max(known, key=lambda one: len(one.values) + len(one.kept), default=nothing)
            looks = (tuple(sorted(more)) for more in (sources.values - most.values, sources.kept - most.kept))
            with self.gm.graph.inserting_before(node):
                args: tuple[Any, ...] = (*looks, *([self.made[most]] if known else []))
                self.made[sources] = self.gm.graph.call_function(self.ask, args)
            set_value(self.made[sources], True)
        return self.made[sources]
