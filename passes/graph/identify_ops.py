"""Find the ATen operations that a node calls, by calling that node alone on fake tensors.

Before: ``x @ w``, ``F.linear(x, w)``, ``torch.ops.aten.mm(x, w)``. After: ``aten.matmul``, ``aten.linear``,
``aten.mm`` in ``node.meta["amp_ops"]``, with each operation's arguments traced back to the node's inputs.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from amp_graph.lists.errors import Attempt
from amp_graph.passes.base import Change, Skip
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.fake_values import argument_values, call_node, fake_result, tensors, value
from amp_graph.passes.graph.meta_keys import IDENTITY, TRANSFORM
from amp_graph.passes.graph.node_pass import NodePass
from amp_graph.passes.graph.trace_node import DECOMPOSITIONS, argument_leaves
from amp_graph.passes.torch_compat.autograd import below_autograd
from amp_graph.passes.torch_compat.dispatch import OpOverload, TorchDispatchMode
from amp_graph.passes.torch_compat.fake import (
    SYMBOLIC,
    FakeTensorMode,
    concrete_number,
    concrete_size,
    depends_on_data,
    tracing_fake,
)


@dataclass(frozen=True)
class Operand:
    """An argument of an operation that is input number ``index`` of the traced node."""

    index: int


INNER = object()  # an argument of an operation that was computed inside the traced node


@dataclass(frozen=True)
class Operation:
    """One ATen operation inside a node: the overload, and its arguments by schema name.

    An argument is an ``Operand`` (an input tensor of the node), ``INNER``, a tuple of them, or a plain value.
    ``floating`` is False if neither inputs nor outputs are floating point.
    """

    op: OpOverload
    arguments: dict[str, Any]
    floating: bool = True

    @property
    def packet(self) -> str:
        """The operation without its overload: ``aten.linear``."""
        return str(self.op).rsplit(".", 1)[0]

    def operands(self, name: str) -> list[int]:
        """Return the input numbers of the node that reach the argument ``name``."""
        found = self.arguments.get(name)
        items = found if isinstance(found, (tuple, list)) else (found,)
        return [item.index for item in items if isinstance(item, Operand)]


Operations = tuple[Operation, ...]  # of a node, in order


@dataclass(frozen=True)
class IdentifyOps(NodePass):
    """Marks each node with the ATen operations it calls. Changes no node. Exactness: bit-exact."""

    required: ClassVar[bool] = True

    def visit(self, gm: GraphModule, node: Node, mode: FakeTensorMode) -> Change | Skip | None:
        """Fill ``node.meta["amp_ops"]``; a node that cannot be traced alone is skipped with the reason."""
        if not is_tensor_call(node) or IDENTITY in node.meta:
            return None
        operations = identify(node, mode)
        if isinstance(operations, str):
            return Skip(node.name, operations)
        node.meta[IDENTITY] = operations
        return Change(self.name, "identified", node.name, ", ".join(names_of(node)))


def is_part(node: Node) -> bool:
    """Say whether ``node`` takes one part out of a multi-output node."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return False
    return isinstance(node.args[0], Node) and not isinstance(value(node.args[0]), torch.Tensor)


def is_tensor_call(node: Node) -> bool:
    """Say whether ``node`` computes on tensors through an ordinary function or method."""
    if node.op not in ("call_function", "call_method") or node_info.is_higher_order(node) or is_part(node):
        return False
    if TRANSFORM in node.meta:  # its values live only while the transform runs
        return False
    return any(tensors(value(source)) for source in node.all_input_nodes) or bool(tensors(value(node)))


def operations_of(node: Node) -> Operations:
    """Return the operations of ``node``, in order; () if it was not identified, or calls none."""
    found: Operations = node.meta.get(IDENTITY, ())
    return found


def only_views(node: Node) -> bool:
    """Say whether ``node`` is known to consist of views only."""
    operations = operations_of(node)
    return bool(operations) and all(node_info.is_view(o.op) for o in operations)


def names_of(node: Node) -> tuple[str, ...]:
    """Return the names of the operations of ``node``, without repeats; () if it was not identified."""
    return packets(operations_of(node))


def packets(operations: Operations) -> tuple[str, ...]:
    """Return ``operations`` as ``aten.linear``, without overloads and repeats."""
    return tuple(dict.fromkeys(o.packet for o in operations))


