"""Lower recurrent layers to single calls: compilers would unroll them step by step, and our backward is faster.

Before: ``torch.lstm(x, (h, c), weights, ...)``.
After: ``recurrent_whole("lstm", x, (h, c), weights, ...)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.backends.recurrent.lstm_functions import is_faster_than_onednn
from amp_graph.passes.backends.recurrent.rnn_functions import KINDS, recurrent_whole, rounds_its_state
from amp_graph.passes.base import Change
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import operations_of
from amp_graph.passes.graph.node_pass import NodePass
from amp_graph.passes.torch_compat.devices import cpu_has_amx
from amp_graph.passes.torch_compat.fake import FakeTensorMode, concrete_size, same

ATEN = {getattr(torch.ops.aten, kind).input: kind for kind in KINDS}
# Multiplications of a trained LSTM layer, all steps, from which on it outweighs the calls of our function; the second
# with AMX. Time over torch's: 1.4 up to 262,144 multiplications, 1.3 to 1.15 from 2 to 17 million, 1.1 at 34 million,
# 1.1 and 0.9 at 67 million (states of 128, 256).
LEAST_RECURRENT, LEAST_RECURRENT_BY_UNITS = 1 << 25, 1 << 23
NAMES = ("params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")


@dataclass(frozen=True)
class LowerRnn(NodePass):
    """Replaces ``torch.lstm``, ``gru``, ``rnn_tanh`` and ``rnn_relu`` with ``recurrent_whole``.

    Law: layers over padded batches; those over packed sequences stay. On every device. Exactness: bit-exact; gradients
    rounding-equal, with their sums in another order.
    """

    why: ClassVar[str] = "a compiler would unroll its steps"

    def visit(self, gm: GraphModule, node: Node, mode: FakeTensorMode) -> Change | None:
        """Replace a recurrent layer."""
        op = _recurrent(node)
        if op is None:
            return None
        given = node_info.schema_arguments(op, node.args, dict(node.kwargs))
        hidden: Any = given["hx"] if ATEN[op] == "lstm" else [given["hx"]]
        if not self.wants(node, ATEN[op], given["input"], hidden):
            return None
        node.target, node.kwargs = recurrent_whole, {}
        node.args = (ATEN[op], given["input"], hidden, *(given[name] for name in NAMES))
        return Change(self.name, "kept whole", node.name, self.why)

    def wants(self, node: Node, kind: str, x: Node, hidden: Sequence[Node]) -> bool:
        """Say whether this layer is to be replaced."""
        return True


@dataclass(frozen=True)
class LstmBackward(LowerRnn):
    """Replaces ``torch.lstm`` with ``recurrent_whole`` when it trains and this is profitable.

    Law: as for ``LowerRnn``. Exactness: rounding-different: the gates' sums, gates and cells are fp32, where oneDNN's
    kernel rounds more often; forward is bit-exact where only the backward is ours, with several threads or AMX.
    """

    why: ClassVar[str] = "it trains faster than with oneDNN, whose gradients go step by step"

    def wants(self, node: Node, kind: str, x: Node, hidden: Sequence[Node]) -> bool:
        """Say whether this is an LSTM in training that compiled C runs faster."""
        alike = all(same(value(h).shape, value(hidden[0]).shape) for h in hidden)
        if kind != "lstm" or not is_trained(node) or not alike:
            return False
        batch, size = (concrete_size(n) for n in value(hidden[0]).shape[-2:])
        *steps, width = (concrete_size(n) for n in value(x).shape)
        least = LEAST_RECURRENT_BY_UNITS if cpu_has_amx() else LEAST_RECURRENT
        if 4 * size * (width + size) * math.prod(steps) < least:
            return False
        return is_faster_than_onednn(value(x).device.type, value(x).dtype, batch, size)


@dataclass(frozen=True)
class GruState(LowerRnn):
    """Replaces ``torch.gru`` in low precision on the CPU with ``recurrent_whole``, which carries the state in fp32.

    Law: as for ``LowerRnn``. Exactness: more exact than torch's kernel, which rounds its state at each step, and than
    ``torch.autocast``, which rounds its gates. Part of every plan: without it a GRU would be less exact than those.
    """

    why: ClassVar[str] = "torch's kernel rounds the state at every step"

    def wants(self, node: Node, kind: str, x: Node, hidden: Sequence[Node]) -> bool:
        """Say whether this is a GRU in low precision on the CPU."""
        return rounds_its_state(kind, value(x))


@dataclass(frozen=True)
class CudnnRnn(LowerRnn):
    """Replaces recurrent layers on CUDA with ``recurrent_whole``, which gives cuDNN the weights as they are.

    Law: as for ``LowerRnn``. Exactness: bit-exact. At each call, ``torch.lstm`` checks whether the weights are parts of
    one flat buffer. Low-precision copies are not, so it warns, and it cannot be traced into a step.
    """

    why: ClassVar[str] = "at each call, torch checks for the weights in one flat buffer"

    def wants(self, node: Node, kind: str, x: Node, hidden: Sequence[Node]) -> bool:
        """Say whether this is a layer on CUDA."""
        return value(x).device.type == "cuda"


def _recurrent(node: Node) -> Any:
    """Return the operator of a recurrent layer over a padded batch; None for any other node."""
    operations = operations_of(node)
    if node.op != "call_function" or node.target is recurrent_whole or len(operations) != 1:
        return None
    return operations[0].op if operations[0].op in ATEN else None
