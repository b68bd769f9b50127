"""Find out which ATen operations a node calls, by tracing that node alone.

Before: ``x @ w``, ``F.linear(x, w)``, ``torch.ops.aten.mm(x, w)``. After: ``aten.matmul``, ``aten.linear``,
``aten.mm`` in ``node.meta["amp_ops"]``, with each operation's arguments traced back to the node's inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_flatten, tree_unflatten

from amp_graph.passes import facts
from amp_graph.passes.base import Change, Pass, PassResult, Skip
from amp_graph.passes.decompositions import DECOMPOSITIONS
from amp_graph.passes.node_value import argument_values, fake_mode_of, tensors, value
from amp_graph.passes.regions import TRANSFORM
from amp_graph.passes.torch_private import (
    FakeTensorMode,
    OpOverload,
    concrete_size,
    make_fx,
    tracing_fake,
)

OPS = "amp_ops"  # meta key


@dataclass(frozen=True)
class Operand:
    """An argument of an operation that is input number ``index`` of the traced node."""

    index: int


@dataclass(frozen=True)
class Inner:
    """An argument of an operation that was made inside the traced node."""

    dtype: torch.dtype | None
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Operation:
    """One ATen operation inside a node: the overload, and its arguments by schema name.

    An argument is an ``Operand`` (a tensor that the node was given), an ``Inner``, a tuple of them, or a
    plain value. ``floating`` is false where neither the inputs nor the outputs carry floats.
    """

    op: OpOverload
    arguments: dict[str, Any]
    floating: bool = True

    def operands(self, name: str) -> list[int]:
        """Return the input numbers of the node that reach the argument ``name``."""
        found = self.arguments.get(name)
        items = found if isinstance(found, (tuple, list)) else (found,)
        return [item.index for item in items if isinstance(item, Operand)]


@dataclass(frozen=True)
class Identity:
    """The operations of a node, in order; ``inputs`` are the tensor arguments that ``Operand`` counts."""

    operations: tuple[Operation, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The operations as ``aten.linear`` (packets, without repeats)."""
        return tuple(dict.fromkeys(str(o.op).rsplit(".", 1)[0] for o in self.operations))


@dataclass(frozen=True)
class IdentifyOps(Pass):
    """Marks each node with the ATen operations it calls. Changes no node. Exactness: bit-exact."""

    name: ClassVar[str] = "identify-ops"

    def run(self, gm: GraphModule) -> PassResult:
        """Fill ``node.meta["amp_ops"]``; a node that cannot be traced alone is skipped with the reason."""
        mode = fake_mode_of(gm)
        changes: list[Change] = []
        skips: list[Skip] = []
        for node in gm.graph.nodes:
            if mode is None or not is_tensor_call(node) or OPS in node.meta:
                continue
            identity = identify(node, mode)
            if isinstance(identity, Identity):
                node.meta[OPS] = identity
                changes.append(Change(self.name, "identified", node.name, ", ".join(identity.names)))
            else:
                skips.append(Skip(node.name, identity))
        return PassResult(gm, tuple(changes), tuple(skips))


