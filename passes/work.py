"""How much an operation computes and moves, from the shapes of its operands; and what that takes on a machine.

Before: ``linear`` of [512, 768] by [768, 768]. After: 6.0e8 FLOP, 1.6e6 elements read and written, twice that in
backward: 9.9 ms in bfloat16 at 1.8e11 FLOP/s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from amp_graph.lists import OpClass
from amp_graph.passes.classify import Classification
from amp_graph.passes.facts import is_view
from amp_graph.passes.identify_ops import OPS, Identity
from amp_graph.passes.machine import COUNTED, Machine
from amp_graph.passes.node_value import captured, tensors
from amp_graph.passes.regions import is_trained
from amp_graph.passes.torch_private import concrete_size, numel, storage_key

PICOSECONDS = 1e12
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "lstm", "gru"})
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu", "mkldnn_rnn_layer"})
KEEPS_OUTPUT = frozenset(
    {"relu", "tanh", "sigmoid", "softmax", "_softmax", "log_softmax", "_log_softmax", "exp", "sqrt"}
)
KEEPS_NOTHING = frozenset({"add", "sub", "rsub", "sum", "mean", "neg", "where", "dropout"})
ACTIVATIONS = KEEPS_OUTPUT - {"relu"} | {
    "gelu", "silu", "elu", "selu", "celu", "mish", "hardswish", "softplus", "log_sigmoid", "glu", "erf", "log", "log1p",
    "sin", "cos", "pow", "rsqrt", "logsumexp", "cross_entropy_loss", "nll_loss", "expm1",
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What one node does.

    ``family``: the rate it goes by ("" for what takes no time, such as a view). ``flops``: of products, in forward.
    ``elements``: read and written in forward. ``backward``: backward's work as a multiple of that. ``keeps``: what it
    keeps for backward, "inputs", "output" or "".
    ``sums``: elements of the gradients that several readers' add up to.
    """

    family: str
    flops: int = 0
    elements: int = 0
    backward: float = 0.0
    keeps: str = ""
    sums: int = 0


def work_of(node: Node, kind: Classification, operands: Iterable[Node] | None = None) -> Work:
    """Return what ``node``, classified as ``kind``, does; ``operands`` are those that it was classified with."""
    if not tensors(captured(node)):
        return Work("")
    if _is_view(node, kind):
        return Work("", sums=_summed(node) + _placed(node) if is_trained(node) else 0)
    given = [t for s in node.all_input_nodes for t in tensors(captured(s)) if t.is_floating_point()]
    made = [t for t in tensors(captured(node)) if t.is_floating_point()]
    sums = _summed(node) if is_trained(node) else 0
    elements = sum(map(numel, given)) + sum(map(numel, made))
    family = _family(kind)
    if family in COUNTED:
        operands = node.all_input_nodes if operands is None else operands
        factors = sum(is_trained(s) for s in operands if s in kind.applies and _is_matrix(s))
        backward = float(factors) if is_trained(node) else 0.0
        return Work(family, _flops(kind, given, made), elements, backward, "inputs" if backward else "", sums)
    return Work(family, 0, elements, float(is_trained(node)), _keeps(kind) if is_trained(node) else "", sums)


def picoseconds(work: Work, machine: Machine, dtype: str) -> int:
    """Return what ``work`` takes on ``machine`` in ``dtype`` ("float32", ...), forward and backward."""
    summed = PICOSECONDS * work.sums * SIZES[dtype] / machine.rates["elementwise"][dtype]
    if not work.family:
        return round(summed)
    moved = work.elements * SIZES[dtype]
    if work.family in COUNTED:
        rates = machine.rates
        once = max(work.flops / rates[work.family][dtype], moved / rates["matvec"][dtype])
    else:
        once = moved / machine.rates[work.family][dtype]
    calls = 1 + math.ceil(work.backward)
    return round(PICOSECONDS * (once * (1 + work.backward) + machine.call * calls) + summed)


def cast_picoseconds(value: Node, machine: Machine, dtype: str, within: bool = False) -> int:
    """Return what one cast of ``value`` takes between float32 and ``dtype``, without that of its gradient.

    ``within``: an operation makes it as it promotes its operand, without a call of its own.
    """
    count = sum(map(numel, tensors(captured(value))))
    once = count * (4 + SIZES[dtype]) / machine.rates["cast"][dtype]
    return round(PICOSECONDS * (once if within else once + machine.call))


