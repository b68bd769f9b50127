"""Give every operator floating-point operands of one dtype, as ONNX and other formats require.

Before: ``layer_norm(x_fp16, weight_fp32, bias_fp32)``, whose kernel computes in fp32 and rounds the result to fp16.
After: ``layer_norm(x_fp16 -> fp32, weight_fp32, bias_fp32) -> fp16``, which rounds as often.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass
from amp_graph.passes.casts.portable_ops import float_operands, put_cast
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.edit import give_value, recompute
from amp_graph.passes.graph.fake_values import fake_mode_of, tensors, value
from amp_graph.passes.graph.identify_ops import is_part, is_tensor_call
from amp_graph.passes.graph.meta_keys import CAST
from amp_graph.passes.torch_compat.dispatch import OpOverload
from amp_graph.passes.torch_compat.fake import FakeTensorMode


@dataclass(frozen=True)
class UniformOperands(Pass):
    """Casts operands of several floating-point dtypes to the widest, and the result to the dtype that it had.

    An operator that writes to an operand takes the others in the dtype of that one. Exactness: rounding-equal, as
    kernels that take mixed operands compute in the widest dtype themselves.
    """

    required: ClassVar[bool] = True

    def rewrite(self, gm: GraphModule) -> Iterator[Change]:
        """Visit every operator."""
        mode = fake_mode_of(gm)
        if mode is None:
            return
        work = _Widening(gm, mode, shares=not any(_is_mutable(n) for n in gm.graph.nodes))
        for node in list(gm.graph.nodes):
            if is_tensor_call(node) and isinstance(node.target, OpOverload):
                if len({t.dtype for t in float_operands(node)}) > 1:
                    work.widen(node)
        yield from work.changes


def _is_mutable(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node_info.is_mutable(node.target)


@dataclass
class _Widening:
    """The state of the walk; ``shares``: nothing is written, so readers may share a cast."""

    gm: GraphModule
    mode: FakeTensorMode
    shares: bool
    casts: dict[tuple[Node, torch.dtype], Node] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    def widen(self, node: Node) -> None:
        given = float_operands(node)
        if _is_mutable(node):
            kept = _written(node)
            dtype = value(kept).dtype
        else:
            kept, dtype = None, given[0].dtype
            for tensor in given[1:]:
                dtype = torch.promote_types(dtype, tensor.dtype)
        for source in node.all_input_nodes:
            val = value(source)
            if source is not kept and isinstance(val, torch.Tensor) and val.is_floating_point() and val.dtype != dtype:
                node.replace_input_with(source, self._cast(source, node, dtype))
        self.changes.append(Change("uniform-operands", f"operands in {dtype}", node.name, "had several dtypes"))
        if kept is None:
            self._restore(node)

    def _restore(self, node: Node) -> None:
        """Recompute the value of ``node`` and cast its results to the dtypes that they had."""
        before = recompute(node, self.mode)
        if isinstance(before, torch.Tensor):
            self._give_back(node, before)
            return
        for part in [user for user in node.users if is_part(user)]:
            old = value(part)
            give_value(part, value(node)[part.args[1]])
            if isinstance(old, torch.Tensor):
                self._give_back(part, old)

    def _give_back(self, node: Node, before: torch.Tensor) -> None:
        if value(node).dtype == before.dtype:
            return
        readers = list(node.users)
        cast = self._new_cast(node, node.next, before.dtype, f"{node.name} is computed in {value(node).dtype}")
        for reader in readers:
            reader.replace_input_with(node, cast)

    def _cast(self, source: Node, reader: Node, dtype: torch.dtype) -> Node:
        key = (source, dtype)
        if not self.shares or key not in self.casts:
            self.casts[key] = self._new_cast(source, reader, dtype, f"{reader.name} takes operands of one dtype")
        return self.casts[key]

    def _new_cast(self, source: Node, before: Node, dtype: torch.dtype, why: str) -> Node:
        cast = put_cast(before, source, dtype, self.mode)
        cast.meta[CAST] = why
        return cast


def _written(node: Node) -> Node:
    """Return the operand that ``node`` writes to: the first, or that of ``out=``."""
    out = node.kwargs.get("out")
    found = out if isinstance(out, Node) else node.args[0]
    if not isinstance(found, Node) or not tensors(value(found)):
        return node.all_input_nodes[0]
    return found
