"""The value of a node: its fake tensors, with their dtypes.

Before: ``node.meta["example_value"]`` (Dynamo) or ``node.meta["val"]`` (export). After: ``value(node)``.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map_only

from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.meta_keys import CAPTURED, IDENTITY
from amp_graph.passes.torch_compat.fake import (
    FakeTensor,
    FakeTensorMode,
    depends_on_data,
    empty_meta,
    fake_of,
    is_number,
    tracing_fake,
    unset_fake_temporarily,
    with_sizes_of,
)
from amp_graph.passes.torch_compat.storage import storage_key

_ATEN = torch.ops.aten
# Fake mode decomposes these into many operations, though the results are new tensors.
TAKEN_APART = frozenset(
    {F.batch_norm, torch.batch_norm, F.layer_norm, torch.layer_norm, F.linear, _ATEN.linear.default}
    | {torch.matmul, operator.matmul, _ATEN.matmul.default}
    | {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
    | {_ATEN.lstm.input, _ATEN.gru.input, _ATEN.rnn_tanh.input, _ATEN.rnn_relu.input}
    | {torch.einsum, _ATEN.einsum.default}
)


# Beside views and what torch tags as pointwise or as a reduction.
OF_ONE_DTYPE = frozenset(
    {_ATEN.linear.default, _ATEN.matmul.default, _ATEN.mm.default, _ATEN.bmm.default, _ATEN.addmm.default}
    | {_ATEN.layer_norm.default, _ATEN.softmax.int, _ATEN.log_softmax.int, _ATEN.embedding.default}
    | {_ATEN.lstm.input, _ATEN.gru.input, _ATEN.rnn_tanh.input, _ATEN.rnn_relu.input}
    | {_ATEN.cat.default, _ATEN.stack.default, _ATEN.masked_fill.Tensor, _ATEN.dropout.default}
)


def value(node: Node) -> Any:
    """Return the fake value of ``node``: a tensor, a (nested) tuple of them, a symbolic number, or None."""
    return node.meta.get("val")


def keep_trained(new: Any, old: Any) -> None:
    """Make the tensors of a new value require gradients if those of the old one did."""
    for fresh, known in zip(tensors(new), tensors(old), strict=False):
        if known.requires_grad and not fresh.requires_grad and fresh.is_floating_point():
            fresh.requires_grad_()


def captured(node: Node) -> Any:
    """Return the fake value ``node`` had when its graph was captured."""
    return node.meta.get(CAPTURED, value(node))


def adopt_values(gm: GraphModule) -> None:
    """Set ``val`` on every node of a newly captured graph, and record it as the captured value."""
    for node in gm.graph.nodes:
        if "val" not in node.meta and "example_value" in node.meta:
            node.meta["val"] = node.meta["example_value"]
        node.meta.setdefault(CAPTURED, node.meta.get("val"))


def tensors(val: Any) -> list[torch.Tensor]:
    """Return the tensors in a node's value, in order."""
    if isinstance(val, torch.Tensor):
        return [val]
    if isinstance(val, (tuple, list, dict)):
        return [leaf for leaf in tree_leaves(val) if isinstance(leaf, torch.Tensor)]
    return []


def has_symbols(gm: GraphModule) -> bool:
    """Say whether ``gm`` has symbolic sizes."""
    return any(type(size) is not int for node in gm.graph.nodes for t in tensors(value(node)) for size in t.shape)


def is_eligible(val: Any) -> bool:
    """Say whether a captured value may be lowered: one fp32 tensor.

    float64, integer, bool and complex values are never cast; half-precision ones come from the user.
    """
    return isinstance(val, torch.Tensor) and val.dtype == torch.float32


def has_eligible(node: Node) -> bool:
    """Say whether any tensor that ``node`` produced at capture may be lowered."""
    return any(is_eligible(t) for t in tensors(captured(node)))


def fake_mode_of(gm: GraphModule) -> FakeTensorMode | None:
    """Return the fake mode that the graph's values belong to; None for a graph without tensors."""
    every = (t for node in gm.graph.nodes for t in tensors(value(node)))
    return next((t.fake_mode for t in every if isinstance(t, FakeTensor)), None)


def run_node(node: Node, mode: FakeTensorMode) -> Any:
    """Compute the value of ``node`` from the current values of its inputs, on fake tensors.

    Raises the operation's error, so that a dtype mismatch shows before the graph is accepted. Data-dependent sizes stay
    those of the capture, as in the rest of the graph.
    """
    args, kwargs = argument_values(node)
    given = [value(source) for source in node.all_input_nodes]
    numbers = [*given, *(n for val in given for t in tensors(val) for n in t.shape)]
    # Empty tensors too: the fake of upsample_nearest2d rejects them, its Python decomposition does not (torch 2.13).
    symbolic = any(isinstance(n, torch.SymInt) or (type(n) is int and n == 0) for n in numbers)
    with tracing_fake(mode, symbolic=symbolic), torch.no_grad():
        made = call_node(node, args, kwargs) if node.op == "call_method" else fake_result(node.target, args, kwargs)
        return with_sizes_of(made, captured(node)) if symbolic or depends_on_data(captured(node)) else made


