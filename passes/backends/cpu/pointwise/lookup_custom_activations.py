"""Compute bf16 activations that are the user's ``autograd.Function``s with lookup tables on the CPU.

Before: ``forward(x)`` of ten operations, and ``backward(grad, x)`` of twenty, on every element of a bf16 tensor.
After: ``activated(x, form)``: 65,536 values and slopes, computed by those bodies once per process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from amp_graph.passes.backends.cpu.pointwise import lookup_table
from amp_graph.passes.backends.cpu.pointwise.lookup_table import FORMS, Form
from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.autograd_functions import bodies_of, drop_bodies, follow_grad_mode, is_custom_function
from amp_graph.passes.graph.edit import set_identity
from amp_graph.passes.graph.fake_values import adopt_values, fake_mode_of, tensors, value
from amp_graph.passes.graph.identify_ops import Identity, identify, is_tensor_call
from amp_graph.passes.graph.match import CONVERSIONS
from amp_graph.passes.graph.meta_keys import CAST, CHECKPOINT, IDENTITY, REGION, TRANSFORM
from amp_graph.passes.profitability.thresholds import table_is_profitable
from amp_graph.passes.torch_compat.dispatch import OpOverload
from amp_graph.passes.torch_compat.fake import FakeTensorMode


@dataclass(frozen=True)
class LookupCustomActivations(Pass):
    """Replaces custom elementwise functions with lookups in tables, when it is profitable.

    Law: bf16 CPU tensors, computed in bf16, or in fp32 between casts; the result comes from pointwise operations on one
    tensor, the only one saved; the gradient is the incoming one times the result of pointwise operations on that
    tensor. Exactness: bit-exact, values and gradients.
    """

    name: ClassVar[str] = "lookup-custom-activations"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every custom function."""
        mode, changes = fake_mode_of(gm), []
        for node in list(gm.graph.nodes):
            site = _site(node) if mode is not None else None
            form = form_of_function(gm, node) if site is not None and lookup_table.library() is not None else ""
            if site is not None and form and mode is not None:
                made = _looked_up(gm, site, form, mode)
                changes.append(Change(self.name, "by a table", made.name, "as the user's function computes a number"))
        if changes:
            drop_bodies(gm)
        return PassResult(gm, tuple(changes))


class _Site(NamedTuple):
    """Where a lookup may replace nodes: the bf16 tensor that it reads, and the tensors that it replaces."""

    x: Node
    results: list[Node]


def _site(node: Node) -> _Site | None:
    """Return where ``node``, a custom function of one tensor, begins and ends in bf16; None if it does not."""
    if not is_custom_function(node) or len(node.args) != 3 or not {REGION, TRANSFORM, CHECKPOINT}.isdisjoint(node.meta):
        return None
    x, results = node.args[2], [node] if isinstance(value(node), Tensor) else list(node.users)
    if results != [node] and any(result.args[1] != 0 for result in results):
        return None
    if isinstance(x, Node) and CAST in x.meta and value(x).dtype == torch.float32:
        x, results = x.all_input_nodes[0], [user for result in results for user in result.users]
        if not all(CAST in result.meta for result in results):
            return None
    if not isinstance(x, Node) or not results:
        return None
    given = value(x)
    low = all(isinstance(t, Tensor) and t.dtype == torch.bfloat16 for t in (given, *map(value, results)))
    return _Site(x, results) if low and table_is_profitable(given.device.type, "", given.numel()) else None


def _looked_up(gm: GraphModule, site: _Site, form: str, mode: FakeTensorMode) -> Node:
    """Replace a custom function, its casts included, with the lookup."""
    with gm.graph.inserting_before(min(site.results)):
        made = gm.graph.call_function(lookup_table.activated, (site.x, form))
    made.meta = {k: v for k, v in site.results[0].meta.items() if k not in (CAST, IDENTITY)}
    set_identity(made, mode)
    for result in site.results:
        _erase(gm, result, made)
    return made


def _erase(gm: GraphModule, node: Node, instead: Node) -> None:
    """Erase ``node`` and what only it has read, up to what ``instead`` reads."""
    node.replace_all_uses_with(instead)
    while node is not instead.args[0] and not node.users:
        source = node.args[2] if is_custom_function(node) else node.args[0]
        gm.graph.erase_node(node)
        node = source  # type: ignore[assignment]


def form_of_function(gm: GraphModule, node: Node) -> str:
    """Return the key in ``by_table.FORMS`` of ``node``, an elementwise custom function; "" if it is none."""
    bodies = bodies_of(gm, node)
    if bodies is None:
        return ""
    for body in bodies:
        follow_grad_mode(body)
        adopt_values(body)
    ahead, back = map(_Body, bodies)
    dtype = ahead.dtype
    if not (_is_of_one_number(ahead, dtype) and _is_slope_times_gradient(back, dtype)):
        return ""
    told = hashlib.sha256(repr((str(dtype), ahead.signature(), back.signature())).encode()).hexdigest()
    name = f"custom {told[:16]}"
    if name not in FORMS:
        FORMS[name] = _form(*bodies, dtype == torch.bfloat16)
    return name