def is_part(node: Node) -> bool:
    """Say whether ``node`` takes one part out of a multi-output node."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return False
    return isinstance(node.args[0], Node) and not isinstance(value(node.args[0]), torch.Tensor)


def is_tensor_call(node: Node) -> bool:
    """Say whether ``node`` computes on tensors through an ordinary function or method."""
    if node.op not in ("call_function", "call_method") or facts.is_higher_order(node) or is_part(node):
        return False
    if TRANSFORM in node.meta:  # its values live only while the transform runs
        return False
    return any(tensors(value(source)) for source in node.all_input_nodes) or bool(tensors(value(node)))


def names_of(node: Node) -> tuple[str, ...]:
    """Return the operations that ``node`` was identified as, without repeats; () where it was not."""
    identity = node.meta.get(OPS)
    return identity.names if isinstance(identity, Identity) else ()


def tensor_inputs(node: Node) -> list[Node]:
    """Return the nodes behind the node's tensor arguments, in the order that ``Operand.index`` counts.

    A tensor that is passed twice counts once: some functions ask whether two arguments are the same object.
    """
    flat, _ = tree_flatten((node.args, dict(node.kwargs)), is_leaf=lambda leaf: isinstance(leaf, Node))
    found = {id(t): leaf for leaf in flat if isinstance(leaf, Node) for t in tensors(value(leaf))}
    return list(found.values())


def traced_inputs(node: Node) -> list[Node]:
    """Return the nodes behind the placeholders of ``trace_node(..., symbolic=True)``, in order."""
    flat, _ = tree_flatten((node.args, dict(node.kwargs)), is_leaf=lambda leaf: isinstance(leaf, Node))
    found: dict[int, Node] = {}
    for leaf in flat:
        if isinstance(leaf, Node):
            given = [value(leaf)] if isinstance(value(leaf), torch.SymInt) else tensors(value(leaf))
            found.update((id(one), leaf) for one in given)
    return list(found.values())


def identify(node: Node, mode: FakeTensorMode, decompose: frozenset[OpOverload] = frozenset()) -> Identity | str:
    """Return the operations of ``node``, or the reason why they cannot be known.

    Nodes that call the same operations share one answer: integers among its arguments may be another node's.
    Operations in ``decompose`` are replaced by what they are written in terms of.
    """
    key = _key(node)
    if key is None:
        return _trace(node, mode, decompose)
    key = (key, decompose)
    if key not in _CACHE:
        if len(_CACHE) > 50_000:
            _CACHE.clear()
        _CACHE[key] = _trace(node, mode, decompose)
    return _CACHE[key]


def operation_of(node: Node, mode: FakeTensorMode) -> Operation | None:
    """Return the one operation of ``node`` with its own numbers, which those that ``identify`` shares may lack."""
    found = _trace(node, mode, frozenset())
    return found.operations[0] if isinstance(found, Identity) and len(found.operations) == 1 else None


_CACHE: dict[Any, Identity | str] = {}
LAYS_OUT = frozenset({"contiguous", "ravel"})
LAYOUTS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def _key(node: Node) -> Any:
    """Return what decides a node's operations: the target and its arguments, tensors by dtype and rank.

    Integers count by type only: sizes and dims do not decide which operation a call becomes, and a key with
    them would be new for each layer.
    """
    args, kwargs = argument_values(node)
    flat, spec = tree_flatten((args, kwargs))
    try:
        first = {id(leaf): i for i, leaf in reversed(list(enumerate(flat))) if isinstance(leaf, torch.Tensor)}
        same = tuple(first.get(id(leaf)) for leaf in flat)
        leaves = tuple(_leaf_key(leaf) for leaf in flat)
        told = (_whole_slices(args), _exponents(node, flat), _lying(node, flat))
        key = (node.op, node.target, str(spec), leaves, same, *told)
        hash(key)
    except TypeError:
        return None
    return key


def _exponents(node: Node, flat: Sequence[Any]) -> tuple[Any, ...]:
    """Return the numbers that a power is called with: lists tell small exponents from large ones."""
    name = getattr(node.target, "__name__", str(node.target))
    return tuple(leaf for leaf in flat if type(leaf) is int) if "pow" in name else ()


def _lying(node: Node, flat: Sequence[Any]) -> tuple[tuple[bool, ...], ...]:
    """Return how the operands lie of what is no operation at all where they lie as it wants them already."""
    if getattr(node.target, "__name__", str(node.target)) not in LAYS_OUT:
        return ()
    return tuple(_layouts(leaf) for leaf in flat if isinstance(leaf, torch.Tensor))


def _layouts(tensor: torch.Tensor) -> tuple[bool, ...]:
    """Say of each layout whether ``tensor`` has it, without a guard on symbolic sizes."""
    sizes, strides = (tuple(map(concrete_size, numbers)) for numbers in (tensor.shape, tensor.stride()))
    alike = torch.empty_strided(sizes, strides, device="meta")
    return tuple(alike.is_contiguous(memory_format=layout) for layout in LAYOUTS)


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return ("tensor", leaf.dtype, leaf.dim(), leaf.device.type)
    if isinstance(leaf, (bool, torch.SymBool)):
        return ("bool", leaf if isinstance(leaf, bool) else None)
    if isinstance(leaf, (int, torch.SymInt)):
        return ("int",)
    if isinstance(leaf, torch.SymFloat):
        return ("float",)
    if isinstance(leaf, slice):
        return ("slice", leaf.start is None, leaf.stop is None, leaf.step is None)
    return (type(leaf), leaf)


def _whole_slices(args: Sequence[Any]) -> tuple[bool | None, ...]:
    """Say which slices of ``x[index]`` take their whole dimension: torch makes no operation of those."""
    if len(args) != 2 or not isinstance(args[0], torch.Tensor):
        return ()
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not all(i is None or i is Ellipsis or type(i) in (int, slice) for i in index):
        return ()
    sizes = args[0].shape
    hidden = len(sizes) - sum(type(i) in (int, slice) for i in index)
    found: list[bool | None] = []
    dim = 0
    for i in index:
        if isinstance(i, slice) and dim < len(sizes):
            found.append(_is_whole(i, sizes[dim]))
        dim += hidden if i is Ellipsis else i is not None
    return tuple(found)


def _is_whole(part: slice, size: Any) -> bool | None:
    numbers = (size, part.start or 0, part.stop or 0, part.step or 1)
    return part.indices(size) == (0, size, 1) if all(type(n) is int for n in numbers) else None


def trace_node(
    node: Node,
    mode: FakeTensorMode,
    decompose: frozenset[OpOverload] = frozenset(),
    *,
    symbolic: bool = False,
) -> GraphModule:
    """Return the node's own small graph of ATen operations, one placeholder per tensor argument.

    Symbolic sizes are traced as numbers, in a fake mode of their own: which operations run does not depend
    on them, and tracing must not add guards to the user's sizes. ``symbolic`` keeps them, for a graph that is
    to run; a symbolic number is then an input as a tensor is.
    """
    args, kwargs = argument_values(node)
    flat, spec = tree_flatten((args, kwargs))
    if not symbolic and any(_is_symbolic(leaf) for leaf in flat):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        once = {id(leaf): _concrete(leaf, mode) for leaf in flat}
        flat = [once[id(leaf)] for leaf in flat]
    places: dict[int, list[int]] = {}
    for i, leaf in enumerate(flat):
        if isinstance(leaf, (torch.Tensor, torch.SymInt)):
            places.setdefault(id(leaf), []).append(i)

    def call(*given: torch.Tensor) -> Any:
        leaves = list(flat)
        for same, tensor in zip(places.values(), given, strict=True):
            for place in same:
                leaves[place] = tensor
        call_args, call_kwargs = tree_unflatten(leaves, spec)
        if node.op == "call_method":
            return getattr(call_args[0], str(node.target))(*call_args[1:], **call_kwargs)
        return node.target(*call_args, **call_kwargs)  # type: ignore[operator]

    table = {op: DECOMPOSITIONS.get(op, op.decompose) for op in decompose}
    with tracing_fake(mode, symbolic=symbolic):
        # Detached: an in-place operation on a leaf that requires a gradient is legal in the user's no_grad.
        given = [f.detach() if isinstance(f := flat[same[0]], torch.Tensor) else f for same in places.values()]
        return make_fx(call, pre_dispatch=True, decomposition_table=table)(*given)


def _is_symbolic(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in (*leaf.shape, *leaf.stride()))
    if isinstance(leaf, slice):
        return any(_is_symbolic(part) for part in (leaf.start, leaf.stop, leaf.step))
    return isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _concrete(leaf: Any, mode: FakeTensorMode) -> Any:
    """Return ``leaf`` with numbers for its symbolic sizes, in ``mode``."""
    if isinstance(leaf, torch.SymInt):
        return concrete_size(leaf)
    if isinstance(leaf, torch.SymFloat):
        return 1.0
    if isinstance(leaf, torch.SymBool):
        return True
    if isinstance(leaf, slice):
        return slice(*(_concrete(part, mode) for part in (leaf.start, leaf.stop, leaf.step)))
    if not isinstance(leaf, torch.Tensor):
        return leaf
    sizes = [concrete_size(size) for size in leaf.shape]
    strides = [concrete_size(stride) for stride in leaf.stride()]
    with mode:
        return torch.empty_strided(sizes, strides, dtype=leaf.dtype, device=leaf.device)


def _trace(node: Node, mode: FakeTensorMode, decompose: frozenset[OpOverload]) -> Identity | str:
    """Trace ``node``; the reason as text where the trace fails (data-dependent Python, foreign code)."""
    try:
        small = trace_node(node, mode, decompose)
    except Exception as error:  # any code may run inside a node: what it raises is the reason
        first = (str(error).splitlines() or [""])[0]
        return f"cannot be traced alone: {type(error).__name__}: {first}"
    return Identity(operations_of(small))


def operations_of(small: GraphModule) -> tuple[Operation, ...]:
    """Read the operations of a traced node."""
    placeholders = [n for n in small.graph.nodes if n.op == "placeholder"]
    order = {node: i for i, node in enumerate(placeholders)}

    def origin(leaf: Any) -> Any:
        return _operand(leaf, order)

    found = []
    for node in small.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            args: Any = map_aggregate(node.args, origin)
            kwargs: Any = map_aggregate(node.kwargs, origin)
            arguments = facts.schema_arguments(node.target, tuple(args), dict(kwargs))
            carried = [*tensors(node.meta.get("val"))]
            for source in node.all_input_nodes:
                carried += tensors(source.meta.get("val"))
            found.append(Operation(node.target, arguments, any(t.is_floating_point() for t in carried)))
    return tuple(found)


def _operand(leaf: Any, order: dict[Node, int]) -> Any:
    """Replace a placeholder, or what is only a view of one, by its ``Operand``."""
    if not isinstance(leaf, Node):
        return leaf
    root = leaf
    while root not in order and _is_same_memory(root):
        root = root.args[0]  # type: ignore[assignment]
    if root in order:
        return Operand(order[root])
    made = leaf.meta.get("val")
    return Inner(made.dtype) if isinstance(made, torch.Tensor) else Inner(None)


def _is_same_memory(node: Node) -> bool:
    """Say whether ``node`` is a view of, or the very, tensor that is its first argument."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return False
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.arguments) and schema.arguments[0].alias_info is not None
