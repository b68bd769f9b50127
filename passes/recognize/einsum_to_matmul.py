"""Recognize matmuls that are written as Einstein sums.

Before: ``einsum("b h i d, b h j d -> b h i j", q, k)``, as in CompVis' diffusion models, which no pass over matmuls,
linears or attention matches. After: ``matmul(q, k.transpose(-2, -1))``.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change
from amp_graph.passes.graph.edit import describe, put_before, put_call
from amp_graph.passes.graph.fake_values import captured
from amp_graph.passes.graph.identify_ops import arguments_of, names_of
from amp_graph.passes.graph.match import Formula
from amp_graph.passes.graph.meta_keys import REGION, TRANSFORM
from amp_graph.passes.graph.node_pass import NodePass
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.torch_compat.fake import FakeTensorMode

ALIKE = (torch.ops.aten.matmul.default, torch.ops.aten.bmm.default, torch.ops.aten.einsum.default)


@dataclass(frozen=True)
class EinsumToMatmul(NodePass):
    """Replaces ``einsum`` of two operands by ``matmul``, with transposes of the operands and the result.

    Law: exactly one index is summed. Each other index is in one operand and the result (one per operand), or in all
    three; or one operand has several of its own and the other one is a matrix. The result has the strides of
    ``einsum``'s result, which later code may depend on. The lists have the same rule for both. Exactness:
    rounding-equal; ``einsum`` computes the same matmul.
    """

    options: PipelineOptions

    def visit(self, gm: GraphModule, node: Node, mode: FakeTensorMode) -> Change | None:
        """Replace an einsum."""
        given = _einsum_arguments(node)
        if given is None or not self.options.lists.says_the_same_of(ALIKE):
            return None
        equation, *operands = given
        product = _with_same_strides(node, equation, operands, mode)
        if product is None:
            return None
        return Change(self.name, "as a matmul", _put(gm, node, product, operands, mode).name, equation)


# Permutations of the first and the second factor of a matmul, and of its result; whether the second operand is first.
Product = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]


def _einsum_arguments(node: Node) -> tuple[str, Node, Node] | None:
    """Return the equation and the two operands of an einsum; None for any other node."""
    is_einsum = names_of(node) == ("aten.einsum",) and {REGION, TRANSFORM}.isdisjoint(node.meta)
    given = arguments_of(node) if is_einsum else None
    return (given["equation"], *given["tensors"]) if given is not None and len(given["tensors"]) == 2 else None


def _with_same_strides(node: Node, equation: str, operands: list[Node], mode: FakeTensorMode) -> Product | None:
    """Return a matmul whose result has the strides of ``node``, an einsum; None if there is none."""
    wanted, given = captured(node), [captured(o) for o in operands]
    read = _read(equation, [t.dim() for t in given])
    if read is None or given[0].dtype != given[1].dtype:
        return None
    first, second, result = read
    sizes = dict(zip(first, given[0].shape, strict=False))
    if any(str(sizes.get(i, n)) != str(n) for i, n in zip(second, given[1].shape, strict=False)):  # a size of 1
        return None
    for swapped in (False, True):
        one, other = (second, first) if swapped else (first, second)
        product = _product(one, other, result, swapped)
        if product is None:
            continue
        with mode:
            made = _build(product, given, _call)
        if _form(made) == _form(wanted):
            return product
    return None


def _read(equation: str, dims: Sequence[int]) -> tuple[str, str, str] | None:
    """Return the indices of both operands, which have ``dims`` dimensions, and of the result; None if unclear.

    ``...`` stands for the remaining dimensions, aligned at the last one.
    """
    terms, arrow, result = equation.replace(" ", "").partition("->")
    parts = terms.split(",")
    if not arrow or len(parts) != 2:
        return None
    unused = [i for i in string.ascii_letters if i not in equation]
    more = [max(0, n - len(part.replace("...", ""))) for n, part in zip(dims, parts, strict=True)]
    of_all = "".join(unused[: max(more)])
    said = [
        part.replace("...", of_all[len(of_all) - n :], 1)
        for n, part in zip((*more, max(more)), (*parts, result), strict=True)
    ]
    if not all(part.isalpha() and len(set(part)) == len(part) for part in said):
        return None
    return said[0], said[1], said[2]


def _product(first: str, second: str, result: str, swapped: bool) -> Product | None:
    """Return the matmul of ``first`` and ``second``; None if the sum is not one matmul."""
    summed = [i for i in first if i in second and i not in result]
    shared = [i for i in result if i in first and i in second]
    rows, columns = [i for i in result if i not in second], [i for i in result if i not in first]
    if len(summed) != 1 or len(columns) != 1 or not rows:
        return None
    if {*first} != {*shared, *rows, *summed} or {*second} != {*shared, *columns, *summed}:
        return None  # an index of one operand alone is summed over
    if len(rows) > 1 and shared:
        return None
    left, right, made = [*shared, *rows, *summed], [*shared, *summed, *columns], [*shared, *rows, *columns]
    return tuple(map(first.index, left)), tuple(map(second.index, right)), tuple(map(made.index, result)), swapped


def _build(product: Product, operands: list[Any], call: Callable[..., Any]) -> Any:
    """Build the permuted matmul of ``operands`` by ``call``, and return the result of the last call."""
    left, right, behind, swapped = product
    one, other = operands[::-1] if swapped else operands
    made = call(torch.matmul, _permuted(one, left, call), _permuted(other, right, call))
    return _permuted(made, behind, call)


def _permuted(operand: Any, order: tuple[int, ...], call: Callable[..., Any]) -> Any:
    if order == tuple(range(len(order))):
        return operand
    *before, last, first = range(len(order))
    of_last_two = order == (*before, first, last)
    return call(torch.transpose, operand, -2, -1) if of_last_two else call(torch.permute, operand, order)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _form(made: Tensor) -> tuple[Any, ...]:
    return made.dtype, *map(str, (*made.shape, *made.stride()))


def _put(gm: GraphModule, node: Node, product: Product, operands: list[Node], mode: FakeTensorMode) -> Node:
    """Replace ``node`` by ``product``; return the new node."""

    def put(function: Callable[..., Any], operand: Node, *args: Any) -> Node:
        if function is not torch.matmul:
            return put_before(gm, node, function, operand, *args, mode=mode, like=node)
        with gm.graph.inserting_before(node):  # with the module path of the einsum
            return describe(gm.graph.call_function(function, (operand, *args)), node, mode)

    last = _build(product, operands, put)
    made = put_call(gm, Formula(operands[0], node, {node}), last.target, last.args, mode)
    gm.graph.erase_node(last)
    return made
