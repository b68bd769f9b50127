"""Give every operator floating-point operands of one dtype, as ONNX and other formats require.

Before: ``layer_norm(x_fp16, weight_fp32, bias_fp32)``, whose kernel computes in fp32 and rounds the result to fp16.
After: ``layer_norm(x_fp16 -> fp32, weight_fp32, bias_fp32) -> fp16``, which rounds as often.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass
from amp_graph.passes.casts.portable_ops import float_operands, put_cast
from amp_graph.passes.graph.edit import give_value, recompute
from amp_graph.passes.graph.fake_values import fake_mode_of, value
from amp_graph.passes.graph.identify_ops import is_part, is_tensor_call
from amp_graph.passes.graph.meta_keys import CAST
from amp_graph.passes.graph.node_info import written_by_name
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
        """Visit every operator; readers share a cast where nothing is written."""
        mode, casts = fake_mode_of(gm), dict[tuple[Node, torch.dtype], Node]()
        nodes = [n for n in gm.graph.nodes if is_tensor_call(n) and isinstance(n.target, OpOverload)]
        shares = not any(map(written_by_name, nodes))
        for node in nodes:
            dtypes, written = {t.dtype for t in float_operands(node)}, written_by_name(node)
            if mode is None or len(dtypes) < 2:
                continue
            dtype = value(written[0]).dtype if written else reduce(torch.promote_types, dtypes)
            for source in node.all_input_nodes:
                val = value(source)
                if source in written or not isinstance(val, torch.Tensor):
                    continue
                if val.is_floating_point() and val.dtype != dtype:
                    if not shares or (source, dtype) not in casts:
                        casts[source, dtype] = put_cast(node, source, dtype, mode)
                        casts[source, dtype].meta[CAST] = f"{node.name} takes operands of one dtype"
                    node.replace_input_with(source, casts[source, dtype])
            if not written:
                _restore(node, mode)
            yield Change(self.name, f"operands in {dtype}", node.name, "had several dtypes")


def _restore(node: Node, mode: FakeTensorMode) -> None:
    """Recompute the value of ``node`` and cast its results to the dtypes that they had."""
    parts = {user: value(user) for user in node.users if is_part(user)}
    before = recompute(node, mode)
    for part in parts:
        give_value(part, value(node)[part.args[1]])
    for made, old in (parts or {node: before}).items():
        if isinstance(old, torch.Tensor) and value(made).dtype != old.dtype:
            readers = list(made.users)
            cast = put_cast(made.next, made, old.dtype, mode)
            cast.meta[CAST] = f"{made.name} is computed in {value(made).dtype}"
            for reader in readers:
                reader.replace_input_with(made, cast)