def tensor_inputs(node: Node, *others: type) -> list[Node]:
    """Return the nodes of the tensor arguments, in the order of ``Operand.index``; and of arguments of ``others``.

    A tensor that is passed twice counts once: some functions check whether two arguments are the same object.
    """
    read = node_info.nodes_inside((node.args, node.kwargs))
    given = ((n, [value(n)] if others and isinstance(value(n), others) else tensors(value(n))) for n in read)
    return list({id(one): n for n, ones in given for one in ones}.values())


def identify(node: Node, mode: FakeTensorMode, decompose: frozenset[OpOverload] = frozenset()) -> Operations | str:
    """Return the operations of ``node``, or the reason why they are unknown.

    Nodes of equal calls, as in equal layers, share one identity. Operations in ``decompose`` are replaced by their
    decompositions.
    """
    key = _call_key(node)
    if key is None:
        return _trace(node, mode, decompose)
    key = (key, decompose)
    if key not in _CACHE:
        if len(_CACHE) > 50_000:
            _CACHE.clear()
        _CACHE[key] = _trace(node, mode, decompose)
    return _CACHE[key]


def _call_key(node: Node) -> Any:
    """Return a key of all that decides the operations of ``node``: its target and arguments, tensors by their layout.

    None: an argument has no hash. Two arguments that are one tensor are another call than two tensors.
    """
    flat, spec = tree_flatten(argument_values(node))
    first = {id(leaf): i for i, leaf in reversed(list(enumerate(flat))) if isinstance(leaf, torch.Tensor)}
    key = (node.op, node.target, str(spec), tuple(map(_leaf_key, flat)), tuple(first.get(id(leaf)) for leaf in flat))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _leaf_key(leaf: Any) -> Any:
    """Return an argument's part of a key: symbolic sizes as the numbers with which the node is called."""
    if isinstance(leaf, torch.Tensor):
        strides = leaf.stride() if leaf.layout is torch.strided else ()
        sizes = (tuple(map(concrete_size, numbers)) for numbers in (leaf.shape, strides))
        return ("tensor", leaf.dtype, leaf.layout, leaf.device.type, *sizes)
    if isinstance(leaf, SYMBOLIC):
        return (type(leaf), concrete_number(leaf))
    if isinstance(leaf, slice):
        return ("slice", *map(_leaf_key, (leaf.start, leaf.stop, leaf.step)))
    return (type(leaf), leaf)


def taken_apart(
    node: Node,
    mode: FakeTensorMode,
    further: Callable[[Operation], bool],
    apart: frozenset[OpOverload] = frozenset(),
) -> tuple[Operations | str, frozenset[OpOverload]]:
    """Identify ``node`` with all operations decomposed for which ``further`` holds; return these operations, too.

    ``apart``: those that are decomposed in any case.
    """
    while True:
        found = identify(node, mode, apart)
        more = () if isinstance(found, str) else {o.op for o in found if o.op not in apart and further(o)}
        if not more:
            return found, apart
        apart |= frozenset(more)


def arguments_of(node: Node) -> dict[str, Any] | None:
    """Return the arguments of the one operation of ``node`` by name, with the nodes that it reads.

    However it is called: ``F.interpolate(x, size=3, mode="area")`` is an ``adaptive_avg_pool2d`` of ``output_size`` 3.
    None: it has several operations, one of its arguments is computed inside or a symbol, or a pass has changed what it
    reads since it was identified.
    """
    operations, inputs = operations_of(node), tensor_inputs(node)
    given = operations[0].arguments if len(operations) == 1 else {}
    leaves = tree_leaves(list(given.values()))
    read = {leaf.index for leaf in leaves if isinstance(leaf, Operand)}
    is_symbolic = any(isinstance(value(source), SYMBOLIC) for source in node.all_input_nodes)
    if not given or read != set(range(len(inputs))) or INNER in leaves or is_symbolic:
        return None
    of = lambda leaf: inputs[leaf.index] if isinstance(leaf, Operand) else leaf  # noqa: E731
    return {name: map_aggregate(argument, of) for name, argument in given.items()}


_CACHE: dict[Any, Operations | str] = {}
ABOUT_TENSORS = ("prim::", "aten::sym_")  # ask for a device or a size: no list speaks of them


def _trace(node: Node, mode: FakeTensorMode, decompose: frozenset[OpOverload]) -> Operations | str:
    """Call ``node``; return the reason as text if that fails (data-dependent Python, foreign code)."""
    with Attempt() as tried:  # a node may run any code: its error is the reason
        return _operations(node, mode, decompose, symbolic=False)
    reason = f"cannot be traced alone: {tried.reason}"
    if not any(depends_on_data(value(source)) for source in node.all_input_nodes):
        return reason
    with Attempt():  # concrete numbers for data-dependent sizes may not match each other
        return _operations(node, mode, decompose, symbolic=True)
    return reason


