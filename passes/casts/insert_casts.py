"""Carry out the plan: one cast per (value, dtype), placed so that the smaller copy lives longer. Reads no list.

Before: ``h = layer_norm(x); q = linear(h, wq); k = linear(h, wk)`` with marks. After: ``c = h.bfloat16()``
once, read by both linears; the cast of each weight comes just before its first use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, PassError
from amp_graph.passes.casts.saturation import is_added, out_of_range, within_range
from amp_graph.passes.casts.user_copies import keep_copy
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.aliasing import Memory, observe
from amp_graph.passes.graph.edit import OWN, place_like, set_value, take_over
from amp_graph.passes.graph.fake_values import (
    captured,
    cast_value,
    fake_mode_of,
    in_other_dtype,
    is_eligible,
    keep_trained,
    run_node,
    tensors,
    value,
)
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import is_part
from amp_graph.passes.graph.meta_keys import CAPTURED, CAST, CHECKPOINT, GRAD, MARK, TRANSFORM
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.precision.plan_precision import Mark, marks, refuse_mixed
from amp_graph.passes.precision.planning_problem import FULL, LOW
from amp_graph.passes.torch_compat.fake import FakeTensorMode

METHODS = {torch.bfloat16: "bfloat16", torch.float16: "half", torch.float32: "float"}


@dataclass(frozen=True)
class InsertCasts(Pass):
    """Inserts the casts that the marks ask for, and recomputes the values that change.

    Replaces a reader's input ``v`` with ``v.bfloat16()`` when its mark wants low precision and ``v`` is not
    (and with ``v.float()`` the other way round). Exactness: approximate, by the rounding of the low dtype,
    where the plan lowers a value; bit-exact where it does not.
    """

    options: PipelineOptions
    required: ClassVar[bool] = True

    @property
    def changes_outputs(self) -> bool:
        """Whether outputs keep the precision in which they are computed."""
        return not self.options.keep_outputs

    def rewrite(self, gm: GraphModule) -> Iterator[Change]:
        """Walk the graph once, in order: cast the inputs, then recompute the value."""
        mode = fake_mode_of(gm)
        if mode is None:
            return
        dtype, saturates = self.options.dtype, self.options.lists.unlisted == "opaque"  # torch.autocast never does
        large = out_of_range(gm, dtype) if saturates else set[Node]()
        work = _Insertion(gm, mode, dtype, observe(gm, marks(gm)), large)
        for node in list(gm.graph.nodes):
            if node.op == "output":
                if self.options.keep_outputs:
                    work.restore_outputs(node)
            elif node.op not in ("placeholder", "get_attr"):
                work.visit(node)
        yield from work.changes


@dataclass
class _Insertion:
    """The state of the walk: the casts inserted so far."""

    gm: GraphModule
    mode: FakeTensorMode
    dtype: torch.dtype
    memory: Memory
    large: set[Node]  # what may be outside the range of ``dtype``
    changes: list[Change] = field(default_factory=list)
    casts: dict[Any, Node] = field(default_factory=dict)
    # Full-precision values that replace low ones which are written later, in both directions: only they see the writes.
    stand_ins: dict[Node, Node] = field(default_factory=dict)
    stood_for: dict[Node, Node] = field(default_factory=dict)

    def visit(self, node: Node) -> None:
        if CAST in node.meta:
            return
        mark: Mark | None = node.meta.get(MARK)
        if mark is None:
            wants = {} if is_part(node) else dict.fromkeys(_eligible(node), FULL)
        else:
            wants = dict(mark.wants)
        for source, want in wants.items():
            self._give(node, self.stand_ins.get(source, source), self.dtype if want == LOW else torch.float32)
        self._saturate(node)
        targets = [self.stand_ins.get(n, n) for n in mark.written] if mark is not None else []
        if mark is not None and any(value(n).dtype == self.dtype for n in targets):
            for source in self.large.intersection(_eligible(node)) - mark.written:
                self._bound(source, node)
        if mark is not None and mark.asks_dtype and "dtype" not in node.kwargs:
            node.kwargs = {**node.kwargs, "dtype": torch.float32}
            self.changes.append(Change("insert-casts", "asks for fp32", node.name, mark.reason))
        self._recompute(node)
        if keep_copy(node, self.memory, self.mode):
            self.changes.append(
                Change("insert-casts", "kept a copy", node.name, "it, or its source, is written, or returned")
            )
        if mark is not None and mark.converts_result and value(node).dtype == self.dtype:
            if not all(CAST in user.meta for user in node.users):  # else this was done before
                self._convert_result(node)

    def _give(self, node: Node, source: Node, dtype: torch.dtype) -> None:
        """Make ``node`` read ``source`` in ``dtype``."""
        if source not in node.all_input_nodes or not is_eligible(captured(source)):
            return
        if value(source).dtype != dtype:
            node.replace_input_with(source, self._cast(source, node, dtype))

    def _cast(self, source: Node, reader: Node, dtype: torch.dtype) -> Node:
        """Return the cast of ``source`` for ``reader``; insert one only if no earlier cast can be shared.

        A downcast comes right after the value, an upcast right before its reader, so the smaller copy lives longer. A
        cast must not be shared across a write to the storage, nor from inside a no_grad region with a reader that
        needs gradients (autocast's cache did that: pytorch#158232).
        """
        kept = self.stood_for.get(source, source)
        leaf, written = source.op in ("placeholder", "get_attr"), self.memory.is_written(kept)
        late = (leaf or written or dtype != self.dtype) and TRANSFORM not in reader.meta
        if reader.op == "output" and is_trained(source) and not reader.meta.get(GRAD, True) and not (leaf or written):
            late = False  # inside no_grad, a cast before the output would cut off the gradient of this value
        before = self._before_no_grad(source, reader) if leaf else reader
        trains = before is not reader or reader.meta.get(GRAD, True)
        place = (trains, reader.meta.get(CHECKPOINT)) if late else None
        key = (source, dtype, self.memory.epoch(kept, reader), place)
        if key not in self.casts:
            self.casts[key] = self._new_cast(source, reader, dtype, before if late else None)
        return self.casts[key]

    def _before_no_grad(self, source: Node, reader: Node) -> Node:
        """Return the start of the no_grad region around ``reader`` if readers outside can share a cast there."""
        trained = captured(source).requires_grad and any(user.meta.get(GRAD, True) for user in source.users)
        place = reader
        while trained and not place.meta.get(GRAD, True):
            if place is source or CHECKPOINT in place.meta or self.memory.is_written(source):
                return reader
            place = place.prev
        return reader if place is reader else place.next

    def _new_cast(self, source: Node, reader: Node, dtype: torch.dtype, before: Node | None) -> Node:
        graph = self.gm.graph
        place = graph.inserting_after(source) if before is None else graph.inserting_before(before)
        with place:
            cast = graph.call_method(METHODS[dtype], (source,))
        new = cast_value(value(source), dtype, self.mode)
        keep_trained(new, captured(source))
        place_like(cast, source if before is None else reader, new, (CHECKPOINT,))
        cast.meta[CAPTURED] = captured(source)  # the value that the readers read before
        if before not in (None, reader):
            cast.meta[GRAD] = True
        mark: Mark | None = reader.meta.get(MARK)
        ops = ", ".join(mark.ops) if mark else str(reader.op)
        takes = "low" if dtype == self.dtype else "full"
        reason = f"{reader.name} ({ops or reader.op}) takes {takes} precision"
        cast.meta[CAST] = reason
        if dtype == self.dtype and source in self.large:
            others = (user for user in source.users if MARK in user.meta and user.meta[MARK].wants.get(source) == LOW)
            if any(is_added(source, user) for user in (reader, *others)):  # which share the cast
                self._bound(source, cast)
        self.changes.append(Change("insert-casts", f"cast to {str(dtype).removeprefix('torch.')}", source.name, reason))
        return cast

    def _bound(self, source: Node, reader: Node) -> None:
        """Clamp what ``reader`` reads from ``source`` to the range of the low dtype."""
        with self.gm.graph.inserting_before(reader):
            bounded = self.gm.graph.call_function(within_range, (source, self.dtype))
        reader.replace_input_with(source, take_over(bounded, reader, value(source), without=(*OWN, CAST)))
        self.changes.append(Change("insert-casts", "saturated a value", source.name, f"beyond {self.dtype}"))

    def _saturate(self, node: Node) -> None:
        """Clamp constants that were captured for fp32 to the range of a low-precision operand.

        The plan lowers such a node only if the constant masks a softmax, for which any very negative number works.
        """
        if not any(tensors(value(s)) and value(s).dtype == self.dtype for s in _eligible(node)):
            return
        limit = torch.finfo(self.dtype).max

        def clamp(constant: Any) -> Any:
            if not isinstance(constant, float) or node_info.fits(constant, self.dtype):
                return constant
            return math.copysign(limit, constant)

        args, kwargs = tuple(map(clamp, node.args)), {k: clamp(v) for k, v in node.kwargs.items()}
        if (args, kwargs) != (node.args, node.kwargs):
            node.args, node.kwargs = args, kwargs
            self.changes.append(Change("insert-casts", "saturated a constant", node.name, f"beyond {self.dtype}"))

    def _recompute(self, node: Node) -> None:
        """Recompute the value of ``node`` if an input changed; use full precision if its kernel rejects the inputs."""
        changed = any(_dtypes(value(s)) != _dtypes(captured(s)) for s in _sources(node))
        if not changed or not tensors(value(node)):
            return
        if is_part(node):
            whole, index = node.args
            set_value(node, value(whole)[index] if isinstance(whole, Node) else None)
            return
        try:
            refuse_mixed(node)
            known = in_other_dtype(node, self.mode)
            set_value(node, run_node(node, self.mode) if known is None else known)
        except Exception as refusal:  # any error that a kernel raises for operands of two precisions
            self._retreat(node, refusal)

    def _retreat(self, node: Node, refusal: Exception) -> None:
        first = (str(refusal).splitlines() or [""])[0]
        for source in _sources(node):
            origin = source.args[0] if CAST in source.meta and source not in self.stood_for else source
            if isinstance(origin, Node) and origin is not source:
                node.replace_input_with(source, origin)
                source = origin
            self._give(node, source, torch.float32)
        self.changes.append(Change("insert-casts", "kept full", node.name, f"refuses lower operands: {first}"))
        if all(_dtypes(value(s)) == _dtypes(captured(s)) for s in _sources(node)):
            set_value(node, captured(node))  # as captured: data-dependent operations may not run on fake tensors
            return
        try:
            set_value(node, run_node(node, self.mode))
        except Exception as error:
            what = f"insert-casts: {node.name} cannot run in full precision either: {error}"
            raise PassError(what + node_info.at_line(node)) from error

    def _convert_result(self, node: Node) -> None:
        readers = list(node.users)
        cast = self._new_cast(node, node, torch.float32, None)
        for reader in readers:
            reader.replace_input_with(node, cast)
        self.stand_ins[node], self.stood_for[cast] = cast, node
        cast.meta[CAST] = f"{node.name} is written in full precision later"

    def restore_outputs(self, output: Node) -> None:
        """Cast every output of the graph back to its captured dtype."""
        for source in list(output.all_input_nodes):
            if is_eligible(captured(source)) and isinstance(value(source), torch.Tensor):
                self._give(output, source, captured(source).dtype)


def _eligible(node: Node) -> list[Node]:
    return [s for s in node.all_input_nodes if is_eligible(captured(s))]


def _sources(node: Node) -> list[Node]:
    return [s for s in node.all_input_nodes if tensors(value(s))]


def _dtypes(val: Any) -> list[torch.dtype]:
    return [t.dtype for t in tensors(val)]