def kept_picoseconds(value: Node, machine: Machine, dtype: str) -> int:
    """Return what keeping ``value`` in ``dtype`` for backward takes."""
    return round(PICOSECONDS * sum(map(numel, tensors(captured(value)))) * SIZES[dtype] / machine.kept)


def _is_view(node: Node, kind: Classification) -> bool:
    """Say whether ``node`` only looks at memory that is there: it takes no time in either precision."""
    identity = node.meta.get(OPS)
    if isinstance(identity, Identity) and identity.operations and all(is_view(o.op) for o in identity.operations):
        return True
    made = {storage_key(t) for t in tensors(captured(node))}
    given = {storage_key(t) for s in node.all_input_nodes for t in tensors(captured(s))}
    return made <= given and None not in made and not kind.written


def _is_matrix(node: Node) -> bool:
    return any(t.dim() > 1 for t in tensors(captured(node)))


def _summed(node: Node) -> int:
    """Return the elements read and written to add up the gradients of several readers."""
    made = sum(map(numel, tensors(captured(node))))
    return 3 * made * max(0, len(node.users) - 1) if isinstance(captured(node), torch.Tensor) else 0


def _placed(node: Node) -> int:
    """Return the elements that backward of a view writes: zeros with the gradient in their midst, or a sum."""
    given = sum(numel(t) for s in node.all_input_nodes for t in tensors(captured(s)))
    made = sum(map(numel, tensors(captured(node))))
    parted = given != made or not isinstance(captured(node), torch.Tensor)
    return given + made if parted else 0


def _names(kind: Classification) -> tuple[str, ...]:
    return tuple(name.partition(".")[2].rstrip("_") for name in kind.names)


def _family(kind: Classification) -> str:
    names = _names(kind)
    if any("conv" in name for name in names):
        return "convolution"
    if "scaled_dot_product_attention" in names:
        return "attention"
    if kind.cls is OpClass.ALLOW or not PRODUCTS.isdisjoint(names):
        return "matmul"
    if any(name.endswith("_norm") for name in names):
        return "normalization"
    return "elementwise" if ACTIVATIONS.isdisjoint(names) else "activation"


def _keeps(kind: Classification) -> str:
    names = _names(kind)
    if (kind.cls is OpClass.NEUTRAL and "relu" not in names) or KEEPS_NOTHING.issuperset(names):
        return ""
    return "inputs" if KEEPS_OUTPUT.isdisjoint(names) else "output"


def _flops(kind: Classification, given: list[torch.Tensor], made: list[torch.Tensor]) -> int:
    """Return the floating-point operations of a product, two to a multiply-add."""
    names = _names(kind)
    if not given or not made:
        return 0
    if any("conv" in name for name in names):
        kernel = next((t for t in given[1:] if t.dim() >= 3), given[0])
        at = given[0] if any("transpose" in name for name in names) else made[0]
        return 2 * numel(at) * math.prod(concrete_size(s) for s in kernel.shape[1:])
    if "scaled_dot_product_attention" in names and len(given) > 1:
        return 4 * numel(given[0]) * concrete_size(given[1].shape[-2])
    if not RECURRENT.isdisjoint(names):
        steps = numel(given[0]) // concrete_size(given[0].shape[-1])
        return 2 * steps * sum(numel(t) for t in given[1:] if t.dim() == 2)
    return _product_flops(given, made[0])


def _product_flops(given: list[torch.Tensor], made: torch.Tensor) -> int:
    """Return the operations of a matrix product [m, k] by [k, n] from its sizes: mk, kn and mn multiply to (mnk)^2.

    Operands that share batches of matrices count each batch once too often.
    """
    factors = sorted((t for t in given if t.dim() > 1), key=numel, reverse=True)[:2]
    if len(factors) < 2:
        return 2 * max(map(numel, given))
    product = math.sqrt(math.prod(map(numel, factors)) * numel(made))
    if all(t.dim() > 2 for t in factors):
        product /= math.sqrt(math.prod(concrete_size(s) for s in made.shape[:-2]))
    return round(2 * product)