def _operations(node: Node, mode: FakeTensorMode, decompose: frozenset[OpOverload], *, symbolic: bool) -> Operations:
    """Call ``node`` on its fake tensors and return the operations that it calls."""
    flat, spec, used = argument_leaves(node, mode, symbolic=symbolic)
    # Code in Python calls any number of operations, which may fail, and tell of it, on another's result.
    is_known = used is mode and not (decompose or inspect.isfunction(node.target)) and bool(tensors(value(node)))
    with tracing_fake(used, symbolic=symbolic):
        once = {id(leaf): leaf for leaf in flat}
        if decompose or _may_change_sizes(node):  # the graph's values keep theirs; parts are fewer without gradients
            once = {i: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for i, leaf in once.items()}
        given = tree_unflatten([once[id(leaf)] for leaf in flat], spec)
        inputs = [one for one in once.values() if isinstance(one, torch.Tensor)]
        for known in (value(node), None) if is_known else (None,):
            recorder = _Recorder(inputs, decompose, known)
            with Attempt() as tried, below_autograd(), recorder:
                call_node(node, *given)
            if not recorder.assumes or (tried.error is None and len(recorder.operations) == 1):
                break
    if tried.error is not None:
        raise tried.error
    return tuple(recorder.operations)


def _may_change_sizes(node: Node) -> bool:
    """Say whether ``node`` may change the sizes of an argument, as ``t_`` or ``resize_`` does, or code of a user."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "_")
    home = getattr(node.target, "__module__", None) or "torch"
    return name.endswith("_") or (node.op == "call_function" and home.split(".")[0] not in ("torch", "_operator"))


class _Recorder(TorchDispatchMode):
    """Notes each operation, with each argument as an ``Operand`` if it is one of ``inputs``, or a view of one.

    ``known``: the result of the first operation if it is the only one, and needs no run. ``assumes``: whether it was
    returned; what is noted behind it is not valid.
    """

    def __init__(self, inputs: list[torch.Tensor], decompose: frozenset[OpOverload], known: Any) -> None:
        super().__init__()
        self._known, self.assumes = known, False
        self.operations: list[Operation] = []
        self._origin = {id(tensor): Operand(i) for i, tensor in enumerate(inputs)}
        self._alive: list[Any] = [inputs]  # an id stays that of one tensor
        self._decompositions = {op: DECOMPOSITIONS.get(op, op.decompose) for op in decompose}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` and note it, or what it is decomposed into."""
        kwargs = kwargs or {}
        if func in self._decompositions:
            with self:
                result = self._decompositions[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        given: Any = map_aggregate(args, self._operand)
        named: Any = map_aggregate(kwargs, self._operand)
        known, self._known = self._known, None
        if known is not None and not func._schema.is_mutable and _may_return(func, known):
            result, self.assumes = known, True
        else:
            result = fake_result(func, args, kwargs)
        self._alive += [args, kwargs, result]
        made = tensors(result)
        if func._schema.name.startswith(ABOUT_TENSORS):
            return result
        first = func._schema.arguments[0].alias_info if args and func._schema.arguments else None
        if isinstance(result, torch.Tensor) and first is not None and id(args[0]) in self._origin:
            self._origin[id(result)] = self._origin[id(args[0])]  # it returns its first argument, or a view of it
        # A function that makes a tensor, as arange does, detaches it inside.
        if func is not torch.ops.aten.detach.default or isinstance(given[0], Operand):
            carried = made + tensors([*args, *kwargs.values()])
            arguments = node_info.schema_arguments(func, given, named)
            self.operations.append(Operation(func, arguments, any(t.is_floating_point() for t in carried)))
        return result

    def _operand(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._origin.get(id(leaf), INNER)
        return INNER if isinstance(leaf, torch.SymInt) else leaf


def _may_return(func: OpOverload, val: Any) -> bool:
    """Say whether ``val`` has the structure of the results of ``func``."""
    kinds = [str(one.type) for one in func._schema.returns]
    if isinstance(val, torch.Tensor):
        return kinds == ["Tensor"]
    return isinstance(val, (tuple, list)) and kinds in (["List[Tensor]"], ["Tensor"] * len(val))
