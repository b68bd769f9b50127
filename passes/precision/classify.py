"""Find the class of a node under an operator list, and the inputs to which the class applies.

Before: ``aten.layer_norm(x, w, b)``. After: ``fp32_inside`` for ``x``; ``w`` and ``b`` stay as captured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from amp_graph.lists import OpClass, OpList, Rule
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.fake_values import captured, tensors
from amp_graph.passes.graph.identify_ops import (
    Operation,
    Operations,
    identify,
    packets,
    taken_apart,
    tensor_inputs,
)
from amp_graph.passes.graph.meta_keys import CLASSIFIED
from amp_graph.passes.graph.trace_node import DECOMPOSITIONS
from amp_graph.passes.precision.composite_matmuls import defaults, without_false_products
from amp_graph.passes.torch_compat.devices import ONEDNN_RNN, onednn_takes_bf16
from amp_graph.passes.torch_compat.dispatch import OpOverload
from amp_graph.passes.torch_compat.dynamo_capture import allow_in_graph
from amp_graph.passes.torch_compat.fake import FakeTensorMode

# These methods and operations only convert. A dtype that a user passes to one is kept.
CONVERSIONS = frozenset({"aten.to", "aten._to_copy", "aten.type_as", "prims.convert_element_type"})
DTYPE_OF_METHOD = {
    "float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64,
}  # fmt: skip
CONVERSION_METHODS = frozenset({*DTYPE_OF_METHOD, "to", "type", "type_as"})


@dataclass(frozen=True)
class Classification:
    """A node's class under a list.

    ``applies``: the inputs to which the class applies; the others keep their captured precision. ``written``: the
    inputs that the node writes to. ``mixed``: the kernel promotes operands of different precision itself.
    ``dtype``: the dtype that the user passed as a ``dtype`` argument, if any. ``takes_dtype``: the call has such an
    argument, and it is not set. ``partial``: the list names the inputs to which the class applies. ``one_dtype``: where
    the node is low, its other inputs are cast as well, as its kernel takes no mixture.
    ``full_in_autocast``: the operation computes in float32 inside, and ``torch.autocast`` returns float32.
    """

    cls: OpClass
    why: str
    origin: str
    names: tuple[str, ...]
    applies: frozenset[Node] = frozenset()
    written: frozenset[Node] = frozenset()
    mixed: bool = False
    conversion: bool = False
    dtype: torch.dtype | None = None
    partial: bool = False
    one_dtype: bool = False
    full_in_autocast: bool = False
    takes_dtype: bool = False
    expand: bool = False
    listed: bool = True
    decomposed: frozenset[OpOverload] = frozenset()


_FUNCTIONS: dict[type, OpClass] = {}


def register_function(function: type, cls: OpClass) -> None:
    """Give the ``autograd.Function`` subclass ``function`` the class ``allow`` or ``deny`` in every call."""
    _FUNCTIONS[function] = cls
    allow_in_graph(function)


def _registered(node: Node) -> Classification | None:
    cells = getattr(node.target, "__closure__", None) or ()
    held = (c.cell_contents for c in cells if isinstance(c.cell_contents, type)) if _FUNCTIONS else ()
    function = next((content for content in held if content in _FUNCTIONS), None)
    if function is None:
        return None
    why = "its owner decided so with amp_graph.precision"
    inputs = frozenset(tensor_inputs(node))
    return Classification(_FUNCTIONS[function], why, "amp_graph.precision", (function.__name__,), inputs)


def classified(node: Node, lists: OpList, mode: FakeTensorMode) -> Classification:
    """Return ``classify(...)``, cached on the node as long as its inputs stay the same."""
    known = node.meta.get(CLASSIFIED)
    if known is None or known[0] is not lists or known[1] != node.all_input_nodes:
        known = node.meta[CLASSIFIED] = (lists, node.all_input_nodes, classify(node, lists, mode))
    found: Classification = known[2]
    return found


def classify(node: Node, lists: OpList, mode: FakeTensorMode) -> Classification:
    """Classify ``node``; ``why`` tells if it cannot be traced alone, or if its operations have different classes."""
    owned = _registered(node)
    if owned is not None:
        return owned
    conversion = is_conversion_target(node)
    found, decomposed = _listed_identity(node, lists, mode)
    inputs = tensor_inputs(node)
    if isinstance(found, str):
        written = frozenset(node_info.written_by_name(node)) & frozenset(inputs)
        return Classification(OpClass.OPAQUE, found, "", (), written=written, listed=False)
    operations = [o for o in found if o.floating]
    written = frozenset(inputs[i] for o in found for i in _written(o))
    names = packets(found)
    if conversion or (names and set(names) <= CONVERSIONS):
        return _conversion(node, names)
    if not operations:
        why = "returns what it was given"
        return Classification(OpClass.NEUTRAL, why, "", names, frozenset(inputs), written, mixed=True)
    rules = [_for_this_cpu(_for_one_operand(lists.lookup(o.op, o.arguments), o, inputs), o, lists) for o in operations]
    known = rules
    if lists.unlisted != "opaque":  # what kernels take is a fact, which PyTorch's policy does not name
        ours = defaults(lists.dtype, lists.device)
        known = [r or ours.lookup(o.op, o.arguments) for r, o in zip(rules, operations, strict=True)]
    classes = {_class_of(rule, o, lists) for rule, o in zip(rules, operations, strict=True)}
    cls = _joined(classes, len(operations))
    rule = next((r for r, o in zip(rules, operations, strict=True) if _class_of(r, o, lists) is cls), None)
    listed = all(r is not None or node_info.is_view(o.op) for r, o in zip(rules, operations, strict=True))
    why = rule.why if rule else _unlisted_reason(lists, operations, rules)
    kernel = next((k for k in known if k is not None), None)
    return Classification(
        OpClass.OPAQUE if cls is None else cls,
        why,
        rule.origin if rule else "",
        names,
        applies=_applies(rule or kernel, operations, inputs),
        written=written,
        mixed=_takes_mixed(rules, known, operations) or (cls is OpClass.NEUTRAL and len(inputs) == 1),
        dtype=_asked_dtype(operations),
        partial=rule is not None and rule.inputs is not None,
        one_dtype=rule is not None and rule.one_dtype,
        full_in_autocast=cls is OpClass.FP32_INSIDE and _is_full_in_autocast(rule, operations, lists),
        takes_dtype=len(operations) == 1 and _takes_dtype(operations[0], cls),
        expand=cls is None,
        listed=listed,
        decomposed=decomposed,
    )


def _takes_dtype(operation: Operation, cls: OpClass | None) -> bool:
    """Say whether the ``dtype`` argument of a call is unset and can be set, also for backward.

    A composite converts its operand by a separate, differentiable operation. The backward of other operations that
    compute in fp32 (``_safe_softmax``) needs the operand in the dtype of the result.
    """
    open_ = operation.arguments.get("dtype", ...) is None
    return open_ and (cls is not OpClass.FP32_INSIDE or node_info.is_composite(operation.op))


def _is_full_in_autocast(rule: Rule | None, operations: list[Operation], lists: OpList) -> bool:
    """Say whether ``torch.autocast`` returns float32 from operations that compute in float32 inside.

    On CUDA it does for softmax, and for the norms that it has a rule for (it has none for batch norms). On the CPU
    all of them return the dtype of their input.
    """
    is_norm = rule is not None and rule.inputs is not None
    return lists.device == "cuda" and (
        not is_norm or any(node_info.autocast_has_rule(o.op, lists.device) for o in operations)
    )


def _for_one_operand(rule: Rule | None, operation: Operation, inputs: list[Node]) -> Rule | None:
    """Return ``rule``, or the neutral rule if ``rule`` promotes operands and there is only one.

    ``x[mask] = 0`` writes a number, which torch converts to the dtype of ``x``: nothing needs promotion.
    """
    if rule is None or rule.cls is not OpClass.PROMOTE:
        return rule
    operands = {i for name in operation.arguments for i in operation.operands(name)}
    floating = [i for i in operands if any(t.is_floating_point() for t in tensors(captured(inputs[i])))]
    if len(floating) != 1:
        return rule
    return replace(rule, cls=OpClass.NEUTRAL, why="writes a number into a tensor")


def _for_this_cpu(rule: Rule | None, operation: Operation, lists: OpList) -> Rule | None:
    """Return ``rule``, or one that keeps an LSTM as captured where oneDNN has no kernel for it in low precision."""
    if rule is None or operation.packet != ONEDNN_RNN or lists.device != "cpu" or onednn_takes_bf16():
        return rule
    return replace(rule, cls=OpClass.OPAQUE, why="oneDNN has no LSTM in low precision for this CPU")


def _takes_mixed(rules: list[Rule | None], known: list[Rule | None], operations: list[Operation]) -> bool:
    """Say whether every operation accepts operands of two precisions.

    A composite that no list names leaves this to the operations that it calls.
    """
    return all(
        k is None or k.promotes or (r is None and node_info.is_composite(o.op))
        for r, k, o in zip(rules, known, operations, strict=True)
    )


def is_conversion_target(node: Node) -> bool:
    """Say whether ``node`` is a conversion that the user wrote, even one that did nothing at capture."""
    return node.op == "call_method" and node.target in CONVERSION_METHODS


def _listed_identity(node: Node, lists: OpList, mode: FakeTensorMode) -> tuple[Operations | str, frozenset[OpOverload]]:
    """Identify ``node``; decompose composites that no list names until the list names their operations."""
    whole = identify(node, mode)

    def is_composite(o: Operation) -> bool:
        known = node_info.is_view(o.op) or lists.lookup(o.op, o.arguments) is not None or o.packet in CONVERSIONS
        # Tracing decomposes dropout differently, which draws other random bits.
        composite = node_info.is_composite(o.op) or o.op in DECOMPOSITIONS
        return o.floating and composite and not known and "dropout" not in str(o.op)

    found, apart = taken_apart(node, mode, is_composite)
    if isinstance(found, str):  # a composite that cannot be decomposed counts as one operation
        return whole, frozenset()
    rules = [lists.lookup(o.op, o.arguments) for o in found if o.floating]
    told = any(rule is not None and rule.cls in (OpClass.ALLOW, OpClass.DENY) for rule in rules)
    if told or isinstance(whole, str):
        return without_false_products(node, lists, mode, found, apart)
    return without_false_products(node, lists, mode, whole, frozenset())


def _class_of(rule: Rule | None, operation: Operation, lists: OpList) -> OpClass:
    if rule is not None:
        return rule.cls
    if node_info.is_view(operation.op):
        return OpClass.NEUTRAL
    return OpClass.FOLLOW if lists.unlisted == "native" else OpClass.OPAQUE


def _joined(classes: set[OpClass], count: int) -> OpClass | None:
    """Return one class for a node of several operations, or None if their classes differ.

    A neutral operation commutes with a cast, so it takes the class of the others.
    """
    rest = classes - {OpClass.NEUTRAL}
    if not rest:
        return OpClass.NEUTRAL
    if len(rest) == 1:
        (only,) = rest
        single = count == 1 or only in (OpClass.FOLLOW, OpClass.DENY, OpClass.OPAQUE)
        return only if single or (len(classes) == 2 and only is OpClass.ALLOW) else None
    return OpClass.OPAQUE if OpClass.OPAQUE in rest and OpClass.ALLOW not in rest else None


def _written(operation: Operation) -> list[int]:
    return [i for name in node_info.written_arguments(operation.op) for i in operation.operands(name)]


def _applies(rule: Rule | None, operations: list[Operation], inputs: list[Node]) -> frozenset[Node]:
    """Return the inputs to which the class applies: all, or those that the rule names."""
    if rule is None or rule.inputs is None or len(operations) != 1:
        return frozenset(inputs)
    return frozenset(inputs[i] for name in rule.inputs for i in operations[0].operands(name))


def _asked_dtype(operations: list[Operation]) -> torch.dtype | None:
    """Return the floating dtype that the last operation got as its ``dtype`` argument, if any."""
    asked: Any = operations[-1].arguments.get("dtype")
    return asked if isinstance(asked, torch.dtype) and asked.is_floating_point else None


def _conversion(node: Node, names: tuple[str, ...]) -> Classification:
    inputs = tensor_inputs(node)
    asked = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, torch.dtype)]
    dtype = asked[0] if asked else DTYPE_OF_METHOD.get(str(node.target))
    if dtype is None and len(inputs) == 1:
        return Classification(OpClass.NEUTRAL, "moves the value", "", names, frozenset(inputs), mixed=True)
    return Classification(
        OpClass.FOLLOW,
        "the user's own conversion is an instruction",
        "",
        names,
        applies=frozenset(inputs[1:]),
        mixed=True,
        conversion=True,
        dtype=dtype,
    )


def _unlisted_reason(lists: OpList, operations: list[Operation], rules: list[Rule | None]) -> str:
    names = dict.fromkeys(o.packet for o, r in zip(operations, rules, strict=True) if r is None)
    listed = ", ".join(names)
    if lists.unlisted == "native":
        return f"no entry for {listed} in {lists.name}: runs in whatever precision arrives"
    return f"no list names {listed}: runs exactly as captured" if names else "its operations are of several classes"
