"""Facts about operations, read from torch's schemas and tags, not from lists.

Before: ``if target in {torch.relu_, ...}``. After: ``is_mutable(op)``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from amp_graph.lists.path_pattern import matches
from amp_graph.passes.graph.meta_keys import MODULE
from amp_graph.passes.torch_compat.dispatch import HigherOrderOperator, OpOverload, dispatch_has_kernel

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Functions of Python's ``operator`` that write to their first argument if it is a tensor.
IN_PLACE = frozenset(
    ("setitem", "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")
)
HALVES = (torch.bfloat16, torch.float16)


def is_mutable(op: OpOverload) -> bool:
    """Say whether ``op`` writes to one of its arguments (in-place, ``out=``)."""
    return bool(op._schema.is_mutable)


def written_arguments(op: OpOverload) -> tuple[str, ...]:
    """Return the names of the arguments that ``op`` writes to."""
    return tuple(a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def returned_arguments(op: OpOverload) -> tuple[str, ...]:
    """Return the names of the arguments that the result of ``op`` may alias, by its schema: all, if it names none."""
    returned = {name for r in op._schema.returns if r.alias_info for name in r.alias_info.before_set}
    given = op._schema.arguments if returned else ()
    named = tuple(a.name for a in given if a.alias_info and returned & set(a.alias_info.before_set))
    return named or tuple(a.name for a in given)


def nodes_inside(argument: Any) -> list[Node]:
    """Return the nodes inside an argument of a node, once for each place."""
    found: list[Node] = []
    torch.fx.node.map_arg(argument, found.append)
    return found


def nodes_named(node: Node, op: OpOverload, names: Iterable[str]) -> list[Node]:
    """Return the nodes inside the arguments ``names`` of ``node``, a call of ``op``."""
    given = schema_arguments(op, node.args, dict(node.kwargs))
    return nodes_inside([given.get(name) for name in names])


def written_by_name(node: Node) -> list[Node]:
    """Return the inputs that a call writes to, judged by its name, for nodes that cannot be traced alone.

    Names in torch show it (``mul_``, ``setitem``, ``out=``, ``inplace=True``); a foreign function may write to all.
    """
    if node.op not in ("call_function", "call_method"):
        return []
    if isinstance(node.target, OpOverload):
        return nodes_named(node, node.target, written_arguments(node.target))
    name = getattr(node.target, "__name__", str(node.target))
    module = getattr(node.target, "__module__", None) or "torch"
    known = node.op == "call_method" or module.split(".")[0] in ("torch", "_operator", "builtins", "math")
    by_name = name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    first = node.args[:1] if by_name or node.kwargs.get("inplace") else ()
    return nodes_inside((node.kwargs.get("out"), first)) if known else node.all_input_nodes


def is_random(op: OpOverload) -> bool:
    """Say whether ``op`` draws from a seeded generator."""
    return torch.Tag.nondeterministic_seeded in op.tags


def draws(op: OpOverload, arguments: dict[str, Any]) -> bool:
    """Say whether a call of ``op`` draws random numbers.

    Attention without dropout does not, despite its tag; nor does dropout in eval mode, or with probability 0.
    """
    if op is torch.ops.aten.dropout.default:
        p = arguments["p"]
        return arguments["train"] is not False and not is_zero(p)
    return is_random(op) and not is_zero(arguments.get("dropout_p"))


def is_zero(argument: Any) -> bool:
    """Say whether an argument is known to be the number 0."""
    return isinstance(argument, (int, float)) and argument == 0


def autocast_has_rule(op: OpOverload, device: str) -> bool:
    """Say whether ``torch.autocast`` casts the operands of ``op`` on a device of type ``device``."""
    return dispatch_has_kernel(op, f"Autocast{device.upper()}")


def is_composite(op: OpOverload) -> bool:
    """Say whether ``op`` is CompositeImplicitAutograd: implemented by other operators."""
    return dispatch_has_kernel(op, "CompositeImplicitAutograd")


def cannot_run_again(op: OpOverload) -> bool:
    """Say whether ``op`` gives another shape on the same fake operands.

    That of ``nonzero`` depends on data, and ``unsqueeze_`` changes the metadata of its argument.
    """
    return torch.Tag.dynamic_output_shape in op.tags or torch.Tag.inplace_view in op.tags


def schema_arguments(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Map the schema's argument names of ``op`` to the values of a call, defaults filled in."""
    found: dict[str, Any] = {}
    for position, argument in enumerate(op._schema.arguments):
        if position < len(args) and not argument.kwarg_only:
            found[argument.name] = args[position]
        elif argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            found[argument.name] = argument.default_value
    return found


