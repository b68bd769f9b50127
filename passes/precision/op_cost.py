"""Cost model of one operation: FLOPs and elements moved, from its shapes, and the time that they take on a machine.

Before: ``linear`` of [512, 768] by [768, 768]. After: 6.0e8 FLOP, 1.6e6 elements read and written, twice that in
backward: 9.9 ms in bfloat16 at 1.8e11 FLOP/s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from amp_graph.lists import OpClass
from amp_graph.passes.graph.fake_values import captured, tensors
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import only_views
from amp_graph.passes.native.gemm_thresholds import panels_are_profitable, small_linear_is_profitable
from amp_graph.passes.native.kernel_table import is_available
from amp_graph.passes.precision.classify import Classification
from amp_graph.passes.precision.machine_rates import (
    ACTIVATIONS,
    BY_LIBRARY,
    COUNTED,
    PRODUCTS,
    SIZES,
    Machine,
)
from amp_graph.passes.torch_compat.fake import concrete_size, numel
from amp_graph.passes.torch_compat.storage import storage_key

PICOSECONDS = 1e12
CALLS_OF_A_STEP = 5  # kernels per step of a recurrent layer
OWN_CALL_THAT_TRAINS = 8e-6  # seconds of overhead per matmul of an autograd.Function
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu", "mkldnn_rnn_layer"})
KEEPS_OUTPUT = frozenset(
    {"relu", "tanh", "sigmoid", "softmax", "_softmax", "log_softmax", "_log_softmax", "exp", "sqrt"}
)
KEEPS_NOTHING = frozenset({"add", "sub", "rsub", "sum", "mean", "neg", "where", "dropout"})


@dataclass(frozen=True)
class Work:
    """The work of one node.

    ``family``: which rate applies ("" for nodes that take no time, such as views). ``flops``: FLOPs of matmuls and
    convolutions in forward. ``elements``: elements read and written in forward. ``backward``: the work of backward as
    a multiple of forward. ``keeps``: what is saved for backward, "inputs", "output" or "".
    ``sums``: elements read and written to sum the gradients of several readers. ``calls``: kernels that run one after
    the other in forward. ``sizes``: rows, outputs and inputs of a linear.
    """

    family: str
    flops: int = 0
    elements: int = 0
    backward: float = 0.0
    keeps: str = ""
    sums: int = 0
    calls: int = 1
    sizes: tuple[int, int, int] | None = None


def work_of(node: Node, kind: Classification) -> Work:
    """Return the work of ``node``, classified as ``kind``."""
    if not tensors(captured(node)):
        return Work("")
    if _is_view(node, kind):
        return Work("", sums=_summed(node) + _placed(node) if is_trained(node) else 0)
    given, made = floats(*node.all_input_nodes), floats(node)
    sums = _summed(node) if is_trained(node) else 0
    elements = sum(map(numel, given)) + sum(map(numel, made))
    family = _family(kind)
    if family in COUNTED:
        matrices = [s for s in node.all_input_nodes if any(t.dim() > 1 for t in tensors(captured(s)))]
        factors = sum(is_trained(s) for s in matrices if s in kind.applies)
        backward = float(factors) if is_trained(node) else 0.0
        keeps, calls = "inputs" if backward else "", _calls(kind, given)
        return Work(family, _flops(kind, given, made), elements, backward, keeps, sums, calls, _sizes(kind, node))
    return Work(family, 0, elements, float(is_trained(node)), _keeps(kind) if is_trained(node) else "", sums)


def forward_flops(node: Node, cls: OpClass, ops: tuple[str, ...]) -> int:
    """Return the forward FLOPs of the matmuls in ``node``, which calls ``ops`` of class ``cls``.

    A multiply-add counts as two. Returns 0 for an operation without matmul, convolution or attention.
    """
    kind = Classification(cls, "", "", ops)
    return _flops(kind, floats(*node.all_input_nodes), floats(node)) if _family(kind) in COUNTED else 0


def floats(*nodes: Node) -> list[torch.Tensor]:
    """Return the floating-point tensors that ``nodes`` had at capture."""
    return [t for node in nodes for t in tensors(captured(node)) if t.is_floating_point()]


def picoseconds(work: Work, machine: Machine, dtype: str) -> int:
    """Return the time of ``work`` on ``machine`` in ``dtype`` ("float32", ...), forward and backward."""
    backward = 0.0 if machine.keeps_weights else work.backward
    summed = PICOSECONDS * work.sums * SIZES[dtype] / machine.rates["elementwise"][dtype]
    if not work.family:
        return round(summed)
    moved, call = work.elements * SIZES[dtype], machine.call
    if work.family in COUNTED:
        ours = dtype == "bfloat16" and machine.device == "cpu" and _runs_our_kernel(work, machine.keeps_weights)
        # Packed weights, and weights that one of our kernels packs only as far as needed, are read in their layout.
        read = machine.rates["matvec"]["float32" if ours or machine.keeps_weights else dtype]
        once = max(work.flops / machine.rates[work.family][dtype], moved / read)
        if ours:
            call += OWN_CALL_THAT_TRAINS if backward else 0.0
        elif work.family in BY_LIBRARY and work.calls == 1:
            call += machine.product_call[dtype]
    else:
        once = moved / machine.rates[work.family][dtype]
    calls = work.calls * (1 + math.ceil(backward))
    return round(PICOSECONDS * (once * (1 + backward) + call * calls) + summed)


def _runs_our_kernel(work: Work, keeps_weights: bool) -> bool:
    """Say whether one of our C kernels runs a linear whose weight is trained or kept packed."""
    if work.sizes is None:
        return False
    profitable = panels_are_profitable if keeps_weights else small_linear_is_profitable
    return (
        (keeps_weights or work.backward > 0)
        and profitable("cpu", torch.bfloat16, *work.sizes)
        and is_available("panel_gemm")
    )


def cast_picoseconds(value: Node, machine: Machine, dtype: str, within: bool = False) -> int:
    """Return the time of one cast of ``value`` between float32 and ``dtype``, without the cast of its gradient.

    ``within``: an operation casts the operand as it promotes it, without a call. 0 for a parameter with a cached
    low-precision copy.
    """
    if machine.keeps_weights and isinstance(captured(value), torch.nn.Parameter):
        return 0
    count = sum(map(numel, tensors(captured(value))))
    once = count * (4 + SIZES[dtype]) / machine.rates["cast"][dtype]
    return round(PICOSECONDS * (once if within else once + machine.call))


def kept_picoseconds(value: Node, machine: Machine, dtype: str) -> int:
    """Return the time cost of saving ``value`` in ``dtype`` for backward."""
    return round(PICOSECONDS * sum(map(numel, tensors(captured(value)))) * SIZES[dtype] / machine.kept)


def _is_view(node: Node, kind: Classification) -> bool:
    """Say whether ``node`` is a view: it takes no time in either precision."""
    if only_views(node):
        return True
    made = {storage_key(t) for t in tensors(captured(node))}
    given = {storage_key(t) for s in node.all_input_nodes for t in tensors(captured(s))}
    return made <= given and None not in made and not kind.written


def _summed(node: Node) -> int:
    """Return the elements read and written to add up the gradients of several readers."""
    made = sum(map(numel, tensors(captured(node))))
    return 3 * made * max(0, len(node.users) - 1) if isinstance(captured(node), torch.Tensor) else 0


def _placed(node: Node) -> int:
    """Return the elements that backward of a view reads and writes: the gradient padded with zeros, or a sum."""
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
    if "scaled_dot_product_attention" in names and "linear" not in names:
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
    """Return the forward FLOPs of a matmul, convolution or attention; a multiply-add counts as two."""
    names = _names(kind)
    if not given or not made:
        return 0
    if any("conv" in name for name in names):
        kernel = next((t for t in given[1:] if t.dim() >= 3), given[0])
        at = given[0] if any("transpose" in name for name in names) else made[0]
        return 2 * numel(at) * math.prod(concrete_size(s) for s in kernel.shape[1:])
    projects = "linear" in names and len(names) > 1  # attention with its projections, which dominate
    if projects or not RECURRENT.isdisjoint(names):
        return 2 * _rows(given[0]) * sum(numel(t) for t in given[1:] if t.dim() == 2)
    if "scaled_dot_product_attention" in names and len(given) > 1:
        return 4 * numel(given[0]) * concrete_size(given[1].shape[-2])
    return _product_flops(given, made[0])


def _calls(kind: Classification, given: list[torch.Tensor]) -> int:
    """Return how many kernels run one after the other: a few per step of a recurrent layer, else one."""
    if "linear" in _names(kind):
        return len(_names(kind))
    if RECURRENT.isdisjoint(_names(kind)) or len(given) < 2 or given[0].dim() < 3:
        return 1
    batch = concrete_size(given[1].shape[-2])
    return max(1, CALLS_OF_A_STEP * _rows(given[0]) // max(1, batch))


def _rows(tensor: torch.Tensor) -> int:
    return math.prod(map(concrete_size, tensor.shape[:-1]))


def _sizes(kind: Classification, node: Node) -> tuple[int, int, int] | None:
    """Return rows, outputs and inputs of a linear; None for other operations and symbolic sizes."""
    weight = captured(node.args[1]) if len(node.args) > 1 and isinstance(node.args[1], Node) else None
    made = captured(node)
    if _names(kind) != ("linear",) or not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return None
    if any(type(size) is not int for size in (*weight.shape, *made.shape)):
        return None
    outputs, inputs = weight.shape
    return made.numel() // max(1, outputs), outputs, inputs


def _product_flops(given: list[torch.Tensor], made: torch.Tensor) -> int:
    """Return the FLOPs of a matmul [m, k] by [k, n] from its sizes: the product of mk, kn and mn is (mnk)^2.

    Operands that share a batch size count each batch once too often, which is corrected here.
    """
    factors = sorted((t for t in given if t.dim() > 1), key=numel, reverse=True)[:2]
    if len(factors) < 2:
        return 2 * max(map(numel, given))
    if not numel(made):
        return 0
    product = math.sqrt(math.prod(map(numel, factors)) * numel(made))
    if len(made.shape) == 2 and sorted(t.dim() for t in factors) == [2, 3]:  # grouped: each row has its weight
        product /= math.sqrt(next(concrete_size(t.shape[0]) for t in factors if t.dim() == 3))
    if all(t.dim() > 2 for t in factors):
        product /= math.sqrt(math.prod(concrete_size(s) for s in made.shape[:-2]))
    return round(2 * product)
