"""Find values that must not be rounded because of what reads them, at any accuracy.

Before: ``f = cat((angles, angles), -1); f.cos()``, whose ``cat`` is harmless by itself. After: ``cat`` and what leads
to it have the precision that ``torch.autocast`` gives them, since a rounded angle is another angle.

A rounding is relative to the value. An operation whose relative condition number is small hands it on as it is
(N. Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 1.6); any other may magnify it without bound.
What lies between a value and such a reader hands on what it gets, so the rule holds for all that leads to it, up to
values that ``torch.autocast`` rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from torch.fx import Node

from amp_graph.lists import OpClass
from amp_graph.lists.schema import functional_packet
from amp_graph.passes.graph.fake_values import captured, is_eligible, tensors
from amp_graph.passes.graph.identify_ops import is_part
from amp_graph.passes.precision.classify import Classification
from amp_graph.passes.precision.planning_problem import FREE, Problem


def _packets(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


# A relative error of an operand becomes one of about its size in the result and in the gradients, whatever the operand.
WELL_CONDITIONED = _packets("""
    mul multiply div divide true_divide outer ger kron ldexp copysign where hypot square sqrt rsqrt reciprocal
    relu abs neg leaky_relu prelu _prelu_kernel rrelu rrelu_with_noise dropout feature_dropout native_dropout
    layer_norm native_layer_norm group_norm native_group_norm instance_norm rms_norm batch_norm native_batch_norm
    _native_batch_norm_legit _native_batch_norm_legit_functional _batch_norm_with_update _batch_norm_impl_index
    cudnn_batch_norm norm linalg_norm linalg_vector_norm frobenius_norm
    gather index_select index _unsafe_index take take_along_dim masked_select repeat_interleave embedding
    unfold im2col unfold_copy pad reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
    replication_pad2d replication_pad3d _pad_circular _pad_enum
    """)
SMALL_POWERS = (0.5, 1, 2, 3, 4)
# The error of the result is at most that of the operands, but the result or its gradient may be much smaller: terms
# that cancel, the flat end of an activation. Where the result has an error of autocast's already, one more is harmless.
BOUNDED_ERROR = _packets("""
    add addcmul addcdiv sum nansum mean nanmean sum_to_size trace avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d index_add scatter_add col2im
    embedding_bag _embedding_bag _embedding_bag_forward_only upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_linear1d upsample_bilinear2d upsample_trilinear3d
    gelu silu mish sigmoid special_expit tanh elu celu selu glu hardswish hardsigmoid hardtanh relu6
    clamp clamp_min clamp_max clip threshold hardshrink softshrink mse_loss l1_loss smooth_l1_loss huber_loss
    """)
COUNTERS = _packets("arange linspace logspace range")
ANGLES = _packets("sin cos tan exp exp2 polar sincos")
SOFTMAX = _packets("softmax _softmax special_softmax _safe_softmax log_softmax _log_softmax special_log_softmax")
POSITIONS = "comes from integer positions and feeds sin/cos/exp: in low precision, different positions become equal"


def kept_as_in_autocast(problem: Problem, low: Collection[Node]) -> dict[Node, str]:
    """Return the nodes that stay full as in ``torch.autocast``, each with the operation for which they do.

    ``low``: the nodes that are low in ``torch.autocast``.
    """
    inexact: set[Node] = set()
    for node in problem.gm.graph.nodes:
        if node in low or not inexact.isdisjoint(node.all_input_nodes):
            inexact.add(node)
    kept: dict[Node, str] = {}
    storages = problem.memory.storages
    memory: dict[int, str] = {}  # the storages of kept nodes, which earlier nodes may write
    for node in reversed(problem.gm.graph.nodes):
        if node in low or node.op == "output":
            continue
        kind = problem.classes.get(node)
        written = {key for n in (kind.written if kind else ()) for key in storages.get(n, ())}
        reader = kept.get(node) or next((memory[key] for key in written if key in memory), "")
        reader = reader or _magnifies(node, kind, inexact)
        if reader:
            found = [node, *(n for n in node.all_input_nodes if n not in low)]
            kept |= {n: reader for n in found if n not in kept}
            memory |= {key: reader for n in found for key in storages.get(n, ())}
    return kept


def _magnifies(node: Node, kind: Classification | None, inexact: set[Node]) -> str:
    """Return the name of what magnifies a rounding of its operands in ``node``, or ""."""
    if kind is None:
        return "" if is_part(node) or not node.op.startswith("call") else node.name
    if kind.conversion and all(t.is_floating_point() for t in tensors(captured(node))):
        return ""
    if kind.cls in (OpClass.ALLOW, OpClass.NEUTRAL):
        return ""
    names = {functional_packet(name) or name for name in kind.names} - WELL_CONDITIONED
    if names == {"aten.pow"} and node.args[1:] and node.args[1] in SMALL_POWERS:
        return ""
    if names <= BOUNDED_ERROR and not inexact.isdisjoint(node.all_input_nodes):
        return ""
    return ", ".join(sorted(names))


def _leading(
    order: Iterable[Node],
    classes: Mapping[Node, Classification],
    readers: frozenset[str],
    through: Callable[[Node], bool],
) -> set[Node]:
    """Return the nodes that one of the operations ``readers`` reads, itself or ``through`` others."""
    leads: set[Node] = set()
    for node in reversed(list(order)):
        read = [user for user in node.users if user in classes]
        if any(not readers.isdisjoint(classes[user].names) or (user in leads and through(user)) for user in read):
            leads.add(node)
    return leads


def leads_to_softmax(order: Iterable[Node], classes: Mapping[Node, Classification]) -> set[Node]:
    """Return the nodes that a softmax reads, itself or behind operations that the lists do not decide."""
    return _leading(order, classes, SOFTMAX, lambda node: classes[node].cls in FREE)


def carriers_of_positions(order: Iterable[Node], classes: Mapping[Node, Classification]) -> frozenset[Node]:
    """Return the ``allow`` nodes that carry integer positions to sin, cos or exp: low precision merges positions."""
    nodes = [node for node in order if node in classes]
    carries: set[Node] = set()
    for node in nodes:
        found = classes[node]
        passes_on = found.cls in (OpClass.FOLLOW, OpClass.NEUTRAL, OpClass.ALLOW, OpClass.PROMOTE)
        if _is_counter(node, found) or (passes_on and not carries.isdisjoint(node.all_input_nodes)):
            carries.add(node)
    feeds = _leading(nodes, classes, ANGLES, carries.__contains__)
    return frozenset(node for node in carries & feeds if classes[node].cls is OpClass.ALLOW)


def _is_counter(node: Node, found: Classification) -> bool:
    """Say whether ``node`` makes floats from integers, without a table lookup."""
    if not is_eligible(captured(node)):
        return False
    if not COUNTERS.isdisjoint(found.names):
        return True
    carried = [t for source in node.all_input_nodes for t in tensors(captured(source))]
    integers = bool(carried) and all(not t.is_floating_point() and not t.is_complex() for t in carried)
    return integers and (found.conversion or found.cls in (OpClass.FOLLOW, OpClass.NEUTRAL))