def is_higher_order(node: Node) -> bool:
    """Say whether ``node`` calls a higher-order operator (checkpoint, cond, scan, autograd.Function)."""
    return node.op == "call_function" and isinstance(node.target, HigherOrderOperator)


def calls_torch(node: Node) -> bool:
    """Say whether ``node`` calls a function of torch, or our replacement of one, with arguments in torch's order.

    False for other functions that Dynamo leaves untraced, whose argument order is unknown, and for reflected operators
    (``w.__rmatmul__(x)``), which swap their operands.
    """
    if node.op == "call_method":
        return not str(node.target).startswith("__r")
    module = getattr(node.target, "__module__", None) or "torch"  # builtins of torch's name none
    return node.op == "call_function" and module.partition(".")[0] in ("torch", "_operator", "operator", "amp_graph")


def fits(value: float, dtype: torch.dtype) -> bool:
    """Say whether ``value`` does not overflow in ``dtype``; True for inf and NaN."""
    return value != value or abs(value) == float("inf") or abs(value) <= torch.finfo(dtype).max


def source_line(node: Node) -> str:
    """Return the user's line that made ``node``: ``file.py:12, in forward: x = self.fc(x)``, or ""."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.strip().splitlines()]
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].startswith("File ") and ", in amp_graph_forward" not in lines[index]:
            code = lines[index + 1] if index + 1 < len(lines) else ""
            return f"{_short(lines[index])}: {code}" if code else _short(lines[index])
    return ""


def at_line(node: Node) -> str:
    """Return the last line of an error that is about ``node``: where the user made it; "" if that is not known."""
    where = source_line(node)
    return f"\n  at {where}" if where else ""


def _short(line: str) -> str:
    """``File "/a/b.py", line 3, in f`` -> ``/a/b.py:3, in f``."""
    parts = line[len("File ") :].split(", ")
    return f"{parts[0].strip(chr(34))}:{parts[1].removeprefix('line ')}" + "".join(f", {p}" for p in parts[2:])


def with_parents(path: str) -> list[str]:
    """Return a module path after those of its parents: ``a``, ``a.b``, ``a.b.c``."""
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def matches_path(pattern: str, path: str) -> bool:
    """Say whether a module path, or one of its parents, matches the whole expression."""
    return any(matches(pattern, parent) for parent in with_parents(path))


def module_path(node: Node) -> str:
    """Return the path of the innermost module that ``node`` was traced in, as the user writes it: ``layer.0.fc``."""
    if MODULE in node.meta:
        return str(node.meta[MODULE])
    stack = node.meta.get("nn_module_stack")
    return clean_path(str(list(stack.values())[-1][0])) if stack else ""


def clean_path(path: str) -> str:
    """Turn Dynamo's ``L['self'].encoder.layer[0]`` or ``L__self___fc`` into ``encoder.layer.0`` or ``fc``."""
    rest = re.sub(r"^[LG]\['[^']*'\]\.?", "", path).removeprefix("L__self___").removeprefix("self.")
    return re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", rest).strip(".")


def is_collective(node: Node) -> bool:
    """Say whether ``node`` starts a functional collective."""
    return str(node.target).startswith("_c10d_functional.") and "wait_tensor" not in str(node.target)


def is_view(op: OpOverload) -> bool:
    """Say whether ``op`` returns an alias of an argument without writing to it."""
    return not op._schema.is_mutable and any(r.alias_info is not None for r in op._schema.returns)