def in_other_dtype(node: Node, mode: FakeTensorMode) -> Any:
    """Return the captured value in the dtype that all inputs have now, if the node does no more than that.

    Its operations compute in the dtype of their operands, and all inputs have the sizes and strides of the capture: so
    has the result. A call on fake tensors finds the same in ten times the time.
    """
    old, operations = captured(node), node.meta.get(IDENTITY, ())
    given = [(value(source), captured(source)) for source in node.all_input_nodes]
    every = [*tensors(old), *(tensor for pair in given for tensor in pair)]
    if not operations or not all(map(_keeps_dtype, operations)) or not all(map(_is_plain, every)):
        return None
    if not all(isinstance(tensor, torch.Tensor) and not tensor.is_complex() for tensor in every):
        return None
    now = {new.dtype for new, was in given if was.is_floating_point()}
    as_captured = all((new.shape, new.stride()) == (was.shape, was.stride()) for new, was in given)
    shown = {storage_key(was): (new, was) for new, was in reversed(given)}
    is_view = any(node_info.is_view(operation.op) for operation in operations)
    if len(now) != 1 or not as_captured or "dtype" in node.kwargs:  # which a mark may have asked for
        return None
    if not all(is_eligible(part) and (storage_key(part) in shown or not is_view) for part in tensors(old)):
        return None
    (dtype,) = now

    def made(part: torch.Tensor) -> torch.Tensor:
        fresh = empty_meta(part, dtype)
        if storage_key(part) in shown:
            new, was = shown[storage_key(part)]
            place = new.storage_offset() + part.storage_offset() - was.storage_offset()
            fresh.set_(new.untyped_storage(), place, part.shape, part.stride())
        return fresh

    return tree_map_only(torch.Tensor, lambda part: fake_of(mode, part.device, lambda: made(part)), old)


def cast_value(val: torch.Tensor, dtype: torch.dtype, mode: FakeTensorMode) -> torch.Tensor:
    """Return the value of a cast of ``val``."""
    if _is_plain(val):
        return fake_of(mode, val.device, lambda: torch.empty_like(empty_meta(val, val.dtype), dtype=dtype))
    with tracing_fake(mode, symbolic=False), torch.no_grad():
        return torch.empty_like(val, dtype=dtype)


def _keeps_dtype(operation: Any) -> bool:
    """Say whether the result of an operation has the dtype of its floating-point operands, if these have one."""
    op = operation.op
    is_view = node_info.is_view(op) and op is not _ATEN.as_strided.default  # whose offset is that in the memory
    is_tagged = not node_info.is_composite(op) and any(tag.name in ("pointwise", "reduction") for tag in op.tags)
    known = is_view or is_tagged or op in OF_ONE_DTYPE
    return known and operation.arguments.get("dtype") is None and not op._schema.is_mutable


def call_node(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function or the method of ``node``."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def fake_result(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what ``function`` makes of fake tensors, under their mode."""
    if function in TAKEN_APART and all(map(_is_plain, tree_leaves((args, kwargs)))):
        return _on_meta(function, args, kwargs)
    return function(*args, **kwargs)


def _is_plain(leaf: Any) -> bool:
    """Say whether ``leaf`` is no tensor and no symbol, or a dense tensor of fixed sizes that has elements."""
    if not isinstance(leaf, torch.Tensor):
        return not isinstance(leaf, torch.SymInt)
    dense = leaf.layout == torch.strided and not leaf.is_nested
    return dense and all(type(n) is int and n for n in leaf.shape) and is_number(*leaf.stride())


class _Layout(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def _on_meta(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the result of ``target`` on the device of its first argument, inside a fake mode.

    A fake mode decomposes the operation and processes each of about twenty parts. The meta device does not: it gives
    the same sizes, strides, dtypes and errors in a fraction of the time, and once for equal layers.
    """
    first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    with unset_fake_temporarily():
        found = _result(target, _as_layouts(args), tuple((k, _as_layouts(v)) for k, v in kwargs.items()))
    return _made(found, first.device)


@functools.lru_cache(maxsize=1024)
def _result(target: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Any:
    return _as_layouts(target(*_made(args, "meta"), **{name: _made(a, "meta") for name, a in kwargs}))


def _as_layouts(val: Any) -> Any:
    """Replace tensors by their layouts, and lists by tuples."""
    if isinstance(val, (tuple, list)):
        return tuple(map(_as_layouts, val))
    return _Layout(val.shape, val.stride(), val.dtype) if isinstance(val, torch.Tensor) else val


def _made(val: Any, device: str | torch.device) -> Any:
    """Replace layouts by tensors."""
    if isinstance(val, _Layout):
        return torch.empty_strided(val.shape, val.stride, dtype=val.dtype, device=device)
    return tuple(_made(part, device) for part in val) if type(val) is tuple else val


def argument_values(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``node`` with every input node replaced by its value."""
    args = torch.fx.node.map_arg(node.args, value)
    kwargs = torch.fx.node.map_arg(node.kwargs, value)
    return tuple(args), dict(kwargs)