def _form(forward: GraphModule, backward: GraphModule, low: bool) -> Form:
    ahead: Callable[..., Any] = forward.forward
    back: Callable[..., Any] = backward.forward
    unread = (None,) * (len(backward.graph.find_nodes(op="placeholder")) - 2)

    def function(x: Tensor) -> Tensor:
        return _first(ahead(x)[0])

    def gradient(grad: Tensor, x: Tensor) -> Tensor:
        return _first(back(grad, *unread, x))

    if low:
        return Form(function, gradient, twice=True, rounds=True)
    return Form(
        lambda x: function(x.float()).to(x.dtype),
        lambda grad, x: gradient(grad.float(), x.float()).to(grad.dtype),
        twice=True,
    )


def _first(made: Any) -> Any:
    return made[0] if isinstance(made, (tuple, list)) and made else made


class _Body:
    """A body's operations, and their operands."""

    def __init__(self, gm: GraphModule) -> None:
        self.nodes = list(gm.graph.nodes)
        self.given = [n for n in self.nodes if n.op == "placeholder"]
        self.calls = [n for n in self.nodes if n not in self.given and n.op != "output"]
        self.returned: Any = gm.graph.output_node().args[0]
        self.mode = fake_mode_of(gm)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of a forward's computation."""
        found = [t.dtype for t in tensors(value(self.given[0]))] if self.given else []
        return found[0] if found else None

    def signature(self) -> list[tuple[str, ...]]:
        """Return what the body computes, independent of node names and of the addresses of functions."""
        places = {node: f"%{i}" for i, node in enumerate(self.nodes)}
        return [
            (n.op, _target(n), *(repr(map_arg(given, places.__getitem__)) for given in (n.args, n.kwargs)))
            for n in self.nodes
        ]

    def is_pointwise(self, x: Node, dtype: torch.dtype | None) -> bool:
        """Say whether every result is made elementwise from tensors like ``x``, which has ``dtype``."""
        like = value(x)
        return isinstance(like, Tensor) and like.dtype == dtype and all(self._is_like(n, like) for n in self.calls)

    def operations(self, node: Node) -> tuple[str, ...]:
        """Return the names of the operators that ``node`` calls; none if it runs no torch operation."""
        found = identify(node, self.mode) if self.mode is not None and is_tensor_call(node) else ""
        pure = isinstance(found, Identity) and all(_is_pure(o.op) for o in found.operations)
        return found.names if isinstance(found, Identity) and (pure or found.names in CONVERSIONS) else ()

    def _is_like(self, node: Node, like: Tensor) -> bool:
        made = value(node)
        return isinstance(made, Tensor) and str(made.shape) == str(like.shape) and bool(self.operations(node))


def _target(node: Node) -> str:
    """Return what a node calls, in words: torch's functions by name, others with their content as well."""
    target: Any = node.target
    if node.op != "call_function":
        return str(target) if node.op == "call_method" else ""
    if isinstance(target, OpOverload):
        return str(target)
    torchs = (getattr(target, "__module__", "") or "torch").partition(".")[0] in ("torch", "_operator", "math")
    return target.__name__ if torchs else f"{target.__qualname__} at {id(target)}"


def _is_pure(op: OpOverload) -> bool:
    pointwise = torch.Tag.pointwise in op.tags and torch.Tag.nondeterministic_seeded not in op.tags
    return pointwise and not op._schema.is_mutable


def _is_of_one_number(body: _Body, dtype: torch.dtype | None) -> bool:
    """Say whether a forward makes one tensor of ``dtype``, or a view of it, from the one that it saves."""
    if len(body.given) != 1 or not isinstance(body.returned, (tuple, list)) or len(body.returned) != 2:
        return False
    (x,), made, saved = body.given, _first(body.returned[0]), body.returned[1]
    made_of_x = isinstance(made, Node) and made in body.calls and value(made).dtype == dtype
    return made_of_x and isinstance(saved, (tuple, list)) and list(saved) == [x] and body.is_pointwise(x, dtype)


def _is_slope_times_gradient(body: _Body, dtype: torch.dtype | None) -> bool:
    """Say whether a backward is the product of the incoming gradient and a function of the saved tensor."""
    if len(body.given) < 2 or not body.is_pointwise(body.given[-1], dtype):
        return False
    (grad, *unread, _), made = body.given, _first(body.returned)
    alone = not isinstance(body.returned, (tuple, list)) or len(body.returned) == 1
    if not (alone and isinstance(made, Node) and set(grad.users) == {made}) or any(g.users for g in unread):
        return False
    factors = made.all_input_nodes
    of_low = all(value(n).dtype == dtype for n in (made, *factors))
    return len(factors) == 2 and of_low and body.operations(made) == ("aten.mul",)
